"""Moves pages between workers: tickets, sessions, transports, and the agent that runs them."""
