"""Ray shells around the worker, the central scheduler and the door: handles, and nothing to decide.

Every method hands over to a plain object. Only the process of a worker imports torch.
"""
