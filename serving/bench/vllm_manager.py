"""The same measurements on vLLM's v1 KVCacheManager, run by a Python that has vLLM; prints JSON objects, one a line.

python -m serving.bench.vllm_manager COUNT NUM_BLOCKS [TRACE]

Replays the trace once for every line on its standard input, so that whoever asks can alternate with its own replays;
at the end of the input it measures the long prompt.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from serving.bench.cache_trace import TOKENS_PER_BLOCK, TraceRequest, best_of, load_trace, synthetic_prompt

_LONG_PROMPT = 32_768
_REPEATS = 40
_TOO_SMALL = "the pool is too small for the trace"


def make_manager(num_blocks: int) -> KVCacheManager:
    """One group of full attention, statistics on, as its scheduler makes it."""
    spec = FullAttentionSpec(block_size=TOKENS_PER_BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    return KVCacheManager(
        config,
        max_model_len=1 << 17,
        scheduler_block_size=TOKENS_PER_BLOCK,
        hash_block_size=TOKENS_PER_BLOCK,
        log_stats=True,
    )


class VllmDriver:
    """vLLM's calls for the verbs of `CacheDriver`; hashing is part of admission and growth."""

    def __init__(self, requests: Sequence[TraceRequest], num_blocks: int) -> None:
        """Request objects are made beforehand, unhashed."""
        self._manager = make_manager(num_blocks)
        self._hasher = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)
        self._requests = [make_request(str(n), request.tokens) for n, request in enumerate(requests)]

    def plan(self, running: Sequence[int], admitted: Sequence[int]) -> None:
        """`allocate_slots`, as `Scheduler.schedule` calls it."""
        manager, requests = self._manager, self._requests
        manager.new_step_starts()
        for number in running:
            if manager.allocate_slots(requests[number], 1) is None:
                raise RuntimeError(_TOO_SMALL)
        for number in admitted:
            request = requests[number]
            request._block_hasher = self._hasher  # noqa: SLF001 - so that hashing is timed, but making requests is not
            request.update_block_hashes()
            blocks, computed, _ = manager.get_computed_blocks(request)
            request.num_computed_tokens = computed
            if manager.allocate_slots(request, request.num_tokens - computed, computed, blocks) is None:
                raise RuntimeError(_TOO_SMALL)

    def complete(self, running: Sequence[int], admitted: Sequence[int]) -> None:
        """What `update_from_output` does to a request."""
        for number in (*running, *admitted):
            request = self._requests[number]
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(number % 1000)

    def free(self, finished: Sequence[int]) -> None:
        """`free`."""
        for number in finished:
            self._manager.free(self._requests[number])


def make_request(name: str, tokens: list[int]) -> Request:
    """A request without hashes."""
    parameters = SamplingParams(max_tokens=1 << 12)
    return Request(request_id=name, prompt_token_ids=tokens, sampling_params=parameters, pooling_params=None)


def long_prompt_us() -> dict[str, float]:
    """Fastest time to hash a long prompt and to find its cached blocks."""
    tokens = synthetic_prompt(_LONG_PROMPT + 1, seed=1)
    manager, hasher = make_manager(4096), get_request_block_hasher(TOKENS_PER_BLOCK, sha256)
    hash_s, claim_s = [], []
    for number in range(_REPEATS):
        request = make_request(f"long{number}", tokens)
        start = time.perf_counter()
        hashes = hasher(request)
        hash_s.append(time.perf_counter() - start)
        request.block_hashes.extend(hashes)
        start = time.perf_counter()
        blocks, computed, _ = manager.get_computed_blocks(request)
        claim_s.append(time.perf_counter() - start)
        if number == 0:
            manager.allocate_slots(request, request.num_tokens - computed, computed, blocks)
            manager.free(request)
        elif computed != _LONG_PROMPT:
            msg = f"only {computed} tokens were found"
            raise RuntimeError(msg)
    return {"hash_us": min(hash_s) * 1e6, "claim_us": min(claim_s[1:]) * 1e6}


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    count, num_blocks, trace = int(argv[0]), int(argv[1]), Path(argv[2]) if len(argv) > 2 else None
    init_none_hash(sha256)
    requests = load_trace(trace, count)
    for _ in sys.stdin:
        times = best_of(requests, lambda: VllmDriver(requests, num_blocks), repeats=2)
        figures = {"us_per_operation": times.us_per_operation, "operations": times.operations, "seconds": times.seconds}
        print(json.dumps(figures), flush=True)
    print(json.dumps(long_prompt_us()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
