"""`pdserve chaos`: a real server whose processes are killed and stopped while streams run through it."""
