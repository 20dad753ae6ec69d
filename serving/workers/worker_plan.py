"""What a worker is built from, as plain values: known to processes that have no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs import ClusterConfig, DeploymentConfig
from manager import Epoch, WorkerName
from scheduler.messages import WorkerRole


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker is built from, apart from its identity; picklable.

    Attributes:
        config: of the whole deployment.
        model_folder: a Hugging Face folder.
        pool_folder: where the pool file is made; in shared memory.
        num_threads: of the engine; 0 leaves torch's setting alone.
    """

    config: DeploymentConfig
    model_folder: Path
    pool_folder: Path
    num_threads: int = 0


def worker_names(cluster: ClusterConfig) -> Iterator[tuple[str, WorkerRole]]:
    """Names and roles of all workers of a deployment: `context-0`, `context-1`, `generation-0`, ..."""
    counts = {
        WorkerRole.CONTEXT: cluster.context_workers,
        WorkerRole.GENERATION: cluster.generation_workers,
        WorkerRole.MIXED: cluster.mixed_workers,
    }
    for role, count in counts.items():
        for index in range(count):
            yield f"{role}-{index}", role


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker must know of where it runs.

    Attributes:
        host: address of this host that the other workers' hosts can connect to.
        namespace: Ray's, in which its actor has its name; empty without Ray.
        spans_hosts: whether other workers may be on other hosts.
    """

    host: str = "127.0.0.1"
    namespace: str = ""
    spans_hosts: bool = False


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who a worker is."""

    name: WorkerName
    role: WorkerRole
    epoch: Epoch
    pid: int
