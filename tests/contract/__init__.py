"""One suite per protocol, run over every implementation."""
