"""Cost of the KV cache manager's bookkeeping, and the same trace through vLLM's.

    us_per_operation      admit, grow, commit and free on the trace, transactions and statistics on
    hash_us, claim_us     hash a prompt of 32k tokens once; find and claim its 2,048 cached blocks
    turn_us               a further turn of that conversation: hash its new blocks, claim all
    pass_us               one admission that evicts, with 10k and with 1M idle cached blocks
    bytes_per_cached_block

Every figure of vLLM's is measured in the same call, by the Python given, on the same machine and trace. Replays
alternate, ours and theirs; `ratio_to_vllm` is the median of the rounds' ratios, since load comes and goes.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypedDict

import psutil

from configs import DeviceTierConfig, KVCacheConfig
from manager import AdapterId, CacheGeometry, Grant, KVCacheManagerV2, LayerId, LayerSpec, RequestId, ReuseScope
from manager.digests import BlockDigests
from serving.bench.cache_trace import TOKENS_PER_BLOCK, ReplayTimes, TraceRequest, best_of, load_trace, synthetic_prompt

_LONG_PROMPT = 32_768
_REPEATS = 40
_ROUNDS = 9
_SCOPE = ReuseScope("")


class ManagerReport(TypedDict):
    """Figures and ratios; a ratio is None where vLLM was not measured."""

    us_per_operation: float
    operations: int
    seconds: dict[str, float]
    hash_us: float
    claim_us: float
    turn_us: float
    pass_us_10k: float
    pass_us_1m: float
    pass_p99_us_10k: float
    pass_p99_us_1m: float
    bytes_per_cached_block: float
    pass_cost_1m_over_10k: float
    pass_p99_1m_over_10k: float
    vllm: dict[str, object] | None
    ratio_to_vllm: float | None
    hash_ratio_to_vllm: float | None
    claim_ratio_to_vllm: float | None


class BenchRequest:
    """The least that the manager reads."""

    __slots__ = (
        "adapter_id",
        "encoder_token_ids",
        "num_draft_tokens",
        "priority",
        "prompt_length",
        "request_id",
        "reuse_scope",
        "token_ids",
    )

    def __init__(self, name: str, tokens: list[int]) -> None:
        """A request without drafts or adapter."""
        self.request_id = RequestId(name)
        self.token_ids = tokens
        self.prompt_length = len(tokens)
        self.reuse_scope = _SCOPE
        self.adapter_id: AdapterId | None = None
        self.encoder_token_ids: Sequence[int] = ()
        self.num_draft_tokens = 0
        self.priority = 0


class OurDriver:
    """Our calls for the verbs of `CacheDriver`."""

    def __init__(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        """Request objects are made beforehand."""
        self._manager = make_manager(num_blocks)
        self._requests = [BenchRequest(str(n), list(request.tokens)) for n, request in enumerate(requests)]

    def plan(self, running: Sequence[int], admitted: Sequence[int]) -> None:
        """One plan."""
        manager, requests = self._manager, self._requests
        plan = manager.begin_plan()
        for number in running:
            _granted(manager.try_allocate_generation(requests[number]))
        for number in admitted:
            request = requests[number]
            claim = _granted(manager.prepare_context(request))
            _granted(manager.resize_context(request, len(request.token_ids) - claim.history_length))
        plan.commit()

    def complete(self, running: Sequence[int], admitted: Sequence[int]) -> None:
        """One complete."""
        manager, requests = self._manager, self._requests
        complete = manager.begin_complete()
        for number in running:
            request = requests[number]
            manager.advance(request, 1)
            request.token_ids.append(number % 1000)
        for number in admitted:
            request = requests[number]
            manager.advance(request, len(request.token_ids) - manager.history_length(request.request_id))
            request.token_ids.append(number % 1000)
        complete.commit()

    def free(self, finished: Sequence[int]) -> None:
        """Part of a complete; in one of its own here, so that it can be timed alone."""
        if finished:
            complete = self._manager.begin_complete()
            for number in finished:
                self._manager.free_resources(self._requests[number])
            complete.commit()


def run(argv: Sequence[str]) -> ManagerReport:
    """Measure everything; `--against-vllm PYTHON` adds vLLM's figures and the ratios."""
    arguments = _parser().parse_args(argv)
    requests = load_trace(arguments.trace, arguments.requests)
    runs: list[ReplayTimes] = []

    def replay_ours() -> float:
        runs.append(best_of(requests, lambda: OurDriver(requests, arguments.blocks), repeats=2))
        return runs[-1].us_per_operation

    vllm, ratio = _alternate(arguments, replay_ours)
    times = min(runs, key=lambda replayed: replayed.us_per_operation)
    long_prompt = _long_prompt_us()
    idle = _in_child(10_000, arguments.cached_blocks)
    return {
        "us_per_operation": times.us_per_operation,
        "operations": times.operations,
        "seconds": times.seconds,
        "hash_us": long_prompt["hash_us"],
        "claim_us": long_prompt["claim_us"],
        "turn_us": long_prompt["turn_us"],
        "pass_us_10k": idle["few_median_us"],
        "pass_us_1m": idle["many_median_us"],
        "pass_p99_us_10k": idle["few_p99_us"],
        "pass_p99_us_1m": idle["many_p99_us"],
        "bytes_per_cached_block": idle["bytes_per_block"],
        "pass_cost_1m_over_10k": idle["many_median_us"] / idle["few_median_us"],
        "pass_p99_1m_over_10k": idle["many_p99_us"] / idle["few_p99_us"],
        "vllm": vllm,
        "ratio_to_vllm": ratio,
        "hash_ratio_to_vllm": _ratio(long_prompt["hash_us"], vllm, "hash_us"),
        "claim_ratio_to_vllm": _ratio(long_prompt["claim_us"], vllm, "claim_us"),
    }


