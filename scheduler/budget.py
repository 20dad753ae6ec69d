"""`BudgetTracker`: what is left of one iteration, in every unit that can run out (S2, M5).

Lives for one pass. It starts from the manager's own availability, read inside the pass's transaction
(V14), is charged with the manager's grants (V13, V16), and must equal the manager when the pass ends
(`reconcile`, V15). It never asks how a number came about: only the manager knows which pages are shared.

Source: TensorRT-LLM's `BudgetTracker` lives for one iteration as well; it counts tokens and requests
that the scheduler estimates, this one counts pages that the manager granted.
"""

from dataclasses import dataclass

from manager import Availability, Grant, PoolGroupId, TierLevel
from scheduler.errors import BudgetDivergence


@dataclass(frozen=True, slots=True)
class BudgetMark:
    """A position to come back to; opaque outside this module."""

    rows: int
    requests: int
    pages: dict[PoolGroupId, int]
    index_slots: int
    adapter_pages: int


class BudgetTracker:
    """What this iteration may still use.

    Attributes:
        rows: tokens that the step may still compute.
        requests: requests that may still join the step.
        pages: device pages per pool group that the manager can still give.
        index_slots: index slots that the manager can still give.
        adapter_pages: adapter pages that the manager can still give.
    """

    __slots__ = ("adapter_pages", "index_slots", "pages", "requests", "rows")

    def __init__(self, *, rows: int, requests: int, availability: Availability) -> None:
        """Start a pass; `availability` is read in the pass's own transaction (V14)."""
        self.rows = rows
        self.requests = requests
        self.pages: dict[PoolGroupId, int] = {}
        self.index_slots = 0
        self.adapter_pages = 0
        self.restart(availability)

    def restart(self, availability: Availability) -> None:
        """Take over the manager's numbers after it let something go.

        What a suspension gives back depends on who shares the pages, which only the manager knows; the
        caller reconciles first, so that nothing unaccounted can hide behind this.
        """
        self.pages = dict(availability.pages)
        self.index_slots = availability.index_slots
        self.adapter_pages = availability.adapter_pages

    def commit(self, grant: Grant) -> None:
        """Charge all that `grant` uses."""
        if grant.pages or grant.index_slots or grant.adapter_pages:
            self._charge(grant, sign=1)

    def refund(self, grant: Grant) -> None:
        """Take a grant's charge back after its revert."""
        self._charge(grant, sign=-1)

    def take_rows(self, num_rows: int) -> None:
        """Seat one request with `num_rows` rows in the step."""
        self.rows -= num_rows
        self.requests -= 1

    def has_seat(self, num_rows: int) -> bool:
        """Whether one more request with `num_rows` rows may join the step."""
        return self.requests > 0 and self.rows >= num_rows

    def mark(self) -> BudgetMark:
        """The present numbers, to `restore` together with the manager's savepoint."""
        return BudgetMark(self.rows, self.requests, dict(self.pages), self.index_slots, self.adapter_pages)

    def restore(self, mark: BudgetMark) -> None:
        """Back to `mark`; a mark may be restored any number of times."""
        self.rows = mark.rows
        self.requests = mark.requests
        self.pages = dict(mark.pages)
        self.index_slots = mark.index_slots
        self.adapter_pages = mark.adapter_pages

    def reconcile(self, availability: Availability) -> None:
        """Prove that the budget and the manager agree. Raises BudgetDivergence with both numbers."""
        ours = (self.pages, self.index_slots, self.adapter_pages)
        theirs = (dict(availability.pages), availability.index_slots, availability.adapter_pages)
        if ours != theirs:
            msg = (
                f"budget has pages={ours[0]} index_slots={ours[1]} adapter_pages={ours[2]}, "
                f"the manager pages={theirs[0]} index_slots={theirs[1]} adapter_pages={theirs[2]}"
            )
            raise BudgetDivergence(msg)

    def _charge(self, grant: Grant, *, sign: int) -> None:
        for cost in grant.pages:
            if cost.tier == TierLevel.DEVICE:
                self.pages[cost.pool_group] -= sign * cost.pages
        self.index_slots -= sign * grant.index_slots
        self.adapter_pages -= sign * grant.adapter_pages
