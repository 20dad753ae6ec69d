"""`pdserve bench scheduler`: microseconds of a pass, by running and by waiting requests. No engine, no memory.

One worker's real scheduler and manager. `running` decodes hold all pages but one each, and that one is theirs to
grow into, so every waiting request is blocked by pages in every pass. A world lasts one block of decode steps and
is then built anew; worlds of all sizes take turns, so that a neighbour's load meets all of them.

`plan_us` is `schedule`, `complete_us` is `complete` with made-up tokens, `pass_us` their sum: the median over the
steps of a world, and of its worlds the best, since other load only ever adds time. `refused_per_pass` counts
attempts that got nothing, in a world of its own, whose manager counts.
"""

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypedDict

from configs import DeviceTierConfig, KVCacheConfig, SchedulerConfig
from manager import CacheGeometry, CacheRequest, Epoch, Grant, KVCacheManagerV2, LayerId, LayerSpec, Refusal
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import WorkerRole
from scheduler.output import DrawnToken, SchedulerOutput
from scheduler.policy import CacheShape
from scheduler.spec import AttemptId, DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from serving.bench import scheduler_stream

RUNNING = (16, 64, 256)
WAITING = (0, 10, 1_000, 10_000)
_TOKENS_PER_BLOCK = 64
_PROMPT_TOKENS = 4 * _TOKENS_PER_BLOCK
_BYTES_PER_TOKEN = 2


class SchedulerRow(TypedDict):
    """One row of the table, as it is printed and written to JSON."""

    running: int
    waiting: int
    plan_us: float
    complete_us: float
    pass_us: float
    refused_per_pass: float
    of_ten_waiting: float


class CountingManager(KVCacheManagerV2):
    """The product's manager; counts attempts. Slower, so it is not the one that is timed.

    Attributes:
        num_context_attempts: contexts that were tried.
        num_refused_generations: decodes that were refused a place.
    """

    num_context_attempts = 0
    num_refused_generations = 0

    def prepare_context(self, request: CacheRequest) -> Grant | Refusal:
        """As the product's."""
        self.num_context_attempts += 1
        return super().prepare_context(request)

    def try_allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        """As the product's."""
        answer = super().try_allocate_generation(request)
        self.num_refused_generations += isinstance(answer, Refusal)
        return answer


@dataclass(slots=True)
class _World:
    """One worker whose decodes have just begun a block."""

    scheduler: KVCacheV2Scheduler
    manager: KVCacheManagerV2

    def step(self) -> tuple[float, float, SchedulerOutput]:
        """One pass; returns the seconds of its two halves."""
        began_s = time.perf_counter()
        output = self.scheduler.schedule(0.0)
        planned_s = time.perf_counter()
        drawers = [chunk.request for chunk in output.contexts if chunk.is_last] + list(output.generations)
        drawn = {request.request_id: DrawnToken(7) for request in drawers}
        ready_s = time.perf_counter()
        self.scheduler.complete(output, drawn, 0.0)
        return planned_s - began_s, time.perf_counter() - ready_s, output


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if arguments.against_vllm is not None:
        against = scheduler_stream.compare_with_vllm(arguments.against_vllm, arguments.running, arguments.rounds)
        print(json.dumps(against) if arguments.json else scheduler_stream.table(against))
        return 0
    rows = measure(tuple(arguments.running), tuple(arguments.waiting), arguments.rounds)
    if arguments.json:
        print(json.dumps(rows))
        return 0
    print("running waiting  plan_us complete_us  pass_us  refused/pass  of 10 waiting")
    for row in rows:
        print(
            f"{row['running']:7} {row['waiting']:7} {row['plan_us']:8.1f} {row['complete_us']:11.1f} "
            f"{row['pass_us']:8.1f} {row['refused_per_pass']:13.2f} {row['of_ten_waiting']:14.2f}"
        )
    return 0


