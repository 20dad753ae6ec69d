"""Forks: a new request begins as a running one, shares its full blocks, and copies the block both go on writing."""

import pytest

from manager import Grant, KVCacheManagerV2, LogicError, Refusal, RefusalReason, Tier
from manager.pools.copy_threads import CopyThread
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry, make_manager, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.page_contents import PageContents

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # two full blocks of four, and half of a third


def source_of(manager: KVCacheManagerV2) -> FakeRequest:
    source = FakeRequest("source", list(PROMPT))
    compute_context(manager, source)
    return source


def choice(name: str, token: int = 99) -> FakeRequest:
    return FakeRequest(name, [*PROMPT, token], prompt_length=len(PROMPT))


def in_use(manager: KVCacheManagerV2) -> int:
    return manager.stats().tiers[Tier.DEVICE].in_use


def test_a_fork_costs_one_page_and_an_index_slot(audited: Register) -> None:
    manager = audited(make_manager())
    source = source_of(manager)
    before = manager.availability()
    plan = manager.begin_plan()
    grant = granted(manager.fork(source, choice("fork")))
    plan.commit()
    after = manager.availability()
    assert (grant.num_pages(), grant.index_slots, grant.adapter_pages) == (1, 1, 0)
    assert (grant.history_length, grant.reused_tokens, grant.capacity) == (10, 10, 12)
    assert sum(before.pages.values()) - sum(after.pages.values()) == 1
    assert before.index_slots - after.index_slots == 1


def test_a_fork_behind_a_whole_block_costs_no_page(audited: Register) -> None:
    manager = audited(make_manager())
    source = FakeRequest("source", PROMPT[:8])
    compute_context(manager, source)
    plan = manager.begin_plan()
    grant = granted(manager.fork(source, FakeRequest("fork", [*PROMPT[:8], 1], prompt_length=8)))
    plan.commit()
    assert (grant.num_pages(), grant.history_length, in_use(manager)) == (0, 8, 2)


def test_full_blocks_are_one_page_and_the_last_block_is_two(audited: Register) -> None:
    manager = audited(make_manager())
    source, fork = source_of(manager), choice("fork")
    plan = manager.begin_plan()
    granted(manager.fork(source, fork))
    plan.commit()
    group = manager.geometry.layer_groups[0].layer_group_id
    ours, theirs = manager.block_table(source.request_id, group), manager.block_table(fork.request_id, group)
    assert ours[:2].tolist() == theirs[:2].tolist()
    assert ours[2] != theirs[2]
    assert in_use(manager) == 4


def test_what_both_write_next_stays_apart(audited: Register) -> None:
    geometry, config = make_geometry(16, head_dim=4)
    contents = PageContents(geometry)
    engine = CopyThread(contents.by_store())
    manager = audited(KVCacheManagerV2(geometry, config, engine=engine))
    source, forks = FakeRequest("source", list(PROMPT)), [choice("a", 70), choice("b", 71)]
    plan = manager.begin_plan()
    granted(manager.prepare_context(source))
    granted(manager.resize_context(source, 10))
    plan.commit()
    contents.write(manager, source.request_id, source.token_ids, range(10))
    complete = manager.begin_complete()
    manager.advance(source, 10)
    complete.commit()
    source.token_ids.append(72)
    plan = manager.begin_plan()
    granted(manager.try_allocate_generation(source))
    for fork in forks:
        granted(manager.fork(source, fork))
        granted(manager.resize_context(fork, 1))
    plan.commit()
    assert manager.finish_fills() == ()
    for request in (source, *forks):
        contents.write(manager, request.request_id, request.token_ids, range(10, 11))
        complete = manager.begin_complete()
        manager.advance(request, 1)
        complete.commit()
    for request in (source, *forks):
        contents.check(manager, request.request_id, request.token_ids)
    manager.close()


def test_forks_outlive_their_source(audited: Register) -> None:
    manager = audited(make_manager())
    source, fork = source_of(manager), choice("fork")
    plan = manager.begin_plan()
    granted(manager.fork(source, fork))
    plan.commit()
    free(manager, source)
    assert in_use(manager) == 3
    free(manager, fork)
    assert in_use(manager) == 0


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("source_first", [True, False])
def test_a_source_may_end_in_the_plan_that_forked_it(audited: Register, source_first: bool, reuse: bool) -> None:
    geometry, config = make_geometry(16, enable_block_reuse=reuse)
    manager = audited(KVCacheManagerV2(geometry, config))
    source, fork = source_of(manager), choice("fork")
    plan = manager.begin_plan()
    granted(manager.fork(source, fork))
    if source_first:
        manager.pause_for_recompute(source)
        manager.revert_allocate_context(fork)
    else:
        manager.revert_allocate_context(fork)
        manager.pause_for_recompute(source)
    manager.audit()
    plan.commit()
    assert in_use(manager) == 0


