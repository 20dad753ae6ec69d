"""The same stream through vLLM's v1 Scheduler, run by a Python that has vLLM.

python -m serving.bench.vllm_scheduler: reads a number of running requests a line, serves the stream once, and
prints its seconds as one JSON object a line. So rounds of both sides can take turns.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from serving.bench.pass_stream import MAX_NUM_TOKENS, TOKENS_PER_BLOCK, make_stream, num_blocks, replay

_MAX_MODEL_TOKENS = 4096
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": _MAX_MODEL_TOKENS,
    "torch_dtype": "float32",
}


def make_config(blocks: int, max_requests: int) -> VllmConfig:
    """A model that is never loaded; prefix caching and chunked prefill on, as vLLM serves by default."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=_MAX_MODEL_TOKENS)
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_requests,
                max_num_batched_tokens=MAX_NUM_TOKENS,
                max_model_len=_MAX_MODEL_TOKENS,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            cache_config=CacheConfig(block_size=TOKENS_PER_BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )
    config.cache_config.num_gpu_blocks = blocks
    return config


class VllmDriver:
    """`schedule` and `update_from_output`."""

    def __init__(self, config: VllmConfig, running: int) -> None:
        """A fresh scheduler. Request objects are made beforehand, unhashed."""
        spec = FullAttentionSpec(block_size=TOKENS_PER_BLOCK, num_kv_heads=3, head_size=64, dtype=torch.float32)
        cache = KVCacheConfig(
            num_blocks=num_blocks(running), kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
        )
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=TOKENS_PER_BLOCK,
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)
        self._requests = [
            Request(
                request_id=str(number),
                prompt_token_ids=request.tokens,
                sampling_params=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
                pooling_params=None,
            )
            for number, request in enumerate(make_stream(running))
        ]
        self._plan: SchedulerOutput | None = None
        self._drawn: ModelRunnerOutput | None = None

    def add(self, number: int) -> None:
        """Hash the prompt, as the engine does when a request arrives, and queue it."""
        request = self._requests[number]
        request._block_hasher = self._hasher  # noqa: SLF001 - so that hashing is timed, but making requests is not
        request.update_block_hashes()
        self._scheduler.add_request(request)

    def plan(self) -> None:
        """`schedule`."""
        self._plan = self._scheduler.schedule()

    def prepare(self) -> None:
        """One token for each whose prompt is computed by this step."""
        assert self._plan is not None
        ids = list(self._plan.num_scheduled_tokens)
        requests = self._scheduler.requests
        done = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in ids]
        tokens = [[7] if draws else [] for draws in done]
        self._drawn = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: index for index, name in enumerate(ids)}, sampled_token_ids=tokens
        )

    def complete(self) -> Sequence[int]:
        """`update_from_output`."""
        assert self._plan is not None
        assert self._drawn is not None
        outputs = self._scheduler.update_from_output(self._plan, self._drawn)
        return [int(one.request_id) for batch in outputs.values() for one in batch.outputs if one.finished]


def main() -> None:
    """Serve one stream for each line."""
    init_none_hash(sha256)
    for line in sys.stdin:
        running = int(line)
        driver = VllmDriver(make_config(num_blocks(running), running), running)
        print(json.dumps(asdict(replay(driver, len(make_stream(running)), running))), flush=True)


if __name__ == "__main__":
    main()
