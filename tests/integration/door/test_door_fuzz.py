"""Bodies that no client would send, from a seed: each is served or refused, and never breaks the door."""

import gc
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from configs import ServerConfig
from serving.api.schema import ChatCompletionRequest, CompletionRequest
from tests.fakes.door import MODEL, open_door, run_async
from tests.fakes.served_cluster import MODEL as SERVED_MODEL
from tests.fakes.served_cluster import serve, small_config
from tests.fakes.tiny_model import write_tiny_model

_NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, 1e308, 10**400, 2**63, -(2**63), "", "a", "\x00", "😀" * 50, "x" * 5000,
    [], [[]], [0], [[0], [1]], [-1], [10**30], [None], ["a", 1], {}, {"a": 1}, {"type": "text"}, {"type": None},
    {"type": "function", "function": {"name": "f", "parameters": {"type": []}}}, [{"role": "user", "content": "a"}],
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"5": 1e9}, {"include_usage": True},
)  # fmt: skip
_FIELDS = sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "suffix", "unheard_of"})
_HEADERS = ("content-type", "accept", "x-request-id", "authorization", "content-encoding", "expect", "origin")
_MAX_GROWTH_BYTES = 16 << 20


def _body(chooser: random.Random, path: str, model: str) -> bytes:
    base: dict[str, Any] = {"model": model, "max_tokens": 3, "prompt": "a"}
    if path.endswith("chat/completions"):
        base = {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    for _ in range(chooser.randint(1, 3)):
        base[chooser.choice(_FIELDS)] = _pick(chooser)
    if chooser.random() < 0.2:
        message = {"role": "user", "content": "a", chooser.choice(["role", "content", "tool_calls"]): _pick(chooser)}
        base["messages"] = [message]
    raw = json.dumps(base).encode()
    if chooser.random() < 0.2:
        cut = chooser.randrange(len(raw))
        raw = raw[:cut] + bytes(chooser.randrange(256) for _ in range(chooser.randint(0, 4))) + raw[cut + 1 :]
    return raw


def _pick(chooser: random.Random) -> Any:
    return chooser.choice(_NASTY)


async def _fuzz(client: httpx.AsyncClient, model: str, seed: int, num_bodies: int) -> list[int]:
    """Send them; returns resident bytes of this process at every tenth of the way."""
    chooser = random.Random(seed)
    statuses: Counter[int] = Counter()
    resident = []
    for number in range(num_bodies):
        path = chooser.choice(["/v1/completions", "/v1/chat/completions"])
        body = _body(chooser, path, model)
        headers = {name: chooser.choice(["", "a", "*/*", "identity", "é"]) for name in chooser.sample(_HEADERS, 2)}
        encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        answer = await client.post(path, content=body, headers=encoded)
        told = f"seed {seed}, body {number}: {body[:300]!r} -> {answer.text[:300]}"
        assert answer.status_code < 500, told
        assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}, told
        statuses[answer.status_code] += 1
        if (number + 1) % (num_bodies // 10) == 0:
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    # Both happen, so neither everything nor nothing is refused.
    assert statuses[200] > num_bodies // 20
    assert statuses[400] > num_bodies // 5
    return resident


@run_async
async def test_malformed_bodies_never_break_the_door(tiny_folder: Path) -> None:
    async with open_door(tiny_folder) as door:
        await _fuzz(door.client, MODEL, seed=20, num_bodies=400)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@run_async
async def test_ten_thousand_malformed_bodies_leave_memory_flat_and_pools_at_their_baseline(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    folder = write_tiny_model(tmp_path / "model", max_position=96)
    pools = tmp_path / "pools"
    pools.mkdir()
    limits = ServerConfig(max_body_bytes=100_000, max_choices=4, max_prompts=4)
    # Serving a cluster ends by an audit of every pool against its baseline.
    async with serve(small_config(mixed=False), folder, pools, limits) as cluster:
        resident = await _fuzz(cluster.client, SERVED_MODEL, seed, num_bodies=10_000)
    print(f"seed {seed}: resident MiB {[size >> 20 for size in resident]}")  # noqa: T201 -- the figures
    # Caches and books of what was asked lately fill up early on; from then on nothing grows.
    assert resident[-1] - resident[4] < _MAX_GROWTH_BYTES
