"""State machines and random inputs (hypothesis)."""
