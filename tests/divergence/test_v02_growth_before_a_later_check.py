"""V2: a context grows and a later check fails; the enlarged cache must not stay."""

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec


def build() -> Scene:
    """The chunk fits, but not beside the block that the running decode needs next."""
    config = SchedulerConfig(max_num_tokens=16, max_batch_size=4, chunk_unit_tokens=4)
    scene = make_scene(WorkerRole.GENERATION, num_pages=6, config=config)
    scene.worker.admit_generation(make_spec("running", 7, max_tokens=10))
    scene.worker.context(make_spec("context", 15, max_tokens=2))
    return scene


def test_a_growth_that_a_later_check_refuses_is_taken_back() -> None:
    scene = build()
    before = dict(scene.worker.manager.availability().pages)
    output = scene.worker.schedule()
    assert "resize_context" in scene.log.calls
    assert not output.contexts
    assert dict(scene.worker.manager.availability().pages) == before


def test_a_thousand_refused_growths_take_no_capacity() -> None:
    scene = build()
    snapshots = []
    for _ in range(1000):
        output = scene.worker.schedule()
        assert not output.contexts
        scene.worker.abandon(output)
        output.generations[0].failed_steps = 0
        snapshots.append(scene.worker.manager.snapshot())
    assert snapshots[-1] == snapshots[0]


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert {"resize_context", "rollback_to"} <= set(fault_at_every_call(build, pass_of))
