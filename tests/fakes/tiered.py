"""`Tiered`: a manager with real pools in every tier, the truth about their contents, and copies that can fail."""

import numpy as np
import numpy.typing as npt

from manager import KVCacheManagerV2, PageCounts, Tier, TierLevel
from manager.pools.copy_threads import CopyThread
from manager.pools.numpy_pools import NumpyPool
from tests.fakes.cache_builders import granted, make_geometry
from tests.fakes.cache_request import FakeRequest
from tests.fakes.page_contents import PageContents


class FailingPool(NumpyPool):
    """A pool whose reads or writes can be made to fail."""

    fails_reading = False
    fails_writing = False

    def read(self, slot: int, out: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.read`."""
        if self.fails_reading:
            msg = "unreadable"
            raise OSError(msg)
        super().read(slot, out)

    def write(self, slot: int, source: npt.NDArray[np.uint8]) -> None:
        """See `SlotPool.write`."""
        if self.fails_writing:
            msg = "no space"
            raise OSError(msg)
        super().write(slot, source)


class Tiered:
    """A manager with real pools, and the truth about their contents."""

    def __init__(
        self, device: int = 6, host: int = 6, disk: int = 0, max_sequences: int = 4, resume_watermark: float = 1.0
    ) -> None:
        """Sizes in slots."""
        geometry, config = make_geometry(
            device,
            host_slots=host,
            disk_slots=disk,
            head_dim=4,
            max_sequences=max_sequences,
            resume_watermark=resume_watermark,
        )
        self.contents = PageContents(geometry)
        for key, pool in self.contents.pools.items():
            self.contents.pools[key] = FailingPool(pool.num_slots, pool.slot_bytes)
        self.manager = KVCacheManagerV2(geometry, config, engine=CopyThread(self.contents.by_store()))

    def pool(self, tier: TierLevel) -> FailingPool:
        """The only pool of a tier."""
        (pool,) = [pool for (level, _), pool in self.contents.pools.items() if level is tier]
        assert isinstance(pool, FailingPool)
        return pool

    def counts(self, tier: Tier) -> PageCounts:
        """Pages of a tier."""
        return self.manager.stats().tiers[tier]

    def compute(self, request: FakeRequest) -> None:
        """Plan a whole context, compute it, complete it."""
        plan = self.manager.begin_plan()
        history = granted(self.manager.prepare_context(request)).history_length
        granted(self.manager.resize_context(request, len(request.token_ids) - history))
        plan.commit()
        assert self.manager.finish_fills() == ()
        complete = self.manager.begin_complete()
        span = range(history, len(request.token_ids))
        self.contents.write(self.manager, request.request_id, request.token_ids, span)
        self.manager.advance(request, len(span))
        complete.commit()

    def suspend(self, request: FakeRequest) -> None:
        """In a plan of its own."""
        plan = self.manager.begin_plan()
        granted(self.manager.suspend_request(request))
        plan.commit()

    def resume(self, request: FakeRequest) -> None:
        """In a plan of its own; its pages must hold what they held."""
        plan = self.manager.begin_plan()
        granted(self.manager.prepare_context(request))
        plan.commit()
        assert self.manager.finish_fills() == ()
        self.contents.check(self.manager, request.request_id, request.token_ids)
