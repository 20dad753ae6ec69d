"""The model: weights, paged attention, sampling, one step."""
