"""Decisions: what runs in this iteration, and which worker gets which request."""
