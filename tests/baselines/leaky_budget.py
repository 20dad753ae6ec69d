"""`LeakyBudget`: a budget that estimates where ours is told (V13, V14, V16), and counts where ours raises."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from manager import Availability, Grant, PoolGroupId
from scheduler.budget import BudgetMark, BudgetTracker
from tests.baselines.switches import Switch


@dataclass(frozen=True, slots=True)
class LogicalMark(BudgetMark):
    """A position, with the tokens that fill no whole page yet."""

    logical_tokens: int = 0


class LeakyBudget(BudgetTracker):
    """One pool group only.

    Attributes:
        asked_tokens: tokens that the present attempt asked for; what V13 charges.
        unseen_blocks: of the present attempt, those that only a drafter's padding needs; what V19 forgets.
        diverged: whether it differed from the manager when that was asked.
    """

    __slots__ = (
        "_believed_free",
        "_logical_tokens",
        "_switches",
        "_tokens_per_block",
        "asked_tokens",
        "diverged",
        "unseen_blocks",
    )

    def __init__(
        self,
        *,
        rows: int,
        requests: int,
        availability: Availability,
        switches: Collection[Switch],
        believed_free: Callable[[], int],
        tokens_per_block: int,
    ) -> None:
        """`believed_free`: pages that the scheduler's own list of requests leaves free (V14)."""
        self._switches = switches
        self._believed_free = believed_free
        self._tokens_per_block = tokens_per_block
        self._logical_tokens = 0
        self.asked_tokens = self.unseen_blocks = 0
        self.diverged = False
        super().__init__(rows=rows, requests=requests, availability=availability)

    def restart(self, availability: Availability) -> None:
        """Take over the manager's numbers, or what the scheduler believes."""
        super().restart(availability)
        if Switch.V14 in self._switches:
            self.pages = {PoolGroupId(0): self._believed_free()}

    def commit(self, grant: Grant) -> None:
        """Charge what this budget sees of the grant."""
        before = dict(self.pages)
        super().commit(grant)
        if Switch.V13 in self._switches:
            total = self._logical_tokens + self.asked_tokens
            self.pages = {group: pages - total // self._tokens_per_block for group, pages in before.items()}
            self._logical_tokens = total % self._tokens_per_block
        elif Switch.V16 in self._switches and grant.reused_tokens:
            fresh = grant.tokens // self._tokens_per_block
            self.pages = {group: pages - fresh for group, pages in before.items()}
        if Switch.V19 in self._switches and self.unseen_blocks:
            self.pages = {group: pages + self.unseen_blocks for group, pages in self.pages.items()}
        self.asked_tokens = self.unseen_blocks = 0

    def mark(self) -> LogicalMark:
        """The present numbers."""
        mark = super().mark()
        return LogicalMark(
            mark.rows, mark.requests, mark.pages, mark.index_slots, mark.adapter_pages, self._logical_tokens
        )

    def restore(self, mark: BudgetMark) -> None:
        """Back to `mark`."""
        super().restore(mark)
        assert isinstance(mark, LogicalMark)
        self._logical_tokens = mark.logical_tokens

    def reconcile(self, availability: Availability) -> None:
        """Nobody asks elsewhere; here the difference is noted for the report."""
        ours = (self.pages, self.index_slots, self.adapter_pages)
        if ours != (dict(availability.pages), availability.index_slots, availability.adapter_pages):
            self.diverged = True
