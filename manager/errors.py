"""Every error that the manager raises.

    ManagerError
    ├── CapacityError            expected; becomes a `Refusal` on the scheduling path
    │   ├── OutOfPagesError
    │   └── OutOfIndexSlotsError
    ├── CacheConfigError         sizes that cannot work, found at start-up
    └── LogicError               a bug of ours; never caught below the process boundary
        └── CorruptedError       `audit()` found state that contradicts itself

Capacity is never an exception on the public path: the public calls return a `Refusal`.
"""


class ManagerError(Exception):
    """Root of the manager's errors."""


class CapacityError(ManagerError):
    """Something is full. Raised and caught inside `manager` only."""


class OutOfPagesError(CapacityError):
    """A pool group has fewer free and evictable slots than asked for."""


class OutOfIndexSlotsError(CapacityError):
    """Every index slot is taken."""


class CacheConfigError(ManagerError, ValueError):
    """A configuration that cannot work; the message has the arithmetic."""


class LogicError(ManagerError):
    """A call that the contract forbids: wrong state, wrong transaction, twice."""


class CorruptedError(LogicError):
    """`audit()` recomputed the state and it differs; names the first broken invariant."""
