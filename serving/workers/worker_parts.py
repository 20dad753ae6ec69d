"""What a worker's loop is made of."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtransfer import TransferAgent
from manager import KVCacheManager
from scheduler.interface import IterationScheduler
from serving.workers.batch_builder import BatchBuilder
from serving.workers.outbox import Outbox
from serving.workers.prefix_feed import PrefixFeed
from serving.workers.self_audit import SelfAudit
from serving.workers.staging import PageStaging
from serving.workers.step_engine import StepEngine
from serving.workers.stop_checker import StopChecker


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The finished collaborators of a loop."""

    manager: KVCacheManager
    scheduler: IterationScheduler
    engine: StepEngine
    agent: TransferAgent
    batch_builder: BatchBuilder
    stop_checker: StopChecker
    outbox: Outbox
    staging: PageStaging
    wake: threading.Event
    """Set by whoever has something for the loop."""
    self_audit: SelfAudit
    prefix_feed: PrefixFeed | None = None
    """What is cached here, for the central scheduler; None where nobody routes by it."""
    overlaps: bool = True
    """Whether contexts are offered in parts (`TransferConfig.overlap`)."""
    transport_choices: Callable[[], Mapping[str, str]] = dict
    """For each peer that pages were read from: over what, and why."""
