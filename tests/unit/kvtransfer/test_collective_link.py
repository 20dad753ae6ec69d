"""An owner's door over gloo that closes while a reader comes in."""

import socket
import threading

import numpy as np
import pytest

from kvtransfer.transports.collective_link import OwnerDoor


def test_a_door_closes_while_a_reader_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    comes_in, may_start = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        if thread.name == "pdserve-link":
            comes_in.set()
            may_start.wait(10)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    door = OwnerDoor("owner", "127.0.0.1", np.zeros(16, dtype=np.uint8), 1.0)
    with socket.create_connection((door.address.host, door.address.port)):
        assert comes_in.wait(10)
        closed = threading.Event()

        def close() -> None:
            door.close()
            closed.set()

        closing = threading.Thread(target=close, name="closing")
        closing.start()
        closing.join(0.1)
        may_start.set()
        closing.join(10)
    assert closed.is_set()
