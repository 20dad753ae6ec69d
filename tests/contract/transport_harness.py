"""Makes the two ends of every transport, for its contract."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from kvtransfer.messages import ReadStatus
from kvtransfer.transports.base import ReadId, Transport
from kvtransfer.transports.best import BestTransport
from kvtransfer.transports.collective import CollectiveTransport
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.object_store import ObjectStoreTransport
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool
from tests.contract.object_keeper import KEEPER, NAMESPACE
from tests.fakes.transfer_transport import GatedTransport

POOL_BYTES = 4096
POLL_BYTES = 256
"""Small, so that a read of a few hundred bytes takes several polls."""

type_of_memory = npt.NDArray[np.uint8]


@dataclass
class Side:
    """One end: its transport, not registered yet, and the memory that it will register."""

    transport: Transport
    memory: type_of_memory
    die: Callable[[], None]
    """What remains after the process has ended and its files were swept."""


class ServedNixl(NixlTransport):
    """NIXL whose peers' agent threads are alive: each poll of ours gives them a turn first."""

    def __init__(self, agent_name: str, peers: list[NixlTransport]) -> None:
        super().__init__(agent_name, POLL_BYTES)
        self._others = peers

    def poll(self, read_id: ReadId) -> ReadStatus:
        for other in self._others:
            other.serve()
        return super().poll(read_id)


class Harness:
    """Makes ends that can reach one another."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack, keeper: Any = None) -> None:
        self.kind = kind
        self._folder = folder
        self._stack = stack
        self._registry = InProcessRegistry()
        self._nixl: list[NixlTransport] = []
        self._num_lives = 0
        self._keeper = keeper

    def side(self, name: str) -> Side:
        if self.kind == "nixl":
            return self._nixl_side(name)
        if self.kind == "object_store":
            return self._object_side(name)
        if self.kind == "collective":
            self._num_lives += 1
            collective = CollectiveTransport(f"{name}.{self._num_lives}", max_batch_bytes=POLL_BYTES, timeout_s=5.0)
            self._stack.callback(collective.close)
            return Side(collective, np.zeros(POOL_BYTES, dtype=np.uint8), collective.close)
        if self.kind in {"shared_memory", "auto"}:
            path = self._folder / f"{name}.pool"
            shared: Transport = SharedMemoryTransport(path, POLL_BYTES)
            if self.kind == "auto":
                shared = BestTransport([shared, InProcessTransport(InProcessRegistry(), name)], f"{name}.1")
            return Side(shared, create_pool(path, POOL_BYTES), lambda: path.unlink())
        memory = np.zeros(POOL_BYTES, dtype=np.uint8)
        if self.kind == "gated":
            gated = GatedTransport(self._registry, name, POLL_BYTES)
            return Side(gated, memory, gated.close)
        inprocess = InProcessTransport(self._registry, name, POLL_BYTES)
        return Side(inprocess, memory, inprocess.close)

    def _nixl_side(self, name: str) -> Side:
        transport = ServedNixl(f"{name}.{len(self._nixl)}", self._nixl)
        self._nixl.append(transport)

        def die() -> None:
            if transport in self._nixl:
                self._nixl.remove(transport)
                transport.close()

        self._stack.callback(die)
        return Side(transport, np.zeros(POOL_BYTES, dtype=np.uint8), die)

    def _object_side(self, name: str) -> Side:
        self._num_lives += 1
        life = f"{name}.{self._num_lives}.{self._folder.name}"
        path = self._folder / life
        memory = create_pool(path, POOL_BYTES)
        transport = ObjectStoreTransport(life, KEEPER, NAMESPACE, POLL_BYTES)
        ray.get(self._keeper.own.remote(life, str(path)))
        self._stack.callback(transport.close)
        return Side(transport, memory, lambda: ray.get(self._keeper.drop.remote(life)))

    def registered(self, name: str, fill: Callable[[type_of_memory], None] | None = None) -> Side:
        side = self.side(name)
        if fill is not None:
            fill(side.memory)
        side.transport.register(side.memory)
        return side
