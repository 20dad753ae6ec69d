"""`CacheGeometry`: tokens to blocks to pages to bytes, and how many slots the quotas buy.

Frozen and pure. Sizes that cannot work are refused here, with the arithmetic in the message.

    layer group   layers of one life cycle (full attention, or one window) and one shape: one page per block
    pool group    layer groups with pages of one size: they share slots
    chain         layer groups that keep the same positions of a request: primary and draft in one, cross in the other
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from configs import KVCacheConfig, ModelConfig
from manager.errors import CacheConfigError
from manager.ids import CacheMember, LayerGroupId, LayerId, PoolGroupId, TierLevel

_LEVELS = {"device": TierLevel.DEVICE, "host": TierLevel.HOST, "disk": TierLevel.DISK}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps.

    Attributes:
        layer_id: its place in the model.
        num_kv_heads: heads of K and of V.
        head_dim: elements of one head.
        window: positions that a query sees, itself included; None for all.
        num_sink_tokens: first positions that a windowed query sees as well.
        extra_bytes_per_block: a further buffer of this layer, at the page's end.
        member: whose layer it is; layers of the draft model have ids of their own.
    """

    layer_id: LayerId
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    num_sink_tokens: int = 0
    extra_bytes_per_block: int = 0
    member: CacheMember = CacheMember.PRIMARY


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one page per block.

    A page is `[num_layers, 2, num_kv_heads, tokens_per_block, head_dim]`, K at index 0 and V at index 1,
    then the extra buffers.

    Attributes:
        max_blocks: most blocks that one request keeps with a page here, sinks included, when it is computed in the
            smallest chunks; None where it keeps every block.
    """

    layer_group_id: LayerGroupId
    layer_ids: tuple[LayerId, ...]
    pool_group_id: PoolGroupId
    num_kv_heads: int
    head_dim: int
    window: int | None
    num_sink_tokens: int
    page_bytes: int
    member: CacheMember = CacheMember.PRIMARY
    max_blocks: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        return len(self.layer_ids)

    def page_shape(self, tokens_per_block: int) -> tuple[int, int, int, int, int]:
        """[num_layers, 2, num_kv_heads, tokens_per_block, head_dim]."""
        return (self.num_layers, 2, self.num_kv_heads, tokens_per_block, self.head_dim)

    def stale_blocks(self, history_length: int, tokens_per_block: int) -> range:
        """Blocks that no query from position `history_length` on can see any more; sinks are never among them.

        0        sinks       stale         window       history_length
        |--------|-----------------------|--------------|
        """
        if self.window is None:
            return range(0)
        end = max(0, history_length - self.window + 1) // tokens_per_block
        return range(min(end, -(-self.num_sink_tokens // tokens_per_block)), end)


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """Slots of one size.

    Attributes:
        num_slots: per configured tier, fastest first.
    """

    pool_group_id: PoolGroupId
    layer_group_ids: tuple[LayerGroupId, ...]
    page_bytes: int
    num_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChainLayout:
    """Layer groups that keep the same positions: one page each per block.

    Attributes:
        groups: their ids, without a gap.
        groups_per_pool: per pool group, how many of them are in it.
        full_groups_per_pool: of those, how many keep every block.
        has_windows: whether any of them forgets.
    """

    groups: tuple[LayerGroupId, ...]
    groups_per_pool: tuple[int, ...]
    full_groups_per_pool: tuple[int, ...]
    has_windows: bool

    @classmethod
    def of(cls, groups: Sequence[LayerGroup], num_pool_groups: int) -> "ChainLayout":
        """Count them."""
        pools = [group.pool_group_id for group in groups]
        full = [group.pool_group_id for group in groups if group.window is None]
        return cls(
            groups=tuple(group.layer_group_id for group in groups),
            groups_per_pool=tuple(pools.count(PoolGroupId(pool)) for pool in range(num_pool_groups)),
            full_groups_per_pool=tuple(full.count(PoolGroupId(pool)) for pool in range(num_pool_groups)),
            has_windows=len(full) < len(pools),
        )


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Everything about sizes.

    Attributes:
        tokens_per_block: positions of a block.
        bytes_per_element: of K and V.
        layer_groups: by id; those of the encoder's output last.
        pool_groups: by id.
        tiers: configured levels, fastest first.
        max_request_tokens: longest request whose pages all fit on the device at once.
        max_encoder_tokens: longest encoder input; 0 without layers for it.
        draft_padding_tokens: positions that a drafting step may write beyond its drafts.
        chain: layer groups of the primary and the draft.
        cross: layer groups of the encoder's output; None without.
    """

    tokens_per_block: int
    bytes_per_element: int
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PoolGroup, ...]
    tiers: tuple[TierLevel, ...]
    max_request_tokens: int
    max_encoder_tokens: int
    draft_padding_tokens: int
    chain: ChainLayout
    cross: ChainLayout | None

    @classmethod
    def from_model(
        cls, model: ModelConfig, cache: KVCacheConfig, bytes_per_element: int, *, chunk_tokens: int = 1
    ) -> "CacheGeometry":
        """The layers, their windows and sinks, as `ModelConfig` describes them; `chunk_tokens` as in `from_layers`."""
        windows = [model.window_of(n) for n in range(model.num_layers)]
        layers = [
            LayerSpec(
                LayerId(n), model.num_kv_heads, model.head_dim, window, 0 if window is None else model.num_sink_tokens
            )
            for n, window in enumerate(windows)
        ]
        return cls.from_layers(
            layers, cache, bytes_per_element, max_position=model.max_position, chunk_tokens=chunk_tokens
        )

    @classmethod
    def from_layers(  # noqa: PLR0913 - what sizes depend on, each with a default
        cls,
        layers: Sequence[LayerSpec],
        cache: KVCacheConfig,
        bytes_per_element: int,
        *,
        max_position: int = 1 << 30,
        max_encoder_tokens: int = 0,
        draft_padding_tokens: int = 0,
        chunk_tokens: int = 1,
    ) -> "CacheGeometry":
        """Group any mixture of layers, of the model, its draft and its cross-attention.

        `chunk_tokens`: positions that the smallest step of a long context adds; a windowed layer has them all beside
        what its window still shows, or such a context would wait for ever.

        Raises:
            CacheConfigError: no size can work with these quotas; names the numbers.
        """
        groups = _layer_groups(layers, cache.tokens_per_block, bytes_per_element)
        cross = [group for group in groups if group.member is CacheMember.CROSS]
        if bool(cross) != (max_encoder_tokens > 0) or len(cross) == len(groups):
            msg = (
                f"{len(cross)} of {len(groups)} layer groups keep encoder output, "
                f"max_encoder_tokens={max_encoder_tokens}"
            )
            raise CacheConfigError(msg)
        need = _RequestNeed(cache.tokens_per_block, max_encoder_tokens, chunk_tokens, cache.enable_block_reuse)
        groups = tuple(replace(group, max_blocks=need.max_blocks(group)) for group in groups)
        pools = _pool_groups(groups, cache, need)
        fitting = min(need.max_tokens(pool, groups) for pool in pools)
        geometry = cls(
            tokens_per_block=cache.tokens_per_block,
            bytes_per_element=bytes_per_element,
            layer_groups=groups,
            pool_groups=pools,
            tiers=tuple(_LEVELS[tier.tier] for tier in cache.tiers),
            max_request_tokens=min(fitting, max_position),
            max_encoder_tokens=max_encoder_tokens,
            draft_padding_tokens=draft_padding_tokens,
            chain=ChainLayout.of(groups[: len(groups) - len(cross)], len(pools)),
            cross=ChainLayout.of(cross, len(pools)) if cross else None,
        )
        need.require_room(geometry, min(chunk_tokens, max_position), "chunk_tokens")
        need.require_room(geometry, cache.required_request_tokens, "required_request_tokens")
        return geometry

    @property
    def has_windows(self) -> bool:
        """Whether any layer group forgets."""
        return any(group.window is not None for group in self.layer_groups)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that cover [0, num_tokens)."""
        return -(-num_tokens // self.tokens_per_block)

    def num_slots(self, tier: TierLevel, pool_group: PoolGroupId) -> int:
        """Slots of a pool group in a tier; 0 where the tier is not configured."""
        if tier not in self.tiers:
            return 0
        return self.pool_groups[pool_group].num_slots[self.tiers.index(tier)]


def _refuse_layer(layer: LayerSpec, tokens_per_block: int) -> None:
    if layer.window is None:
        return
    if layer.member is CacheMember.CROSS:
        msg = f"layer {layer.layer_id} keeps encoder output, which is seen whole: window={layer.window}"
        raise CacheConfigError(msg)
    if layer.window < tokens_per_block:
        msg = (
            f"layer {layer.layer_id}: window={layer.window} is smaller than tokens_per_block={tokens_per_block}: "
            "a page would leave the window before its block is full"
        )
        raise CacheConfigError(msg)


def _layer_groups(layers: Sequence[LayerSpec], tokens_per_block: int, element: int) -> tuple[LayerGroup, ...]:
    if not layers:
        msg = "a cache needs at least one layer"
        raise CacheConfigError(msg)
    kinds: dict[tuple[CacheMember, int | None, int, int, int, int], list[LayerSpec]] = {}
    for layer in sorted(layers, key=lambda layer: layer.member is CacheMember.CROSS):
        _refuse_layer(layer, tokens_per_block)
        kind = (
            layer.member,
            layer.window,
            layer.num_sink_tokens,
            layer.num_kv_heads,
            layer.head_dim,
            layer.extra_bytes_per_block,
        )
        kinds.setdefault(kind, []).append(layer)
    sizes: list[int] = []
    groups = []
    for number, ((member, window, sinks, heads, dim, extra), members) in enumerate(kinds.items()):
        size = len(members) * (2 * heads * tokens_per_block * dim * element + extra)
        if size not in sizes:
            sizes.append(size)
        groups.append(
            LayerGroup(
                layer_group_id=LayerGroupId(number),
                layer_ids=tuple(layer.layer_id for layer in members),
                pool_group_id=PoolGroupId(sizes.index(size)),
                num_kv_heads=heads,
                head_dim=dim,
                window=window,
                num_sink_tokens=sinks,
                page_bytes=size,
                member=member,
            )
        )
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _RequestNeed:
    """Pages that one request keeps on the device."""

    tokens_per_block: int
    max_encoder_tokens: int
    chunk_tokens: int
    has_reuse: bool

    def resident_blocks(self, group: LayerGroup, num_tokens: int) -> int:
        """Most blocks of one group for a request of `num_tokens`, computed in the smallest chunks."""
        if group.member is CacheMember.CROSS:
            return -(-self.max_encoder_tokens // self.tokens_per_block)
        blocks = -(-num_tokens // self.tokens_per_block)
        return blocks if group.max_blocks is None else min(blocks, group.max_blocks)

    def max_blocks(self, group: LayerGroup) -> int | None:
        """The same for any number of tokens; None where every block is kept.

        The window lies behind the history, the chunk before it, and neither need be aligned to blocks.
        """
        if group.window is None:
            return None
        sinks = -(-group.num_sink_tokens // self.tokens_per_block)
        size, chunk = self.tokens_per_block, self.chunk_tokens
        if (
            self.has_reuse
        ):  # pages leave as seen from the last committed block, up to `size - 1` before the history's end
            kept = -(-(group.window - 1) // size) + -(-(size - 1 + chunk) // size)
        else:  # as seen from one block behind the history
            kept = -(-(group.window + chunk - 2) // size) + 2
        return kept + sinks

    def byte_shares(self, members: Mapping[PoolGroupId, Sequence[LayerGroup]]) -> dict[PoolGroupId, float]:
        """Split a tier's bytes by what a typical request (four of the longest window) keeps in each pool group."""
        windows = [group.window for inside in members.values() for group in inside if group.window is not None]
        typical = max(4 * max(windows, default=self.tokens_per_block), self.max_encoder_tokens)
        weights = {
            pool: sum(self.resident_blocks(group, typical) * group.page_bytes for group in inside)
            for pool, inside in members.items()
        }
        whole = sum(weights.values())
        return {pool: weight / whole for pool, weight in weights.items()}

    def require_room(self, geometry: CacheGeometry, num_tokens: int, name: str) -> None:
        """Refuse to start where one request of `num_tokens` has no place on the device, whatever else is there.

        Raises:
            CacheConfigError: names the setting, the pool group and the numbers.
        """
        for pool in geometry.pool_groups:
            inside = [geometry.layer_groups[number] for number in pool.layer_group_ids]
            pages = sum(self.resident_blocks(group, num_tokens) for group in inside)
            if pages > pool.num_slots[0]:
                msg = (
                    f"{name}={num_tokens} takes {pages} pages of {pool.page_bytes} bytes in pool group "
                    f"{pool.pool_group_id} ({self.tokens_per_block} tokens a block, {len(inside)} layer groups), "
                    f"{pages * pool.page_bytes} bytes; its share of the device quota is {pool.num_slots[0]} pages"
                )
                raise CacheConfigError(msg)

    def max_tokens(self, pool: PoolGroup, groups: Sequence[LayerGroup]) -> int:
        """Longest request whose pages fit into the pool group's device slots.

        Raises:
            CacheConfigError: not even one block fits.
        """
        inside = [groups[number] for number in pool.layer_group_ids]
        bounded = [group for group in inside if group.window is not None or group.member is CacheMember.CROSS]
        fixed = sum(self.resident_blocks(group, 1 << 30) for group in bounded)
        left = pool.num_slots[0] - fixed
        growing = len(inside) - len(bounded)
        if left < growing:
            fixed_parts = "encoder output and windows" if self.max_encoder_tokens else "windows"
            msg = (
                f"pool group {pool.pool_group_id}: {pool.num_slots[0]} device slots, but the {fixed_parts} of one "
                f"request alone keep {fixed} pages in chunks of {self.chunk_tokens}, and its first block takes "
                f"{growing} more"
            )
            raise CacheConfigError(msg)
        return left // growing * self.tokens_per_block if growing else 1 << 30


