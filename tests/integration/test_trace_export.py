"""What real workers remember, in Chrome's trace event format."""

import json
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from configs import load_deployment
from serving.tracing.chrome import AnchoredHistory, chrome_trace
from tests.fakes.deployments import Deployment
from tests.fakes.tiny_model import write_tiny_model

_PROMPT_TOKENS = 20
_NUM_TOKENS = 60
_NUMBER = {"type": "number", "minimum": 0}
_ID = {"type": "integer", "minimum": 0}
_COMMON = {"name": {"type": "string"}, "pid": _ID, "tid": _ID, "ts": _NUMBER, "cat": {"type": "string"}}


def _kind(phases: list[str], required: list[str], **fields: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"ph": {"enum": phases}, "args": {"type": "object"}, **_COMMON, **fields},
        "required": ["ph", "name", "pid", "tid", "ts", *required],
        "additionalProperties": False,
    }


_SCHEMA = {
    "type": "object",
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    _kind(["X"], ["dur", "cat"], dur=_NUMBER),
                    _kind(["M"], ["args"]),
                    _kind(["C"], ["args"]),
                    _kind(["i"], ["s"], s={"enum": ["g", "p", "t"]}),
                    _kind(["s", "t", "f"], ["id", "cat", "bp"], id=_ID, bp={"const": "e"}),
                ]
            },
        },
    },
    "required": ["traceEvents"],
}
"""The part of "Trace Event Format" (Google) that is written here; there is no official schema."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a pair whose generation worker is too small for what it is given, so that it suspends."""
    folder = tmp_path_factory.mktemp("trace")
    config = load_deployment(
        "local-cpu",
        {
            "engine": {"dtype": "float32"},
            "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
            "cache": {"tiers": [{"tier": "device", "quota_bytes": 64 << 10}], "max_sequences": 6},
            "scheduler": {"max_batch_size": 6, "max_num_tokens": 16, "chunk_unit_tokens": 16},
        },
    )
    deployment = Deployment(config, write_tiny_model(folder), folder)
    uids = [deployment.submit(range(10 * n, 10 * n + _PROMPT_TOKENS), max_tokens=_NUM_TOKENS) for n in range(6)]
    deployment.run(uids)
    workers = deployment.cluster.workers.values()
    document = chrome_trace([AnchoredHistory(worker.history(600.0), time.monotonic()) for worker in workers])
    deployment.settle_down()
    deployment.close()
    found: dict[str, Any] = json.loads(json.dumps(document))
    return found


def events(trace: dict[str, Any], phase: str, category: str | None = None) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase and category in (None, event.get("cat"))]


def test_the_document_is_valid(trace: dict[str, Any]) -> None:
    jsonschema.validate(trace, _SCHEMA)


def test_each_worker_is_a_process_with_named_lanes(trace: dict[str, Any]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in events(trace, "M") if event["name"] == "process_name"}
    assert sorted(names.values()) == ["central", "context-0 (context)", "generation-0 (generation)"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    for event in events(trace, "X"):
        assert (event["pid"], event["tid"]) in lanes
    shown = {f"{names[pid].split()[0]}: {lane.split()[0]}" for (pid, _), lane in lanes.items()}
    assert shown >= {
        "central: waits", "context-0: steps", "context-0: chunk", "context-0: prefill",
        "generation-0: steps", "generation-0: transfer", "generation-0: decode", "generation-0: suspended",
    }  # fmt: skip


def test_slices_of_one_lane_never_overlap(trace: dict[str, Any]) -> None:
    lanes = defaultdict(list)
    for event in events(trace, "X"):
        lanes[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for slices in lanes.values():
        for (began, lasted), (following, _) in pairwise(sorted(slices)):
            assert began + lasted <= following


def test_every_chunk_lies_in_a_step_of_its_worker(trace: dict[str, Any]) -> None:
    steps = {(step["pid"], step["ts"]): step for step in events(trace, "X", "step")}
    chunks = events(trace, "X", "chunk")
    assert sum(chunk["args"]["tokens"] for chunk in chunks if chunk["args"]["request"] == "request-0") >= _PROMPT_TOKENS
    for chunk in chunks:
        near = [ts for pid, ts in steps if pid == chunk["pid"] and abs(ts - chunk["ts"]) < 0.01]
        assert near, chunk


def test_the_steps_account_for_every_token(trace: dict[str, Any]) -> None:
    steps = events(trace, "X", "step")
    assert sum(step["args"]["context tokens"] for step in steps) == sum(
        chunk["args"]["tokens"] for chunk in events(trace, "X", "chunk")
    )
    num_recomputed = sum(step["args"]["recomputed"] for step in steps)
    assert num_recomputed == len(events(trace, "X", "suspended")) > 0
    # The first token of each, and the next one of what was computed again, come with a context.
    assert sum(step["args"]["decodes"] for step in steps) == 6 * (_NUM_TOKENS - 1) - num_recomputed


def test_arrows_follow_each_request_from_its_first_chunk_to_its_decode(trace: dict[str, Any]) -> None:
    starts = {(event["pid"], event["tid"], event["ts"]): event for event in events(trace, "X")}
    flows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) == 6
    for stops in flows.values():
        assert [stop["ph"] for stop in stops] == ["s", *"t" * (len(stops) - 2), "f"]
        slices = [starts[stop["pid"], stop["tid"], stop["ts"]] for stop in stops]  # each begins a slice
        assert len({each["args"]["request"] for each in slices}) == 1
        kinds = [each["cat"] for each in slices]
        assert kinds[0] == "chunk"
        assert {"transfer", "decode"} <= set(kinds)


def test_nothing_to_tell_is_a_valid_document() -> None:
    jsonschema.validate(json.loads(json.dumps(chrome_trace([]))), _SCHEMA)
