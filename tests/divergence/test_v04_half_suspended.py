"""V4: suspending touches several things in turn; a fault between them must not leave a request half suspended."""

import pytest

from manager.kv_cache import KVCache
from scheduler.states import AttemptState
from tests.divergence.faults import fault_at_every_call, pass_of
from tests.divergence.pressure import (
    is_pushed_out,
    requests,
    two_decodes_before_the_shortage,
    two_sets_before_the_shortage,
)
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


@pytest.mark.parametrize("host_pages", [0, 20])
def test_a_set_loses_draft_cross_index_slot_and_adapter_together_and_finds_them_again(host_pages: int) -> None:
    scene = two_sets_before_the_shortage(host_pages)
    older, newer = requests(scene)
    before = scene.worker.manager.availability()
    output = scene.worker.step()
    assert output.generations == (older,)
    assert (output.num_suspended, output.num_recomputed) == ((1, 0) if host_pages else (0, 1))
    after = scene.worker.manager.availability()
    assert (after.index_slots, after.adapter_pages) == (before.index_slots + 1, before.adapter_pages + 1)
    assert is_pushed_out(newer)
    scene.worker.settle()
    counters = scene.worker.scheduler.counters()
    assert counters["resumes"] == counters["suspensions"] == (1 if host_pages else 0)
    assert len(scene.worker.tokens["newer"]) == 9, "every step checked what it read, in every member"


@pytest.mark.parametrize("member", [0, 1])
def test_an_exception_between_the_members_of_a_set_leaves_it_active(
    member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = two_sets_before_the_shortage(20)
    before = scene.everything
    real = KVCache.suspend
    calls: list[KVCache] = []

    def suspend(cache: KVCache) -> list[int]:
        calls.append(cache)
        if len(calls) == member + 1:
            name = "between the members"
            raise Injected(name)
        return real(cache)

    monkeypatch.setattr(KVCache, "suspend", suspend)
    with pytest.raises(Injected, match="between the members"):
        scene.worker.schedule()
    assert len(calls) == member + 1
    assert scene.everything == before
    monkeypatch.undo()
    scene.worker.settle()
    assert len(scene.worker.tokens["newer"]) == 9


@pytest.mark.parametrize("host_pages", [0, 20])
def test_a_fault_anywhere_in_a_pass_over_sets_leaves_nothing(host_pages: int) -> None:
    hit = fault_at_every_call(lambda: two_sets_before_the_shortage(host_pages), pass_of)
    assert "suspend_request" in hit
