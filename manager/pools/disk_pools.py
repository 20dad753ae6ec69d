"""`DiskPool`: slots in a file that has no name, so that nothing survives the process and nothing leaks."""

import os
from tempfile import TemporaryFile

import numpy as np
import numpy.typing as npt

from manager.errors import CacheConfigError


class DiskPool:
    """Slots in one unlinked file, whose space is taken when it is opened."""

    def __init__(self, num_slots: int, slot_bytes: int, folder: str) -> None:
        """Open the file in `folder`.

        Raises:
            CacheConfigError: the folder does not exist or has less room than the tier's quota.
        """
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        try:
            self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
            if num_slots:
                os.posix_fallocate(self._file.fileno(), 0, num_slots * slot_bytes)
        except OSError as error:
            msg = f"disk tier: {num_slots} slots of {slot_bytes} bytes in {folder!r}: {error}"
            raise CacheConfigError(msg) from error

    def read(self, slot: int, out: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.read`. Raises OSError, also for a short read."""
        self._check(os.preadv(self._file.fileno(), [out.data], slot * self.slot_bytes))

    def write(self, slot: int, source: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.write`. Raises OSError, also for a short write."""
        self._check(os.pwritev(self._file.fileno(), [source.data], slot * self.slot_bytes))

    def close(self) -> None:
        """Close the file, and with it give its space back; may be called twice."""
        self._file.close()

    def _check(self, moved: int) -> None:
        if moved != self.slot_bytes:
            msg = f"moved {moved} of {self.slot_bytes} bytes"
            raise OSError(msg)
