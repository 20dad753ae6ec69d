"""`FakeRequest`: the least that satisfies `manager.CacheRequest`."""

from dataclasses import dataclass, field

from manager import AdapterId, RequestId, ReuseScope

COMMON_SCOPE = ReuseScope("")


@dataclass
class FakeRequest:
    """A request as the manager sees it; tests append to `token_ids`."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    prompt_length: int = 0
    reuse_scope: ReuseScope = COMMON_SCOPE
    adapter_id: AdapterId | None = None
    num_draft_tokens: int = 0
    priority: int = 0
    encoder_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """The prompt is what it starts with."""
        if not self.prompt_length:
            self.prompt_length = len(self.token_ids)

    @property
    def request_id(self) -> RequestId:
        """Its name."""
        return RequestId(self.name)
