"""Faults that systems of this kind have had, each as a test of the situation in which it happened."""
