"""Fakes and builders shared by tests."""
