"""One connection of two processes over torch.distributed's gloo, and the threads that wait for it.

gloo is two-sided and its waits block, so each end of a link has a thread:

    reader's thread   request (up to MAX_BATCH_RUNS runs of the owner's memory) ──►   owner's thread
                      ◄── their bytes, one after another                             gathers, sends

A link is a process group of its own with two ranks: one that breaks takes no other with it. It breaks at the first
error or timeout, and is never repaired: whoever wants to read again makes a new one.

The two find each other over a plain socket, on which they exchange gloo's addresses. Not torch's TCPStore: it looks
up the name of every address that it connects to, and waits seconds for a name server that does not answer.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]  # public, but not in __all__

from kvtransfer.errors import PeerError
from kvtransfer.transports.runs import Run
from kvtransfer.transports.staged import MAX_BATCH_RUNS, gather

_log = logging.getLogger(__name__)
_TAG = 0
_OWNER, _READER = 0, 1
_LENGTH_BYTES = 8
_MAX_FRAME_BYTES = 1 << 20
_JOIN_S = 1.0
"""A thread inside gloo while Python ends would take the process down with an abort."""
_FOREVER = timedelta(days=365)
"""An idle link waits for its next request; the other end's death closes the connection and ends the wait."""


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where an owner is found."""

    host: str
    port: int
    name: str
    """Of one life of one worker: another process may have the port by now."""


class LinkFetch:
    """A batch that a link's thread brings. A `Fetch`."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Nothing has come yet."""
        self.runs = runs
        self.num_bytes = sum(num_bytes for _, _, num_bytes in runs)
        self._received: npt.NDArray[np.uint8] | None = None
        self._error = ""

    @property
    def is_ready(self) -> bool:
        """Whether it has come, or never will."""
        return self._received is not None or bool(self._error)

    def take(self) -> npt.NDArray[np.uint8] | None:
        """The bytes when they are here. Raises PeerError when the link broke."""
        if self._error:
            raise PeerError(self._error)
        return self._received

    def release(self) -> None:
        """Let the buffer go with this object."""

    def bring(self, received: npt.NDArray[np.uint8]) -> None:
        """The link's thread has them."""
        self._received = received

    def fail(self, message: str) -> None:
        """The link broke."""
        self._error = message


