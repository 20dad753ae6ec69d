"""`pdserve bench scheduler --against-vllm`: the same request stream through our scheduler and vLLM's, in turns.

Ours: `schedule` (plan and commit), finding out who has enough tokens, and `complete`. Theirs: `schedule` and
`update_from_output`. Making up the drawn tokens is timed on neither side. vLLM hashes a prompt when it arrives and
ours in its first plan, so the times with arrivals are shown as well. Of the rounds of each side the best counts.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from configs import DeviceTierConfig, KVCacheConfig, SchedulerConfig
from manager import CacheGeometry, Epoch, KVCacheManagerV2, LayerId, LayerSpec, RequestId
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import WorkerRole
from scheduler.output import DrawnToken, SchedulerOutput
from scheduler.policy import CacheShape
from scheduler.request import Request
from scheduler.spec import (
    AttemptId,
    DoorName,
    FinishReason,
    RequestSpec,
    RequestUid,
    SamplingParams,
    StopParams,
)
from serving.bench.pass_stream import (
    MAX_NUM_TOKENS,
    TOKENS_PER_BLOCK,
    StreamRequest,
    StreamSeconds,
    make_stream,
    num_blocks,
    replay,
)


class StreamRow(TypedDict):
    """One row: both sides with the same number of running requests; `ratio` is ours over theirs."""

    running: int
    passes: int
    vllm_passes: int
    us_per_pass: float
    vllm_us_per_pass: float
    ratio: float
    us_with_arrivals: float
    vllm_us_with_arrivals: float
    ratio_with_arrivals: float


class StreamOfOurs:
    """A mixed worker's scheduler and manager behind the verbs of `StreamDriver`."""

    def __init__(self, running: int) -> None:
        """A fresh worker. Specs are made beforehand."""
        cache = KVCacheConfig(
            tokens_per_block=TOKENS_PER_BLOCK,
            tiers=(DeviceTierConfig(quota_bytes=num_blocks(running) * TOKENS_PER_BLOCK * 2),),
            max_sequences=running,
        )
        geometry = CacheGeometry.from_layers([LayerSpec(LayerId(0), 1, 1)], cache, bytes_per_element=1)
        config = SchedulerConfig(max_num_tokens=MAX_NUM_TOKENS, max_batch_size=running)
        manager = KVCacheManagerV2(geometry, cache, Epoch(1))
        self._scheduler = KVCacheV2Scheduler(config, manager, WorkerRole.MIXED, CacheShape.of(geometry))
        self._specs = [_spec(number, request) for number, request in enumerate(make_stream(running))]
        self._output = SchedulerOutput(0)
        self._drawn: dict[RequestId, DrawnToken] = {}

    def add(self, number: int) -> None:
        """Queue it."""
        self._scheduler.add_context(AttemptId(str(number)), self._specs[number], 0.0)

    def plan(self) -> None:
        """`schedule`."""
        self._output = self._scheduler.schedule(0.0)

    def prepare(self) -> None:
        """One token for each whose prompt is computed by this step."""
        self._drawn = {request.request_id: DrawnToken(7) for request in self._drawers()}

    def complete(self) -> Sequence[int]:
        """Length limits, which the loop checks, and `complete`."""
        for request in self._drawers():
            if request.num_generated + 1 >= request.spec.stop.max_tokens:
                self._drawn[request.request_id] = DrawnToken(7, FinishReason.LENGTH)
        completed = self._scheduler.complete(self._output, self._drawn, 0.0)
        return [int(request.request_id) for request in completed.finished]

    @property
    def has_work(self) -> bool:
        """Whether anybody is left."""
        return self._scheduler.has_work or bool(self._scheduler.running)

    def _drawers(self) -> list[Request]:
        output = self._output
        return [*(chunk.request for chunk in output.contexts if chunk.is_last), *output.generations]


def compare_with_vllm(python: Path, running: Sequence[int], rounds: int) -> list[StreamRow]:
    """A row per number of running requests.

    Raises:
        CalledProcessError: that Python cannot drive vLLM's scheduler; its own message is on stderr.
    """
    root = Path(__file__).resolve().parents[2]
    variables = ["HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", f"PYTHONPATH={root}"]
    command = ["env", *variables, "VLLM_LOGGING_LEVEL=ERROR", str(python), "-m", "serving.bench.vllm_scheduler"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        ours: dict[int, StreamSeconds] = {}
        theirs: dict[int, StreamSeconds] = {}
        for _ in range(rounds):
            for count in running:
                _keep_best(ours, count, replay(StreamOfOurs(count), len(make_stream(count)), count))
                _keep_best(theirs, count, _ask(child, count))
    return [_row(count, ours[count], theirs[count]) for count in running]


def _ask(child: "subprocess.Popen[str]", count: int) -> StreamSeconds:
    assert child.stdin is not None
    assert child.stdout is not None
    print(count, file=child.stdin, flush=True)
    for line in child.stdout:
        if line.startswith("{"):
            return StreamSeconds(**json.loads(line))
    raise subprocess.CalledProcessError(child.wait(), child.args)


def _keep_best(best: dict[int, StreamSeconds], count: int, seconds: StreamSeconds) -> None:
    if count not in best or seconds.us_per_pass < best[count].us_per_pass:
        best[count] = seconds


def _row(running: int, ours: StreamSeconds, theirs: StreamSeconds) -> StreamRow:
    return {
        "running": running,
        "passes": ours.passes,
        "vllm_passes": theirs.passes,
        "us_per_pass": round(ours.us_per_pass, 1),
        "vllm_us_per_pass": round(theirs.us_per_pass, 1),
        "ratio": round(ours.us_per_pass / theirs.us_per_pass, 3),
        "us_with_arrivals": round(ours.us_with_arrivals, 1),
        "vllm_us_with_arrivals": round(theirs.us_with_arrivals, 1),
        "ratio_with_arrivals": round(ours.us_with_arrivals / theirs.us_with_arrivals, 3),
    }


def table(rows: Sequence[StreamRow]) -> str:
    """For people."""
    lines = ["running  passes  vLLM's   us/pass  vLLM's  ratio   with arrivals  vLLM's  ratio"]
    lines += [
        f"{row['running']:7} {row['passes']:7} {row['vllm_passes']:7} {row['us_per_pass']:9} "
        f"{row['vllm_us_per_pass']:7} {row['ratio']:6} {row['us_with_arrivals']:15} "
        f"{row['vllm_us_with_arrivals']:7} {row['ratio_with_arrivals']:6}"
        for row in rows
    ]
    return "\n".join(lines)


def _spec(number: int, request: StreamRequest) -> RequestSpec:
    return RequestSpec(
        uid=RequestUid(f"u{number}"),
        door=DoorName("door"),
        prompt_token_ids=tuple(request.tokens),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=request.output_tokens),
    )