def _pool_groups(groups: Sequence[LayerGroup], cache: KVCacheConfig, need: _RequestNeed) -> tuple[PoolGroup, ...]:
    """Every pool group gets its least number of device slots first; the rest of the bytes is split by need."""
    members: dict[PoolGroupId, list[LayerGroup]] = {}
    for group in groups:
        members.setdefault(group.pool_group_id, []).append(group)
    shares = need.byte_shares(members)
    least = {pool: cache.max_sequences * len(inside) for pool, inside in members.items()}
    quota = cache.tiers[0].quota_bytes
    rest = quota - sum(least[pool] * inside[0].page_bytes for pool, inside in members.items())
    if rest < 0:
        sums = " + ".join(f"{least[pool]} x {inside[0].page_bytes}" for pool, inside in sorted(members.items()))
        msg = (
            f"device quota of {quota} bytes: max_sequences={cache.max_sequences} needs at least a page of each layer "
            f"group per sequence, {sums} = {quota - rest} bytes"
        )
        raise CacheConfigError(msg)
    pools = []
    for pool, inside in sorted(members.items()):
        size, ids = inside[0].page_bytes, tuple(group.layer_group_id for group in inside)
        device = least[pool] + int(rest * shares[pool]) // size
        lower = (int(tier.quota_bytes * shares[pool]) // size for tier in cache.tiers[1:])
        pools.append(PoolGroup(pool, ids, size, (device, *lower)))
    return tuple(pools)
