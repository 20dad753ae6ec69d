"""V5: a disaggregated init resumes and prepares before it resizes; a failed resize must keep nothing."""

import pytest

from manager import Refusal, RefusalReason
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec

PREFIX = tuple(range(8))


def build(prompt_rest: int = 12) -> Scene:
    """Two blocks of the offer's prompt are cached here; the rest of it does not fit."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=8)
    scene.worker.context(make_spec("seed", (*PREFIX, 70), max_tokens=1))
    scene.worker.step()
    scene.worker.admit_generation(make_spec("running", 12, max_tokens=6))
    scene.worker.offer(make_spec("offer", (*PREFIX, *range(500, 500 + prompt_rest)), max_tokens=3))
    return scene


def test_a_refused_init_leaves_no_cache_no_claim_and_no_index_slot() -> None:
    scene, without = build(), build()
    offer = without.worker.scheduler.waiting[0]
    without.worker.scheduler.cancel(offer.attempt_id, 0.0)
    output = scene.worker.schedule()
    without.worker.schedule()
    [(_, deferral)] = output.deferred
    assert deferral.reason == RefusalReason.OUT_OF_PAGES
    assert scene.worker.manager.snapshot() == without.worker.manager.snapshot()


def test_a_thousand_deferred_inits_take_nothing() -> None:
    scene = build()
    scene.worker.step()
    held = scene.worker.manager.snapshot()
    offer = make_spec("again", (*PREFIX, *range(500, 515)), max_tokens=4)
    for _ in range(1000):
        scene.worker.offer(offer)
        output = scene.worker.schedule()
        assert len(output.deferred) == 1
        scene.worker.abandon(output)
        output.generations[0].failed_steps = 0
    assert scene.worker.manager.snapshot() == held


def test_the_managers_own_refusal_has_changed_nothing() -> None:
    scene = build()
    offer = scene.worker.scheduler.waiting[0]
    transaction = scene.worker.manager.begin_plan()
    before = scene.worker.manager.snapshot()
    assert isinstance(scene.worker.manager.prepare_disagg_gen_init(offer), Refusal)
    assert scene.worker.manager.snapshot() == before
    transaction.rollback()


@pytest.mark.parametrize("prompt_rest", [12, 1])
def test_a_fault_anywhere_in_the_pass_leaves_nothing(prompt_rest: int) -> None:
    """Once with an init that is refused, once with one that is granted."""

    def act(scene: Scene) -> None:
        scene.worker.scheduler.take_room_report()
        pass_of(scene)

    hit = fault_at_every_call(lambda: build(prompt_rest), act)
    assert "prepare_disagg_gen_init" in hit
    assert ("try_take" in hit) == (prompt_rest == 1)
