"""Other ways to drive the same manager, to compare ours with."""
