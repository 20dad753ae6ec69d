"""The loop of a worker and what differs between the roles."""
