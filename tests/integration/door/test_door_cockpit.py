"""GET /metrics and the dashboard of a door that serves requests."""

import json
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.door import Door, open_door, run_async


async def samples(door: Door) -> dict[str, float]:
    answer = await door.client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


@run_async
async def test_metrics_count_what_clients_received(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.complete(max_tokens=5, n=2, ignore_eos=True, seed=1)
        usage = answer.json()["usage"]
        found = await samples(door)
        assert found["vllm:generation_tokens_total"] == usage["completion_tokens"] == 10
        assert found["vllm:request_generation_tokens_count"] == 2
        assert found["vllm:request_success_total"] == 2
        assert found["vllm:time_to_first_token_seconds_count"] == 2
        assert found["vllm:inter_token_latency_seconds_count"] == 8
        assert found["vllm:e2e_request_latency_seconds_count"] == 2


@run_async
async def test_metrics_of_the_door_are_there_without_the_central_scheduler(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        door.cluster.is_reachable = False
        found = await samples(door)
        assert found["pdserve:up"] == 0
        assert found["vllm:generation_tokens_total"] == 0


@run_async
async def test_a_resubmission_and_a_failure_are_counted(tiny_folder: Path) -> None:
    async with open_door(tiny_folder, is_pumping=False, request_timeout_s=0.05) as door:
        assert (await door.complete()).status_code == 504
        found = await samples(door)
        assert found["pdserve:request_failure_total"] == 1
        assert "vllm:request_success_total" not in found


@run_async
async def test_the_dashboard_is_one_page_that_names_no_other_host(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        answer = await door.client.get("/dashboard")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text
        assert "https://" not in answer.text


@run_async
async def test_dashboard_events_show_the_cluster_and_the_newest_requests(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        await door.complete(max_tokens=3, ignore_eos=True)
        await door.frontend.close()  # so that the events end: this client reads whole answers
        answer = await door.client.get("/dashboard/events")
        (event,) = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
        request: dict[str, Any] = event["requests"][0]
        assert request["state"] == "finished"
        assert request["choices"][0]["completion_tokens"] == 3
        assert event["latency"]["ttft_s"]["p50"] is not None
        assert event["cluster"]["central"]["running"] == 0
