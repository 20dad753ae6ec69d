"""V19: padding reserved inside a draft manager is invisible to the scheduler; here it is part of the grant."""

import pytest

from manager import Grant, PoolGroupId
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec
from tests.fakes.small_cache import Members

GROUP = PoolGroupId(0)


def build(num_drafts: int = 5) -> Scene:
    """A decode of ten known tokens whose next step has drafts."""
    scene = make_scene(num_pages=12)
    request = scene.worker.context(make_spec("x", 9, max_tokens=20))
    scene.worker.step()
    request.num_draft_tokens = num_drafts
    return scene


@pytest.mark.parametrize("num_drafts", range(12))
def test_page_rounding_of_drafts_is_charged_in_full(num_drafts: int) -> None:
    scene = build(num_drafts)
    manager = scene.worker.manager
    [request] = scene.worker.scheduler.running
    plan = manager.begin_plan()
    before = manager.availability().pages[GROUP]
    grant = manager.try_allocate_generation(request)
    assert isinstance(grant, Grant)
    assert before - manager.availability().pages[GROUP] == grant.num_pages() == -(-(10 + num_drafts) // 4) - 3
    assert grant.capacity % 4 == 0
    plan.rollback()


def test_places_of_rejected_drafts_are_used_before_new_ones_are_taken() -> None:
    scene = build(5)
    [request] = scene.worker.scheduler.running
    scene.worker.step()
    held = scene.worker.manager.availability().pages[GROUP]
    request.num_draft_tokens = 0
    while len(request.token_ids) < 16:
        scene.worker.step()
        assert scene.worker.manager.availability().pages[GROUP] == held


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert "try_allocate_generation" in fault_at_every_call(build, pass_of)


@pytest.mark.parametrize("num_drafts", range(6))
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_padding_of_a_drafting_step_is_charged_in_the_drafts_own_pool(num_drafts: int, padding: int) -> None:
    scene = make_scene(num_pages=12, members=Members(draft=True, draft_padding=padding))
    request = scene.worker.context(make_spec("x", 9, max_tokens=20))
    scene.worker.step()
    request.num_draft_tokens = num_drafts
    before = scene.worker.manager.availability().pages
    output = scene.worker.schedule()
    after = scene.worker.manager.availability().pages
    positions = 10 + (num_drafts + padding if num_drafts else 0)
    assert output.draft_lengths == (num_drafts,)
    assert {before[group] - after[group] for group in before} == {-(-positions // 4) - 3}
    scene.worker.complete(output, accept=num_drafts)
    scene.worker.settle()


def test_drafts_whose_padding_has_no_place_are_left_out() -> None:
    scene = make_scene(num_pages=3, max_sequences=1, members=Members(draft=True, draft_padding=3))
    request = scene.worker.context(make_spec("x", 9, max_tokens=3))
    scene.worker.step()
    request.num_draft_tokens = 1
    assert scene.worker.schedule().draft_lengths == (0,), "10 tokens, a draft and 3 of padding are 14 of 12 positions"


def test_a_fault_anywhere_in_a_pass_with_padding_leaves_nothing() -> None:
    def build_padded() -> Scene:
        scene = make_scene(num_pages=12, members=Members(draft=True, draft_padding=2))
        scene.worker.context(make_spec("x", 9, max_tokens=20)).num_draft_tokens = 3
        scene.worker.step()
        return scene

    assert "try_allocate_generation" in fault_at_every_call(build_padded, pass_of)
