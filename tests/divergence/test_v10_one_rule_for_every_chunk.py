"""V10: elsewhere a failed resize suspends on the first chunk and leaves later ones active; here nothing changes."""

import pytest

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec

CONFIG = SchedulerConfig(max_num_tokens=8, max_batch_size=3, chunk_unit_tokens=8)
"""Chunks of two pages."""


def build(num_done: int) -> Scene:
    """A context with `num_done` chunks done, one page short of the next, since a lease holds three."""
    scene = make_scene(WorkerRole.CONTEXT, num_pages=3 + 2 * num_done + 1, max_sequences=3, config=CONFIG)
    scene.worker.context(make_spec("leased", 12))
    scene.worker.run_until_idle()
    scene.worker.context(make_spec("context", 8 * num_done + 8))
    for _ in range(num_done):
        scene.worker.step()
    return scene


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_refused_chunk_changes_nothing_whichever_chunk_it_is(num_done: int) -> None:
    scene = build(num_done)
    before = scene.everything
    scene.log.calls.clear()
    output = scene.worker.schedule()
    assert scene.log.calls.count("resize_context") == 1
    assert not output.has_step
    assert scene.everything == before
    assert output.deadlock is None, "a lease in flight is no deadlock"


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_the_refused_chunk_runs_once_the_lease_has_ended(num_done: int) -> None:
    scene = build(num_done)
    scene.worker.schedule()
    had_work = scene.worker.scheduler.has_work
    scene.worker.scheduler.on_lease_ended(scene.worker.leases.pop("leased"), 0.0, settled=True)
    assert (had_work, scene.worker.scheduler.has_work) == (False, True)
    [chunk] = scene.worker.step().contexts
    assert (chunk.start, chunk.num_tokens, chunk.is_last) == (8 * num_done, 8, True)


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_a_fault_anywhere_in_the_pass_leaves_nothing(num_done: int) -> None:
    def build_granted() -> Scene:
        scene = build(num_done)
        scene.worker.scheduler.on_lease_ended(scene.worker.leases.pop("leased"), 0.0, settled=True)
        return scene

    assert "resize_context" in fault_at_every_call(build_granted, pass_of)
