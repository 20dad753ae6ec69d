"""V22: a step fails after its plan was committed; abandon leaves history where it was, and nothing else changed."""

import pytest

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from scheduler.states import AttemptState
from tests.divergence.faults import Scene, fault_at_every_call, make_scene
from tests.fakes.attempts import make_spec

ROLES = list(WorkerRole)


def build(role: WorkerRole = WorkerRole.MIXED) -> Scene:
    """A decode (but on a context worker), a context between chunks, and one that ends in the next step."""
    config = SchedulerConfig(max_num_tokens=16, max_batch_size=4, chunk_unit_tokens=4)
    scene = make_scene(role, num_pages=16, config=config)
    scene.worker.context(make_spec("first", 6, max_tokens=4))
    scene.worker.step()
    scene.worker.context(make_spec("chunked", 18, max_tokens=4))
    scene.worker.step()
    scene.worker.context(make_spec("ends", 5, max_tokens=1))
    return scene


@pytest.mark.parametrize("role", ROLES)
def test_history_stays_and_the_next_pass_plans_the_same_step(role: WorkerRole) -> None:
    scene = build(role)
    first = scene.worker.schedule()
    planned = scene.worker.manager.snapshot()
    scene.worker.abandon(first)
    assert scene.worker.manager.snapshot() == planned
    second = scene.worker.schedule()
    assert (second.contexts, second.generations) == (first.contexts, first.generations)
    assert scene.worker.manager.snapshot() == planned
    scene.worker.complete(second)
    scene.worker.settle()


@pytest.mark.parametrize("role", ROLES)
def test_a_failed_step_changes_no_token(role: WorkerRole) -> None:
    plain, disturbed = build(role), build(role)
    plain.worker.settle()
    disturbed.worker.abandon(disturbed.worker.schedule())
    disturbed.worker.settle()
    assert disturbed.worker.tokens == plain.worker.tokens


def test_the_second_failure_in_a_row_fails_the_steps_requests_and_frees_them() -> None:
    scene = build()
    scene.worker.abandon(scene.worker.schedule())
    output = scene.worker.schedule()
    members = {*output.generations, *(chunk.request for chunk in output.contexts)}
    abandoned = scene.worker.abandon(output)
    assert set(abandoned.failed) == members
    assert {request.state for request in members} == {AttemptState.FAILED}
    assert scene.worker.manager.stats().index_slots_free == 4
    assert not scene.worker.scheduler.running


def complete(scene: Scene) -> object:
    output = scene.worker.scheduler._open_output
    assert output is not None
    return scene.worker.complete(output)


@pytest.mark.parametrize("role", ROLES)
def test_a_fault_while_completing_leaves_the_step_open_and_everything_in_place(role: WorkerRole) -> None:
    def build_planned() -> Scene:
        scene = build(role)
        scene.worker.schedule()
        return scene

    hit = fault_at_every_call(build_planned, complete)
    assert {"begin_complete", "advance", "free_resources", "commit"} <= set(hit)
    assert ("grant_lease" in hit) == (role is WorkerRole.CONTEXT)


@pytest.mark.parametrize("role", ROLES)
def test_a_fault_while_abandoning_leaves_the_step_open(role: WorkerRole) -> None:
    def build_failing() -> Scene:
        scene = build(role)
        scene.worker.abandon(scene.worker.schedule())
        scene.worker.schedule()
        return scene

    def abandon(scene: Scene) -> object:
        output = scene.worker.scheduler._open_output
        assert output is not None
        return scene.worker.abandon(output)

    assert "free_resources" in fault_at_every_call(build_failing, abandon)
