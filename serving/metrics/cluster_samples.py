"""`ClusterSamples`: the cluster's account of itself as Prometheus samples.

Stateless between scrapes: a count lives where it is counted (worker, manager, central scheduler), and
reaches a scrape through the same JSON as GET /cluster/state, so that the two cannot disagree. A worker's
counters begin again at zero when it is restarted, which Prometheus' `rate` understands.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

JsonObject = Mapping[str, Any]


class _WorkerCount(NamedTuple):
    """A counter of one worker: its name here, the field in the worker's JSON, and what it means."""

    name: str
    field: str
    text: str


_WORKER_COUNTS = (
    _WorkerCount("vllm:prefix_cache_queries", "prefix_queried_tokens", "Tokens looked up in the prefix cache."),
    _WorkerCount("vllm:prefix_cache_hits", "prefix_hit_tokens", "Of those, found."),
    _WorkerCount("vllm:num_preemptions", "suspensions", "Requests suspended or paused for want of pages."),
    _WorkerCount("pdserve:suspensions", "suspensions", "Requests suspended or paused for want of pages."),
    _WorkerCount("pdserve:resumes", "resumes", "Suspended requests that run again."),
    _WorkerCount("pdserve:rollbacks", "rollbacks", "Transactions and savepoints undone."),
    _WorkerCount("pdserve:deferrals", "deferrals", "Offers answered with Deferred."),
    _WorkerCount("pdserve:iterations", "iterations", "Passes of the step loop."),
    _WorkerCount("pdserve:failed_steps", "failed_steps", "Steps in which the engine raised."),
    _WorkerCount("pdserve:transfers", "receives_verified", "Handoffs read and verified."),
    _WorkerCount("pdserve:shared_prefills", "shared_prefills", "Choices that drew from another choice's prefill."),
    _WorkerCount("pdserve:forks", "forks", "Choices that began as a running one: its pages, without a prefill."),
    _WorkerCount("pdserve:transfer_failures", "receives_failed", "Handoffs that failed on the way."),
    _WorkerCount("pdserve:transfer_bytes", "bytes_received", "Bytes of pages that were read."),
    _WorkerCount("pdserve:leases_granted", "leases_granted", "Leases given to readers."),
    _WorkerCount("pdserve:leases_renewed", "leases_renewed", "Leases prolonged."),
    _WorkerCount("pdserve:leases_settled", "leases_settled", "Leases that ended by a trusted read."),
    _WorkerCount("pdserve:leases_expired", "leases_expired", "Leases that nobody renewed."),
    _WorkerCount("pdserve:late_signals", "late_signals", "Renewals and settles that came too late, ignored."),
    _WorkerCount("pdserve:refused_terms", "refused_terms", "Commands of an older central scheduler, refused."),
)
_CENTRAL_COUNTS = (
    ("pdserve:routing_decisions", "dispatches", "Halves of requests that were given to a worker."),
    ("pdserve:routed_cached_tokens", "routed_cached_tokens", "Prompt tokens believed cached where they were routed."),
    ("pdserve:routed_uncached_tokens", "routed_uncached_tokens", "Of routed prompts, the others."),
    ("pdserve:routed_by_prefix", "routed_by_prefix", "Choices of a worker with more load for what it has cached."),
    ("pdserve:local_prefills", "local_prefills", "Prompts given to generation workers to compute."),
    ("pdserve:local_turns", "local_turns", "Of those, turns longer than a prompt that is always computed there."),
    ("pdserve:local_prefills_refused", "local_prefills_refused", "Of those short enough, too many were waiting there."),
    ("pdserve:offers", "offers", "Offers to generation workers."),
    ("pdserve:retries", "retries", "Attempts that were lost and begun again."),
    ("pdserve:lost_workers", "lost_workers", "Lives of workers that were fenced."),
)
_DIVERGENCES = (("audit", "audit_violations"), ("reconcile", "divergences"))
_KINDS = ("free", "cached", "in_use", "leased", "reserved", "quarantined")
_OF_WORKER = ("model_name", "role", "worker")


class ClusterSamples:
    """One scrape's samples. A `prometheus_client` collector."""

    def __init__(self, model: str, state: JsonObject | None) -> None:
        """Args.

        model: the name in the API.
        state: what GET /cluster/state shows; None when the central scheduler does not answer.
        """
        self._model = model
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """All of them; only `pdserve:up` without an account."""
        yield _gauge(
            "pdserve:up",
            "Whether the central scheduler answers.",
            ("model_name",),
            [((self._model,), float(self._state is not None))],
        )
        if self._state is None:
            return
        workers = [worker for worker in self._state["workers"] if worker["state"] != "lost"]
        yield from self._loads(workers)
        yield from self._pages(workers)
        yield from self._counts(workers, self._state["counters"])

    def _loads(self, workers: Sequence[JsonObject]) -> Iterable[Metric]:
        for field in ("running", "waiting"):
            samples = [(self._labels(worker), float(worker[field])) for worker in workers]
            yield _gauge(f"vllm:num_requests_{field}", f"Attempts {field} on a worker.", _OF_WORKER, samples)
        central = self._state["central"] if self._state else {}
        for field in ("queued", "waiting_offer", "deferred"):
            yield _gauge(
                f"pdserve:requests_{field}",
                f"Requests of the central scheduler: {field}.",
                ("model_name",),
                [((self._model,), float(central[field]))],
            )

    def _pages(self, workers: Sequence[JsonObject]) -> Iterable[Metric]:
        usage = [
            (self._labels(worker), pages["in_use"] / pages["total"])
            for worker in workers
            if (pages := worker["pages"].get("device")) and pages["total"]
        ]
        yield _gauge("vllm:kv_cache_usage_perc", "Device pages in use; 1 is all of them.", _OF_WORKER, usage)
        by_kind = [
            ((*self._labels(worker), tier, kind), float(pages[kind]))
            for worker in workers
            for tier, pages in worker["pages"].items()
            for kind in _KINDS
        ]
        yield _gauge(
            "pdserve:pages",
            "Pages by tier and kind. Leased and reserved ones are counted on top of the others.",
            (*_OF_WORKER, "tier", "kind"),
            by_kind,
        )

    def _counts(self, workers: Sequence[JsonObject], central: JsonObject) -> Iterable[Metric]:
        for name, field, text in _WORKER_COUNTS:
            samples = [(self._labels(worker), float(worker["counters"].get(field, 0))) for worker in workers]
            yield _counter(name, text, _OF_WORKER, samples)
        for name, field, text in _CENTRAL_COUNTS:
            yield _counter(name, text, ("model_name",), [((self._model,), float(central.get(field, 0)))])
        yield _counter(
            "pdserve:divergences",
            "Differences between what is held and what is believed; anything but 0 is a fault.",
            ("model_name", "source"),
            [((self._model, source), float(central.get(field, 0))) for source, field in _DIVERGENCES],
        )

    def _labels(self, worker: JsonObject) -> tuple[str, str, str]:
        return self._model, worker["role"], worker["name"]


_Samples = Sequence[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], samples: _Samples) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
