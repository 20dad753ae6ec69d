"""`Journal`: the undo log of the one open transaction.

Every primitive that changes the manager's state pushes its exact inverse. Undoing runs the inverses
newest first, so that lists and linked structures come back in their old order. Inverses never push.
"""

from collections.abc import Callable

Undo = tuple[Callable[..., None], tuple[object, ...]]
"""A function and its arguments."""


class Journal:
    """Inverses of all changes since the transaction began, oldest first.

    Attributes:
        entries: the inverses; the list is the same one for ever.
        push: append one inverse; bound once, because it runs for every change.
    """

    __slots__ = ("entries", "push")

    def __init__(self) -> None:
        """Start empty."""
        self.entries: list[Undo] = []
        self.push: Callable[[Undo], None] = self.entries.append

    def __len__(self) -> int:
        return len(self.entries)

    def undo_to(self, mark: int) -> None:
        """Undo everything pushed since the journal was `mark` entries long."""
        entries = self.entries
        while len(entries) > mark:
            undo, arguments = entries.pop()
            undo(*arguments)

    def forget(self) -> None:
        """Keep the changes: the transaction was published."""
        self.entries.clear()
