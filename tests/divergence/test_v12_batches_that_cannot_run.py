"""V12: a batch that cannot run gives growth back but keeps context growth; here the whole pass is undone."""

import pytest

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene
from tests.fakes.attempts import make_request, make_spec


def build(host_pages: int = 0) -> Scene:
    """The only decode needs a page, and every other page is held for a transfer."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=6, host_pages=host_pages)
    scene.worker.admit_generation(make_spec("alone", 7, max_tokens=9))
    reserved = scene.worker.offer(make_spec("reserved", 10, max_tokens=2))
    assert scene.worker.step().reserved == (reserved,)
    while scene.worker.step().has_step:
        pass
    return scene


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_pass_without_a_result_is_undone_suspensions_included(host_pages: int) -> None:
    scene = build(host_pages)
    before = scene.everything
    output = scene.worker.schedule()
    assert "suspend_request" in scene.log.calls
    assert (output.has_step, output.num_suspended, output.num_recomputed) == (False, 0, 0)
    assert scene.everything == before


def test_it_is_no_deadlock_while_the_transfer_is_in_flight() -> None:
    scene = build()
    assert scene.worker.schedule().deadlock is None
    assert not scene.worker.scheduler.has_work


def test_pages_held_outside_the_scheduler_are_reported_with_the_numbers() -> None:
    scene = make_scene(num_pages=4)
    outsider = make_request("outsider", 12)
    plan = scene.worker.manager.begin_plan()
    scene.worker.manager.prepare_context(outsider)
    scene.worker.manager.resize_context(outsider, 12)
    plan.commit()
    scene.worker.context(make_spec("stuck", 9, max_tokens=2))
    deadlock = scene.worker.schedule().deadlock
    assert deadlock is not None
    assert "1 waiting contexts" in deadlock
    assert "needs 3, 1 available" in deadlock


def test_the_decode_goes_on_once_the_transfer_has_ended() -> None:
    scene = build()
    scene.worker.settle()
    assert len(scene.worker.tokens["alone"]) == 8


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    def act(scene: Scene) -> object:
        return scene.worker.schedule()

    assert "pause_for_recompute" in fault_at_every_call(build, act)


def test_a_reservation_alone_is_worth_a_commit() -> None:
    config = SchedulerConfig(max_num_tokens=8, max_batch_size=2, chunk_unit_tokens=4)
    scene = make_scene(WorkerRole.GENERATION, config=config)
    request = scene.worker.offer(make_spec("reserved", 7))
    assert scene.worker.schedule().reserved == (request,)
    assert scene.worker.manager.has_cache(request.request_id)
