"""`SimulationResults`: what a run came to, and how it is printed. A pure function of the finished deployment."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from scheduler.messages import WorkerRole
from serving.simulation.deployment import SimulatedDeployment
from serving.simulation.door import Stream

_SHARES = (50, 90, 99)
_SUMS = ("suspensions", "recomputes", "resumes", "deferrals", "rollbacks", "abandoned_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResults:
    """Numbers of one run; all seconds are virtual.

    Attributes:
        requests: that arrived.
        failed: of those, ended without their last token.
        makespan_s: from the first arrival to the last token.
        tokens_per_s: generated tokens over the makespan.
        requests_per_s: finished requests over the makespan.
        ttft_s: percentiles of the time to the first token, by name.
        tpot_s: percentiles of the mean time between tokens of a request, by name.
        passes: passes of all iteration schedulers.
        audits: of managers, each of which found nothing.
        page_occupancy: per role, mean and peak share of device pages in use.
        prefix_hits: per role, share of the tokens looked up in a cache that were found there.
        local_prefills: prompts that a generation worker was given to compute.
        transfers: handoffs whose pages were verified.
        failed_transfers: receives that failed or expired.
        worker_deaths: lives that ended.
        resubmissions: attempts that the door asked for again.
        retries: attempts that the central scheduler began again by itself.
        divergences: differences between the ledger and a worker, repaired.
        events: of the simulation.
        digest: of every token's request, place and time; equal runs have equal digests.
    """

    requests: int
    failed: int
    makespan_s: float
    tokens_per_s: float
    requests_per_s: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]
    passes: int
    suspensions: int
    recomputes: int
    resumes: int
    deferrals: int
    rollbacks: int
    abandoned_steps: int
    audits: int
    page_occupancy: dict[str, dict[str, float]]
    prefix_hits: dict[str, float]
    local_prefills: int
    transfers: int
    transfer_bytes: int
    failed_transfers: int
    worker_deaths: int
    resubmissions: int
    retries: int
    divergences: int
    events: int
    digest: str

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)

    def as_table(self) -> str:
        """A line per number."""
        lines = []
        for name, value in asdict(self).items():
            parts = value if isinstance(value, dict) else {"": value}
            for part, number in parts.items():
                shown = f"{number:.4f}" if isinstance(number, float) else number
                lines.append(f"{f'{name} {part}'.strip():<32} {shown}")
        return "\n".join(lines)


def summarize(deployment: SimulatedDeployment) -> SimulationResults:
    """Read a finished run."""
    streams = list(deployment.door.streams.values())
    done = [stream for stream in streams if stream.failure is None]
    first_s = min((stream.arrived_s for stream in streams), default=0.0)
    makespan_s = max((stream.last_s for stream in done), default=first_s) - first_s
    counters = [worker.scheduler.counters() for worker in deployment.lives]
    transfers = [worker.agent.counters() for worker in deployment.lives]
    num_tokens = sum(len(stream.accepted) for stream in streams)
    central = deployment.central.state(deployment.events.now_s)["counters"]
    return SimulationResults(
        requests=len(streams),
        failed=len(streams) - len(done),
        makespan_s=makespan_s,
        tokens_per_s=num_tokens / makespan_s if makespan_s else 0.0,
        requests_per_s=len(done) / makespan_s if makespan_s else 0.0,
        ttft_s=_percentiles([stream.first_s - stream.arrived_s for stream in done]),
        tpot_s=_percentiles([_tpot_s(stream) for stream in done if len(stream.accepted) > 1]),
        passes=sum(counts["iterations"] for counts in counters),
        **{name: sum(counts[name] for counts in counters) for name in _SUMS},
        audits=sum(worker.tally.num_audits for worker in deployment.lives),
        page_occupancy=_occupancy(deployment),
        prefix_hits=_prefix_hits(deployment),
        local_prefills=central["local_prefills"],
        transfers=sum(counts["receives_verified"] for counts in transfers),
        transfer_bytes=sum(counts["bytes_received"] for counts in transfers),
        failed_transfers=sum(counts["receives_failed"] + counts["receives_expired"] for counts in transfers),
        worker_deaths=len(deployment.lives) - len(deployment.workers),
        resubmissions=sum(stream.num_resubmissions for stream in streams),
        retries=central["retries"],
        divergences=len(deployment.divergences),
        events=deployment.events.num_events,
        digest=_digest(streams),
    )


def _tpot_s(stream: Stream) -> float:
    return (stream.last_s - stream.first_s) / (len(stream.accepted) - 1)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles; empty without values."""
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-len(ordered) * share // 100) - 1] for share in _SHARES} if ordered else {}


def _occupancy(deployment: SimulatedDeployment) -> dict[str, dict[str, float]]:
    occupancy = {}
    for role in WorkerRole:
        tallies = [worker.tally for worker in deployment.lives if worker.identity.role is role]
        busy_s = sum(tally.busy_s for tally in tallies)
        if busy_s:
            mean = sum(tally.page_share_seconds for tally in tallies) / busy_s
            occupancy[role.value] = {"mean": mean, "peak": max(tally.peak_page_share for tally in tallies)}
    return occupancy


def _prefix_hits(deployment: SimulatedDeployment) -> dict[str, float]:
    hits = {}
    for role in WorkerRole:
        stats = [worker.manager.stats() for worker in deployment.lives if worker.identity.role is role]
        queried = sum(counts.prefix_queried_tokens for counts in stats)
        if queried:
            hits[role.value] = sum(counts.prefix_hit_tokens for counts in stats) / queried
    return hits


def _digest(streams: Sequence[Stream]) -> str:
    digest = hashlib.sha256()
    for stream in streams:
        parts = (stream.spec.uid, stream.failure, stream.first_s.hex(), stream.last_s.hex(), stream.accepted)
        digest.update(repr(parts).encode())
    return digest.hexdigest()
