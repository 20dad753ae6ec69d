"""Which transports a worker has: those that its deployment can use, best first.

`auto` within one host is shared memory and nothing else: no other way could be better there, and each costs threads,
ports or copies. Across hosts it is every one that is installed; which one a read takes depends on the peer
(`kvtransfer.transports.best`). A transport that is named in the configuration must be there.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtransfer import TransportUnavailable
from kvtransfer.transports.base import Transport
from kvtransfer.transports.best import BestTransport
from kvtransfer.transports.shared_memory import SharedMemoryTransport
from serving.workers.worker_plan import Surroundings, WorkerIdentity

_log = logging.getLogger("pdserve.worker")
PREFERENCE = ("shared_memory", "nixl", "collective", "object_store")
AnswerFetch = Callable[[str, list[tuple[int, int]]], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class WorkerTransport:
    """What a worker moves pages with.

    Attributes:
        best: what its agent reads through; not registered yet.
        answer_fetch: what its actor calls for peers that read through the object store; None without that transport.
    """

    best: BestTransport
    answer_fetch: AnswerFetch | None = None


def make_transport(
    choice: str, identity: WorkerIdentity, pool_path: Path, surroundings: Surroundings
) -> WorkerTransport:
    """The transports of one life of a worker.

    Args:
        choice: `TransferConfig.transport`.
        identity: of that life.
        pool_path: the file in shared memory that holds its pool.
        surroundings: what it must know of its host and deployment.

    Raises:
        TransportUnavailable: one that was named is missing here.
    """
    life_name = f"{identity.name}.{identity.epoch}"
    names: tuple[str, ...] = (choice,)
    if choice == "auto":
        names = PREFERENCE if surroundings.spans_hosts else PREFERENCE[:1]
    transports: list[Transport] = []
    answer_fetch: AnswerFetch | None = None
    for name in names:
        try:
            match name:
                case "shared_memory":
                    transports.append(SharedMemoryTransport(pool_path))
                case "nixl":
                    transports.append(_nixl(life_name))
                case "collective":
                    transports.append(_collective(life_name, surroundings))
                case _:
                    transport, answer_fetch = _object_store(life_name, identity, surroundings)
                    transports.append(transport)
        except TransportUnavailable as error:
            if choice != "auto":
                raise
            _log.info("%s does without %s: %s", life_name, name, error)
    _log.info("%s has the transports %s", life_name, [transport.name for transport in transports])
    return WorkerTransport(BestTransport(transports, life_name), answer_fetch)


# Imported when they are used: a bare machine has neither NIXL nor Ray.


def _nixl(life_name: str) -> Transport:
    from kvtransfer.transports.nixl import NixlTransport

    return NixlTransport(life_name)


def _collective(life_name: str, surroundings: Surroundings) -> Transport:
    from kvtransfer.transports.collective import CollectiveTransport

    return CollectiveTransport(life_name, surroundings.host)


def _object_store(
    life_name: str, identity: WorkerIdentity, surroundings: Surroundings
) -> tuple[Transport, AnswerFetch]:
    if not surroundings.namespace:
        msg = "this worker runs without Ray"
        raise TransportUnavailable(msg)
    from kvtransfer.transports.object_store import ObjectStoreTransport

    transport = ObjectStoreTransport(life_name, identity.name, surroundings.namespace)
    return transport, transport.answer_fetch
