"""Reads through Ray's object store: the last resort, where Ray's own connections are all that two hosts have.

A reader calls `answer_fetch` of the owner's actor, whose result Ray carries: pages are copied into the object store,
perhaps over the wire, and out of it. The bytes enter our memory in `poll` only (`staged`).

The only file of this package that knows Ray.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from kvtransfer.errors import PeerError
from kvtransfer.messages import MemoryDescription
from kvtransfer.transports.description import attribute
from kvtransfer.transports.runs import Run
from kvtransfer.transports.staged import MAX_BATCH_BYTES, StagedTransport, gather

_NAME = "object_store"
OwnerRuns = Sequence[tuple[int, int]]
"""Offset in the owner's memory and number of bytes."""


class ObjectFetch:
    """A batch that Ray brings. A `Fetch`."""

    def __init__(self, reference: Any, owner: str) -> None:
        """`reference`: Ray's, to the answer of `owner`."""
        self._reference = reference
        self._owner = owner

    @property
    def is_ready(self) -> bool:
        """Whether the object, or its failure, is on this host."""
        ready, _ = ray.wait([self._reference], timeout=0)
        return bool(ready)

    def take(self) -> npt.NDArray[np.uint8] | None:
        """The bytes, still in the object store. Raises PeerError when the owner is gone or refuses."""
        if not self.is_ready:
            return None
        try:
            received: npt.NDArray[np.uint8] = ray.get(self._reference)
        except ray.exceptions.RayError as error:
            msg = f"{self._owner} is gone: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            raise PeerError(msg) from error
        return received

    def release(self) -> None:
        """Let the object store drop it."""
        self._reference = None


class ObjectStoreTransport(StagedTransport):
    """A `Transport` over an actor's method.

    Args:
        life_name: unique among the peers and over lives.
        actor: name of the actor that gives calls of `answer_fetch` to us.
        namespace: Ray's, of that actor.
        max_batch_bytes: bytes that one poll copies at most.
    """

    def __init__(self, life_name: str, actor: str, namespace: str, max_batch_bytes: int = MAX_BATCH_BYTES) -> None:
        """Start without memory."""
        super().__init__(_NAME, max_batch_bytes)
        self._life_name = life_name
        self._actor = actor
        self._namespace = namespace
        self._actors: dict[str, Any] = {}
        self._is_closed = False

    def describe(self) -> MemoryDescription:
        """Which actor to call, and which life of it."""
        num_bytes = self.memory.size
        attributes: dict[str, str | int | bytes] = {
            "actor": self._actor,
            "life": self._life_name,
            "num_bytes": num_bytes,
        }
        return MemoryDescription(_NAME, {**attributes, "namespace": self._namespace})

    def answer_fetch(self, life: str, runs: OwnerRuns) -> npt.NDArray[np.uint8]:
        """The owner's side, called by its actor on any thread: the bytes of the runs, one after another.

        Raises:
            PeerError: the reader means another life of us, we have ended, or a run leaves our memory.
        """
        if self._is_closed or life != self._life_name:
            msg = f"{life} has ended, this is {self._life_name}"
            raise PeerError(msg)
        return gather(self.memory, runs)

    def serve(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Answer nobody any more and forget all reads; may be called twice."""
        self._is_closed = True
        super().close()
        self._actors.clear()

    def _size_of(self, source: MemoryDescription) -> int:
        return attribute(source, _NAME, "num_bytes", int)

    def _fetch(self, source: MemoryDescription, runs: Sequence[Run]) -> ObjectFetch:
        actor, life = attribute(source, _NAME, "actor", str), attribute(source, _NAME, "life", str)
        namespace = attribute(source, _NAME, "namespace", str)
        handle = self._actors.get(actor)
        if handle is None:
            try:
                handle = self._actors[actor] = ray.get_actor(actor, namespace=namespace)
            except ValueError as error:
                msg = f"{life} is gone: {error}"
                raise PeerError(msg) from error
        wanted = [(offset, num_bytes) for offset, _, num_bytes in runs]
        return ObjectFetch(handle.answer_fetch.remote(life, wanted), life)
