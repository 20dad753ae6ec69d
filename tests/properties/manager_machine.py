"""The state machine behind `test_manager_machine.py`: every public call, against the naive model.

Each rule opens the kind of transaction that it needs, ending the other kind by commit. Contents are
checked whenever no transaction is open, the audit after every rule.
"""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from manager import Grant, LogicError, Refusal
from tests.fakes.cache_request import FakeRequest
from tests.fakes.naive_cache import NaiveEntry
from tests.properties.manager_world import PICK, TOKENS, Call, ManagerWorld


class ManagerMachine(ManagerWorld):
    """Random calls on one manager."""

    # -- plan ----------------------------------------------------------------------------------------

    @rule(tokens=TOKENS)
    def prepare(self, tokens: list[int]) -> None:
        """A new context."""
        self.enter("plan")
        request = self.new_request(tokens)
        answer = self.charged(lambda: self.manager.prepare_context(request))
        if isinstance(answer, Grant):
            self.model.note_grant(request.name)
            limit = self.model.longest_possible(request, len(tokens) - 1)
            assert answer.history_length == answer.reused_tokens <= limit
            blocks = -(-answer.history_length // self.size)
            self.model.entries[request.name] = NaiveEntry(request, answer.history_length, blocks)

    @precondition(lambda self: any(entry.history for entry in self.model.entries.values()))
    @rule(pick=PICK, place=st.integers(0, 24), tail=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def fork(self, pick: int, place: int, tail: list[int]) -> None:
        """Begin as a running request does, up to any position that it has."""
        entry = self.pick_entry(pick, suspended=True)
        if entry is None:
            return
        self.enter("plan")
        known = entry.request.token_ids
        shared = len(known) - place % (len(known) + 1)
        request = self.new_request([*known[:shared], *tail])
        request.prompt_length = shared
        answer = self.charged(lambda: self.manager.fork(entry.request, request))
        if isinstance(answer, Grant):
            self.model.note_grant(request.name)
            assert answer.history_length == answer.reused_tokens == min(shared, entry.history)
            blocks = -(-answer.history_length // self.size)
            self.model.entries[request.name] = NaiveEntry(request, answer.history_length, blocks)

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        """Plan a whole context."""
        self.admitted(tokens)

    def admitted(self, tokens: list[int]) -> NaiveEntry | None:
        """Plan a whole context; take it back where it does not fit."""
        self.prepare(tokens)
        name = f"r{self.serial}"
        if name not in self.model.entries:
            return None
        entry = self.model.entries[name]
        rest = len(tokens) - entry.history
        self.grow(entry, len(tokens), lambda: self.manager.resize_context(entry.request, rest))
        if entry.num_blocks * self.size >= len(tokens):
            return entry
        self.manager.revert_allocate_context(entry.request)
        del self.model.entries[name]
        del self.model.before_grant[name]
        return None

    @rule(tokens=TOKENS)
    def run(self, tokens: list[int]) -> None:
        """Compute a whole context."""
        self.computed(tokens)

    def computed(self, tokens: list[int]) -> NaiveEntry | None:
        """A whole context, computed and complete."""
        entry = self.admitted(tokens)
        if entry is not None:
            self.commit()
            self.compute(entry, len(tokens) - entry.history)
        return entry

    @rule(tokens=TOKENS)
    def run_and_free(self, tokens: list[int]) -> None:
        """A whole request: what it computed stays cached."""
        entry = self.computed(tokens)
        if entry is not None:
            self.manager.free_resources(entry.request)
            del self.model.entries[entry.request.name]

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, tokens=st.integers(1, 12))
    def resize(self, pick: int, tokens: int) -> None:
        """Grow a context."""
        entry = self.pick_entry(pick)
        if entry is not None:
            self.enter("plan")
            self.grow(entry, entry.history + tokens, lambda: self.manager.resize_context(entry.request, tokens))

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, token=st.integers(0, 1))
    def generate(self, pick: int, token: int) -> None:
        """Give a decode its next place, back on the device."""
        entry = self.pick_entry(pick, suspended=True)
        if entry is not None:
            self.enter("plan")
            if entry.history == len(entry.request.token_ids):
                entry.request.token_ids.append(token)
            target = len(entry.request.token_ids) + entry.request.num_draft_tokens
            self.grow(entry, target, lambda: self.manager.try_allocate_generation(entry.request))

    def grow(self, entry: NaiveEntry, target: int, call: Call) -> None:
        """Growth is whole blocks, and never less than there was."""
        answer = self.charged(call)
        if isinstance(answer, Grant):
            self.model.note_grant(entry.request.name)
            entry.num_blocks = max(entry.num_blocks, -(-target // self.size))
            entry.is_suspended = False

    def charged(self, call: Call) -> Grant | Refusal:
        """A grant names exactly what availability loses; a refusal changes nothing."""
        before, snapshot = self.manager.availability(), self.manager.snapshot()
        answer = call()
        after = self.manager.availability()
        if isinstance(answer, Grant):
            for pool, pages in before.pages.items():
                charged = sum(cost.pages for cost in answer.pages if cost.pool_group == pool and not cost.tier)
                assert pages - after.pages[pool] == charged
            assert before.index_slots - after.index_slots == answer.index_slots
        else:
            assert self.manager.snapshot() == snapshot
        return answer

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, tokens=TOKENS)
    def suspend_and_run(self, pick: int, tokens: list[int]) -> None:
        """Make room for another request, in steps of their own."""
        self.suspend(pick)
        if self.open is not None:
            self.commit()
        self.run_and_free(tokens)

    @precondition(lambda self: any(entry.is_suspended for entry in self.model.entries.values()))
    @rule(pick=PICK)
    def resume(self, pick: int) -> None:
        """Bring a suspended cache back without growth."""
        self.enter("plan")
        entries = [entry for entry in self.model.entries.values() if entry.is_suspended]
        if entries:
            entry = entries[pick % len(entries)]
            self.grow(entry, 0, lambda: self.manager.prepare_context(entry.request))

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK)
    def suspend(self, pick: int) -> None:
        """Move a cache to lower tiers; places without data are given up."""
        entry = self.pick_entry(pick)
        if entry is None:
            return
        self.enter("plan")
        before = self.manager.snapshot()
        answer = self.manager.suspend_request(entry.request)
        if isinstance(answer, Grant):
            entry.is_suspended = True
            entry.num_blocks = entry.committed_plan_blocks = -(-entry.history // self.size)
            self.model.before_grant.pop(entry.request.name, None)
        else:
            assert self.manager.snapshot() == before

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK)
    def pause(self, pick: int) -> None:
        """Let a cache go for recompute."""
        entry = self.pick_entry(pick, suspended=True)
        if entry is not None:
            self.enter("plan")
            self.manager.pause_for_recompute(entry.request)
            del self.model.entries[entry.request.name]
            self.model.before_grant.pop(entry.request.name, None)

    @rule(tokens=TOKENS)
    def reserve(self, tokens: list[int]) -> None:
        """Take an offer."""
        self.enter("plan")
        request = self.new_request(tokens)
        answer = self.charged(lambda: self.manager.prepare_disagg_gen_init(request))
        if isinstance(answer, Grant):
            self.model.note_grant(request.name)
            assert answer.reused_tokens <= self.model.longest_possible(request, len(tokens))
            blocks = -(-(len(tokens) + 1 + request.num_draft_tokens) // self.size)
            self.model.entries[request.name] = NaiveEntry(request, answer.history_length, blocks, is_reservation=True)

    @precondition(lambda self: self.model.before_grant and self.open is not None and self.open[0] == "plan")
    @rule(pick=PICK)
    def revert(self, pick: int) -> None:
        """Undo what one request acquired in this plan; twice is allowed."""
        name = list(self.model.before_grant)[pick % len(self.model.before_grant)]
        self.manager.revert_allocate_context(FakeRequest(name))
        old = self.model.before_grant.pop(name)
        if old is None:
            del self.model.entries[name]
        else:
            self.model.entries[name] = old

    # -- complete ------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, tokens=st.integers(0, 12))
    def advance(self, pick: int, tokens: int) -> None:
        """A step computed positions that a committed plan gave a place."""
        entry = self.pick_entry(pick)
        if entry is None:
            return
        self.enter("complete")
        known = min(len(entry.request.token_ids), entry.committed_plan_blocks * self.size)
        count = min(tokens, known - entry.history)
        if count >= 0:
            self.compute(entry, count)

    def compute(self, entry: NaiveEntry, count: int) -> None:
        """What a step and its complete do to one request."""
        self.enter("complete")
        request = entry.request
        span = range(entry.history, entry.history + count)
        self.contents.write(self.manager, request.request_id, request.token_ids, span)
        self.manager.advance(request, count)
        entry.history += count
        self.model.commit_prefixes(entry, self.size)

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, tokens=st.integers(0, 4))
    def rewind(self, pick: int, tokens: int) -> None:
        """Reject drafts."""
        entry = self.pick_entry(pick)
        if entry is not None:
            self.enter("complete")
            free = entry.history - self.manager.num_committed_tokens(entry.request.request_id)
            count = min(tokens, free)
            try:
                self.manager.rewind(entry.request, count)
            except LogicError:  # right behind a transfer that left out what only earlier positions see
                assert any(group.window for group in self.geometry.layer_groups)
            else:
                entry.history -= count

    @precondition(lambda self: any(entry.is_reservation for entry in self.model.entries.values()))
    @rule(pick=PICK)
    def activate(self, pick: int) -> None:
        """A transfer is verified."""
        entry = self.pick_entry(pick, reservation=True)
        if entry is None:
            return
        self.enter("complete")
        if entry.request.name not in self.model.entries or not entry.committed_plan_blocks:
            return
        request = entry.request
        pages = self.manager.pages_to_fill(request.request_id)
        wanted = range(entry.history // self.size, -(-request.prompt_length // self.size))
        assert {(page.block, page.layer_group) for page in pages} == {
            (block, group.layer_group_id)
            for group in self.geometry.layer_groups
            for block in wanted
            if block not in group.stale_blocks(request.prompt_length, self.size)
        }
        span = range(entry.history, request.prompt_length)
        self.contents.write(self.manager, request.request_id, request.token_ids, span)
        self.manager.activate_disagg_gen(request)
        entry.history, entry.is_reservation = request.prompt_length, False
        self.model.commit_prefixes(entry, self.size)

    @precondition(lambda self: any(entry.is_reservation for entry in self.model.entries.values()))
    @rule(pick=PICK)
    def quarantine(self, pick: int) -> None:
        """A transfer is cancelled while its reads may run."""
        entry = self.pick_entry(pick, reservation=True)
        if entry is not None:
            self.enter("complete")
            pages = tuple(self.manager.pages_to_fill(entry.request.request_id))
            self.manager.quarantine(entry.request)
            del self.model.entries[entry.request.name]
            self.model.quarantined[entry.request.name] = pages

    @precondition(lambda self: self.model.quarantined)
    @rule(pick=PICK)
    def release_quarantine(self, pick: int) -> None:
        """The reads have ended."""
        self.enter("complete")
        name = sorted(self.model.quarantined)[pick % len(self.model.quarantined)]
        del self.model.quarantined[name]
        self.manager.release_quarantine(FakeRequest(name).request_id)

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK)
    def lease(self, pick: int) -> None:
        """Hold pages for a reader."""
        entry = self.pick_entry(pick)
        if entry is not None:
            self.enter("complete")
            lease = self.manager.grant_lease(entry.request)
            self.model.leases[lease.lease_id] = (lease, tuple(entry.request.token_ids[: entry.history]))

    @precondition(lambda self: self.model.leases)
    @rule(pick=PICK)
    def end_lease(self, pick: int) -> None:
        """A lease is settled or expires."""
        self.enter("complete")
        lease_id = sorted(self.model.leases)[pick % len(self.model.leases)]
        del self.model.leases[lease_id]
        self.manager.end_lease(lease_id)

    @precondition(lambda self: self.model.entries)
    @rule(pick=PICK, reservation=st.booleans())
    def free(self, pick: int, reservation: bool) -> None:
        """A request ends."""
        entry = self.pick_entry(pick, reservation=reservation, suspended=True)
        if entry is not None:
            self.enter("complete")
            self.manager.free_resources(entry.request)
            del self.model.entries[entry.request.name]
