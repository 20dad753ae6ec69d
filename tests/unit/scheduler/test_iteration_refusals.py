"""Refusals that no real pool of these tests gives: the real manager, with one answer replaced."""

from manager import RefusalReason
from scheduler.messages import WorkerRole
from scheduler.states import AttemptState
from tests.divergence.faults import make_scene
from tests.fakes.attempts import make_spec, state_of

NEVER = RefusalReason.NEVER_FITS


def test_a_context_that_can_never_fit_fails_and_those_behind_it_run() -> None:
    scene = make_scene()
    request = scene.worker.context(make_spec("never", 4))
    other = scene.worker.context(make_spec("other", 4))
    scene.log.refuse("resize_context", NEVER)
    output = scene.worker.step()
    assert [failed for failed, _ in output.failed] == [request]
    assert "never_fits" in output.failed[0][1]
    assert [chunk.request for chunk in output.contexts] == [other]
    assert state_of(request) is AttemptState.FAILED
    assert scene.worker.scheduler.get(request.attempt_id) is None
    assert not scene.worker.manager.has_cache(request.request_id)


def test_a_pass_that_only_fails_somebody_is_committed() -> None:
    scene = make_scene()
    request = scene.worker.context(make_spec("never", 4))
    scene.log.refuse("resize_context", NEVER)
    output = scene.worker.step()
    assert [failed for failed, _ in output.failed] == [request]
    assert not output.has_step
    assert not scene.worker.scheduler.has_work


def test_a_chunk_that_never_fits_is_shortened_before_its_context_is_given_up() -> None:
    scene = make_scene(num_pages=16)
    scene.worker.context(make_spec("windowed", 20))
    scene.log.refuse("resize_context", NEVER, NEVER)
    [chunk] = scene.worker.step().contexts
    assert (chunk.num_tokens, chunk.is_last) == (12, False)
    scene.worker.settle()
    assert len(scene.worker.tokens["windowed"]) == 8


def test_a_decode_that_can_never_fit_fails_and_lets_go_of_its_pages() -> None:
    scene = make_scene()
    request = scene.worker.context(make_spec("never", 4))
    scene.worker.step()
    scene.log.refuse("try_allocate_generation", NEVER, NEVER)
    output = scene.worker.step()
    assert [failed for failed, _ in output.failed] == [request]
    assert not scene.worker.manager.has_cache(request.request_id)
    scene.worker.manager.audit()
    assert scene.worker.manager.availability().index_slots == 4


def test_an_offer_that_can_never_fit_fails_instead_of_being_deferred_for_ever() -> None:
    scene = make_scene(WorkerRole.GENERATION)
    request = scene.worker.offer(make_spec("never", 4))
    other = scene.worker.offer(make_spec("other", 4))
    scene.log.refuse("prepare_disagg_gen_init", NEVER)
    output = scene.worker.step()
    assert [failed for failed, _ in output.failed] == [request]
    assert not output.deferred
    assert output.reserved == (other,)


def test_a_release_by_failure_is_reported_as_room() -> None:
    scene = make_scene(WorkerRole.GENERATION, num_pages=4)
    running = scene.worker.admit_generation(make_spec("running", 8, max_tokens=4))
    scene.worker.offer(make_spec("deferred", 8, max_tokens=4))
    scene.worker.step()
    assert scene.worker.outputs[-1].deferred
    assert not scene.worker.scheduler.take_room_report()
    scene.log.refuse("try_allocate_generation", NEVER, NEVER)
    assert [failed for failed, _ in scene.worker.step().failed] == [running]
    assert scene.worker.scheduler.take_room_report()


def test_an_index_slot_that_is_missing_defers_an_offer_with_that_reason() -> None:
    scene = make_scene(WorkerRole.GENERATION)
    scene.worker.offer(make_spec("x", 4))
    scene.log.refuse("prepare_disagg_gen_init", RefusalReason.OUT_OF_INDEX_SLOTS)
    [(_, deferral)] = scene.worker.step().deferred
    assert (deferral.reason, deferral.needed, deferral.available) == ("out_of_index_slots", 1, 0)
