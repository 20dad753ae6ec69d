"""The names, types and labels that dashboards rely on. A change here breaks somebody's graphs."""

from prometheus_client.parser import text_string_to_metric_families

from serving.metrics import ClusterSamples, StreamMetrics, render

_DOOR = {"model_name", "role", "door"}
_WORKER = {"model_name", "role", "worker"}
_CLUSTER = {"model_name"}

GOLDEN: dict[str, tuple[str, set[str]]] = {
    "vllm:prompt_tokens": ("counter", _DOOR),
    "vllm:generation_tokens": ("counter", _DOOR),
    "vllm:request_success": ("counter", _DOOR | {"finished_reason"}),
    "pdserve:request_failure": ("counter", _DOOR | {"outcome"}),
    "pdserve:resubmissions": ("counter", _DOOR),
    "pdserve:open_choices": ("gauge", _DOOR),
    "vllm:time_to_first_token_seconds": ("histogram", _DOOR),
    "vllm:inter_token_latency_seconds": ("histogram", _DOOR),
    "vllm:request_time_per_output_token_seconds": ("histogram", _DOOR),
    "vllm:e2e_request_latency_seconds": ("histogram", _DOOR),
    "vllm:request_queue_time_seconds": ("histogram", _DOOR),
    "vllm:request_prefill_time_seconds": ("histogram", _DOOR),
    "vllm:request_decode_time_seconds": ("histogram", _DOOR),
    "pdserve:request_transfer_time_seconds": ("histogram", _DOOR),
    "vllm:request_prompt_tokens": ("histogram", _DOOR),
    "vllm:request_generation_tokens": ("histogram", _DOOR),
    "pdserve:up": ("gauge", _CLUSTER),
    "vllm:num_requests_running": ("gauge", _WORKER),
    "vllm:num_requests_waiting": ("gauge", _WORKER),
    "pdserve:requests_queued": ("gauge", _CLUSTER),
    "pdserve:requests_waiting_offer": ("gauge", _CLUSTER),
    "pdserve:requests_deferred": ("gauge", _CLUSTER),
    "vllm:kv_cache_usage_perc": ("gauge", _WORKER),
    "pdserve:pages": ("gauge", _WORKER | {"tier", "kind"}),
    "vllm:prefix_cache_queries": ("counter", _WORKER),
    "vllm:prefix_cache_hits": ("counter", _WORKER),
    "vllm:num_preemptions": ("counter", _WORKER),
    "pdserve:suspensions": ("counter", _WORKER),
    "pdserve:resumes": ("counter", _WORKER),
    "pdserve:rollbacks": ("counter", _WORKER),
    "pdserve:deferrals": ("counter", _WORKER),
    "pdserve:iterations": ("counter", _WORKER),
    "pdserve:failed_steps": ("counter", _WORKER),
    "pdserve:transfers": ("counter", _WORKER),
    "pdserve:shared_prefills": ("counter", _WORKER),
    "pdserve:forks": ("counter", _WORKER),
    "pdserve:transfer_failures": ("counter", _WORKER),
    "pdserve:transfer_bytes": ("counter", _WORKER),
    "pdserve:leases_granted": ("counter", _WORKER),
    "pdserve:leases_renewed": ("counter", _WORKER),
    "pdserve:leases_settled": ("counter", _WORKER),
    "pdserve:leases_expired": ("counter", _WORKER),
    "pdserve:late_signals": ("counter", _WORKER),
    "pdserve:refused_terms": ("counter", _WORKER),
    "pdserve:routing_decisions": ("counter", _CLUSTER),
    "pdserve:routed_cached_tokens": ("counter", _CLUSTER),
    "pdserve:routed_uncached_tokens": ("counter", _CLUSTER),
    "pdserve:routed_by_prefix": ("counter", _CLUSTER),
    "pdserve:local_prefills": ("counter", _CLUSTER),
    "pdserve:local_prefills_refused": ("counter", _CLUSTER),
    "pdserve:local_turns": ("counter", _CLUSTER),
    "pdserve:offers": ("counter", _CLUSTER),
    "pdserve:retries": ("counter", _CLUSTER),
    "pdserve:lost_workers": ("counter", _CLUSTER),
    "pdserve:divergences": ("counter", _CLUSTER | {"source"}),
}

_PAGES = {"total": 10, "free": 4, "cached": 3, "in_use": 2, "leased": 1, "reserved": 0, "quarantined": 1}
STATE = {
    "workers": [
        {
            "name": "context-0",
            "role": "context",
            "state": "running",
            "running": 2,
            "waiting": 1,
            "pages": {"device": _PAGES},
            "counters": {"suspensions": 7, "prefix_queried_tokens": 100, "prefix_hit_tokens": 40},
        },
        {"name": "generation-0", "role": "generation", "state": "lost"},
    ],
    "central": {"queued": 3, "running": 2, "waiting_offer": 1, "deferred": 0},
    "counters": {"dispatches": 9, "divergences": 1, "audit_violations": 2},
}


def scrape(state: object) -> dict[str, object]:
    streams = StreamMetrics("m", "door-0")
    for reason in ("stop", "length"):
        streams._successes.labels("m", "door", "door-0", reason)
    streams._failures.labels("m", "door", "door-0", "failed")
    text = render([streams.families(3)], ClusterSamples("m", state)).decode()  # type: ignore[arg-type]
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_metric_has_its_golden_name_type_and_labels() -> None:
    found = {}
    for name, family in scrape(STATE).items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}  # type: ignore[attr-defined]
        if name.startswith(("vllm:", "pdserve:")):
            found[name] = (family.type, labels)  # type: ignore[attr-defined]
    created = {name for name in found if name.endswith("_created")}
    assert {name: value for name, value in found.items() if name not in created} == GOLDEN


def value(name: str, state: object = STATE, **labels: str) -> float:
    for family in scrape(state).values():
        for sample in family.samples:  # type: ignore[attr-defined]
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    raise KeyError(name)


def test_values_are_those_of_the_clusters_account() -> None:
    assert value("vllm:num_requests_running", worker="context-0", role="context") == 2
    assert value("vllm:kv_cache_usage_perc", worker="context-0") == 0.2
    assert value("pdserve:pages", worker="context-0", tier="device", kind="quarantined") == 1
    assert value("vllm:num_preemptions_total", worker="context-0") == 7
    assert value("vllm:prefix_cache_hits_total", worker="context-0") == 40
    assert value("pdserve:divergences_total", source="audit") == 2
    assert value("pdserve:divergences_total", source="reconcile") == 1


def test_a_silent_central_scheduler_is_told_instead_of_hiding_the_doors_metrics() -> None:
    assert value("pdserve:up") == 1
    assert value("pdserve:open_choices", state=None, door="door-0") == 3
    assert value("pdserve:up", state=None) == 0
    assert value("vllm:prompt_tokens_total", state=None) == 0