class ReaderLink:
    """Our end of a link to one owner.

    Args:
        address: the owner.
        own_host: address of ours that the owner can connect to.
        timeout_s: how long to wait for a connection or an answer before the link counts as broken.
    """

    def __init__(self, address: LinkAddress, own_host: str, timeout_s: float) -> None:
        """Connect in the background."""
        self._address = address
        self._own_host = own_host
        self._timeout = timedelta(seconds=timeout_s)
        self._fetches: queue.SimpleQueue[LinkFetch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=f"pdserve-link-{address.name}", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether a new link is needed."""
        return bool(self._error)

    def fetch(self, runs: Sequence[Run]) -> LinkFetch:
        """Ask for a batch; answers come in order."""
        fetch = LinkFetch(runs)
        with self._lock:
            if self._error:
                fetch.fail(self._error)
            else:
                self._fetches.put(fetch)
        return fetch

    def close(self) -> None:
        """End the thread when what it waits for has ended; may be called twice."""
        self._fetches.put(None)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        current: LinkFetch | None = None
        try:
            group = self._connect()
            while (current := self._fetches.get()) is not None:
                self._carry_out(group, current)
            message = f"the link to {self._address.name} was closed"
        except (RuntimeError, OSError, PeerError) as error:  # gloo and the store raise RuntimeError and its kin
            message = f"{self._address.name} is gone: {error}"
        with self._lock:
            self._error = message
        if current is not None:
            current.fail(message)
        while not self._fetches.empty():
            if (waiting := self._fetches.get()) is not None:
                waiting.fail(message)

    def _connect(self) -> Any:
        address = self._address
        connection = socket.create_connection((address.host, address.port), self._timeout.total_seconds())
        with connection:
            name = receive_frame(connection).decode()
            if name != address.name:
                msg = f"its port belongs to {name} now"
                raise PeerError(msg)
            return make_group(connection, _READER, self._own_host, self._timeout)

    def _carry_out(self, group: Any, fetch: LinkFetch) -> None:
        request = torch.zeros(1 + 2 * MAX_BATCH_RUNS, dtype=torch.int64)
        request[0] = len(fetch.runs)
        wanted = torch.tensor([(offset, num_bytes) for offset, _, num_bytes in fetch.runs], dtype=torch.int64)
        request[1 : 1 + wanted.numel()] = wanted.flatten()
        group.send([request], _OWNER, _TAG).wait(self._timeout)
        answer = torch.empty(fetch.num_bytes, dtype=torch.uint8)
        group.recv([answer], _OWNER, _TAG).wait(self._timeout)
        fetch.bring(answer.numpy())


class OwnerDoor:
    """An owner's end: lets readers in and answers them, a thread for each.

    Args:
        name: as in `LinkAddress`.
        host: address of ours that readers can connect to.
        memory: what they may read.
        timeout_s: how long to wait for a reader that has begun to connect, or that takes an answer.
    """

    def __init__(self, name: str, host: str, memory: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Listen."""
        self._host = host
        self._memory = memory
        self._timeout = timedelta(seconds=timeout_s)
        self._is_closed = False
        self._links: list[threading.Thread] = []
        self._listener = socket.create_server((host, 0))
        self.address = LinkAddress(host, self._listener.getsockname()[1], name)
        self._listening = threading.Thread(target=self._listen, name=f"pdserve-links-{name}", daemon=True)
        self._listening.start()

    def close(self) -> None:
        """Answer nobody any more: links end at their reader's next request. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept that waits
            self._listener.close()
            self._listening.join()  # from here on no link is added
            # Most readers end with us. One that does not holds its thread until the process ends.
            end_s = time.monotonic() + _JOIN_S
            for link in self._links:
                link.join(max(0.0, end_s - time.monotonic()))

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    _log.exception("%s: readers can connect no more", self.address.name)
                return
            link = threading.Thread(target=self._serve, args=(connection,), name="pdserve-link", daemon=True)
            self._links = [*(other for other in self._links if other.is_alive()), link]
            link.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(self._timeout.total_seconds())
                send_frame(connection, self.address.name.encode())
                group = make_group(connection, _OWNER, self._host, self._timeout)
            request = torch.zeros(1 + 2 * MAX_BATCH_RUNS, dtype=torch.int64)
            while True:
                group.recv([request], _READER, _TAG).wait(_FOREVER)
                if self._is_closed:
                    return
                num_runs = int(request[0])
                wanted = request[1 : 1 + 2 * num_runs].view(num_runs, 2).tolist()
                answer = gather(self._memory, [(offset, num_bytes) for offset, num_bytes in wanted])
                group.send([torch.from_numpy(answer)], _READER, _TAG).wait(self._timeout)
        except (RuntimeError, OSError, PeerError) as error:  # the reader is gone, slow or wrong: its link ends
            _log.info("%s: a link ends: %s", self.address.name, error)


class _Exchange(TorchStore):
    """What gloo needs to connect two ranks: each puts its address and takes the other's, over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection` has a timeout."""
        super().__init__()
        self._connection = connection
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # gloo passes bytes
        """Keep it, and send it to the other."""
        self._values[key] = bytes(value)
        send_frame(self._connection, key.encode())
        send_frame(self._connection, bytes(value))

    def get(self, key: str) -> bytes:
        """Ours or the other's; waits for it."""
        while key not in self._values:
            name = receive_frame(self._connection).decode()
            self._values[name] = receive_frame(self._connection)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """All of them; the socket's timeout counts."""
        for key in keys:
            self.get(key)


def send_frame(connection: socket.socket, content: bytes) -> None:
    """A length, and that many bytes."""
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def receive_frame(connection: socket.socket) -> bytes:
    """What `send_frame` sent. Raises PeerError when it is not, or when the other end has closed."""
    num_bytes = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
    if num_bytes > _MAX_FRAME_BYTES:
        msg = f"the other end is no peer: it announces {num_bytes} bytes"
        raise PeerError(msg)
    return _receive(connection, num_bytes)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            msg = "the other end has closed the connection"
            raise PeerError(msg)
        received += part
    return received


def make_group(connection: socket.socket, rank: int, host: str, timeout: timedelta) -> Any:
    """Two ranks over gloo; blocks until both are here. Raises RuntimeError or PeerError, after `timeout` at most."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options and its point-to-point calls
    options = gloo._Options()  # noqa: SLF001 -- the only way to choose the address
    options._devices = [gloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return gloo(_Exchange(connection), rank, 2, options)
