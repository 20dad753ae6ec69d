"""`WatchedManager`: the product's manager, which remembers whom a plan was asked for. Changes nothing."""

from manager import AdapterId, CacheRequest, Grant, KVCacheManagerV2, Refusal, RequestId


class WatchedManager(KVCacheManagerV2):
    """Both sides of the comparison run on it.

    Attributes:
        asked: requests that a plan was asked to give something to, until somebody forgets them.
    """

    asked: dict[RequestId, None]

    def watch(self) -> "WatchedManager":
        """Begin to remember; call it once."""
        self.asked = {}
        return self

    def prepare_context(self, request: CacheRequest) -> Grant | Refusal:
        """As the product's."""
        self.asked[request.request_id] = None
        return super().prepare_context(request)

    def resize_context(self, request: CacheRequest, num_tokens: int) -> Grant | Refusal:
        """As the product's."""
        self.asked[request.request_id] = None
        return super().resize_context(request, num_tokens)

    def try_allocate_generation(self, request: CacheRequest) -> Grant | Refusal:
        """As the product's."""
        self.asked[request.request_id] = None
        return super().try_allocate_generation(request)

    def prepare_disagg_gen_init(self, request: CacheRequest) -> Grant | Refusal:
        """As the product's."""
        self.asked[request.request_id] = None
        return super().prepare_disagg_gen_init(request)

    def pages_held(self, request_id: RequestId) -> int:
        """Device pages that an active cache holds; 0 for any other."""
        if not self.has_cache(request_id) or self.is_suspended(request_id):
            return 0
        groups = self.geometry.layer_groups
        return sum(int((self.block_table(request_id, group.layer_group_id) >= 0).sum()) for group in groups)

    # -- V20, for the other side only ------------------------------------------------------------------

    def keep_adapter(self, request: CacheRequest) -> None:
        """A request that was just suspended keeps its adapter."""
        self._adapters.pin(request.adapter_id)

    def drop_kept_adapter(self, adapter_id: AdapterId) -> None:
        """Give one kept pin back, if there is any: more pins than active caches."""
        caches = self._caches.by_request.values()
        num_active = sum(one.adapter_id == adapter_id and not one.is_suspended for one in caches)
        if self._adapters.pins.get(adapter_id, 0) > num_active:
            self._adapters.unpin(adapter_id)
