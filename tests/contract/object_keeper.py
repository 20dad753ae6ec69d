"""A Ray actor that owns memories for the transport contract: the other end of the object store transport."""

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import psutil
import ray

from kvtransfer.errors import PeerError
from kvtransfer.transports.object_store import ObjectStoreTransport, OwnerRuns

NAMESPACE = "transport-contract"
KEEPER = "keeper"
PATIENCE_S = 60.0


class Keeper:
    """Answers for every life that was given to it."""

    def __init__(self) -> None:
        self._lives: dict[str, ObjectStoreTransport] = {}

    def own(self, life: str, path: str) -> None:
        transport = ObjectStoreTransport(life, KEEPER, NAMESPACE)
        with Path(path).open("r+b") as file:
            transport.register(np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8))
        self._lives[life] = transport

    def drop(self, life: str) -> None:
        self._lives.pop(life).close()

    def answer_fetch(self, life: str, runs: OwnerRuns) -> npt.NDArray[np.uint8]:
        if life not in self._lives:
            msg = f"{life} has ended"
            raise PeerError(msg)
        return self._lives[life].answer_fetch(life, runs)

    def die(self) -> None:
        os._exit(1)


@contextmanager
def running_keeper(temporary: Path) -> Iterator[Any]:
    """A Ray of our own, in processes of its own, with a keeper in it; all of them are ended."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Without tokens: this process may have imported Ray long before, and it reads its token then.
    with mock.patch.dict(os.environ, {"RAY_AUTH_MODE": "disabled"}):  # noqa: TID251 -- Ray knows no other way
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
                *("--include-dashboard=false", "--num-cpus=1", f"--port={port}", f"--temp-dir={temporary}"),
                f"--object-store-memory={100 << 20}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _connect(f"127.0.0.1:{port}")
            yield ray.remote(Keeper).options(name=KEEPER, num_cpus=0, max_restarts=-1).remote()
        finally:
            ray.shutdown()
            started = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            head.wait(30)
            _, alive = psutil.wait_procs(started, timeout=10)
            assert alive == []


def _connect(address: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        except ConnectionError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.2)
        else:
            return
