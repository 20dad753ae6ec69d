"""Builds a worker out of its parts. The only place where a worker's collaborators meet."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from configs import DiskTierConfig, HostTierConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from kvtransfer import PeerChannel, TransferAgent
from manager import CacheConfigError, LayerGroupId
from manager.geometry import CacheGeometry
from manager.kv_cache_manager import KVCacheManagerV2
from manager.pools.base import SlotPool
from manager.pools.copy_threads import CopyThread
from manager.pools.disk_pools import DiskPool
from manager.pools.numpy_pools import NumpyPool
from scheduler.admission import TransferAdmission
from scheduler.errors import InvalidRequest
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.messages import WorkerRole
from scheduler.policy import CacheShape
from serving.engine.model_folder import TOKENIZER_FILE, load_model_config, model_fingerprint
from serving.engine.runner import Engine, exactness_class
from serving.engine.weights import load_weights, resolve_dtype
from serving.grammar import GrammarCompiler
from serving.output_text import StopStringDetector
from serving.tokenizer import Tokenizer
from serving.workers.agent_thread import AgentThread
from serving.workers.batch_builder import BatchBuilder
from serving.workers.device_pools import DevicePools
from serving.workers.draw_rules import DrawRules
from serving.workers.outbox import Outbox, WorkerSinks
from serving.workers.prefix_feed import PrefixFeed
from serving.workers.self_audit import SelfAudit
from serving.workers.step_loop import WorkerLoop
from serving.workers.stop_checker import StopChecker
from serving.workers.transports import make_transport
from serving.workers.worker import Worker
from serving.workers.worker_parts import WorkerParts
from serving.workers.worker_plan import Surroundings, WorkerIdentity, WorkerPlan

_ALONE = Surroundings()

_EVENT_QUEUE_BLOCKS = 1 << 16


def build_worker(
    identity: WorkerIdentity,
    plan: WorkerPlan,
    peers: PeerChannel,
    sinks: WorkerSinks,
    clock: Callable[[], float] = time.monotonic,
    surroundings: Surroundings = _ALONE,
) -> Worker:
    """Load the model and connect everything; nothing runs yet.

    Raises:
        ModelFileError: the model's folder is damaged.
        CacheConfigError: the quotas cannot work.
        OSError: there is no room for the pool.
        TransportUnavailable: the configured transport is missing here.
    """
    if plan.num_threads:
        torch.set_num_threads(plan.num_threads)
    config = plan.config
    model = load_model_config(plan.model_folder)
    dtype = resolve_dtype(config.engine.dtype, config.engine.device)
    chunk_tokens = config.scheduler.chunk_unit_tokens
    geometry = CacheGeometry.from_model(model, config.cache, dtype.itemsize, chunk_tokens=chunk_tokens)
    for left_behind in plan.pool_folder.glob(f"{identity.name}-*.pool"):
        # Of an earlier life that was killed. Its readers notice that the file is gone, and nothing writes it.
        left_behind.unlink()
    pool_path = plan.pool_folder / f"{identity.name}-{identity.epoch}.pool"
    device = DevicePools(geometry, pool_path, config.engine.device)
    transport = make_transport(config.transfer.transport, identity, pool_path, surroundings)
    transport.best.register(device.memory)

    wake = threading.Event()
    kernels = exactness_class(config.engine.kernels, model, config.engine.device)
    layout = device.layout(model, model_fingerprint(plan.model_folder), kernels, dtype)
    agent = TransferAgent(transport.best, peers, config.transfer, layout, identity.name, identity.epoch, wake=wake.set)
    tiers: list[SlotPool] = [*device.pools, *_lower_tiers(geometry, config.cache, plan.pool_folder)]
    copies = CopyThread(tiers)  # within one tier, too: a block that begins like a cached one is a copy of it
    cache = config.cache
    if config.router.needs_kv_events:
        cache = replace(cache, event_queue_blocks=cache.event_queue_blocks or _EVENT_QUEUE_BLOCKS)
    manager = KVCacheManagerV2(geometry, cache, identity.epoch, copies)
    scheduler = KVCacheV2Scheduler(
        _for_role(config.scheduler, identity.role),
        manager,
        identity.role,
        CacheShape.of(geometry),
        window=TransferAdmission(config.transfer.max_inflight_bytes),
    )
    # A folder of bare weights (a device check) has no text to match stop strings in.
    tokenizer = Tokenizer.load(plan.model_folder) if (plan.model_folder / TOKENIZER_FILE).is_file() else None
    parts = WorkerParts(
        manager=manager,
        scheduler=scheduler,
        engine=_make_engine(plan, model, geometry, device.pages(dtype)),
        agent=agent,
        batch_builder=BatchBuilder(
            manager,
            [group.layer_group_id for group in geometry.layer_groups],
            DrawRules(model.eos_token_ids, _make_grammars(tokenizer, model)),
        ),
        stop_checker=_make_stop_checker(tokenizer, plan.model_folder, model),
        outbox=Outbox(identity.name, identity.epoch, sinks),
        staging=device.staging,
        wake=wake,
        overlaps=config.transfer.overlap,
        transport_choices=lambda: transport.best.choices,
        self_audit=SelfAudit(manager.audit, config.cache.audit_period_s, config.cache.audit_max_share, clock),
        prefix_feed=PrefixFeed(manager) if config.router.needs_kv_events else None,
    )
    loop = WorkerLoop(identity, parts, clock)
    return Worker(
        identity,
        loop,
        AgentThread(loop, agent, sinks, config.transfer.heartbeat_s, clock),
        manager=manager,
        transport=transport,
        on_close=lambda: _close(manager, tiers, pool_path),
    )


def _for_role(scheduler: SchedulerConfig, role: WorkerRole) -> SchedulerConfig:
    """Where streams decode, a prompt computed beside them takes small steps."""
    if role is not WorkerRole.GENERATION or scheduler.max_context_tokens_beside_decodes:
        return scheduler
    return replace(scheduler, max_context_tokens_beside_decodes=scheduler.chunk_unit_tokens)


def _lower_tiers(geometry: CacheGeometry, cache: KVCacheConfig, run_folder: Path) -> list[SlotPool]:
    """Tier by tier, a pool for each pool group: the order of the manager's stores."""
    pools: list[SlotPool] = []
    for place, tier in enumerate(cache.tiers[1:], start=1):
        for group in geometry.pool_groups:
            match tier:
                case HostTierConfig():
                    pools.append(NumpyPool(group.num_slots[place], group.page_bytes))
                case DiskTierConfig():
                    pools.append(DiskPool(group.num_slots[place], group.page_bytes, tier.path or str(run_folder)))
                case _:
                    msg = f"tier {tier.tier} cannot be below another"
                    raise CacheConfigError(msg)
    return pools


