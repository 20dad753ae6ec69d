"""The routing policies that a deployment can choose from, and how each is made from its configuration.

    round_robin    the next name after the last one chosen
    least_tokens   fewest tokens outstanding (`router.LeastTokensRouter`)
    power_of_two   the less loaded of two drawn from a seed
    prefix_aware   fewest tokens outstanding, less prefix_weight * cached tokens of this prompt

Balance of `prefix_aware`: a worker that holds n tokens of a prompt gets it only while its load is less than
prefix_weight * n above the least loaded worker's. However hot one prefix is, two workers therefore never differ by
more than prefix_weight * its length and one request: the excess goes to workers that lack it, compute it once, and
hold it from then on.

Source: the cost function of Dynamo's KV router (overlap and load in one sum), in tokens instead of blocks; SGLang's
router switches between cache and load by two thresholds instead, which oscillates where they are crossed.
"""

from collections.abc import Sequence
from random import Random
from typing import assert_never

from configs import RouterConfig, RoutingPolicy
from manager import WorkerName
from scheduler.router import LeastTokensRouter, Router, WorkerLoad


class RoundRobinRouter:
    """The candidates one after the other, in order of their names."""

    def __init__(self) -> None:
        """Begin with the first name."""
        self._last = WorkerName("")

    def choose(self, candidates: Sequence[WorkerLoad]) -> WorkerLoad:
        """See `Router`. A worker that is no candidate this time loses its turn."""
        chosen = min(candidates, key=lambda load: (load.worker <= self._last, load.worker))
        self._last = chosen.worker
        return chosen


class PowerOfTwoRouter:
    """The less loaded of two that are drawn: nearly as even as the least loaded, and no herd forms on stale counts."""

    def __init__(self, random: Random) -> None:
        """Draw from `random`."""
        self._random = random
        self._least = LeastTokensRouter()

    def choose(self, candidates: Sequence[WorkerLoad]) -> WorkerLoad:
        """See `Router`."""
        drawn = candidates if len(candidates) <= 2 else self._random.sample(candidates, 2)
        return self._least.choose(drawn)


class PrefixAwareRouter:
    """The worker on which the request ends soonest, its cached prefix taken into account."""

    def __init__(self, prefix_weight: float) -> None:
        """A cached token outweighs `prefix_weight` outstanding ones."""
        self._prefix_weight = prefix_weight

    def choose(self, candidates: Sequence[WorkerLoad]) -> WorkerLoad:
        """See `Router`; equal costs go to fewer attempts, then to the name."""
        weight = self._prefix_weight
        return min(
            candidates,
            key=lambda load: (load.num_tokens - weight * load.num_cached_tokens, load.num_attempts, load.worker),
        )


def make_router(config: RouterConfig, role: str) -> Router:
    """The configured policy, for the workers of one role; each role draws from a chain of its own."""
    match config.policy:
        case RoutingPolicy.ROUND_ROBIN:
            return RoundRobinRouter()
        case RoutingPolicy.LEAST_TOKENS:
            return LeastTokensRouter()
        case RoutingPolicy.POWER_OF_TWO:
            return PowerOfTwoRouter(Random(f"{role} {config.seed}"))
        case RoutingPolicy.PREFIX_AWARE:
            return PrefixAwareRouter(config.prefix_weight)
        case _:
            assert_never(config.policy)
