"""The ground under `manager_machine`: a small manager, its naive model, transactions, and what always holds."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manager import (
    BlockHash,
    Grant,
    KVCacheManagerV2,
    KVEventKind,
    Refusal,
    Savepoint,
    TierLevel,
    Transaction,
    replay,
)
from manager.pools.copy_threads import CopyThread
from tests.fakes.cache_builders import make_geometry
from tests.fakes.cache_request import FakeRequest
from tests.fakes.known_blocks import known_blocks
from tests.fakes.naive_cache import NaiveCache, NaiveEntry
from tests.fakes.page_contents import PageContents

TOKENS = st.builds(
    # Few families and lengths, so that prompts share prefixes and the small pools overflow.
    lambda family, length, tail: [family] * length + tail,
    st.integers(0, 2),
    st.integers(1, 19),
    st.lists(st.integers(0, 2), max_size=4),
)
PICK = st.integers(0, 7)
Call = Callable[[], Grant | Refusal]


class ManagerWorld(RuleBasedStateMachine):
    """A manager and its model, in step."""

    def __init__(self) -> None:
        """Sizes are drawn in `build`."""
        super().__init__()
        self.model = NaiveCache()
        self.serial = 0
        self.open: tuple[str, Transaction] | None = None
        self.at_begin: tuple[NaiveCache, object] | None = None
        self.marks: list[tuple[Savepoint, NaiveCache, object]] = []
        self.known: dict[BlockHash, TierLevel] = {}

    @initialize(
        num_slots=st.sampled_from([6, 9, 14]),  # per layer group
        windows=st.sampled_from([(None,), (None, 8), (6,), (None, None, 5), (9, None, 5)]),
        num_sink_tokens=st.sampled_from([0, 3]),
        lower=st.sampled_from([(0, 0), (4, 0), (9, 0), (5, 7), (3, 3)]),
        watermark=st.sampled_from([1.0, 0.7]),
    )
    def build(
        self,
        num_slots: int,
        windows: tuple[int | None, ...],
        num_sink_tokens: int,
        lower: tuple[int, int],
        watermark: float,
    ) -> None:
        """A small manager with real pools."""
        geometry, config = make_geometry(
            num_slots * len(set(windows)),
            windows=windows,
            num_sink_tokens=num_sink_tokens,
            head_dim=4,
            max_sequences=4,
            host_slots=lower[0],
            disk_slots=lower[1],
            resume_watermark=watermark,
            event_queue_blocks=12,
        )
        self.geometry = geometry
        self.size = geometry.tokens_per_block
        self.contents = PageContents(geometry)
        self.engine = CopyThread(self.contents.by_store())
        self.manager = KVCacheManagerV2(geometry, config, engine=self.engine)

    # -- transactions --------------------------------------------------------------------------------

    def enter(self, kind: str) -> None:
        """Make sure that a transaction of this kind is open."""
        if self.open is not None and self.open[0] != kind:
            self.commit()
        if self.open is None:
            self.at_begin = (self.model.copy(), self.manager.snapshot())
            begin = self.manager.begin_plan if kind == "plan" else self.manager.begin_complete
            self.open = (kind, begin())

    @precondition(lambda self: self.open is not None)
    @rule()
    def commit(self) -> None:
        """Publish; what a plan gave may be written from now on."""
        assert self.open is not None
        self.open[1].commit()
        assert self.manager.finish_fills() == ()
        for entry in self.model.entries.values():
            entry.committed_plan_blocks = entry.num_blocks
        self._ended()

    @precondition(lambda self: self.open is not None)
    @rule()
    def rollback(self) -> None:
        """Everything is as it was at the beginning, order included."""
        assert self.open is not None
        assert self.at_begin is not None
        self.open[1].rollback()
        self.model, before = self.at_begin
        assert self.manager.snapshot() == before
        self._ended()

    def _ended(self) -> None:
        self.open = None
        self.marks.clear()
        self.model.before_grant.clear()

    @precondition(lambda self: self.open is not None)
    @rule()
    def mark(self) -> None:
        """Set a savepoint."""
        assert self.open is not None
        self.marks.append((self.open[1].savepoint(), self.model.copy(), self.manager.snapshot()))

    @precondition(lambda self: self.marks)
    @rule(pick=PICK)
    def rollback_to(self, pick: int) -> None:
        """Return to any savepoint; later ones are gone."""
        assert self.open is not None
        place = pick % len(self.marks)
        savepoint, model, before = self.marks[place]
        self.open[1].rollback_to(savepoint)
        self.model = model.copy()
        assert self.manager.snapshot() == before
        del self.marks[place + 1 :]

    def new_request(self, tokens: list[int]) -> FakeRequest:
        """A request that the manager has never seen."""
        self.serial += 1
        return FakeRequest(f"r{self.serial}", tokens, num_draft_tokens=self.serial % 3, priority=self.serial % 2)

    def pick_entry(self, pick: int, *, reservation: bool = False, suspended: bool = False) -> NaiveEntry | None:
        """One of the present caches."""
        entries = [
            entry
            for entry in self.model.entries.values()
            if entry.is_reservation == reservation and entry.is_suspended <= suspended
        ]
        return entries[pick % len(entries)] if entries else None

    # -- always --------------------------------------------------------------------------------------

    @invariant()
    def audited(self) -> None:
        """The manager agrees with itself and with the model; pages hold what they should."""
        if not hasattr(self, "manager"):
            return
        self.manager.audit()
        for name, entry in self.model.entries.items():
            request_id = FakeRequest(name).request_id
            assert self.manager.is_suspended(request_id) == entry.is_suspended
            assert self.manager.history_length(request_id) == entry.history
            assert self.manager.capacity(request_id) == entry.num_blocks * self.size
        if self.open is None:
            self.check_contents()
            self.check_events()

    def check_events(self) -> None:
        """What was told of cached prefixes, and what is listed, is what the tree has, in every tier."""
        expected = known_blocks(self.manager.snapshot().tree, self.geometry, self.model.committed)
        listing = self.manager.known_prefixes()
        events = self.manager.take_kv_events()
        replay(events, self.known)
        if [event.kind for event in events] == [KVEventKind.CLEARED]:
            replay(listing, self.known)
        listed: dict[BlockHash, TierLevel] = {}
        replay(listing, listed)
        assert self.known == listed == expected

    def check_contents(self) -> None:
        """Late reads write into quarantined slots; everything else must be what was computed."""
        for pages in self.model.quarantined.values():
            for page in pages:
                self.contents.spoil(page.layer_group, page.slot)
        for entry in self.model.entries.values():
            if not entry.is_suspended:
                self.contents.check(self.manager, entry.request.request_id, entry.request.token_ids)
        for lease, tokens in self.model.leases.values():
            for page in lease.pages:
                self.contents.check_page(page.layer_group, page.slot, tokens, page.block)

    def teardown(self) -> None:
        """With everything released, all is free or cached (I12)."""
        if not hasattr(self, "manager"):
            return
        if self.open is not None:
            self.commit()
        self.enter("complete")
        for entry in self.model.entries.values():
            self.manager.free_resources(entry.request)
        for lease_id in self.model.leases:
            self.manager.end_lease(lease_id)
        for name in self.model.quarantined:
            self.manager.release_quarantine(FakeRequest(name).request_id)
        assert self.open is not None
        self.open[1].commit()
        self.manager.close()
        self.manager.audit()
        for counts in self.manager.stats().tiers.values():
            assert (counts.in_use, counts.leased, counts.reserved, counts.quarantined) == (0, 0, 0, 0)
