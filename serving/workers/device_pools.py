"""`DevicePools`: the device tier of one worker: a pool for each pool group, and the memory that peers can read.

    registered memory   |-- pool group 0 --|------ pool group 1 ------|
                        slot 0, slot 1, ...  slot 0, slot 1, ...

One file in shared memory holds all pools, one after another, so that a transport registers one run of bytes. Layer
groups with pages of one size share a pool and its slots.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from configs import ModelConfig
from kvtransfer import GroupLayout, PoolLayout
from kvtransfer.transports.shared_memory import create_pool
from manager import LayerGroupId
from manager.geometry import CacheGeometry, LayerGroup
from manager.pools.torch_pools import TorchPool
from serving.workers.staging import PageStaging, SharedPool, TwinPool


class DevicePools:
    """Pools in the order of the pool groups, over one file.

    Attributes:
        pools: by pool group.
        memory: [num_bytes] uint8, what a transport registers.
        staging: between the pools and `memory`.
    """

    def __init__(self, geometry: CacheGeometry, path: Path, device: str) -> None:
        """Make the file and lay the pools over it; on a device, beside it.

        Raises:
            OSError: there is no room for the file.
        """
        self._geometry = geometry
        sizes = [group.num_slots[0] * group.page_bytes for group in geometry.pool_groups]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.memory = create_pool(path, sum(sizes))
        parts = [self.memory[start : start + size] for start, size in zip(self._starts, sizes, strict=True)]
        is_cpu = torch.device(device).type == "cpu"
        self.pools = [
            TorchPool(group.num_slots[0], group.page_bytes, device=device, memory=part if is_cpu else None)
            for group, part in zip(geometry.pool_groups, parts, strict=True)
        ]
        self.staging: PageStaging = SharedPool() if is_cpu else self._twins(parts)

    def pages(self, dtype: torch.dtype) -> dict[LayerGroupId, torch.Tensor]:
        """For each layer group, [slots, layers, 2, kv_heads, tokens, head_dim]: a view of its pool."""
        return {
            group.layer_group_id: self._pool_of(group).pages(group, self._geometry.tokens_per_block, dtype)
            for group in self._geometry.layer_groups
        }

    def layout(self, model: ModelConfig, fingerprint: str, exactness_class: str, dtype: torch.dtype) -> PoolLayout:
        """What peers compare at the handshake, and where the pools lie in `memory`."""
        groups = self._geometry.layer_groups
        return PoolLayout(
            model_fingerprint=fingerprint,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            tokens_per_block=self._geometry.tokens_per_block,
            dtype=str(dtype).removeprefix("torch."),
            groups=tuple(
                GroupLayout(
                    group.layer_ids,
                    group.window,
                    group.num_sink_tokens,
                    group.page_bytes,
                    group.num_kv_heads,
                    group.head_dim,
                )
                for group in groups
            ),
            exactness_class=exactness_class,
            offsets=tuple(self._starts[group.pool_group_id] for group in groups),
        )

    def _pool_of(self, group: LayerGroup) -> TorchPool:
        return self.pools[group.pool_group_id]

    def _twins(self, parts: list[npt.NDArray[np.uint8]]) -> TwinPool:
        groups = self._geometry.layer_groups
        return TwinPool({group.layer_group_id: (self._pool_of(group), parts[group.pool_group_id]) for group in groups})
