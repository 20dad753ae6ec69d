"""V7: a request that pushes itself out is listed only after its suspension returned; here both or neither."""

from manager import Grant
from scheduler.states import AttemptState
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.divergence.pressure import requests
from tests.fakes.attempts import make_spec


def build() -> Scene:
    """The newer decode is about to need a page, and nobody stands behind it."""
    scene = make_scene(num_pages=4)
    scene.worker.context(make_spec("older", 5, max_tokens=6))
    scene.worker.context(make_spec("newer", 7, max_tokens=8))
    scene.worker.step()
    scene.worker.step()
    return scene


def test_a_request_without_victims_pushes_itself_out_whole() -> None:
    scene = build()
    older, newer = requests(scene)
    output = scene.worker.step()
    assert output.generations == (older,)
    assert output.num_suspended + output.num_recomputed == 1
    assert newer.state is AttemptState.CONTEXT_INIT
    assert newer in scene.worker.scheduler.waiting
    assert not scene.worker.manager.has_cache(newer.request_id)


def test_pages_of_the_one_pushed_out_can_be_used_in_the_same_transaction() -> None:
    scene = build()
    older, newer = requests(scene)
    transaction = scene.worker.manager.begin_plan()
    before = scene.worker.manager.snapshot()
    scene.worker.manager.pause_for_recompute(newer)
    older.num_draft_tokens = 8
    assert isinstance(scene.worker.manager.try_allocate_generation(older), Grant)
    transaction.rollback()
    assert scene.worker.manager.snapshot() == before


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert {"suspend_request", "pause_for_recompute"} <= set(fault_at_every_call(build, pass_of))