def make_manager(num_blocks: int) -> KVCacheManagerV2:
    """One layer group without memory behind it."""
    layer = LayerSpec(LayerId(0), num_kv_heads=1, head_dim=1)
    tier = DeviceTierConfig(quota_bytes=num_blocks * 2 * TOKENS_PER_BLOCK)
    config = KVCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, tiers=(tier,), max_sequences=256)
    return KVCacheManagerV2(CacheGeometry.from_layers([layer], config, bytes_per_element=1), config)


def idle_blocks(few: int, many: int) -> dict[str, float]:
    """Cost of a pass that evicts, with few and with many cached blocks in turn, and bytes per block.

    For a process of its own, whose memory grows by nothing else.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    large = make_manager(many)
    _fill(large, many)
    gc.collect()
    bytes_per_block = (process.memory_info().rss - before) / many
    small = make_manager(few)
    _fill(small, few)
    gc.collect()
    gc.freeze()
    durations: dict[str, list[float]] = {"few": [], "many": []}
    for number in range(3000):
        durations["few"].append(_pass_s(small, number))
        durations["many"].append(_pass_s(large, number))
    figures = {"bytes_per_block": bytes_per_block}
    for name, values in durations.items():
        values.sort()
        figures[f"{name}_median_us"] = statistics.median(values) * 1e6
        figures[f"{name}_p99_us"] = values[int(0.99 * len(values))] * 1e6
    return figures


def _fill(manager: KVCacheManagerV2, count: int) -> None:
    """Cache `count` blocks, in prompts of 128 blocks."""
    step = 128
    for number in range(count // step):
        _compute(manager, BenchRequest(f"fill{number}", synthetic_prompt(step * TOKENS_PER_BLOCK, seed=number + 10)))


def _compute(manager: KVCacheManagerV2, request: BenchRequest) -> None:
    """A whole request in one pass."""
    plan = manager.begin_plan()
    claim = _granted(manager.prepare_context(request))
    size = len(request.token_ids) - claim.history_length
    _granted(manager.resize_context(request, size))
    plan.commit()
    complete = manager.begin_complete()
    manager.advance(request, size)
    manager.free_resources(request)
    complete.commit()


def _pass_s(manager: KVCacheManagerV2, number: int) -> float:
    request = BenchRequest(f"pass{number}", synthetic_prompt(8 * TOKENS_PER_BLOCK, seed=-number - 1))
    start = time.perf_counter()
    _compute(manager, request)
    return time.perf_counter() - start


def _long_prompt_us() -> dict[str, float]:
    tokens = synthetic_prompt(_LONG_PROMPT + 1, seed=1)
    manager = make_manager(4096)
    _compute(manager, BenchRequest("warm", tokens))
    hash_s, claim_s, turn_s = [], [], []
    for number in range(_REPEATS):
        start = time.perf_counter()
        BlockDigests(_SCOPE, TOKENS_PER_BLOCK).extend(tokens, _LONG_PROMPT // TOKENS_PER_BLOCK)
        hash_s.append(time.perf_counter() - start)
        again = BenchRequest(f"again{number}", list(tokens))
        turn = BenchRequest(f"turn{number}", tokens + synthetic_prompt(512, seed=number + 2))
        turn_s.append(_claim_s(manager, turn))
        _claim_s(manager, again)  # hashes; what follows finds and claims only
        claim_s.append(_claim_s(manager, again))
    fastest = (min(times) * 1e6 for times in (hash_s, claim_s, turn_s))
    return dict(zip(("hash_us", "claim_us", "turn_us"), fastest, strict=True))


def _claim_s(manager: KVCacheManagerV2, request: BenchRequest) -> float:
    plan = manager.begin_plan()
    start = time.perf_counter()
    grant = _granted(manager.prepare_context(request))
    duration = time.perf_counter() - start
    plan.rollback()
    if grant.reused_tokens < _LONG_PROMPT:
        msg = f"only {grant.reused_tokens} tokens were found"
        raise RuntimeError(msg)
    return duration


def _granted(answer: object) -> Grant:
    if not isinstance(answer, Grant):
        msg = f"the pool is too small for the trace: {answer}"
        raise RuntimeError(msg)
    return answer


def _in_child(few: int, many: int) -> dict[str, float]:
    code = f"import json; from serving.bench.manager import idle_blocks; print(json.dumps(idle_blocks({few}, {many})))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return {name: float(value) for name, value in json.loads(output).items()}


def _alternate(
    arguments: argparse.Namespace, replay_ours: Callable[[], float]
) -> tuple[dict[str, object] | None, float | None]:
    """Replay in turns with vLLM; returns its figures, the fastest replay's, and the median ratio."""
    if not arguments.against_vllm:
        for _ in range(_ROUNDS):
            replay_ours()
        return None, None
    command = [str(arguments.against_vllm), "-m", "serving.bench.vllm_manager"]
    command += [str(arguments.requests), str(arguments.blocks), *([str(arguments.trace)] if arguments.trace else [])]
    root = Path(__file__).resolve().parents[2]
    variables = ["HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", f"PYTHONPATH={root}"]
    pipe = subprocess.PIPE
    rounds: list[tuple[float, dict[str, float]]] = []
    with subprocess.Popen(["env", *variables, *command], stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(_ROUNDS):
            process.stdin.write("replay\n")
            process.stdin.flush()
            theirs = _next_figures(process.stdout)
            rounds.append((replay_ours() / theirs["us_per_operation"], theirs))
        process.stdin.close()
        long_prompt = _next_figures(process.stdout)
    fastest = min((theirs for _, theirs in rounds), key=lambda figures: figures["us_per_operation"])
    return {**fastest, **long_prompt}, statistics.median(ratio for ratio, _ in rounds)


def _next_figures(lines: Iterable[str]) -> dict[str, float]:
    """VLLM may print other lines of its own."""
    line = next((line for line in lines if line.startswith("{")), None)
    if line is None:
        msg = "vLLM ended without figures; its error is above"
        raise RuntimeError(msg)
    return dict(json.loads(line))


def _ratio(ours: float, vllm: dict[str, object] | None, key: str) -> float | None:
    theirs = vllm[key] if vllm else None
    return ours / theirs if isinstance(theirs, float) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve bench manager", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--trace", type=Path, help="a request trace, one JSON object a line; made up without it")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the trace to replay")
    parser.add_argument("--blocks", type=int, default=8192, help="blocks of the pool")
    parser.add_argument("--cached-blocks", type=int, default=1_000_000, help="idle cached blocks of the large pool")
    parser.add_argument("--against-vllm", type=Path, metavar="PYTHON", help="a Python that can import vLLM")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
