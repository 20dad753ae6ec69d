"""Every error that the manager raises.

    ManagerError
    ├── CapacityError            expected; becomes a `Refusal` on the scheduling path
    │   ├── OutOfPagesError
    │   └── OutOfIndexSlotsError
    ├── CopyFailedError          a copy to a lower tier failed; its transaction was rolled back
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


class CopyFailedError(ManagerError):
    """A copy out failed at stage: the transaction was rolled back, later ones plan without that tier.

    Attributes:
        target_store: the store that could not take its copy.
    """

    def __init__(self, target_store: int, cause: OSError) -> None:
        """Name the store and the system's error."""
        super().__init__(f"copy into store {target_store} failed: {cause}")
        self.target_store = target_store


class CacheConfigError(ManagerError, ValueError):
    """A configuration that cannot work; the message has the arithmetic."""


class LogicError(ManagerError):
    """A call that the contract forbids: wrong state, wrong transaction, twice."""


class CorruptedError(LogicError):
    """`audit()` recomputed the state and it differs; names the first broken invariant."""
