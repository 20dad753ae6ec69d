"""V9: a chunk's later allocation fails after prepare, chunk bookkeeping and resize; all of it goes back."""

import pytest

from configs import SchedulerConfig
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec
from tests.fakes.small_cache import Members

CONFIG = SchedulerConfig(max_num_tokens=9, max_batch_size=4, chunk_unit_tokens=4)


def build() -> Scene:
    """A context is between its chunks; the running decode's next block leaves no room for the next one."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=6, config=CONFIG)
    scene.worker.admit_generation(make_spec("running", 6, max_tokens=12))
    scene.worker.context(make_spec("chunked", 18, max_tokens=2))
    scene.worker.step()
    return scene


def test_a_refused_chunk_moves_no_cursor() -> None:
    scene = build()
    chunked = scene.worker.scheduler.running[-1]
    assert chunked.attempt_id == "chunked"
    capacity = scene.worker.manager.capacity(chunked.request_id)
    history = scene.worker.manager.history_length(chunked.request_id)
    output = scene.worker.schedule()
    assert not output.contexts
    assert "resize_context" in scene.log.calls
    assert scene.worker.manager.capacity(chunked.request_id) == capacity == history == 8


def test_the_chunk_that_follows_starts_where_the_last_one_ended() -> None:
    scene = build()
    scene.worker.settle()
    chunks = [chunk for output in scene.worker.outputs for chunk in output.contexts]
    computed = 0
    for chunk in chunks:
        if chunk.start == 0:
            computed = 0
        assert chunk.start == computed or scene.worker.scheduler.counters()["recomputes"]
        computed = chunk.start + chunk.num_tokens
    assert computed >= 18


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_fault_anywhere_in_the_pass_leaves_nothing(passes: int) -> None:
    def build_later() -> Scene:
        scene = build()
        for _ in range(passes):
            scene.worker.step()
        return scene

    assert "resize_context" in fault_at_every_call(build_later, pass_of)


def build_cross() -> Scene:
    """A decode holds six of eight pages; a context has room for its first block, but not for its encoder's output."""
    config = SchedulerConfig(max_num_tokens=24, max_batch_size=4, chunk_unit_tokens=4)
    scene = make_scene(num_pages=4, config=config, members=Members(cross=True, adapter_pages=3))
    scene.worker.context(make_spec("running", 21, max_tokens=3))
    scene.worker.step()
    scene.worker.context(make_spec("crossed", 4, max_tokens=3, adapter="a", encoder=(1, 2, 3, 4, 5)))
    return scene


def test_a_chunk_without_room_for_its_encoder_output_keeps_nothing() -> None:
    scene = build_cross()
    before = scene.worker.manager.availability()
    scene.log.calls.clear()
    output = scene.worker.schedule()
    assert {"prepare_context", "resize_context"} <= set(scene.log.calls)
    assert [request.attempt_id for request in output.generations] == ["running"]
    assert not output.contexts
    assert scene.worker.manager.availability() == before
    [crossed] = scene.worker.scheduler.waiting
    assert not scene.worker.manager.has_cache(crossed.request_id)
    scene.worker.complete(output)
    scene.worker.settle()
    assert len(scene.worker.tokens["crossed"]) == 3


def test_a_fault_anywhere_in_a_pass_with_encoder_output_leaves_nothing() -> None:
    def build_second() -> Scene:
        scene = build_cross()
        scene.worker.step()
        scene.worker.step()
        return scene

    assert "resize_context" in fault_at_every_call(build_cross, pass_of)
    assert "resize_context" in fault_at_every_call(build_second, pass_of)
