"""GET /cluster/state: JSON, with the workers' accounts beside the ledger's."""

import json

from tests.fakes.central_world import CentralWorld, make_spec


def test_the_state_is_json_and_has_every_field_of_a_worker() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"))
    world.advance(0.5)
    state = json.loads(json.dumps(world.central.state(world.now_s)))
    worker = state["workers"][0]
    assert worker["name"] == "c0"
    assert worker["role"] == "context"
    assert (worker["pid"], worker["epoch"], worker["state"], worker["iteration"]) == (100, 1, "running", 0)
    assert (worker["running"], worker["waiting"]) == (1, 0)
    assert worker["ledger"] == {"attempts": 1, "tokens": 10, "leases": 0}
    assert worker["pages"]["device"] == {
        "total": 8, "free": 8, "cached": 0, "in_use": 0, "leased": 0, "reserved": 0, "quarantined": 0,
    }  # fmt: skip


def test_the_central_part_counts_requests_by_where_they_are() -> None:
    world = CentralWorld("c0", "g0")
    world.submit(make_spec("a"), make_spec("b"))
    world.compute_context("a")
    world.defer("a")
    central = world.central.state(world.now_s)["central"]
    assert central["term"] == 3
    assert (central["queued"], central["running"], central["deferred"]) == (0, 2, 1)
    world.lose("c0")
    central = world.central.state(world.now_s)["central"]
    assert (central["queued"], central["running"], central["deferred"]) == (1, 0, 0)


def test_worker_counters_are_summed_and_survive_a_restart() -> None:
    world = CentralWorld("c0", "g0")
    world.advance(0.5)
    assert [world.counter(name) for name in ("refused_terms", "rollbacks", "suspensions")] == [2, 6, 4]
    world.lose("g0")
    world.start("g0")
    assert world.counter("refused_terms") == 2
    world.advance(0.5)
    assert world.counter("refused_terms") == 3


def test_transfer_bytes_are_those_that_readers_say_they_moved() -> None:
    world = CentralWorld("c0", "g0")
    assert world.counter("transfer_bytes") == 0
    world.advance(0.5)
    assert world.counter("transfer_bytes") == 20


def test_a_worker_that_has_not_beaten_yet_is_shown_as_registered() -> None:
    worker = CentralWorld("c0").central.state(100.0)["workers"][0]
    assert worker["state"] == "registered"
    assert worker["pages"] == {}
