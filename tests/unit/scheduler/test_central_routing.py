"""The central scheduler routes by what workers have cached; generation workers compute what they mostly have."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from configs import CentralConfig, DispatchPolicy, RouterConfig, RoutingPolicy
from manager import ReuseScope, block_hashes
from scheduler.messages import OfferGeneration, RunContext, RunLocal
from scheduler.prefix_changes import PrefixesChanged
from scheduler.spec import RequestSpec
from tests.fakes.central_world import CentralWorld, make_spec

_BLOCK = 4
_BY_PREFIX = RouterConfig(local_prefill_max_tokens=0)
_LOCAL = RouterConfig(local_prefill_max_tokens=6, local_turn_max_tokens=0, local_prefill_max_waiting=2)
_TURNS = replace(_LOCAL, local_turn_max_tokens=20)


def _hold(world: CentralWorld, name: str, token_ids: Iterable[int], *, is_listing: bool = False) -> None:
    """A worker says that it has these tokens cached."""
    hashes = tuple(block_hashes(tuple(token_ids), _BLOCK, ReuseScope("")))
    report = PrefixesChanged(stored=hashes, is_listing=is_listing)
    world.do(name, lambda worker: worker.reports.append(report))


def _kinds(world: CentralWorld, name: str) -> list[type]:
    return [type(command) for command in world.commands(name)]


def test_a_prompt_goes_to_the_worker_that_has_its_prefix() -> None:
    world = CentralWorld("c0", "c1", "g0", "g1", router=_BY_PREFIX)
    _hold(world, "c1", range(40))
    _hold(world, "g1", range(40))
    world.submit(make_spec("a", num_prompt=41))
    world.compute_context("a", "c1")
    assert _kinds(world, "g1") == [OfferGeneration]
    assert world.counter("routed_prefix_aware") == 2
    assert world.counter("routed_cached_tokens") == 80
    assert world.counter("routed_uncached_tokens") == 2


def test_load_on_the_worker_that_has_the_prefix_sends_the_next_one_elsewhere() -> None:
    world = CentralWorld("c0", "c1", "g0", router=_BY_PREFIX)
    _hold(world, "c1", range(40))
    world.submit(*(make_spec(f"r{number}", num_prompt=60) for number in range(4)))
    assert [world.load("c0"), world.load("c1")] == [(1, 60), (3, 60)]
    assert world.counter("routed_by_prefix") == 1, "of three that it got, one was against the load"


def test_a_context_counts_for_what_it_has_to_compute() -> None:
    world = CentralWorld("c0", "g0", router=_BY_PREFIX)
    _hold(world, "c0", range(40))
    world.submit(make_spec("a", num_prompt=43))
    assert world.load("c0") == (1, 3)
    world.compute_context("a")
    assert world.load("c0") == (0, 0)


def test_a_wholly_cached_prompt_still_counts_for_its_last_token() -> None:
    world = CentralWorld("c0", "g0", router=_BY_PREFIX)
    _hold(world, "c0", range(40))
    world.submit(make_spec("a", num_prompt=40))
    assert world.load("c0") == (1, 1)


def test_what_a_dead_worker_had_is_forgotten_and_its_next_life_begins_empty() -> None:
    world = CentralWorld("c0", "c1", "g0", router=_BY_PREFIX)
    _hold(world, "c1", range(40))
    world.lose("c1")
    world.start("c1")
    world.submit(make_spec("a", num_prompt=41))
    assert _kinds(world, "c0") == [RunContext]
    assert world.central.state(world.now_s)["routing"]["index"]["blocks"] == 0


def test_a_new_term_routes_by_what_workers_list_to_it() -> None:
    world = CentralWorld("c0", "c1", "g0", router=_BY_PREFIX)
    _hold(world, "c1", range(40))
    world.succeed(4)
    assert world.central.state(world.now_s)["routing"]["index"]["blocks"] == 0
    _hold(world, "c1", range(40), is_listing=True)
    world.submit(make_spec("a", num_prompt=41))
    assert _kinds(world, "c1") == [RunContext]


def test_blocks_of_another_reuse_scope_are_not_the_same_blocks() -> None:
    world = CentralWorld("c0", "c1", "g0", router=_BY_PREFIX)
    _hold(world, "c1", range(40))
    world.submit(replace(make_spec("a", num_prompt=41), reuse_scope="tenant"))
    assert _kinds(world, "c0") == [RunContext]


# -- conditional disaggregation ------------------------------------------------------------------------------


@pytest.mark.parametrize("dispatch", list(DispatchPolicy))
def test_a_short_prompt_is_computed_where_it_decodes(dispatch: DispatchPolicy) -> None:
    world = CentralWorld("c0", "g0", config=CentralConfig(dispatch=dispatch), router=_LOCAL)
    world.submit(make_spec("a", num_prompt=6))
    assert _kinds(world, "g0") == [RunLocal]
    assert world.load("g0") == (1, 11)
    world.finish("a")
    world.assert_idle()
    assert world.commands("c0") == []
    assert world.counter("local_prefills") == 1


@pytest.mark.parametrize("dispatch", list(DispatchPolicy))
def test_the_next_turn_of_a_conversation_is_computed_on_the_worker_that_holds_it(dispatch: DispatchPolicy) -> None:
    world = CentralWorld("c0", "g0", "g1", config=CentralConfig(dispatch=dispatch), router=_LOCAL)
    _hold(world, "g1", range(40))
    world.submit(make_spec("a", num_prompt=46), make_spec("b", num_prompt=47))
    assert _kinds(world, "g1")[:1] == [RunLocal]
    assert world.counter("local_prefills") == 1, "of the second one, a token too much is missing"


@pytest.mark.parametrize("dispatch", list(DispatchPolicy))
def test_a_long_turn_goes_where_its_conversation_is_if_a_context_worker_would_compute_the_answer_again(
    dispatch: DispatchPolicy,
) -> None:
    world = CentralWorld("c0", "c1", "g0", "g1", config=CentralConfig(dispatch=dispatch), router=_TURNS)
    _hold(world, "c1", range(32))
    _hold(world, "g1", range(40))
    world.submit(make_spec("a", num_prompt=60))
    assert _kinds(world, "g1") == [RunLocal]
    world.finish("a", "g1")
    assert (world.counter("local_prefills"), world.counter("local_turns")) == (1, 1)
    world.assert_idle()


def test_a_long_turn_is_handed_over_where_a_context_worker_has_as_much_of_it() -> None:
    world = CentralWorld("c0", "c1", "g0", router=_TURNS)
    _hold(world, "c1", range(40))
    _hold(world, "g0", range(40))
    world.submit(make_spec("a", num_prompt=60))
    assert _kinds(world, "c1") == [RunContext]
    assert world.counter("local_turns") == 0


def test_a_turn_beyond_the_bound_is_handed_over() -> None:
    world = CentralWorld("c0", "g0", router=_TURNS)
    _hold(world, "g0", range(40))
    world.submit(make_spec("a", num_prompt=61))
    assert _kinds(world, "c0") == [RunContext]


def test_a_new_prompt_that_nobody_has_is_no_turn() -> None:
    world = CentralWorld("c0", "g0", router=_TURNS)
    world.submit(make_spec("a", num_prompt=19))
    assert _kinds(world, "c0") == [RunContext]


def test_no_more_prompts_are_computed_there_than_may_wait() -> None:
    world = CentralWorld("c0", "g0", router=_LOCAL)
    world.submit(*(make_spec(uid, num_prompt=5) for uid in "abc"))
    assert _kinds(world, "g0") == [RunLocal, RunLocal]
    assert _kinds(world, "c0") == [RunContext]
    assert world.counter("local_prefills_refused") == 1


def test_prompts_that_have_begun_there_make_room_for_further_ones() -> None:
    world = CentralWorld("c0", "g0", router=_LOCAL)
    world.submit(*(make_spec(uid, num_prompt=5) for uid in "ab"))
    world.advance(0.5)  # its account lists both as running
    world.submit(make_spec("c", num_prompt=5))
    assert _kinds(world, "g0") == [RunLocal] * 3


def test_a_short_prompt_does_not_pass_an_older_request_that_waits_for_a_generation_worker() -> None:
    world = CentralWorld("c0", "g0", router=_LOCAL)
    world.submit(make_spec("old", num_prompt=30))
    world.compute_context("old")
    world.defer("old")
    world.submit(make_spec("young", num_prompt=5))
    assert _kinds(world, "g0") == [OfferGeneration]
    assert _kinds(world, "c0") == [RunContext, RunContext]


def test_a_prompt_that_is_too_long_for_the_generation_worker_that_has_it_is_handed_over() -> None:
    world = CentralWorld("c0", "g0", router=_LOCAL)
    world.start("g1", max_request_tokens=20)
    _hold(world, "g1", range(40))
    world.submit(make_spec("a", num_prompt=44))
    assert _kinds(world, "g1") == []
    assert _kinds(world, "c0") == [RunContext]


def test_a_locally_computed_request_whose_worker_dies_goes_back_to_its_door() -> None:
    world = CentralWorld("c0", "g0", "g1", router=_LOCAL)
    world.submit(make_spec("a", num_prompt=5))
    world.lose("g0")
    assert [(notice.uid, notice.retriable) for notice in world.notices] == [("a", True)]
    world.submit(make_spec("a", num_prompt=5, accepted=1))
    assert _kinds(world, "g1") == [RunLocal]
    world.finish("a", "g1")
    world.assert_idle()


@pytest.mark.parametrize("policy", list(RoutingPolicy))
def test_every_policy_counts_its_decisions(policy: RoutingPolicy) -> None:
    world = CentralWorld("c0", "c1", "g0", router=RouterConfig(policy=policy, local_prefill_max_tokens=0))
    world.submit(make_spec("a"), make_spec("b"))
    assert {world.load("c0")[0], world.load("c1")[0]} <= {0, 1, 2}
    assert world.counter(f"routed_{policy}") == 2
    routing = world.central.state(world.now_s)["routing"]
    assert (routing["policy"], routing["decisions"]) == (policy.value, 2)


def test_a_scored_prompt_finds_nothing_cached() -> None:
    world = CentralWorld("c0", "c1", "g0", router=_BY_PREFIX)
    _hold(world, "c1", range(40))
    spec = make_spec("a", num_prompt=41)
    world.submit(_scored(spec))
    assert _kinds(world, "c0") == [RunContext]


def _scored(spec: RequestSpec) -> RequestSpec:
    return replace(spec, sampling=replace(spec.sampling, wants_prompt_logprobs=True))
