"""Processes, devices and HTTP: everything that is not a decision."""
