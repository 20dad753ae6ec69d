"""Builds a worker out of its parts. The only place where a worker's collaborators meet."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from configs import DiskTierConfig, HostTierConfig, KVCacheConfig, ModelConfig
from kvtransfer import PeerChannel, TransferAgent
from kvtransfer.messages import PoolLayout
from kvtransfer.transports.shared_memory import SharedMemoryTransport, create_pool
from manager import CacheConfigError, LayerGroupId
from manager.geometry import CacheGeometry
from manager.kv_cache_manager import KVCacheManagerV2
from manager.pools.base import SlotPool
from manager.pools.copy_threads import CopyThread
from manager.pools.disk_pools import DiskPool
from manager.pools.numpy_pools import NumpyPool
from manager.pools.torch_pools import TorchPool
from scheduler.admission import TransferAdmission
from scheduler.errors import InvalidRequest
from scheduler.kv_cache_v2_scheduler import KVCacheV2Scheduler
from scheduler.policy import CacheShape
from serving.engine.model_folder import TOKENIZER_FILE, load_model_config, model_fingerprint
from serving.engine.runner import Engine
from serving.engine.weights import load_weights, resolve_dtype
from serving.output_text import StopStringDetector
from serving.tokenizer import Tokenizer
from serving.workers.agent_thread import AgentThread
from serving.workers.batch_builder import BatchBuilder
from serving.workers.outbox import Outbox, WorkerSinks
from serving.workers.self_audit import SelfAudit
from serving.workers.staging import PageStaging, SharedPool, TwinPool
from serving.workers.step_loop import WorkerLoop, WorkerParts
from serving.workers.stop_checker import StopChecker
from serving.workers.worker import Worker
from serving.workers.worker_plan import WorkerIdentity, WorkerPlan


def build_worker(
    identity: WorkerIdentity,
    plan: WorkerPlan,
    peers: PeerChannel,
    sinks: WorkerSinks,
    clock: Callable[[], float] = time.monotonic,
) -> Worker:
    """Load the model and connect everything; nothing runs yet.

    Raises:
        ModelFileError: the model's folder is damaged.
        CacheConfigError: the quotas cannot work.
        OSError: there is no room for the pool.
    """
    if plan.num_threads:
        torch.set_num_threads(plan.num_threads)
    config = plan.config
    model = load_model_config(plan.model_folder)
    dtype = resolve_dtype(config.engine.dtype, config.engine.device)
    geometry = CacheGeometry.from_model(model, config.cache, dtype.itemsize)
    for left_behind in plan.pool_folder.glob(f"{identity.name}-*.pool"):
        # Of an earlier life that was killed. Its readers notice that the file is gone, and nothing writes it.
        left_behind.unlink()
    pool_path = plan.pool_folder / f"{identity.name}-{identity.epoch}.pool"
    pool, memory, staging = _make_pool(geometry, pool_path, config.engine.device)
    transport = SharedMemoryTransport(pool_path)
    transport.register(memory)

    wake = threading.Event()
    layout = _pool_layout(model, geometry, model_fingerprint(plan.model_folder), dtype)
    agent = TransferAgent(transport, peers, config.transfer, layout, identity.name, identity.epoch, wake=wake.set)
    tiers = [pool, *_lower_tiers(geometry, config.cache, plan.pool_folder)]
    copies = CopyThread(tiers)  # within one tier, too: a block that begins like a cached one is a copy of it
    manager = KVCacheManagerV2(geometry, config.cache, identity.epoch, copies)
    scheduler = KVCacheV2Scheduler(
        config.scheduler,
        manager,
        identity.role,
        CacheShape.of(geometry),
        window=TransferAdmission(config.transfer.max_inflight_bytes),
    )
    (group,) = geometry.layer_groups
    pages = {group.layer_group_id: pool.pages(group, geometry.tokens_per_block, dtype)}
    parts = WorkerParts(
        manager=manager,
        scheduler=scheduler,
        engine=_make_engine(plan, model, dtype, pages),
        agent=agent,
        batch_builder=BatchBuilder(manager, [group.layer_group_id]),
        stop_checker=_make_stop_checker(plan.model_folder, model),
        outbox=Outbox(identity.name, identity.epoch, sinks),
        staging=staging,
        wake=wake,
    )
    loop = WorkerLoop(identity, parts, clock)
    return Worker(
        identity,
        loop,
        AgentThread(loop, agent, sinks, config.transfer.heartbeat_s, clock),
        manager=manager,
        self_audit=SelfAudit(manager.audit, config.cache.audit_period_s, config.cache.audit_max_share, clock),
        on_close=lambda: _close(manager, tiers, pool_path),
    )


def _make_pool(
    geometry: CacheGeometry, path: Path, device: str
) -> tuple[TorchPool, npt.NDArray[np.uint8], PageStaging]:
    (group,) = geometry.pool_groups
    num_slots = group.num_slots[0]
    memory = create_pool(path, num_slots * group.page_bytes)
    if torch.device(device).type == "cpu":
        return TorchPool(num_slots, group.page_bytes, memory=memory), memory, SharedPool()
    pool = TorchPool(num_slots, group.page_bytes, device=device)
    return pool, memory, TwinPool(pool, memory)


def _lower_tiers(geometry: CacheGeometry, cache: KVCacheConfig, run_folder: Path) -> list[SlotPool]:
    (group,) = geometry.pool_groups
    pools: list[SlotPool] = []
    for tier, num_slots in zip(cache.tiers[1:], group.num_slots[1:], strict=True):
        match tier:
            case HostTierConfig():
                pools.append(NumpyPool(num_slots, group.page_bytes))
            case DiskTierConfig():
                pools.append(DiskPool(num_slots, group.page_bytes, tier.path or str(run_folder)))
            case _:
                msg = f"tier {tier.tier} cannot be below another"
                raise CacheConfigError(msg)
    return pools


def _close(manager: KVCacheManagerV2, tiers: Sequence[SlotPool], pool_path: Path) -> None:
    manager.close()
    for pool in tiers:
        pool.close()
    pool_path.unlink(missing_ok=True)


def _pool_layout(model: ModelConfig, geometry: CacheGeometry, fingerprint: str, dtype: torch.dtype) -> PoolLayout:
    return PoolLayout(
        model_fingerprint=fingerprint,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        tokens_per_block=geometry.tokens_per_block,
        dtype=str(dtype).removeprefix("torch."),
        page_bytes=geometry.pool_groups[0].page_bytes,
    )


def _make_engine(
    plan: WorkerPlan, model: ModelConfig, dtype: torch.dtype, pages: dict[LayerGroupId, torch.Tensor]
) -> Engine:
    weights = load_weights(plan.model_folder, model, dtype, plan.config.engine.device)
    return Engine(model, weights, pages, exact=plan.config.engine.exact)


def _make_stop_checker(model_folder: Path, model: ModelConfig) -> StopChecker:
    # A folder of bare weights (a device check) has no text to match stop strings in.
    tokenizer = Tokenizer.load(model_folder) if (model_folder / TOKENIZER_FILE).is_file() else None

    def make_detector(stop_strings: Sequence[str]) -> StopStringDetector:
        if tokenizer is None:
            msg = f"{model_folder} has no {TOKENIZER_FILE}: stop strings cannot be matched"
            raise InvalidRequest(msg)
        return StopStringDetector(tokenizer, stop_strings)

    return StopChecker(model.eos_token_ids, make_detector)
