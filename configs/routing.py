"""Which worker gets a request, and when its prompt is computed where it decodes."""

from dataclasses import dataclass
from enum import StrEnum

from configs.base import Section


class RoutingPolicy(StrEnum):
    """How the central scheduler chooses among the workers of a role."""

    ROUND_ROBIN = "round_robin"
    """One after the other, whatever they do."""
    LEAST_TOKENS = "least_tokens"
    """The one with the fewest tokens outstanding."""
    POWER_OF_TWO = "power_of_two"
    """The less loaded of two drawn at random."""
    PREFIX_AWARE = "prefix_aware"
    """The one with the fewest tokens outstanding, cached tokens of the prompt taken off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(Section):
    """Routing and conditional disaggregation.

    Attributes:
        policy: of both roles.
        seed: of the draws of `power_of_two`.
        prefix_weight: of `prefix_aware`: a worker that has n tokens of the prompt cached is preferred to one that
            has none as long as it has less than prefix_weight * n tokens more outstanding.
        max_index_blocks: distinct blocks whose holders the central scheduler remembers, at about 200 bytes each;
            what is beyond them is not found, and nothing else happens.
        local_prefill_max_tokens: a prompt of which a generation worker lacks at most this many tokens is computed
            there, and nothing is handed over; 0 hands every prompt over.
        local_turn_max_tokens: so is one of which it lacks at most this many tokens and every context worker more:
            a later turn of a conversation that it holds. 0 knows no such turns.
        local_prefill_max_waiting: a generation worker on which this many attempts wait is given no such prompt.
    """

    policy: RoutingPolicy = RoutingPolicy.PREFIX_AWARE
    seed: int = 0
    prefix_weight: float = 1.0
    max_index_blocks: int = 1 << 20
    local_prefill_max_tokens: int = 64
    local_turn_max_tokens: int = 512
    local_prefill_max_waiting: int = 4

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_positive("max_index_blocks", "local_prefill_max_waiting")
        self.require_not_negative("prefix_weight", "local_prefill_max_tokens", "local_turn_max_tokens")

    @property
    def needs_kv_events(self) -> bool:
        """Whether anything here asks what workers have cached."""
        return self.policy is RoutingPolicy.PREFIX_AWARE or self.local_prefill_max_tokens > 0
