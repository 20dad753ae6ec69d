"""`CopyThread`: one thread that copies between the pools of a worker, batch by batch, in order.

On a CPU the copies release the interpreter lock inside numpy and the system calls; on a GPU `TorchPool` orders them
on the device's stream before the next kernel.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

import numpy as np

from manager.errors import CopyFailedError
from manager.pools.base import SlotCopy, SlotPool


class CopyThread:
    """A `CopyEngine` over real pools, by store number."""

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        """The thread starts with the first batch."""
        self._pools = pools
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")
        self._fills: list[Future[list[SlotCopy]]] = []

    def stage(self, copies: Sequence[SlotCopy]) -> None:
        """Copy and wait. Raises CopyFailedError for the first that failed; what was copied until then is of no use."""
        self._thread.submit(self._copy_all, list(copies)).result()

    def fill(self, copies: Sequence[SlotCopy]) -> None:
        """Start to copy."""
        self._fills.append(self._thread.submit(self._try_all, list(copies)))

    def wait(self) -> Sequence[SlotCopy]:
        """Wait for every fill; returns those that failed since the last wait."""
        failed = [copy for fill in self._fills for copy in fill.result()]
        self._fills.clear()
        return failed

    def close(self) -> None:
        """Finish what runs, then end the thread; may be called twice."""
        self._thread.shutdown(wait=True)

    def _copy_all(self, copies: Sequence[SlotCopy]) -> None:
        for (source, target), batch in groupby(copies, key=lambda copy: (copy.source_store, copy.target_store)):
            buffer = np.empty(self._pools[source].slot_bytes, np.uint8)
            for copy in batch:
                try:
                    self._pools[source].read(copy.source_slot, buffer)
                    self._pools[target].write(copy.target_slot, buffer)
                except OSError as error:
                    raise CopyFailedError(target, error) from error

    def _try_all(self, copies: Sequence[SlotCopy]) -> list[SlotCopy]:
        failed = []
        for copy in copies:
            try:
                self._copy_all((copy,))
            except CopyFailedError:
                failed.append(copy)
        return failed
