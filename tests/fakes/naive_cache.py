"""`NaiveCache`: what a KV cache manager should answer, in dicts and lists, without sharing a single page."""

from copy import deepcopy
from dataclasses import dataclass, field, replace

from manager import LeaseId, PageLease, PageLocation
from tests.fakes.cache_request import FakeRequest


@dataclass
class NaiveEntry:
    """One request's cache."""

    request: FakeRequest
    history: int
    num_blocks: int
    is_reservation: bool = False
    is_suspended: bool = False
    committed_plan_blocks: int = 0
    """Blocks that a committed plan gave: what a step may write."""


@dataclass
class NaiveCache:
    """Lengths per request, prefixes ever committed, leases and quarantines; copied whole for a rollback."""

    entries: dict[str, NaiveEntry] = field(default_factory=dict)
    committed: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    leases: dict[LeaseId, tuple[PageLease, tuple[int, ...]]] = field(default_factory=dict)
    quarantined: dict[str, tuple[PageLocation, ...]] = field(default_factory=dict)
    before_grant: dict[str, NaiveEntry | None] = field(default_factory=dict)
    """What each request had before its first grant in the open plan."""

    def copy(self) -> "NaiveCache":
        """An independent copy; requests stay the same objects, since tokens are not the cache's."""
        requests = [entry.request for entry in (*self.entries.values(), *self.before_grant.values()) if entry]
        return deepcopy(self, {id(request): request for request in requests})

    def note_grant(self, name: str) -> None:
        """A request is about to be given something in this plan."""
        if name not in self.before_grant:
            entry = self.entries.get(name)
            self.before_grant[name] = None if entry is None else replace(entry)

    def commit_prefixes(self, entry: NaiveEntry, tokens_per_block: int) -> None:
        """Every full block of the history may be found by others from now on."""
        for end in range(tokens_per_block, entry.history + 1, tokens_per_block):
            self.committed.add((entry.request.reuse_scope, tuple(entry.request.token_ids[:end])))

    def longest_possible(self, request: FakeRequest, limit: int) -> int:
        """Most positions that a claim can find, if nothing was ever evicted."""
        tokens = request.token_ids
        for end in range(min(limit, len(tokens)), 0, -1):
            if (request.reuse_scope, tuple(tokens[:end])) in self.committed:
                return end
        return 0
