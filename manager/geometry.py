"""`CacheGeometry`: tokens to blocks to pages to bytes, and how many slots the quotas buy.

Frozen and pure. Sizes that cannot work are refused here, with the arithmetic in the message.

    layer group   layers of one life cycle (full attention, or one window) and one shape: one page per block
    pool group    layer groups with pages of one size: they share slots
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from configs import KVCacheConfig, ModelConfig
from manager.errors import CacheConfigError
from manager.ids import LayerGroupId, LayerId, PoolGroupId, TierLevel

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
    """

    layer_id: LayerId
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    num_sink_tokens: int = 0
    extra_bytes_per_block: int = 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one page per block.

    A page is `[num_layers, 2, num_kv_heads, tokens_per_block, head_dim]`, K at index 0 and V at index 1,
    then the extra buffers.
    """

    layer_group_id: LayerGroupId
    layer_ids: tuple[LayerId, ...]
    pool_group_id: PoolGroupId
    num_kv_heads: int
    head_dim: int
    window: int | None
    num_sink_tokens: int
    page_bytes: int

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
class CacheGeometry:
    """Everything about sizes.

    Attributes:
        tokens_per_block: positions of a block.
        bytes_per_element: of K and V.
        layer_groups: by id.
        pool_groups: by id.
        tiers: configured levels, fastest first.
        max_request_tokens: longest request whose pages all fit on the device at once.
    """

    tokens_per_block: int
    bytes_per_element: int
    layer_groups: tuple[LayerGroup, ...]
    pool_groups: tuple[PoolGroup, ...]
    tiers: tuple[TierLevel, ...]
    max_request_tokens: int

    @classmethod
    def from_model(cls, model: ModelConfig, cache: KVCacheConfig, bytes_per_element: int) -> "CacheGeometry":
        """The layers, their windows and sinks, as `ModelConfig` describes them."""
        windows = [model.window_of(n) for n in range(model.num_layers)]
        layers = [
            LayerSpec(
                LayerId(n), model.num_kv_heads, model.head_dim, window, 0 if window is None else model.num_sink_tokens
            )
            for n, window in enumerate(windows)
        ]
        return cls.from_layers(layers, cache, bytes_per_element, max_position=model.max_position)

    @classmethod
    def from_layers(
        cls, layers: Sequence[LayerSpec], cache: KVCacheConfig, bytes_per_element: int, *, max_position: int = 1 << 30
    ) -> "CacheGeometry":
        """Group any mixture of layers.

        Raises:
            CacheConfigError: no size can work with these quotas; names the numbers.
        """
        groups = _layer_groups(layers, cache.tokens_per_block, bytes_per_element)
        pools = _pool_groups(groups, cache)
        fitting = min(_max_tokens(pool, groups, cache.tokens_per_block) for pool in pools)
        return cls(
            tokens_per_block=cache.tokens_per_block,
            bytes_per_element=bytes_per_element,
            layer_groups=groups,
            pool_groups=pools,
            tiers=tuple(_LEVELS[tier.tier] for tier in cache.tiers),
            max_request_tokens=min(fitting, max_position),
        )

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


def _layer_groups(layers: Sequence[LayerSpec], tokens_per_block: int, element: int) -> tuple[LayerGroup, ...]:
    if not layers:
        msg = "a cache needs at least one layer"
        raise CacheConfigError(msg)
    kinds: dict[tuple[int | None, int, int, int, int], list[LayerSpec]] = {}
    for layer in layers:
        if layer.window is not None and layer.window < tokens_per_block:
            msg = (
                f"layer {layer.layer_id}: window={layer.window} is smaller than tokens_per_block={tokens_per_block}: "
                "a page would leave the window before its block is full"
            )
            raise CacheConfigError(msg)
        kind = (
            layer.window,
            layer.num_sink_tokens,
            layer.num_kv_heads,
            layer.head_dim,
            layer.extra_bytes_per_block,
        )
        kinds.setdefault(kind, []).append(layer)
    sizes: list[int] = []
    groups = []
    for number, ((window, sinks, heads, dim, extra), members) in enumerate(kinds.items()):
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
            )
        )
    return tuple(groups)


def _resident_blocks(group: LayerGroup, num_tokens: int, tokens_per_block: int) -> int:
    """Most blocks that one request of `num_tokens` keeps on the device in one group, decoding token by token.

    A window that is not aligned to blocks touches one block more at either end.
    """
    blocks = -(-num_tokens // tokens_per_block)
    if group.window is None:
        return blocks
    sinks = -(-group.num_sink_tokens // tokens_per_block)
    return min(blocks, -(-(group.window - 1) // tokens_per_block) + 1 + sinks)


def _pool_groups(groups: Sequence[LayerGroup], cache: KVCacheConfig) -> tuple[PoolGroup, ...]:
    """Every pool group gets its least number of device slots first; the rest of the bytes is split by need."""
    members: dict[PoolGroupId, list[LayerGroup]] = {}
    for group in groups:
        members.setdefault(group.pool_group_id, []).append(group)
    shares = _byte_shares(members, cache.tokens_per_block)
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


def _byte_shares(
    members: Mapping[PoolGroupId, Sequence[LayerGroup]], tokens_per_block: int
) -> dict[PoolGroupId, float]:
    """Split a tier's bytes by what a typical request (four of the longest window) keeps in each pool group."""
    windows = [group.window for inside in members.values() for group in inside if group.window is not None]
    typical = 4 * max(windows, default=tokens_per_block)
    weights = {
        pool: sum(_resident_blocks(group, typical, tokens_per_block) * group.page_bytes for group in inside)
        for pool, inside in members.items()
    }
    whole = sum(weights.values())
    return {pool: weight / whole for pool, weight in weights.items()}


def _max_tokens(pool: PoolGroup, groups: Sequence[LayerGroup], tokens_per_block: int) -> int:
    """Longest request whose pages fit into the pool group's device slots."""
    inside = [groups[number] for number in pool.layer_group_ids]
    windowed = [group for group in inside if group.window is not None]
    fixed = sum(_resident_blocks(group, 1 << 30, tokens_per_block) for group in windowed)
    left = pool.num_slots[0] - fixed
    full = len(inside) - len(windowed)
    if left < full:
        msg = (
            f"pool group {pool.pool_group_id}: {pool.num_slots[0]} device slots, but the windows of one request alone "
            f"keep {fixed} pages"
        )
        raise CacheConfigError(msg)
    return left // full * tokens_per_block if full else 1 << 30
