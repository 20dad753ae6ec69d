"""When a worker counts as lost (C5): silence means dead, a frozen iteration number means hung."""

from configs import CentralConfig
from scheduler.introductions import HoldingKind
from scheduler.ledger import WorkerRecord
from scheduler.messages import WorkerHeartbeat

_MOVES_ITERATION = frozenset({HoldingKind.GENERATION, HoldingKind.LOCAL})


def note_heartbeat(record: WorkerRecord, heartbeat: WorkerHeartbeat, now_s: float) -> None:
    """Remember a heartbeat of this life; mutates the record."""
    previous = record.heartbeat
    if previous is None or previous.iteration != heartbeat.iteration or not _must_progress(record):
        record.progress_at_s = now_s
    record.heard_at_s = now_s
    record.heartbeat = heartbeat


def loss_reason(record: WorkerRecord, config: CentralConfig, now_s: float) -> str | None:
    """Why this worker must be given up now, or None.

    The bound for a frozen number is generous, since the longest step is known only from the past.
    """
    silent_s = now_s - record.heard_at_s
    limit_s = config.missed_heartbeats * config.heartbeat_s
    if now_s - record.vouched_at_s <= limit_s:
        # Its process is seen to run, so it is neither dead nor stopped: short of processor time, or hung.
        limit_s = max(limit_s, config.door_deadline_s)
    if silent_s > limit_s:
        return f"silent for {silent_s:.2f} s, more than {limit_s} s at heartbeats of {config.heartbeat_s} s"
    if record.heartbeat is None or not _must_progress(record):
        return None
    frozen_s = now_s - record.progress_at_s
    bound_s = max(config.door_deadline_s, config.missed_heartbeats * record.heartbeat.longest_step_s)
    if frozen_s > bound_s:
        return f"iteration {record.heartbeat.iteration} has not moved for {frozen_s:.2f} s, more than {bound_s:.2f} s"
    return None


def _must_progress(record: WorkerRecord) -> bool:
    """Whether the worker holds work that no transfer and no lease can keep waiting."""
    kinds = {holding.kind for holding in record.holdings.values() if not holding.is_ending}
    if kinds & _MOVES_ITERATION:
        return True
    # A context may rightly wait for pages while leases hold them.
    return HoldingKind.CONTEXT in kinds and HoldingKind.LEASE not in kinds
