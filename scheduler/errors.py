"""Errors of the scheduling layer.

SchedulerError
├── IllegalTransition    an event that the state table does not allow (a bug); state is unchanged
├── UnknownRequest       a name that this scheduler never had
├── InvalidConfiguration limits that disagree, found at start-up
├── InvalidRequest       refused on admission; the message has the value and the limit
│   └── RequestTooLarge  could never fit this worker's pools
└── OwnFault             a bug of ours; never caught below the process boundary
    ├── BudgetDivergence the budget and the manager disagree after a pass
    └── CallOutOfTurn    schedule, complete and abandon were not called in turn
"""


class SchedulerError(Exception):
    """Root of the scheduling layer's errors."""


class IllegalTransition(SchedulerError):  # noqa: N818 -- named for what happened, as the design does
    """The table has no such event for this state."""


class UnknownRequest(SchedulerError, KeyError):  # noqa: N818
    """No request of that name."""


class InvalidConfiguration(SchedulerError, ValueError):  # noqa: N818
    """Sizes that would deadlock at run time (V21); the message has both."""


class InvalidRequest(SchedulerError, ValueError):  # noqa: N818
    """The request cannot be accepted."""


class RequestTooLarge(InvalidRequest):
    """More pages or tokens than the worker has in all; waiting cannot help."""


class OwnFault(SchedulerError):  # noqa: N818
    """A bug of this program: the worker must stop, not carry on."""


class BudgetDivergence(OwnFault):
    """The budget and the manager disagree after a pass (V13 to V16); the pass was rolled back."""


class CallOutOfTurn(OwnFault):
    """A step was left open, or is closed twice."""
