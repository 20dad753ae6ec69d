"""The API end to end, over real models and a real cluster."""
