"""`IterationPass`: one plan while its transaction is open.

Keeps three things in step: the manager's transaction, the budget, and the list of what the pass decided.
A `PassMark` names one position in all three, so that an attempt which fails, victims included, comes back
to exactly where it began. Nothing here touches a request's state or a place in the table: that happens
after the commit, from the lists below (V6, V7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from manager import Grant, KVCacheManager, Refusal, RefusalReason, RequestId, Savepoint, Transaction
from scheduler.budget import BudgetMark, BudgetTracker
from scheduler.output import ContextChunk, Deferral
from scheduler.request import Request
from scheduler.request_table import RequestTable

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class PassMark:
    """A position in the pass; opaque outside this module."""

    savepoint: Savepoint
    budget: BudgetMark
    num_pushed_out: int


@dataclass(slots=True)
class PassDecisions:
    """What a pass decided, to be applied after its commit.

    Attributes:
        generations: requests that decode in the step, each with its draft length.
        chunks: context chunks of the step.
        out_of_line: contexts taken from the waiting line to be looked at, in order.
        started: those of them that have a chunk now, or have failed.
        num_duplicates: those of them that wait a pass for blocks that another computes.
        claims: tokens that each context found in the cache.
        forked: contexts that began as a running choice of the same prompt; those that were taken back are among them.
        resumed: requests whose suspended cache became active again.
        pushed_out: victims in order; True when suspended, False when paused for recompute.
        reserved: offers that became reservations.
        deferred: offers that were not taken.
        failed: requests that can never run here, with the reason.
        blocked_by: why the first request that wanted pages in vain was refused.
        restarts: a suspended request was let go so that it can start again; worth a commit by itself.
    """

    generations: dict[RequestId, tuple[Request, int]] = field(default_factory=dict)
    chunks: list[ContextChunk] = field(default_factory=list)
    out_of_line: list[Request] = field(default_factory=list)
    num_duplicates: int = 0
    started: list[Request] = field(default_factory=list)
    claims: list[tuple[Request, int]] = field(default_factory=list)
    forked: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    pushed_out: dict[RequestId, tuple[Request, bool]] = field(default_factory=dict)
    reserved: list[Request] = field(default_factory=list)
    deferred: list[tuple[Request, Deferral]] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    blocked_by: Refusal | None = None
    restarts: bool = False

    @property
    def is_worth_commit(self) -> bool:
        """Whether anything came of the pass; otherwise it is undone, suspensions included (V12)."""
        return bool(self.generations or self.chunks or self.reserved or self.failed or self.restarts)

    def decoding(self) -> list[Request]:
        """The requests of `generations`."""
        return [request for request, _ in self.generations.values()]


def newest_suspended(table: RequestTable, manager: KVCacheManager) -> Request | None:
    """The suspended request to start again where nothing runs and nothing comes back by itself (S5)."""
    if table.has_pages_in_flight:
        return None
    held = [request for request in table.admitted() if manager.has_cache(request.request_id)]
    suspended = [request for request in held if manager.is_suspended(request.request_id)]
    return table.ordering.first_to_last(suspended)[-1] if suspended else None


class IterationPass:
    """The open plan of one iteration.

    Attributes:
        manager: for the calls of the plan; their grants go through `charge`.
        budget: what is left.
        decisions: what to apply after the commit.
    """

    __slots__ = ("_transaction", "budget", "decisions", "manager")

    def __init__(
        self, manager: KVCacheManager, transaction: Transaction, budget: BudgetTracker, decisions: PassDecisions
    ) -> None:
        """`budget` was started from the manager's availability inside `transaction`; no decisions yet."""
        self.manager = manager
        self.budget = budget
        self.decisions = decisions
        self._transaction = transaction

    def mark(self) -> PassMark:
        """The present position; marks nest."""
        return PassMark(self._transaction.savepoint(), self.budget.mark(), len(self.decisions.pushed_out))

    def return_to(self, mark: PassMark) -> None:
        """Undo everything since `mark`: pages, budget, and victims, who are back as they were."""
        self._transaction.rollback_to(mark.savepoint)
        self.budget.restore(mark.budget)
        pushed_out = self.decisions.pushed_out
        while len(pushed_out) > mark.num_pushed_out:
            pushed_out.popitem()

    def is_pushed_out(self, request: Request) -> bool:
        """Whether it lost its pages in this pass; it is not tried again in the same one."""
        return request.request_id in self.decisions.pushed_out

    def is_active(self, request: Request) -> bool:
        """Whether it holds device pages now."""
        return self.manager.has_cache(request.request_id) and not self.manager.is_suspended(request.request_id)

    def block(self, refusal: Refusal) -> None:
        """Remember the first refusal: from here on nothing enters that would take what it waits for."""
        if self.decisions.blocked_by is None:
            self.decisions.blocked_by = refusal

    def push_out(self, victim: Request) -> None:
        """Take the victim's device pages: suspend it, or where no lower tier can take them, pause it.

        The budget is proved right up to here and then starts again from the manager, which alone knows
        what came back: pages that others share did not.
        """
        self.budget.reconcile(self.manager.availability())
        suspended = isinstance(self.manager.suspend_request(victim), Grant)
        if not suspended:
            self.manager.pause_for_recompute(victim)
        self.budget.restart(self.manager.availability())
        self.decisions.pushed_out[victim.request_id] = (victim, suspended)

    def restart_suspended(self, request: Request) -> None:
        """Let a suspended cache go, so that the request starts again from what the prefix cache has."""
        self._let_go(request)
        self.decisions.pushed_out[request.request_id] = (request, False)
        self.decisions.restarts = True

    def fail(self, request: Request, refusal: Refusal) -> None:
        """It can never run here: let go of what it holds and report it."""
        if self.manager.has_cache(request.request_id):
            self._let_go(request)
        self.decisions.failed.append((request, str(refusal)))

    def _let_go(self, request: Request) -> None:
        self.budget.reconcile(self.manager.availability())
        self.manager.pause_for_recompute(request)
        self.budget.restart(self.manager.availability())

    def try_with_victims(
        self,
        request: Request,
        attempt: Callable[[Request], Given | Refusal | None],
        victims: Callable[[], Sequence[Request]],
    ) -> Given | Refusal | None:
        """Attempt; when refused, push out victims one by one and attempt again (S3).

        While the pages of an adapter are short, only those go who hold another one.

        Args:
            request: who asks.
            attempt: all or nothing, and charges the budget itself. None means that it wants nothing now.
            victims: who may be pushed out, in order; asked for only when the first attempt is refused.

        Returns:
            What `attempt` gave; or None or its last refusal, and then every victim is back.
        """
        answer = attempt(request)
        if not isinstance(answer, Refusal) or answer.reason is RefusalReason.NEVER_FITS:
            return answer
        mark = self.mark()
        line = list(victims())
        while isinstance(answer, Refusal):
            victim = _first_who_helps(line, request, answer)
            if victim is None:
                break
            line.remove(victim)
            self.push_out(victim)
            answer = attempt(request)
        if answer is None or isinstance(answer, Refusal):
            self.return_to(mark)
        return answer


def _first_who_helps(line: Sequence[Request], request: Request, refusal: Refusal) -> Request | None:
    if refusal.reason is not RefusalReason.OUT_OF_ADAPTER_PAGES:
        return line[0] if line else None
    return next((victim for victim in line if victim.adapter_id not in {None, request.adapter_id}), None)
