"""KV events: told at publish only, batched per transaction, bounded, and complete when replayed."""

import subprocess
import sys

import pytest

from manager import (
    AdapterId,
    BlockHash,
    KVCacheManagerV2,
    KVEvent,
    KVEventKind,
    LogicError,
    ReuseScope,
    TierLevel,
    block_hashes,
    effective_scope,
    replay,
)
from tests.conftest import Register
from tests.fakes.cache_builders import compute_context, free, granted, make_geometry, make_manager
from tests.fakes.cache_request import COMMON_SCOPE, FakeRequest

SIZE = 4


def telling_manager(num_slots: int = 8, *, host_slots: int = 0, event_queue_blocks: int = 100) -> KVCacheManagerV2:
    return KVCacheManagerV2(*make_geometry(num_slots, host_slots=host_slots, event_queue_blocks=event_queue_blocks))


def hashes(request: FakeRequest) -> tuple[BlockHash, ...]:
    scope = effective_scope(request.reuse_scope, request.adapter_id, request.encoder_token_ids)
    return tuple(block_hashes(request.token_ids, SIZE, scope))


def test_a_committed_prefix_is_told_once_with_its_tier_and_scope(audited: Register) -> None:
    manager = audited(telling_manager())
    request = FakeRequest("a", [1] * 10, reuse_scope=ReuseScope("tenant"))
    compute_context(manager, request)
    told = manager.take_kv_events()
    assert told == (KVEvent(KVEventKind.STORED, TierLevel.DEVICE, ReuseScope("tenant"), hashes(request)),)
    free(manager, request)
    compute_context(manager, FakeRequest("b", [1] * 10, reuse_scope=ReuseScope("tenant")))
    assert manager.take_kv_events() == ()
    assert manager.known_prefixes() == told


def test_nothing_is_told_of_a_plan_that_is_rolled_back_or_a_step_that_is_abandoned(audited: Register) -> None:
    manager = audited(telling_manager(4))
    old = FakeRequest("old", [1] * 16)
    compute_context(manager, old)
    free(manager, old)
    manager.take_kv_events()
    new = FakeRequest("new", [2] * 8)
    plan = manager.begin_plan()
    granted(manager.prepare_context(new))
    granted(manager.resize_context(new, 8))
    plan.rollback()
    assert manager.take_kv_events() == ()
    plan = manager.begin_plan()
    granted(manager.prepare_context(new))
    granted(manager.resize_context(new, 8))
    plan.commit()
    (removed,) = manager.take_kv_events()
    assert removed == KVEvent(KVEventKind.REMOVED, TierLevel.DEVICE, COMMON_SCOPE, hashes(old)[:1:-1])
    complete = manager.begin_complete()
    manager.advance(new, 8)
    complete.rollback()
    assert manager.take_kv_events() == ()


def test_a_demoted_prefix_is_told_as_updated_and_a_promoted_one_too(audited: Register) -> None:
    manager = audited(telling_manager(4, host_slots=8))
    old, new = FakeRequest("old", [1] * 12), FakeRequest("new", [2] * 12)
    compute_context(manager, old)
    free(manager, old)
    manager.take_kv_events()
    compute_context(manager, new)
    down = manager.take_kv_events()
    assert {(event.kind, event.tier, frozenset(event.block_hashes)) for event in down} == {
        (KVEventKind.UPDATED, TierLevel.HOST, frozenset(hashes(old)[1:])),
        (KVEventKind.STORED, TierLevel.DEVICE, frozenset(hashes(new))),
    }
    free(manager, new)
    compute_context(manager, FakeRequest("again", [1] * 13))
    up = manager.take_kv_events()
    assert KVEvent(KVEventKind.UPDATED, TierLevel.DEVICE, COMMON_SCOPE, hashes(old)[1:]) in up


def test_a_full_queue_asks_the_reader_to_read_all_again(audited: Register) -> None:
    manager = audited(telling_manager(event_queue_blocks=2))
    requests = [FakeRequest(f"r{n}", [n] * 8) for n in range(2)]
    for request in requests:
        compute_context(manager, request)
    events = manager.take_kv_events()
    assert [event.kind for event in events] == [KVEventKind.CLEARED]
    known = {BlockHash(0): TierLevel.DISK}
    replay((*events, *manager.known_prefixes()), known)
    assert known == dict.fromkeys([*hashes(requests[0]), *hashes(requests[1])], TierLevel.DEVICE)
    assert manager.take_kv_events() == ()


def test_without_a_queue_events_are_off_and_asking_for_them_is_an_error(audited: Register) -> None:
    manager = audited(make_manager())
    with pytest.raises(LogicError, match="event_queue_blocks=0"):
        manager.take_kv_events()
    with pytest.raises(LogicError, match="event_queue_blocks=0"):
        manager.known_prefixes()


def test_block_hashes_are_the_same_in_every_process() -> None:
    code = "from manager import *; print(block_hashes(range(40), 4, effective_scope('s', 'adapter', (1, 2))))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    scope = effective_scope(ReuseScope("s"), AdapterId("adapter"), (1, 2))
    assert output.strip() == str(block_hashes(range(40), 4, scope))


def test_hashes_differ_by_prefix_scope_and_adapter() -> None:
    scopes = [
        effective_scope(ReuseScope(scope), adapter, encoder)
        for scope in ("", "a")
        for adapter in (None, AdapterId("x"))
        for encoder in ((), (1,))
    ]
    found = [block_hashes(tokens, 4, scope)[-1] for scope in scopes for tokens in ([0] * 8, [0] * 4, [1] * 4 + [0] * 4)]
    assert len(set(found)) == len(found)
