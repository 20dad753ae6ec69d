"""The network transports' rows of `pdserve bench transport`: a process that reads, a process that owns.

In processes of their own, because UCX takes its links from the environment when it is loaded. The owner polls as often
as a worker's agent does; the reader sleeps less between two polls than an agent would.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from configs import TransferConfig
from kvtransfer.messages import MemoryDescription
from kvtransfer.transports import nixl
from kvtransfer.transports.base import Transport
from serving.bench.transport import TransportRow, measure, touched

KINDS = ("nixl", "nixl-tcp", "collective")
_TIMEOUT_S = 300.0


def network_rows(sizes_bytes: Sequence[int], page_bytes: int, repeats: int) -> list[TransportRow]:
    """Rows of every network transport that is installed."""
    rows: list[TransportRow] = []
    for kind in KINDS:
        if kind.startswith("nixl") and nixl.why_unavailable():
            continue
        links = ["/usr/bin/env", "UCX_TLS=tcp"] if kind == "nixl-tcp" else []
        numbers = [str(number) for number in (page_bytes, repeats, *sizes_bytes)]
        command = [*links, sys.executable, "-m", "serving.bench.network_transport", kind, *numbers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            msg = f"{kind} ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
            raise RuntimeError(msg)
        measured: list[TransportRow] = json.loads(done.stdout.splitlines()[-1])
        for row in measured:
            row["transport"] = kind
        rows += measured
    return rows


def main() -> None:
    """Measure one kind and print its rows as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("page_bytes", type=int)
    parser.add_argument("repeats", type=int)
    parser.add_argument("sizes_bytes", type=int, nargs="+")
    arguments = parser.parse_args()
    with _pair(arguments.kind, max(arguments.sizes_bytes)) as (transport, source):
        rows = measure(transport, source, arguments.sizes_bytes, arguments.page_bytes, arguments.repeats)
    print(json.dumps(rows))


@contextmanager
def _pair(kind: str, pool_bytes: int) -> Iterator[tuple[Transport, MemoryDescription]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_own_pool, args=(theirs, kind, pool_bytes), daemon=True)
    child.start()
    theirs.close()
    try:
        reader = _make_transport(kind, "reader.1")
        reader.register(touched(pool_bytes))
        yield reader, ours.recv()
        reader.close()
    finally:
        ours.close()  # the child waits for this
        child.join()


def _own_pool(connection: Connection, kind: str, pool_bytes: int) -> None:
    """Child: own a filled pool and serve it until the parent hangs up."""
    transport = _make_transport(kind, "owner.1")
    transport.register(touched(pool_bytes))
    connection.send(transport.describe())
    while not connection.poll(TransferConfig().agent_poll_s):
        transport.serve()
    transport.close()


def _make_transport(kind: str, name: str) -> Transport:
    if kind == "collective":
        from kvtransfer.transports.collective import CollectiveTransport  # torch, where it is measured only

        return CollectiveTransport(name)
    return nixl.NixlTransport(name)


if __name__ == "__main__":
    main()
