"""One file for each row of scheduler/DIVERGENCE.md: the row as a test, plain and with faults injected."""
