"""V3: a generation's allocation fails after resuming the cache and noting a draft length; it leaves neither."""

from scheduler.states import AttemptState
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec, state_of


def build() -> Scene:
    """Drafts of the older decode need more pages than there are; without them it fits."""
    scene = make_scene(num_pages=5)
    older = scene.worker.context(make_spec("older", 7, max_tokens=5))
    scene.worker.context(make_spec("newer", 5, max_tokens=3))
    scene.worker.step()
    older.num_draft_tokens = 9
    return scene


def test_refused_drafts_leave_no_place_and_do_not_change_the_wish() -> None:
    scene = build()
    older = scene.worker.scheduler.running[0]
    output = scene.worker.schedule()
    assert scene.log.calls.count("try_allocate_generation") == 3
    assert output.draft_lengths == (0, 0)
    assert older.num_draft_tokens == 9
    assert scene.worker.manager.capacity(older.request_id) == 8


def build_paused() -> Scene:
    """The newer decode has lost its pages to the older one and cannot get them back."""
    scene = make_scene(num_pages=5)
    scene.worker.context(make_spec("older", 7, max_tokens=12))
    newer = scene.worker.context(make_spec("newer", 7, max_tokens=8))
    while state_of(newer) is not AttemptState.GENERATION_IN_PROGRESS:
        scene.worker.step()
    while state_of(newer) is AttemptState.GENERATION_IN_PROGRESS:
        scene.worker.step()
    return scene


def test_a_paused_request_that_cannot_come_back_stays_as_it_was() -> None:
    scene = build_paused()
    newer = scene.worker.scheduler.waiting[0]
    output = scene.worker.schedule()
    assert not output.num_resumed
    assert not scene.worker.manager.has_cache(newer.request_id)


def test_a_fault_anywhere_in_the_pass_leaves_nothing() -> None:
    assert fault_at_every_call(build, pass_of).count("try_allocate_generation") == 3
    assert "prepare_context" in fault_at_every_call(build_paused, pass_of)


def build_before_the_return() -> Scene:
    """The newer decode is suspended to the host, and in the next pass there is room for it again."""
    scene = make_scene(num_pages=4, host_pages=8)
    older = scene.worker.context(make_spec("older", 7, max_tokens=5))
    newer = scene.worker.context(make_spec("newer", 7, max_tokens=8))
    while not older.is_terminal:
        scene.worker.step()
    assert state_of(newer) is AttemptState.GENERATION_PAUSED
    return scene


def test_a_decode_that_came_back_in_a_pass_that_fails_is_suspended_as_before() -> None:
    assert build_before_the_return().worker.schedule().num_resumed == 1
    hit = fault_at_every_call(build_before_the_return, pass_of)
    assert hit.index("try_allocate_generation") < hit.index("commit")
