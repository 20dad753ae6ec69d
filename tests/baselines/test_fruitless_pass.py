"""A pass from which nothing comes: ours undoes its suspensions, the other keeps them (V6, V12)."""

from collections.abc import Collection

import pytest

from configs import DeviceTierConfig, HostTierConfig, KVCacheConfig, SchedulerConfig
from manager import CacheGeometry, LayerId, LayerSpec
from scheduler.messages import WorkerRole
from scheduler.output import DrawnToken
from scheduler.policy import CacheShape
from scheduler.spec import AttemptId
from tests.baselines.pass_observer import PassObserver
from tests.baselines.switches import Switch
from tests.baselines.try_and_see import TryAndSeeScheduler
from tests.baselines.watched_manager import WatchedManager
from tests.fakes.attempts import make_handoff, make_spec

_PAGE_BYTES = 8


def _decode_beside_a_transfer(switches: Collection[Switch]) -> tuple[TryAndSeeScheduler, WatchedManager]:
    """Six pages of four tokens: one decode has four of them, a reservation that stays in flight the other two."""
    tiers = (DeviceTierConfig(quota_bytes=6 * _PAGE_BYTES), HostTierConfig(quota_bytes=6 * _PAGE_BYTES))
    cache = KVCacheConfig(tokens_per_block=4, tiers=tiers, max_sequences=4)
    geometry = CacheGeometry.from_layers([LayerSpec(LayerId(0), 1, 1)], cache, bytes_per_element=1)
    manager = WatchedManager(geometry, cache).watch()
    scheduler = TryAndSeeScheduler(
        SchedulerConfig(max_batch_size=4),
        manager,
        WorkerRole.GENERATION,
        CacheShape.of(geometry),
        switches=switches,
        reservations={},
    )
    scheduler.observer = PassObserver(manager)
    for name in ("decode", "in-flight"):
        scheduler.add_generation_offer(AttemptId(name), make_spec(name, 7, max_tokens=17), make_handoff(7), 0.0)
    decode, in_flight = scheduler.schedule(0.0).reserved
    assert in_flight.attempt_id == "in-flight"
    scheduler.on_received(decode.request_id, 7, 0.0)
    while (output := scheduler.schedule(0.0)).has_step:
        scheduler.complete(output, {decode.request_id: DrawnToken(7)}, 0.0)
    assert len(decode.token_ids) == 17
    return scheduler, manager


def test_ours_undoes_a_suspension_that_helped_nobody() -> None:
    scheduler, manager = _decode_beside_a_transfer(())
    [decode] = [request for request in scheduler.running if request.attempt_id == "decode"]
    assert not manager.is_suspended(decode.request_id)
    assert scheduler.counters()["suspensions"] == 0


@pytest.mark.parametrize("switch", [Switch.V6, Switch.V12])
def test_the_other_keeps_it(switch: Switch) -> None:
    scheduler, manager = _decode_beside_a_transfer({switch})
    [decode] = [request for request in scheduler.running if request.attempt_id == "decode"]
    assert manager.is_suspended(decode.request_id)
    assert scheduler.counters()["suspensions"] == 1
