"""V4: suspending touches several things in turn; a fault between them must not leave a request half suspended."""

import pytest

from scheduler.states import AttemptState
from tests.divergence.faults import fault_at_every_call, pass_of
from tests.divergence.pressure import is_pushed_out, requests, two_decodes_before_the_shortage
from tests.fakes.call_log import Injected

STOPS = ["suspend_request", "pause_for_recompute"]


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_suspension_changes_pages_state_and_place_together(host_pages: int) -> None:
    scene = two_decodes_before_the_shortage(host_pages)
    older, newer = requests(scene)
    output = scene.worker.step()
    assert output.generations == (older,)
    assert output.num_suspended + output.num_recomputed == 1
    assert is_pushed_out(newer)
    is_suspended = scene.worker.manager.is_suspended(newer.request_id)
    assert is_suspended == (newer.state is AttemptState.GENERATION_PAUSED)
    assert scene.worker.manager.has_cache(newer.request_id) == is_suspended


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_fault_after_the_suspension_gives_the_victim_everything_back(host_pages: int) -> None:
    scene = two_decodes_before_the_shortage(host_pages)
    before = scene.everything
    scene.log.calls.clear()
    plain = two_decodes_before_the_shortage(host_pages)
    plain.log.calls.clear()
    plain.worker.schedule()
    stop = next(i for i, name in enumerate(plain.log.calls) if name in STOPS)
    scene.log.aim(raise_in=stop + 1)
    with pytest.raises(Injected):
        scene.worker.schedule()
    assert scene.everything == before


@pytest.mark.parametrize("host_pages", [0, 8])
def test_a_fault_anywhere_in_the_pass_leaves_nothing(host_pages: int) -> None:
    hit = fault_at_every_call(lambda: two_decodes_before_the_shortage(host_pages), pass_of)
    assert "suspend_request" in hit