def test_without_reuse_full_private_blocks_are_shared_and_cannot_be_rewound(audited: Register) -> None:
    geometry, config = make_geometry(16, enable_block_reuse=False)
    manager = audited(KVCacheManagerV2(geometry, config))
    source, fork = source_of(manager), choice("fork")
    plan = manager.begin_plan()
    assert granted(manager.fork(source, fork)).history_length == 10
    plan.commit()
    assert in_use(manager) == 4
    complete = manager.begin_complete()
    manager.rewind(source, 2)
    for request in (source, fork):
        with pytest.raises(LogicError, match="2 shared"):
            manager.rewind(request, 3)
    manager.free_resources(source)
    complete.commit()
    assert in_use(manager) == 3


def test_a_fork_that_finds_no_room_changes_nothing(audited: Register) -> None:
    manager = audited(make_manager(num_slots=3, max_sequences=3))
    source = source_of(manager)
    plan = manager.begin_plan()
    before = manager.snapshot()
    refusal = refused(manager.fork(source, choice("fork")))
    assert (refusal.reason, refusal.needed, refusal.available) == (RefusalReason.OUT_OF_PAGES, 1, 0)
    assert manager.snapshot() == before
    plan.rollback()


def test_a_fork_without_an_index_slot_is_refused(audited: Register) -> None:
    manager = audited(make_manager(max_sequences=1))
    source = source_of(manager)
    plan = manager.begin_plan()
    assert refused(manager.fork(source, choice("fork"))).reason is RefusalReason.OUT_OF_INDEX_SLOTS
    plan.rollback()


def _suspended(manager: KVCacheManagerV2, source: FakeRequest) -> FakeRequest:
    granted(manager.suspend_request(source))
    return choice("fork")


def _other_tokens(manager: KVCacheManagerV2, source: FakeRequest) -> FakeRequest:
    return FakeRequest("fork", [1, *PROMPT[1:], 99], prompt_length=10)


def _encoder(manager: KVCacheManagerV2, source: FakeRequest) -> FakeRequest:
    return FakeRequest("fork", [*PROMPT, 99], prompt_length=10, encoder_token_ids=(1, 2))


def _gone(manager: KVCacheManagerV2, source: FakeRequest) -> FakeRequest:
    manager.pause_for_recompute(source)
    return choice("fork")


@pytest.mark.parametrize("spoil", [_suspended, _other_tokens, _encoder, _gone])
def test_what_cannot_be_shared_is_refused_by_name(audited: Register, spoil: object) -> None:
    geometry, config = make_geometry(16, host_slots=8)
    manager = audited(KVCacheManagerV2(geometry, config))
    source = source_of(manager)
    plan = manager.begin_plan()
    assert callable(spoil)
    fork = spoil(manager, source)
    before = manager.snapshot()
    assert refused(manager.fork(source, fork)).reason is RefusalReason.CANNOT_FORK
    assert manager.snapshot() == before
    plan.rollback()


def test_a_reservation_is_no_source(audited: Register) -> None:
    manager = audited(make_manager())
    source = FakeRequest("source", list(PROMPT))
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(source))
    assert refused(manager.fork(source, choice("fork"))).reason is RefusalReason.CANNOT_FORK
    plan.rollback()


def test_a_source_whose_window_has_passed_the_prompt_is_no_source(audited: Register) -> None:
    manager = audited(make_manager(num_slots=24, windows=(None, 4)))
    source, fork = source_of(manager), choice("fork")
    plan = manager.begin_plan()
    granted(manager.fork(source, fork))
    plan.rollback()
    for token in range(12):
        source.token_ids.append(token)
        plan = manager.begin_plan()
        granted(manager.try_allocate_generation(source))
        plan.commit()
        complete = manager.begin_complete()
        manager.advance(source, 1)
        complete.commit()
    plan = manager.begin_plan()
    assert refused(manager.fork(source, fork)).reason is RefusalReason.CANNOT_FORK
    plan.rollback()


def test_a_reverted_fork_leaves_nothing(audited: Register) -> None:
    manager = audited(make_manager())
    source, fork = source_of(manager), choice("fork")
    plan = manager.begin_plan()
    before = manager.snapshot()
    granted(manager.fork(source, fork))
    granted(manager.resize_context(fork, 3))
    manager.revert_allocate_context(fork)
    assert manager.snapshot().without_slot_names() == before.without_slot_names()
    granted(manager.fork(source, fork))
    plan.rollback()


def test_a_fork_that_has_a_cache_is_a_mistake(audited: Register) -> None:
    manager = audited(make_manager())
    source = source_of(manager)
    plan = manager.begin_plan()
    with pytest.raises(LogicError, match="has a cache already"):
        manager.fork(source, source)
    plan.rollback()


def test_a_fork_of_a_fork_of_this_plan_with_an_unmade_copy_is_refused(audited: Register) -> None:
    manager = audited(make_manager())
    source, fork = source_of(manager), choice("a")
    plan = manager.begin_plan()
    granted(manager.fork(source, fork))
    answer: Grant | Refusal = manager.fork(fork, choice("b"))
    assert refused(answer).reason is RefusalReason.CANNOT_FORK
    plan.rollback()