def measure(running: Sequence[int] = RUNNING, waiting: Sequence[int] = WAITING, rounds: int = 5) -> list[SchedulerRow]:
    """A row per number of running and of waiting requests; `rounds` worlds of each."""
    places = list(product(running, waiting))
    best = dict.fromkeys(places, (math.inf, math.inf, math.inf))
    for _ in range(rounds):
        for place in places:
            best[place] = min(best[place], _median_seconds(_build(*place, KVCacheManagerV2)), key=lambda it: it[2])
    rows: list[SchedulerRow] = []
    for num_running, num_waiting in places:
        plan_s, complete_s, pass_s = best[num_running, num_waiting]
        ten_s = best.get((num_running, 10), (0.0, 0.0, math.nan))[2]
        rows.append(
            {
                "running": num_running,
                "waiting": num_waiting,
                "plan_us": round(plan_s * 1e6, 2),
                "complete_us": round(complete_s * 1e6, 2),
                "pass_us": round(pass_s * 1e6, 2),
                "refused_per_pass": _refused_per_pass(num_running, num_waiting),
                "of_ten_waiting": round(pass_s / ten_s, 3),
            }
        )
    return rows


def _median_seconds(world: _World) -> tuple[float, float, float]:
    gc.collect()
    gc.freeze()  # the waiting requests are old; a long-running worker's collector has done with them, too
    try:
        halves = [world.step()[:2] for _ in range(_TOKENS_PER_BLOCK - 2)]
    finally:
        gc.unfreeze()
    plans, completes = zip(*halves, strict=True)
    passes = [plan + complete for plan, complete in halves]
    return statistics.median(plans), statistics.median(completes), statistics.median(passes)


def _refused_per_pass(num_running: int, num_waiting: int) -> float:
    world = _build(num_running, num_waiting, CountingManager)
    manager = world.manager
    assert isinstance(manager, CountingManager)
    manager.num_context_attempts = manager.num_refused_generations = 0
    num_passes, num_started = _TOKENS_PER_BLOCK - 2, 0
    for _ in range(num_passes):
        num_started += len(world.step()[2].contexts)
    return (manager.num_context_attempts + manager.num_refused_generations - num_started) / num_passes


def _build(num_running: int, num_waiting: int, manager_class: type[KVCacheManagerV2]) -> _World:
    """Every decode stands at the start of its fifth block, and the pool has a sixth for each of them."""
    num_pages = num_running * (_PROMPT_TOKENS // _TOKENS_PER_BLOCK + 2)
    cache = KVCacheConfig(
        tokens_per_block=_TOKENS_PER_BLOCK,
        tiers=(DeviceTierConfig(quota_bytes=num_pages * _TOKENS_PER_BLOCK * _BYTES_PER_TOKEN),),
        max_sequences=2 * num_running,
    )
    geometry = CacheGeometry.from_layers([LayerSpec(LayerId(0), 1, 1)], cache, bytes_per_element=1)
    manager = manager_class(geometry, cache, Epoch(1))
    config = SchedulerConfig(
        max_num_tokens=(num_running + 1) * _PROMPT_TOKENS,
        max_batch_size=2 * num_running,
        chunk_unit_tokens=_TOKENS_PER_BLOCK,
    )
    scheduler = KVCacheV2Scheduler(config, manager, WorkerRole.MIXED, CacheShape.of(geometry))
    world = _World(scheduler, manager)
    for number in range(num_running):
        scheduler.add_context(AttemptId(f"r{number}"), _spec(number), 0.0)
    world.step()
    for number in range(num_running, num_running + num_waiting):
        scheduler.add_context(AttemptId(f"w{number}"), _spec(number), 0.0)
    world.step()
    return world


def _spec(number: int) -> RequestSpec:
    """Prompts that share nothing; outputs longer than any world lasts."""
    return RequestSpec(
        uid=RequestUid(f"u{number}"),
        door=DoorName("door"),
        prompt_token_ids=tuple(range(number * _PROMPT_TOKENS, (number + 1) * _PROMPT_TOKENS)),
        sampling=SamplingParams(),
        stop=StopParams(max_tokens=2 * _TOKENS_PER_BLOCK),
    )