def _close(manager: KVCacheManagerV2, tiers: Sequence[SlotPool], pool_path: Path) -> None:
    manager.close()
    for pool in tiers:
        pool.close()
    pool_path.unlink(missing_ok=True)


def _make_engine(
    plan: WorkerPlan, model: ModelConfig, geometry: CacheGeometry, pages: dict[LayerGroupId, torch.Tensor]
) -> Engine:
    groups = {group.layer_group_id: group.layer_ids for group in geometry.layer_groups}
    dtype = next(iter(pages.values())).dtype
    engine = plan.config.engine
    weights = load_weights(plan.model_folder, model, dtype, engine.device, engine.kernels)
    return Engine(model, weights, pages, layer_groups=groups, exact=engine.exact)


def _make_grammars(tokenizer: Tokenizer | None, model: ModelConfig) -> GrammarCompiler | None:
    if tokenizer is None:
        return None
    return GrammarCompiler(tokenizer.document, model.vocab_size, model.eos_token_ids)


def _make_stop_checker(tokenizer: Tokenizer | None, model_folder: Path, model: ModelConfig) -> StopChecker:
    def make_detector(stop_strings: Sequence[str], min_tokens: int) -> StopStringDetector:
        if tokenizer is None:
            msg = f"{model_folder} has no {TOKENIZER_FILE}: stop strings cannot be matched"
            raise InvalidRequest(msg)
        return StopStringDetector(tokenizer, stop_strings, min_tokens)

    return StopChecker(model.eos_token_ids, make_detector)
