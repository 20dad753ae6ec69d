"""V15: what failed or later rejected attempts changed never reaches the budget elsewhere; here there is nothing."""

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec

CONFIG = SchedulerConfig(max_num_tokens=24, max_batch_size=4, chunk_unit_tokens=4)


def build() -> Scene:
    """One pass in which a decode succeeds, an offer is deferred after its grant, and a context is refused."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=7, config=CONFIG)
    scene.worker.admit_generation(make_spec("decode", 7, max_tokens=12))
    scene.window.try_take(scene.worker.scheduler.running[0].request_id, 9_500)
    scene.worker.offer(make_spec("deferred", 7, max_tokens=3))
    scene.worker.context(make_spec("refused", 19, max_tokens=2))
    return scene


def test_rejected_attempts_leave_the_budget_equal_to_the_manager() -> None:
    """The scheduler proves it before the commit; a difference would have ended the pass."""
    scene = build()
    output = scene.worker.schedule()
    assert [request.attempt_id for request in output.generations] == ["decode"]
    assert [deferral.reason for _, deferral in output.deferred] == ["transfer_window"]
    assert not output.contexts
    assert {"prepare_disagg_gen_init", "rollback_to", "resize_context"} <= set(scene.log.calls)


def test_a_pass_with_rejected_attempts_leaves_what_one_without_them_does() -> None:
    tried, untried = build(), build()
    for request in list(untried.worker.scheduler.waiting):
        untried.worker.scheduler.cancel(request.attempt_id, 0.0)
    tried.worker.schedule()
    untried.worker.schedule()
    assert tried.worker.manager.snapshot() == untried.worker.manager.snapshot()


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    def act(scene: Scene) -> object:
        return pass_of(scene)

    assert "rollback_to" in fault_at_every_call(build, act)
