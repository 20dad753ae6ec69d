"""One request as one trace over door, central scheduler and workers, sent to a real OTLP receiver."""

import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs import load_deployment
from serving.tracing.otlp import OtlpTraces, TracingUnavailableError
from tests.fakes.door import run_async
from tests.fakes.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.fakes.served_cluster import MODEL, ServedCluster, serve
from tests.fakes.tiny_model import write_tiny_model

_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_PARENT = "00f067aa0ba902b7"
_PROMPT = "the river runs " * 6
"""90 tokens of the byte tokenizer: two chunks of 48 at most."""


@contextmanager
def traced(served: ServedCluster) -> Iterator[OtlpReceiver]:
    """All its requests are exported by the end of the block."""
    with otlp_receiver() as receiver:
        clock = served.frontend._clock
        traces = OtlpTraces(receiver.url, MODEL, "door-0", clock=clock, wall_clock_ns=time.time_ns)
        served.frontend.trace_sink = traces.export
        try:
            yield receiver
        finally:
            traces.close()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def chunked(model_folder: Path, pool_folder: Path) -> AsyncIterator[ServedCluster]:
    """A pair of workers whose steps have at most 48 rows."""
    config = load_deployment(
        "local-cpu",
        {
            "engine": {"dtype": "float32"},
            "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
            "cache": {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}]},
            "scheduler": {"max_num_tokens": 48, "chunk_unit_tokens": 16},
        },
    )
    async with serve(config, model_folder, pool_folder) as served:
        yield served


async def ask(served: ServedCluster, traceparent: str = "", **fields: object) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 4, "ignore_eos": True, "seed": 1, **fields}
    answer = await served.client.post("/v1/completions", json=body, headers={"traceparent": traceparent})
    assert answer.status_code == 200, answer.text
    return await told(served.client, answer)


async def told(client: httpx.AsyncClient, answer: httpx.Response) -> dict[str, Any]:
    timeline: dict[str, Any] = (await client.get(f"/requests/{answer.json()['id']}")).json()
    return timeline


@run_async
async def test_every_phase_is_a_span_of_the_callers_trace(model_folder: Path, tmp_path: Path) -> None:
    async with chunked(model_folder, tmp_path) as served:
        with traced(served) as receiver:
            timeline = await ask(served, f"00-{_TRACE}-{_PARENT}-01")
    assert receiver.paths == {"/v1/traces"}
    assert {span["trace_id"] for span in receiver.spans} == {_TRACE} == {timeline["trace_id"]}
    (root,) = receiver.named("request")
    assert (root["parent_id"], root["pdserve.process"], root["gen_ai.response.id"]) == (
        _PARENT, "door-0", timeline["id"],
    )  # fmt: skip
    where = {(span["name"], span["pdserve.process"]) for span in receiver.spans}
    assert where >= {
        ("choice", "door-0"), ("queue", "central"), ("queue", "context-0"), ("prefill", "context-0"),
        ("prefill.chunk", "context-0"), ("transfer", "generation-0"), ("decode", "generation-0"),
    }  # fmt: skip
    assert [chunk["pdserve.num_tokens"] for chunk in receiver.named("prefill.chunk")] == [48, len(_PROMPT) - 48]


@run_async
async def test_spans_lie_inside_their_parents_and_in_the_order_of_the_phases(
    model_folder: Path, tmp_path: Path
) -> None:
    async with chunked(model_folder, tmp_path) as served:
        with traced(served) as receiver:
            await ask(served)
    by_id = {span["span_id"]: span for span in receiver.spans}
    slack_ns = 50_000_000  # a worker's word is put on the door's clock when it comes
    for span in receiver.spans:
        assert span["began_ns"] <= span["ended_ns"]
        if span["parent_id"]:
            parent = by_id[span["parent_id"]]
            assert parent["began_ns"] - slack_ns <= span["began_ns"]
            assert span["ended_ns"] <= parent["ended_ns"] + slack_ns
    (choice,), (prefill,) = receiver.named("choice"), receiver.named("prefill")
    assert {chunk["parent_id"] for chunk in receiver.named("prefill.chunk")} == {prefill["span_id"]}
    assert prefill["parent_id"] == choice["span_id"]
    assert choice["events"] == ["first_token"]
    starts = [receiver.named(name)[0]["began_ns"] for name in ("queue", "prefill", "transfer", "decode")]
    assert starts == sorted(starts)


@run_async
async def test_the_timeline_has_the_spans_relative_to_the_submission(model_folder: Path, tmp_path: Path) -> None:
    async with chunked(model_folder, tmp_path) as served:
        timeline = await ask(served)
    (choice,) = timeline["choices"]
    names = [span["name"] for span in choice["spans"]]
    assert {"central", "queue", "context", "chunk", "transfer", "generation"} <= set(names)
    assert len(timeline["trace_id"]) == 32
    context = next(span for span in choice["spans"] if span["name"] == "context")
    assert context["lasted_s"] == pytest.approx(choice["phases"]["context_s"])
    assert all(-0.05 <= span["began_s"] <= choice["total_s"] for span in choice["spans"])


@run_async
async def test_requests_without_a_header_have_traces_of_their_own(model_folder: Path, tmp_path: Path) -> None:
    async with chunked(model_folder, tmp_path) as served:
        with traced(served) as receiver:
            told = [await ask(served, header) for header in ("", "", f"00-{'0' * 32}-{_PARENT}-01", "nonsense")]
    ids = {timeline["trace_id"] for timeline in told}
    assert len(ids) == 4
    assert {root["trace_id"] for root in receiver.named("request")} == ids
    assert {root["parent_id"] for root in receiver.named("request")} == {""}


@run_async
async def test_a_caller_that_does_not_record_its_trace_is_not_exported(model_folder: Path, tmp_path: Path) -> None:
    async with chunked(model_folder, tmp_path) as served:
        with traced(served) as receiver:
            timeline = await ask(served, f"00-{_TRACE}-{_PARENT}-00")
    assert timeline["trace_id"] == _TRACE
    assert receiver.spans == []


@run_async
async def test_every_choice_and_every_attempt_is_in_the_one_trace(model_folder: Path, tmp_path: Path) -> None:
    async with chunked(model_folder, tmp_path) as served:
        served.lose_after.append(2)
        with traced(served) as receiver:
            await ask(served, n=2, max_tokens=5)
    assert len({span["trace_id"] for span in receiver.spans}) == 1
    choices = receiver.named("choice")
    assert sorted(choice["pdserve.choice"] for choice in choices) == [0, 1]
    assert max(choice["pdserve.resubmissions"] for choice in choices) == 1
    attempts = {span["pdserve.attempt"] for span in receiver.named("prefill")}
    assert len(attempts) > 2


def test_a_server_that_is_told_to_trace_without_the_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracingUnavailableError, match=r"pdserve\[tracing\]"):
        OtlpTraces("http://127.0.0.1:1", MODEL, "door-0", clock=time.monotonic, wall_clock_ns=time.time_ns)
