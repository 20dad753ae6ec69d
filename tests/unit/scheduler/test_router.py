"""Routing policies: each by its own rule, over loads and overlaps."""

from collections import Counter
from random import Random

import pytest

from configs import RouterConfig, RoutingPolicy
from manager import WorkerName
from scheduler.router import LeastTokensRouter, WorkerLoad
from scheduler.routing_policies import PowerOfTwoRouter, PrefixAwareRouter, RoundRobinRouter, make_router


def _load(name: str, num_attempts: int = 0, num_tokens: int = 0, cached: int = 0) -> WorkerLoad:
    return WorkerLoad(WorkerName(name), num_attempts, num_tokens, cached)


def test_the_worker_with_the_fewest_tokens_is_chosen() -> None:
    loads = [_load("g0", 1, 50), _load("g1", 3, 20), _load("g2", 1, 21)]
    assert LeastTokensRouter().choose(loads).worker == "g1"


def test_equal_tokens_go_to_fewer_attempts_then_to_the_first_name() -> None:
    router = LeastTokensRouter()
    assert router.choose([_load("g0", 2, 20), _load("g1", 1, 20)]).worker == "g1"
    assert router.choose([_load("g1", 1, 20), _load("g0", 1, 20)]).worker == "g0"


def test_round_robin_takes_turns_in_order_of_names_and_leaves_out_who_is_no_candidate() -> None:
    router = RoundRobinRouter()
    loads = [_load("g2", num_tokens=9), _load("g0", num_tokens=99), _load("g1")]
    assert [router.choose(loads).worker for _ in range(4)] == ["g0", "g1", "g2", "g0"]
    assert router.choose([loads[0], loads[1]]).worker == "g2"
    assert router.choose(loads).worker == "g0"


def test_of_two_that_are_drawn_the_less_loaded_is_chosen() -> None:
    loads = [_load(f"g{number}", num_tokens=number) for number in range(8)]
    router = PowerOfTwoRouter(Random(1))
    chosen = Counter(str(router.choose(loads).worker) for _ in range(400))
    assert chosen["g7"] == 0, "it loses against whomever it is drawn with"
    assert chosen["g0"] > chosen["g3"] > chosen["g6"] > 0
    assert router.choose(loads[:2]).worker == "g0"
    assert router.choose(loads[5:6]).worker == "g5"


def test_the_same_seed_draws_the_same_workers_and_each_role_its_own() -> None:
    loads = [_load(f"g{number}", num_tokens=number) for number in range(8)]
    config = RouterConfig(policy=RoutingPolicy.POWER_OF_TWO, seed=5)
    first, again, other = (make_router(config, role) for role in ("context", "context", "generation"))
    draws = [[router.choose(loads).worker for _ in range(20)] for router in (first, again, other)]
    assert draws[0] == draws[1] != draws[2]


def test_a_cached_prefix_outweighs_load_up_to_its_own_length() -> None:
    router = PrefixAwareRouter(prefix_weight=1.0)
    assert router.choose([_load("g0", num_tokens=0), _load("g1", num_tokens=63, cached=64)]).worker == "g1"
    assert router.choose([_load("g0", num_tokens=0), _load("g1", num_tokens=65, cached=64)]).worker == "g0"


def test_the_weight_says_how_much_load_a_cached_token_is_worth() -> None:
    loads = [_load("g0", num_tokens=0), _load("g1", num_tokens=100, cached=64)]
    assert PrefixAwareRouter(prefix_weight=0.0).choose(loads).worker == "g0"
    assert PrefixAwareRouter(prefix_weight=2.0).choose(loads).worker == "g1"


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
def test_one_hot_prefix_never_unbalances_two_workers_by_more_than_its_weight_and_a_request(weight: float) -> None:
    router = PrefixAwareRouter(weight)
    prefix, suffix = 640, 32
    load = dict.fromkeys(("g0", "g1", "g2", "g3"), 0)
    has_prefix: set[str] = set()
    for _ in range(500):
        cached = {name: prefix if name in has_prefix else 0 for name in load}
        chosen = router.choose([_load(name, num_tokens=load[name], cached=cached[name]) for name in load])
        load[chosen.worker] += prefix + suffix - chosen.num_cached_tokens
        has_prefix.add(chosen.worker)
        assert max(load.values()) - min(load.values()) <= weight * prefix + prefix + suffix
    assert has_prefix == load.keys(), "the excess goes to workers that lack it"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RoutingPolicy.ROUND_ROBIN, RoundRobinRouter),
        (RoutingPolicy.LEAST_TOKENS, LeastTokensRouter),
        (RoutingPolicy.POWER_OF_TWO, PowerOfTwoRouter),
        (RoutingPolicy.PREFIX_AWARE, PrefixAwareRouter),
    ],
)
def test_every_policy_has_its_router(policy: RoutingPolicy, expected: type) -> None:
    assert type(make_router(RouterConfig(policy=policy), "context")) is expected
