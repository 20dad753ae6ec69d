"""`TorchPool`: device slots that the engine reads as a tensor; on a CPU, over memory that peers can map.

The one module of `manager` that imports torch; nothing else in `manager` imports it.
"""

import numpy as np
import numpy.typing as npt
import torch

from manager.geometry import LayerGroup


class TorchPool:
    """Device slots of one pool group.

    Attributes:
        num_slots: slots in the pool.
        slot_bytes: bytes of a page.
        tensor: [num_slots, slot_bytes] uint8 on the device.
    """

    __slots__ = ("num_slots", "slot_bytes", "tensor")

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        device: str = "cpu",
        memory: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Zeroed slots on `device`, or laid over `memory` (CPU only), which is zeroed.

        Args:
            num_slots: slots in the pool.
            slot_bytes: bytes of a page.
            device: a torch device string.
            memory: writable [num_slots * slot_bytes] uint8, such as a mapped file; the caller keeps it open.

        Raises:
            ValueError: `memory` has another size or type, is not writable, or the device is not the CPU.
        """
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        if memory is None:
            self.tensor = torch.zeros((num_slots, slot_bytes), dtype=torch.uint8, device=device)
            return
        if memory.dtype != np.uint8 or memory.shape != (num_slots * slot_bytes,) or not memory.flags.writeable:
            msg = f"memory is {memory.dtype} {memory.shape}, expected writable uint8 ({num_slots * slot_bytes},)"
            raise ValueError(msg)
        if torch.device(device).type != "cpu":
            msg = f"memory can only be laid under a CPU pool, not {device}"
            raise ValueError(msg)
        memory[:] = 0
        self.tensor = torch.from_numpy(memory).view(num_slots, slot_bytes)

    def pages(self, group: LayerGroup, tokens_per_block: int, dtype: torch.dtype) -> torch.Tensor:
        """A view [num_slots, num_layers, 2, num_kv_heads, tokens_per_block, head_dim] for one layer group.

        Raises:
            ValueError: the group's pages have another size in `dtype`.
        """
        shape = group.page_shape(tokens_per_block)
        elements = int(np.prod(shape))
        if group.page_bytes != self.slot_bytes or elements * dtype.itemsize > self.slot_bytes:
            msg = f"layer group {group.layer_group_id}: pages {shape} of {dtype} exceed {self.slot_bytes} bytes"
            raise ValueError(msg)
        # Extra buffers lie behind K and V.
        return self.tensor[:, : elements * dtype.itemsize].view(dtype).view(self.num_slots, *shape)

    def read(self, slot: int, out: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.read`."""
        out[:] = self.tensor[slot].cpu().numpy()

    def write(self, slot: int, source: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.write`."""
        self.tensor[slot].copy_(torch.from_numpy(source))

    def close(self) -> None:
        """Let the memory go with its last view; a mapped file is its owner's to close."""
