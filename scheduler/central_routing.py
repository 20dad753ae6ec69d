"""`CentralRouting`: which worker gets a waiting request, by load and by what is cached where.

    request ─► hashes of its blocks (once) ─► overlap per worker ─┐
    ledger ─► tokens outstanding per worker ──────────────────────┴─► Router ─► worker

Conditional disaggregation: a prompt of which a generation worker lacks little is computed there. It then costs that
worker's decodes one short chunk, and saves a context pass over tokens that only the generation worker has (the
answers of earlier turns), and a transfer. A longer turn of a conversation goes there, too, up to a bound of its own:
a context worker would compute the answers again.

    tokens of the prompt that the generation worker lacks
    0 ─────── local_prefill_max_tokens ─────────── local_turn_max_tokens ──────►
       local          local where every context worker lacks more        handed over

Decides and counts; changes neither queues nor holdings.
"""

from collections.abc import Mapping, Sequence

from configs import RouterConfig, RoutingPolicy
from manager import WorkerName
from scheduler.central_books import CentralBooks
from scheduler.introductions import HoldingKind
from scheduler.ledger import WorkerRecord
from scheduler.messages import WorkerRole
from scheduler.router import WorkerLoad
from scheduler.routing_policies import make_router
from scheduler.spec import Term
from scheduler.tracked_request import TrackedRequest

HAND_EVERYTHING_OVER = RouterConfig(policy=RoutingPolicy.LEAST_TOKENS, local_prefill_max_tokens=0)
"""What needs to know nothing of caches: by load alone, and no prompt is computed where it decodes."""


class CentralRouting:
    """The routing of one term."""

    def __init__(self, books: CentralBooks) -> None:
        """Read and count in `books`. Both roles are routed by the same policy, each with a router of its own."""
        self._books = books
        self._config = books.router
        self._routers = {role: make_router(books.router, role) for role in WorkerRole}

    def choose(self, request: TrackedRequest, records: Sequence[WorkerRecord]) -> WorkerLoad:
        """One of these workers of one role; there is at least one."""
        loads = self._loads(request, records)
        chosen = self._routers[records[0].registration.role].choose(loads)
        counters = self._books.counters
        counters[f"routed_{self._config.policy}"] += 1
        counters["routed_cached_tokens"] += chosen.num_cached_tokens
        counters["routed_uncached_tokens"] += request.context_tokens - chosen.num_cached_tokens
        lightest = min(load.num_tokens for load in loads)
        counters["routed_by_prefix"] += chosen.num_tokens > lightest and chosen.num_cached_tokens > 0
        return chosen

    def choose_local(self, request: TrackedRequest, records: Sequence[WorkerRecord]) -> WorkerLoad | None:
        """The generation worker that computes the prompt itself, or None: it is handed over.

        Args:
            request: has not been given to anybody.
            records: generation workers that may be given it.
        """
        limit = self._config.local_prefill_max_tokens
        if not limit or not records:
            return None
        lacking = self._lacking(request, records)
        short = [record for record in records if lacking[record.worker] <= limit]
        is_turn = not short
        if is_turn:
            short = self._holders_of_turn(request, records, lacking)
        if not short:
            return None
        most = self._config.local_prefill_max_waiting
        free = [record for record in short if num_waiting(record, self._books.term) < most]
        self._books.counters["local_prefills_refused"] += not free
        if not free:
            return None
        self._books.counters["local_prefills"] += 1
        self._books.counters["local_turns"] += is_turn
        return self.choose(request, free)

    def _holders_of_turn(
        self, request: TrackedRequest, records: Sequence[WorkerRecord], lacking: Mapping[WorkerName, int]
    ) -> list[WorkerRecord]:
        """Generation workers that have, of the prompt, what no context worker has."""
        limit = self._config.local_turn_max_tokens
        holders = [record for record in records if lacking[record.worker] <= limit]
        if not holders:
            return []
        contexts = self._books.ledger.workers(WorkerRole.CONTEXT)
        elsewhere = min(self._lacking(request, contexts).values(), default=request.context_tokens)
        return [record for record in holders if lacking[record.worker] < elsewhere]

    def _lacking(self, request: TrackedRequest, records: Sequence[WorkerRecord]) -> dict[WorkerName, int]:
        """Tokens of the prompt that each would have to compute."""
        return {load.worker: request.context_tokens - load.num_cached_tokens for load in self._loads(request, records)}

    def _loads(self, request: TrackedRequest, records: Sequence[WorkerRecord]) -> list[WorkerLoad]:
        cached = self._cached_tokens(request, records)
        return [
            WorkerLoad(record.worker, record.num_attempts, record.num_tokens, cached.get(record.worker, 0))
            for record in records
        ]

    def _cached_tokens(self, request: TrackedRequest, records: Sequence[WorkerRecord]) -> dict[WorkerName, int]:
        """At most all tokens but one, since the last is always computed."""
        index, sizes = self._books.prefixes, {record.registration.tokens_per_block for record in records} - {0}
        # A prompt that is scored shares no block: a cached one has no logits.
        if not index.num_blocks or not sizes or request.spec.sampling.wants_prompt_logprobs:
            return {}
        most = request.context_tokens - 1
        cached: dict[WorkerName, int] = {}
        for size in sizes:
            blocks = index.cached_blocks(request.block_hashes(size))
            cached.update(
                (record.worker, min(blocks.get(record.worker, 0) * size, most))
                for record in records
                if record.registration.tokens_per_block == size
            )
        return cached


def num_waiting(record: WorkerRecord, term: Term) -> int:
    """Attempts that wait on a worker: those of its last account, and prompts that it was given since."""
    heartbeat = record.heartbeat
    if heartbeat is None:
        return record.num_held(HoldingKind.LOCAL)
    seen = heartbeat.snapshot.commands_seen or (term, 0)
    given_since = sum(
        holding.kind is HoldingKind.LOCAL and (term, holding.sequence) > seen for holding in record.holdings.values()
    )
    return len(heartbeat.snapshot.waiting) + given_since
