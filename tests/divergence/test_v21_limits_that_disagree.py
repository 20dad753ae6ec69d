"""V21: request budget, index slots and pages limit each other; sized apart they deadlock. Here they cannot be."""

import pytest

from configs import DeploymentConfig, KVCacheConfig, SchedulerConfig
from manager import CacheConfigError
from scheduler.errors import InvalidConfiguration
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec
from tests.fakes.iteration_worker import make_worker
from tests.fakes.small_cache import make_manager


def test_a_batch_larger_than_the_index_slots_is_refused_at_start_up() -> None:
    with pytest.raises(ValueError, match=r"max_batch_size=5 exceeds cache\.max_sequences=4"):
        DeploymentConfig(scheduler=SchedulerConfig(max_batch_size=5), cache=KVCacheConfig(max_sequences=4))
    with pytest.raises(InvalidConfiguration, match="max_batch_size=5 is above the 4 index slots"):
        make_worker(max_sequences=4, config=SchedulerConfig(max_num_tokens=8, max_batch_size=5, chunk_unit_tokens=4))


def test_more_index_slots_than_pages_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(CacheConfigError, match="max_sequences=8"):
        make_manager(num_pages=4, max_sequences=8, cap_sequences=False)


def build(max_sequences: int = 3) -> Scene:
    """More requests of each kind than there are index slots."""
    config = SchedulerConfig(max_num_tokens=32, max_batch_size=max_sequences, chunk_unit_tokens=4)
    scene = make_scene(WorkerRole.GENERATION, num_pages=16, max_sequences=max_sequences, config=config)
    for number in range(3):
        scene.worker.offer(make_spec(f"offer{number}", 3, max_tokens=3))
        scene.worker.context(make_spec(f"context{number}", 3, max_tokens=3))
    return scene


@pytest.mark.parametrize("max_sequences", [1, 2, 3])
def test_no_more_is_admitted_than_there_are_index_slots_and_the_rest_waits(max_sequences: int) -> None:
    scene = build(max_sequences)
    output = scene.worker.step()
    assert len(output.reserved) + len(output.contexts) == max_sequences
    assert scene.worker.manager.availability().index_slots == 0
    scene.worker.settle()
    assert len(scene.worker.finished) == 3 + len(output.reserved)


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert "prepare_disagg_gen_init" in fault_at_every_call(lambda: build(2), pass_of)
