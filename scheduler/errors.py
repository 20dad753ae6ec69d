"""Errors of the scheduling layer.

SchedulerError
├── IllegalTransition    an event that the state table does not allow (a bug); state is unchanged
├── UnknownRequest       a name that this scheduler never had
└── InvalidRequest       refused on admission; the message has the value and the limit
    └── RequestTooLarge  could never fit this worker's pools
"""


class SchedulerError(Exception):
    """Root of the scheduling layer's errors."""


class IllegalTransition(SchedulerError):  # noqa: N818 -- named for what happened, as the design does
    """The table has no such event for this state."""


class UnknownRequest(SchedulerError, KeyError):  # noqa: N818
    """No request of that name."""


class InvalidRequest(SchedulerError, ValueError):  # noqa: N818
    """The request cannot be accepted."""


class RequestTooLarge(InvalidRequest):
    """More pages or tokens than the worker has in all; waiting cannot help."""
