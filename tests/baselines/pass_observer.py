"""`PassObserver`: looks at scheduler and manager around every pass, from outside, and counts where they disagree.

*Stranded* are pages gained in a pass, by growth, resume or prefix pin, by a request that is not in that pass's
committed batch; counted each pass until used or returned. The same observer looks at both sides.
"""

from dataclasses import dataclass, field

from manager import CorruptedError, RequestId
from scheduler.output import SchedulerOutput
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.states import AttemptState
from tests.baselines.watched_manager import WatchedManager


@dataclass(slots=True)
class PassObserver:
    """Counts of one worker.

    Attributes:
        num_passes: passes seen.
        stranded_page_iterations: stranded pages, summed over the passes.
        num_divergent_budgets: passes whose budget differed from the manager at their end.
        num_disagreements: requests that scheduler and manager see in different states, summed over the passes.
        num_corrupted: audits of the manager that failed.
        audit_every: passes between two audits of the manager.
    """

    manager: WatchedManager
    audit_every: int = 1
    num_passes: int = 0
    stranded_page_iterations: int = 0
    num_divergent_budgets: int = 0
    num_disagreements: int = 0
    num_corrupted: int = 0
    _held: dict[RequestId, int] = field(default_factory=dict)
    _stranded: dict[RequestId, int] = field(default_factory=dict)

    @property
    def num_violations(self) -> int:
        """All of them."""
        return self.num_divergent_budgets + self.num_disagreements + self.num_corrupted

    def before(self) -> None:
        """A pass begins: what happened since the last one is nobody's gain."""
        held = {request_id: self.manager.pages_held(request_id) for request_id in self.manager.asked}
        self._return_pages(held)
        self._held = held

    def after(self, output: SchedulerOutput, table: RequestTable) -> None:
        """The pass has ended with `output`."""
        self.num_passes += 1
        held = {request_id: self.manager.pages_held(request_id) for request_id in self.manager.asked}
        self._return_pages(held)
        batch = {chunk.request.request_id for chunk in output.contexts}
        batch |= {request.request_id for request in (*output.generations, *output.reserved)}
        for request_id, pages in held.items():
            gained = pages - self._held.get(request_id, 0)
            if request_id in batch:
                self._stranded.pop(request_id, None)
            elif gained > 0:
                self._stranded[request_id] = self._stranded.get(request_id, 0) + gained
        self.stranded_page_iterations += sum(self._stranded.values())
        self.num_disagreements += self._disagreements(table)
        if self.num_passes % self.audit_every == 0:
            try:
                self.manager.audit()
            except CorruptedError:
                self.num_corrupted += 1
        self._held = held
        for request_id in held:
            if not self.manager.has_cache(request_id):
                del self.manager.asked[request_id]

    def _return_pages(self, held: dict[RequestId, int]) -> None:
        for request_id, pages in list(self._stranded.items()):
            lost = self._held.get(request_id, 0) - held.get(request_id, 0)
            if lost > 0:
                self._stranded[request_id] = pages - lost
            if self._stranded[request_id] <= 0 or not held.get(request_id):
                del self._stranded[request_id]

    def _disagreements(self, table: RequestTable) -> int:
        """Caches whose state is not what the place and state of their request say."""
        placed: dict[RequestId, Request] = {**table.contexts, **table.receiving, **table.generations}
        count = 0
        for request_id in self.manager.asked:
            request = placed.get(request_id)
            has_cache = self.manager.has_cache(request_id)
            if request is None:
                count += has_cache  # waiting, deferred or unknown: it holds nothing, says the scheduler
                continue
            is_suspended = has_cache and self.manager.is_suspended(request_id)
            if request.state is AttemptState.GENERATION_PAUSED:
                count += has_cache and not is_suspended
            elif request.state is not AttemptState.CONTEXT_INIT:
                count += is_suspended or not has_cache
        return count
