"""V1: preparing a context creates a cache and claims a prefix; not admitted means not happened."""

from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec

PREFIX = tuple(range(8))


def build() -> Scene:
    """A decode holds most of the pool; eight tokens of the newcomer's prompt are cached."""
    scene = make_scene(num_pages=8)
    scene.worker.context(make_spec("seed", (*PREFIX, 70), max_tokens=1))
    scene.worker.step()
    scene.worker.context(make_spec("running", 12, max_tokens=12))
    scene.worker.step()
    scene.worker.context(make_spec("newcomer", (*PREFIX, *range(500, 512)), max_tokens=2))
    return scene


def test_a_context_that_is_not_admitted_leaves_no_cache_no_claim_and_no_statistics() -> None:
    scene = build()
    running = scene.worker.scheduler.running
    queried = scene.worker.manager.stats().prefix_queried_tokens
    output = scene.worker.schedule()
    assert "prepare_context" in scene.log.calls
    assert output.generations == tuple(running)
    assert not output.contexts
    newcomer = scene.worker.scheduler.waiting[0]
    assert not scene.worker.manager.has_cache(newcomer.request_id)
    assert newcomer.num_reused_tokens is None
    assert scene.worker.manager.stats().prefix_queried_tokens == queried
    assert scene.worker.manager.stats().index_slots_free == 3


def test_the_refused_context_does_not_touch_the_order_of_the_cache() -> None:
    with_newcomer, without = build(), build()
    without.worker.scheduler.cancel(without.worker.scheduler.waiting[0].attempt_id, 0.0)
    with_newcomer.worker.schedule()
    without.worker.schedule()
    assert with_newcomer.worker.manager.snapshot() == without.worker.manager.snapshot()


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert {"prepare_context", "resize_context", "commit"} <= set(fault_at_every_call(build, pass_of))
