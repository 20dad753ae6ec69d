"""V11: elsewhere one revert for one case, which frees the cache when history has moved; here any, exactly."""

from collections.abc import Callable

import pytest

from manager import CacheRequest, Grant, KVCacheManagerV2
from scheduler.messages import WorkerRole
from scheduler.request import Request
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_request, make_spec

PREFIX = tuple(range(8))


def build() -> Scene:
    """A decode runs, a context is between chunks, and eight tokens are cached for whoever comes."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=16)
    scene.worker.context(make_spec("seed", (*PREFIX, 70), max_tokens=1))
    scene.worker.step()
    scene.worker.admit_generation(make_spec("decode", 7, max_tokens=12))
    scene.worker.step()
    scene.worker.step()
    scene.worker.context(make_spec("chunked", 36, max_tokens=2))
    scene.worker.step()
    return scene


def running(scene: Scene, name: str) -> Request:
    return next(request for request in scene.worker.scheduler.running if request.attempt_id == name)


def claim(manager: KVCacheManagerV2, scene: Scene) -> CacheRequest:
    newcomer = make_request("newcomer", (*PREFIX, *range(300, 306)), max_tokens=4)
    assert isinstance(manager.prepare_context(newcomer), Grant)
    assert isinstance(manager.resize_context(newcomer, 6), Grant)
    return newcomer


def later_chunk(manager: KVCacheManagerV2, scene: Scene) -> CacheRequest:
    chunked = running(scene, "chunked")
    assert isinstance(manager.prepare_context(chunked), Grant)
    assert isinstance(manager.resize_context(chunked, 4), Grant)
    return chunked


def generation(manager: KVCacheManagerV2, scene: Scene) -> CacheRequest:
    decode = running(scene, "decode")
    decode.num_draft_tokens = 7
    assert isinstance(manager.try_allocate_generation(decode), Grant)
    decode.num_draft_tokens = 0
    return decode


def init(manager: KVCacheManagerV2, scene: Scene) -> CacheRequest:
    offer = make_request("offer", (*PREFIX, *range(300, 306)), max_tokens=4)
    assert isinstance(manager.prepare_disagg_gen_init(offer), Grant)
    return offer


ACQUISITIONS = [claim, later_chunk, generation, init]


@pytest.mark.parametrize("acquire", ACQUISITIONS)
def test_a_revert_leaves_what_a_pass_without_the_request_would(
    acquire: Callable[[KVCacheManagerV2, Scene], CacheRequest],
) -> None:
    scene = build()
    manager = scene.worker.manager
    before = manager.snapshot()
    transaction = manager.begin_plan()
    request = acquire(manager, scene)
    if acquire in (claim, later_chunk):
        manager.revert_allocate_context(request)
    else:
        manager.revert_allocate_generation(request)
    transaction.commit()
    manager.audit()
    assert manager.snapshot().without_slot_names() == before.without_slot_names()


@pytest.mark.parametrize("acquire", ACQUISITIONS)
def test_a_return_to_a_savepoint_is_identical_in_everything(
    acquire: Callable[[KVCacheManagerV2, Scene], CacheRequest],
) -> None:
    scene = build()
    manager = scene.worker.manager
    transaction = manager.begin_plan()
    before = manager.snapshot()
    savepoint = transaction.savepoint()
    acquire(manager, scene)
    transaction.rollback_to(savepoint)
    assert manager.snapshot() == before
    transaction.rollback()


def build_offer() -> Scene:
    """An offer whose prefix is cached, on a worker whose window is taken."""
    scene = build()
    scene.window.try_take(running(scene, "decode").request_id, 9_500)
    scene.worker.offer(make_spec("offer", (*PREFIX, *range(300, 306)), max_tokens=4))
    return scene


def test_an_offer_deferred_after_its_grant_leaves_no_pin_on_the_prefix_it_found() -> None:
    scene = build_offer()
    output = scene.worker.schedule()
    assert [deferral.reason for _, deferral in output.deferred] == ["transfer_window"]
    assert not scene.worker.manager.has_cache(output.deferred[0][0].request_id)
    assert scene.window.taken_bytes == 9_500


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert {"prepare_disagg_gen_init", "rollback_to"} <= set(fault_at_every_call(build_offer, pass_of))
