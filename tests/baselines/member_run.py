"""Both schedulers over one worker whose requests have drafts, encoder inputs and adapters: where V19 and V20 act.

The deployment of `comparison.py` serves models without these; here one mixed worker runs arrivals from a seed, on
real managers with real page contents.
"""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from tests.baselines.pass_observer import PassObserver
from tests.baselines.switches import Switch
from tests.baselines.try_and_see import TransactionalScheduler, TryAndSeeScheduler
from tests.baselines.watched_manager import WatchedManager
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import IterationWorker
from tests.fakes.small_cache import EVERY_MEMBER, make_geometry, shape_of
from tests.fakes.step_contents import StepContents

_CONFIG = SchedulerConfig(max_num_tokens=32, max_batch_size=5, chunk_unit_tokens=4)
_MAX_PASSES = 5000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOutcome:
    """What the observer saw; `has_ended` when every request had its last token in the end."""

    stranded_page_iterations: int
    audit_violations: int
    divergent_budgets: int
    corrupted: int
    suspensions: int
    passes: int
    has_ended: bool


def run_members(seed: int, switches: Collection[Switch] | None, num_requests: int = 40) -> MemberOutcome:
    """Serve requests with ours (`switches` None), or with the other scheduler under these switches."""
    geometry, config = make_geometry(num_pages=8, max_sequences=5, host_pages=40, members=EVERY_MEMBER)
    contents = StepContents(geometry)
    manager = WatchedManager(geometry, config, engine=contents, adapters=EVERY_MEMBER.adapters)
    observer, shape = PassObserver(manager.watch()), shape_of(manager, EVERY_MEMBER)
    scheduler: TransactionalScheduler | TryAndSeeScheduler
    if switches is None:
        scheduler = TransactionalScheduler(_CONFIG, manager, WorkerRole.MIXED, shape)
    else:
        scheduler = TryAndSeeScheduler(_CONFIG, manager, WorkerRole.MIXED, shape, switches=switches, reservations={})
    scheduler.observer = observer
    worker = IterationWorker(manager, scheduler, contents)
    _serve(worker, Random(f"members {seed}"), num_requests)
    counters = scheduler.counters()
    return MemberOutcome(
        stranded_page_iterations=observer.stranded_page_iterations,
        audit_violations=observer.num_violations,
        divergent_budgets=observer.num_divergent_budgets,
        corrupted=observer.num_corrupted,
        suspensions=counters["suspensions"],
        passes=observer.num_passes,
        has_ended=len(worker.finished) == num_requests,
    )


def _serve(worker: IterationWorker, random: Random, num_requests: int) -> None:
    """A request every few passes; then on until nothing can run."""
    num_arrived = 0
    for _ in range(_MAX_PASSES):
        if num_arrived < num_requests and random.random() < 0.4:
            spec = make_spec(
                f"r{num_arrived}",
                random.randint(2, 9),
                max_tokens=random.randint(2, 12),
                adapter=random.choice(["a", "b", "c", None]),
                encoder=tuple(range(random.choice([0, 3, 5, 8]))),
            )
            worker.context(spec).num_draft_tokens = random.randint(0, 3)
            num_arrived += 1
        output = worker.schedule()
        if output.has_step:
            worker.complete(output, accept=random.randint(0, 3))
        elif num_arrived == num_requests and not worker.scheduler.has_work:
            return
