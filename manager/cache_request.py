"""What the manager needs to know of a request: a read-only view that `scheduler.Request` satisfies."""

from collections.abc import Sequence
from typing import Protocol

from manager.ids import AdapterId, RequestId, ReuseScope


class CacheRequest(Protocol):
    """One attempt, as the manager sees it. The manager only reads it."""

    @property
    def request_id(self) -> RequestId:
        """Unique per attempt; the key of its cache."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """Every token known so far: the prompt, then what was generated. Grows at its end only."""
        ...

    @property
    def prompt_length(self) -> int:
        """Tokens that must be computed before the first new token can be drawn."""
        ...

    @property
    def reuse_scope(self) -> ReuseScope:
        """Blocks are shared only with requests of the same scope."""
        ...

    @property
    def adapter_id(self) -> AdapterId | None:
        """The LoRA adapter it runs with; its pages are held while the cache is active."""
        ...

    @property
    def num_draft_tokens(self) -> int:
        """Draft positions wanted in the next generation step."""
        ...

    @property
    def encoder_token_ids(self) -> Sequence[int]:
        """What the encoder reads, as ids that stand for it; empty for a request without one. Never changes."""
        ...

    @property
    def priority(self) -> int:
        """Higher is kept longer; decides eviction order of its blocks."""
        ...
