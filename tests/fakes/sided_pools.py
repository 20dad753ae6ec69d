"""Pools of known bytes at both ends of a transfer, of any block size and tensor-parallel degree."""

import dataclasses
import itertools
import random

import numpy as np
import numpy.typing as npt

from kvtransfer.messages import GroupLayout, MemoryDescription, TransferTicket
from manager import BlockOrdinal, LayerGroupId, LeaseId, PageLease, PageLocation, RequestId, SlotId, TierLevel
from tests.fakes.transfer_values import EPOCH, LAYOUT, OWNER

NUM_HEADS = 4
HEAD_DIM = 8
LAYERS = ((0, 2), (1, 3, 4))
"""Of two layer groups."""
NUM_TOKENS = 150
SENTINEL = 0xEE


class Side:
    """One tensor-parallel group: a memory for each rank, all with the same pages in the same slots."""

    def __init__(self, degree: int, block: int, seed: int, window: int | None = None) -> None:
        self.degree, self.block = degree, block
        self.num_blocks = -(-NUM_TOKENS // block)
        sizes = [len(layers) * 2 * (NUM_HEADS // degree) * block * HEAD_DIM for layers in LAYERS]
        slots = list(range(2 * self.num_blocks))
        self._slots = [random.Random(seed + group).sample(slots, self.num_blocks) for group in range(len(LAYERS))]
        starts = (0, sizes[0] * len(slots))
        groups = tuple(GroupLayout(layers, window, 0, size) for layers, size in zip(LAYERS, sizes, strict=True))
        self.layouts = [
            dataclasses.replace(
                LAYOUT,
                num_kv_heads=NUM_HEADS,
                head_dim=HEAD_DIM,
                tokens_per_block=block,
                groups=groups,
                offsets=starts,
                tp_degree=degree,
                tp_rank=rank,
            )
            for rank in range(degree)
        ]
        self.memories = [np.full(starts[1] + sizes[1] * len(slots), SENTINEL, dtype=np.uint8) for _ in range(degree)]

    def pages(self, blocks: range | None = None) -> tuple[PageLocation, ...]:
        return tuple(
            PageLocation(BlockOrdinal(block), LayerGroupId(group), SlotId(slots[block]), TierLevel.DEVICE)
            for group, slots in enumerate(self._slots)
            for block in blocks or range(self.num_blocks)
        )

    def page(self, rank: int, location: PageLocation) -> npt.NDArray[np.uint8]:
        """[layers, 2, heads, tokens, dim]: a view."""
        layout = self.layouts[rank]
        group = layout.groups[location.layer_group]
        start = layout.offsets[location.layer_group] + location.slot * group.page_bytes
        shape = (len(group.layer_ids), 2, NUM_HEADS // self.degree, self.block, HEAD_DIM)
        return self.memories[rank][start : start + group.page_bytes].reshape(shape)

    def put(self, content: list[npt.NDArray[np.uint8]]) -> None:
        """Write the whole model's [layers, 2, heads, tokens, dim] of each group into pages."""
        share = NUM_HEADS // self.degree
        for rank, location in itertools.product(range(self.degree), self.pages()):
            first = location.block * self.block
            part = content[location.layer_group][:, :, rank * share : (rank + 1) * share, first : first + self.block]
            self.page(rank, location)[:, :, :, : part.shape[3]] = part

    def get(self) -> list[npt.NDArray[np.uint8]]:
        """What the pages hold, as one array for each group; positions beyond the tokens included."""
        share = NUM_HEADS // self.degree
        shape = (2, NUM_HEADS, self.num_blocks * self.block, HEAD_DIM)
        content = [np.empty((len(layers), *shape), dtype=np.uint8) for layers in LAYERS]
        for rank, location in itertools.product(range(self.degree), self.pages()):
            first = location.block * self.block
            heads = slice(rank * share, (rank + 1) * share)
            content[location.layer_group][:, :, heads, first : first + self.block] = self.page(rank, location)
        return content

    def ticket(self, rank: int, pages: tuple[PageLocation, ...], num_tokens: int = NUM_TOKENS) -> TransferTicket:
        held = PageLease(LeaseId(1), EPOCH, RequestId("context"), num_tokens, pages)
        return TransferTicket(OWNER, held, self.layouts[rank], MemoryDescription("known"))


def known_bytes() -> list[npt.NDArray[np.uint8]]:
    generator = np.random.default_rng(3)
    return [
        generator.integers(0, 256, (len(layers), 2, NUM_HEADS, NUM_TOKENS, HEAD_DIM), dtype=np.uint8)
        for layers in LAYERS
    ]
