"""The JSON of GET /cluster/state: what workers say of themselves beside what the ledger believes."""

from dataclasses import asdict
from typing import Any

from scheduler.central_books import CentralBooks
from scheduler.introductions import HoldingKind
from scheduler.ledger import WorkerRecord

JsonObject = dict[str, Any]  # JSON has no static type

_WORKER_COUNTERS = ("rollbacks", "suspensions", "refused_terms")


def cluster_state(books: CentralBooks, now_s: float) -> JsonObject:
    """A JSON-ready picture of the cluster; shares nothing with the books."""
    reported = books.ledger.worker_counters()
    counters = dict.fromkeys(_WORKER_COUNTERS, 0) | dict(reported) | dict(books.counters)
    # What readers moved, not what tickets offered: held blocks are skipped, and a transport that does
    # nothing must show.
    counters["transfer_bytes"] = reported["bytes_received"]
    return {
        "workers": [_worker_state(record, now_s) for record in books.ledger],
        "central": {
            "term": books.term,
            "dispatch": books.config.dispatch.value,
            "queued": books.num_queued,
            "running": len(books.attempts),
            "waiting_context": len(books.contexts),
            "waiting_offer": len(books.offers),
            "losses": [
                {"worker": loss.worker, "pid": loss.pid, "reason": loss.reason, "s_ago": round(now_s - loss.at_s, 3)}
                for loss in books.ledger.losses
            ],
            "is_taking_over": books.is_taking_over,
            "deferred": sum(request.num_deferrals > 0 for request in books.offers),
        },
        "routing": _routing_state(books),
        "counters": counters,
    }


def _routing_state(books: CentralBooks) -> JsonObject:
    router, counters = books.router, books.counters
    return {
        "policy": router.policy.value,
        "local_prefill_max_tokens": router.local_prefill_max_tokens,
        "local_turn_max_tokens": router.local_turn_max_tokens,
        "decisions": counters[f"routed_{router.policy}"],
        "cached_tokens": counters["routed_cached_tokens"],
        "uncached_tokens": counters["routed_uncached_tokens"],
        "decided_by_prefix": counters["routed_by_prefix"],
        "local_prefills": counters["local_prefills"],
        "local_turns": counters["local_turns"],
        "local_prefills_refused": counters["local_prefills_refused"],
        "index": {
            "blocks": books.prefixes.num_blocks,
            "max_blocks": router.max_index_blocks,
            "by_worker": {record.worker: books.prefixes.num_held(record.worker) for record in books.ledger},
            **books.prefixes.counters,
        },
    }


def _worker_state(record: WorkerRecord, now_s: float) -> JsonObject:
    registration = record.registration
    state: JsonObject = {
        "name": registration.worker,
        "role": registration.role.value,
        "pid": registration.pid,
        "epoch": registration.epoch,
        "state": "registered",
        "iteration": 0,
        "running": 0,
        "waiting": 0,
        "transports": {},
        "pages": {},
        "ledger": {
            "attempts": record.num_attempts,
            "tokens": record.num_tokens,
            "leases": record.num_held(HoldingKind.LEASE),
        },
        "counters": {},
        "max_request_tokens": registration.max_request_tokens,
        "heard_s_ago": round(now_s - record.heard_at_s, 3),
    }
    if record.heartbeat is not None:
        snapshot = record.heartbeat.snapshot
        state |= {
            "state": snapshot.state,
            "iteration": record.heartbeat.iteration,
            "running": len(snapshot.running),
            "waiting": len(snapshot.waiting),
            "transports": dict(snapshot.transports),
            "pages": {tier.value: asdict(counts) for tier, counts in snapshot.stats.tiers.items()},
            "counters": {
                **snapshot.counters,
                "prefix_queried_tokens": snapshot.stats.prefix_queried_tokens,
                "prefix_hit_tokens": snapshot.stats.prefix_hit_tokens,
            },
        }
    if not record.is_live:
        state |= {"state": "lost", "lost_reason": record.lost_reason}
    return state
