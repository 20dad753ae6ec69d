"""Random lives of requests with drafts, encoder inputs and adapters: nothing is lost, and what is undone never was."""

from random import Random

import pytest

from manager import Grant, Refusal
from tests.fakes.cache_request import FakeRequest
from tests.fakes.cache_sets import ADAPTERS, make_set_manager

_ADAPTERS = [None, *ADAPTERS]


class _World:
    """Requests in every state, and one random transaction after another."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.manager = make_set_manager(self.random.choice([14, 24]), host_slots=self.random.choice([0, 12]))
        self.requests: dict[str, FakeRequest] = {}
        self.scheduled: set[str] = set()
        self.counts = {"rolled back": 0, "suspended": 0, "resumed": 0, "reused": 0, "refused": 0}

    def plan(self) -> None:
        """Random calls for random requests; rolled back now and then, whole or to a savepoint."""
        before = self.manager.snapshot()
        self.scheduled.clear()
        plan = self.manager.begin_plan()
        for request in self.random.sample(list(self.requests.values()), k=min(3, len(self.requests))):
            mark, at_mark = plan.savepoint(), self.manager.snapshot()
            self._call(request)
            self.manager.audit()
            if self.random.random() < 0.2:
                plan.rollback_to(mark)
                self.scheduled.discard(request.name)
                assert self.manager.snapshot() == at_mark
                self.counts["rolled back"] += 1
        if self.random.random() < 0.2:
            plan.rollback()
            self.scheduled.clear()
            assert self.manager.snapshot() == before
            self.counts["rolled back"] += 1
        else:
            plan.commit()
            self.manager.take_adapter_loads()

    def _call(self, request: FakeRequest) -> None:
        manager, name = self.manager, request.request_id
        if not manager.has_cache(name) or manager.is_suspended(name):
            kind = "resumed" if manager.has_cache(name) else "reused"
            self._note(manager.prepare_context(request), kind)
            return
        left = len(request.token_ids) - manager.history_length(name)
        choice = self.random.random()
        if choice < 0.25:
            self._note(manager.suspend_request(request), "suspended")
        elif left > 1:
            self._schedule(request, manager.resize_context(request, self.random.randint(1, left)))
        else:
            request.num_draft_tokens = self.random.randint(0, 4)
            self._schedule(request, manager.try_allocate_generation(request))

    def _schedule(self, request: FakeRequest, answer: Grant | Refusal) -> None:
        self._note(answer, "")
        if isinstance(answer, Grant):
            self.scheduled.add(request.name)

    def _note(self, answer: Grant | Refusal, name: str) -> None:
        if isinstance(answer, Refusal):
            self.counts["refused"] += 1
        elif name == "reused":
            self.counts[name] += answer.reused_tokens > 0
        elif name:
            self.counts[name] += 1

    def complete(self) -> None:
        """History moves where the plan gave room; some requests end."""
        complete = self.manager.begin_complete()
        for request in list(self.requests.values()):
            name = request.request_id
            if request.name not in self.scheduled:
                continue
            room = self.manager.capacity(name) - self.manager.history_length(name)
            steps = min(room, len(request.token_ids) - self.manager.history_length(name))
            if steps:
                self.manager.advance(request, steps)
                request.token_ids.append(self.random.randrange(3))
            if self.random.random() < 0.15:
                self.manager.free_resources(request)
                del self.requests[request.name]
        complete.commit()

    def arrive(self, number: int) -> None:
        """A request whose tokens, encoder input and adapter others may have as well."""
        random = self.random
        request = FakeRequest(
            f"r{number}",
            [random.randrange(2)] * random.randint(2, 9),
            encoder_token_ids=random.choice([(), (1, 2, 3, 4, 5, 6), (1, 2, 3)]),
            adapter_id=random.choice(_ADAPTERS),
        )
        self.requests[request.name] = request

    def end(self) -> None:
        """Everybody leaves; every pool is at its baseline."""
        complete = self.manager.begin_complete()
        for request in self.requests.values():
            if self.manager.has_cache(request.request_id):
                self.manager.free_resources(request)
        complete.commit()
        self.manager.audit()
        there = self.manager.availability()
        assert there.index_slots == 4
        assert there.adapter_pages == 4
        assert list(there.pages.values()) == [self.manager.geometry.pool_groups[0].num_slots[0]]


def _run(seed: int) -> dict[str, int]:
    world = _World(seed)
    for number in range(60):
        if len(world.requests) < 5:
            world.arrive(number)
        world.plan()
        world.manager.audit()
        world.complete()
        world.manager.audit()
    world.end()
    return world.counts


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_sets_survive_random_lives_with_every_undo_exact(first: int) -> None:
    total: dict[str, int] = {}
    for seed in range(first, first + 8):
        for name, count in _run(seed).items():
            total[name] = total.get(name, 0) + count
    assert min(total.values()) > 0, total  # each kind of event really happened
