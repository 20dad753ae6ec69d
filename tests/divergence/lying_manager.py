"""A real manager whose answers are falsified on the way: what a budget must notice."""

from collections.abc import Callable
from typing import Any

from manager import Availability, Grant, KVCacheManager


class LyingManager:
    """Passes every call on; grants, or availability outside the first look of a pass, are changed."""

    def __init__(self, manager: KVCacheManager, lie: Callable[[Grant], Grant]) -> None:
        """`lie` is applied to every grant."""
        self._manager = manager
        self._lie = lie

    def __getattr__(self, name: str) -> Any:
        """The manager's, with its grants changed."""
        target = getattr(self._manager, name)
        if not callable(target):
            return target

        def changed(*args: object, **kwargs: object) -> object:
            answer = target(*args, **kwargs)
            return self._lie(answer) if isinstance(answer, Grant) else answer

        return changed


class ShiftingManager:
    """A real manager that has fewer pages from one look to the next: somebody acts outside the transaction."""

    def __init__(self, manager: KVCacheManager) -> None:
        """Honest at first."""
        self._manager = manager
        self.looks = 0

    def availability(self) -> Availability:
        """One page less from the second look on."""
        real = self._manager.availability()
        self.looks += 1
        return Availability(
            pages={group: pages - (self.looks > 1) for group, pages in real.pages.items()},
            index_slots=real.index_slots,
            adapter_pages=real.adapter_pages,
        )

    def __getattr__(self, name: str) -> Any:
        """The manager's."""
        return getattr(self._manager, name)
