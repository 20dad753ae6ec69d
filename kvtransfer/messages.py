"""Frozen wire types of the handoff: what a context worker hands over and what peers answer.

Durations, never timestamps, cross processes (M7).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from manager import Epoch, LeaseId, PageLease, RequestId, WorkerName

ReaderId = NewType("ReaderId", str)
"""Who settles a lease: one receive of one life of one worker, and never another one.

Not the attempt: a new term may offer an attempt again whose first reader has settled and then died, and to the
second one the pages are another's.
"""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The pages of one layer group.

    A page is `[len(layer_ids), 2, num_kv_heads, tokens_per_block, head_dim]`, contiguous.

    Attributes:
        layer_ids: the model's layers in it, in the page's order.
        window: positions that a query of these layers sees; None for all. Pages outside are not sent.
        num_sink_tokens: first positions that it sees as well.
        page_bytes: size of a page.
        num_kv_heads: of these layers, on all ranks; None for the pool's.
        head_dim: of these layers; None for the pool's.
    """

    layer_ids: tuple[int, ...]
    window: int | None
    num_sink_tokens: int
    page_bytes: int
    num_kv_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The shape of one worker's pages; compared field by field at the handshake (C18).

    Attributes:
        num_kv_heads: of the model, on all ranks of a tensor-parallel group.
        tokens_per_block: may be a multiple or a part of the peer's.
        groups: by layer group id.
        offsets: for each layer group, the byte of the registered memory at which its slot 0 lies. A pool's own:
            not compared.
        tp_degree: ranks that share the heads; not compared, pages are re-laid out.
        tp_rank: which of them this memory belongs to.
        exactness_class: names the arithmetic that wrote the pages; workers of unlike kernels must not mix bits.
    """

    model_fingerprint: str
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: str
    groups: tuple[GroupLayout, ...]
    layout_version: int = 2
    exactness_class: str = ""
    offsets: tuple[int, ...] = field(default=(0,), compare=False)
    tp_degree: int = field(default=1, compare=False)
    tp_rank: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class MemoryDescription:
    """How a peer reaches a registered memory.

    Attributes:
        transport: name of the transport that wrote this.
        attributes: transport's own (a file path and its length, an agent's metadata, ...).
        ways: of a worker with several transports, the description of each.
    """

    transport: str
    attributes: Mapping[str, str | int | bytes] = field(default_factory=dict)
    ways: "tuple[MemoryDescription, ...]" = ()


@dataclass(frozen=True, slots=True)
class TransferTicket:
    """What a context worker hands over: a lease, and where its pages are. Satisfies `scheduler.Ticket`."""

    owner: WorkerName
    lease: PageLease
    layout: PoolLayout
    memory: MemoryDescription

    @property
    def epoch(self) -> Epoch:
        """The owner's life when it gave the lease."""
        return self.lease.epoch

    @property
    def lease_id(self) -> LeaseId:
        """The hold on the pages."""
        return self.lease.lease_id

    @property
    def num_tokens(self) -> int:
        """Positions whose KV the pages contain."""
        return self.lease.num_tokens

    @property
    def total_bytes(self) -> int:
        """Bytes of all pages; those of a layer group that does not exist are refused by the plan of a receive."""
        sizes = [group.page_bytes for group in self.layout.groups]
        known = [page.layer_group for page in self.lease.pages if 0 <= page.layer_group < len(sizes)]
        return sum(sizes[layer_group] for layer_group in known)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One contiguous run of bytes, from the source memory to our own."""

    source_offset: int
    destination_offset: int
    num_bytes: int


class SettleReply(StrEnum):
    """The owner's answer to `settle(lease, epoch)`, asked after the last byte was read."""

    OK = "ok"
    """The lease was live the whole time: the bytes may be trusted. Asking twice answers OK twice."""
    EXPIRED = "expired"
    """Discard what was read and recompute."""


class ReadStatus(StrEnum):
    """Where a read is."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Nothing is being written into our memory any more."""


class ReceiveResult(StrEnum):
    """How a receive ended."""

    VERIFIED = "verified"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReceiveOutcome:
    """A receive has ended, and no byte of it is being written any more: the loop may act on the pages.

    Attributes:
        request_id: the attempt whose pages were read.
        result: how it ended.
        num_bytes: bytes that were moved.
        duration_s: from start to the settle's answer.
        message: what failed, for FAILED.
    """

    request_id: RequestId
    result: ReceiveResult
    num_bytes: int = 0
    duration_s: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """A lease that we gave has ended."""

    lease_id: LeaseId
    request_id: RequestId
    settled: bool


@dataclass(frozen=True, slots=True)
class ReservationExpired:
    """A reservation was neither activated nor given up by its deadline; a read into its pages may still run."""

    request_id: RequestId


TransferOutcome = ReceiveOutcome | LeaseOutcome | ReservationExpired
