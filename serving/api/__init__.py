"""OpenAI's HTTP API on FastAPI."""
