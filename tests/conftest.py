"""Fixtures of every test: the audit at the end (I1 to I12), and the hypothesis profile."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import pytest
from hypothesis import settings

from manager import KVCacheManager

_Manager = TypeVar("_Manager", bound=KVCacheManager)

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")


class Register(Protocol):
    """Register a manager and hand it back."""

    def __call__(self, manager: _Manager, /) -> _Manager:
        """See the fixture `audited`."""
        ...


@pytest.fixture(autouse=True)
def audited_managers() -> Iterator[list[KVCacheManager]]:
    """Managers that are audited when the test is over; empty unless something registers one."""
    managers: list[KVCacheManager] = []
    yield managers
    for manager in managers:
        manager.audit()


@pytest.fixture
def audited(audited_managers: list[KVCacheManager]) -> Register:
    """Give it a manager: it comes back registered for the final audit, as in `audited(make_manager())`."""

    def register(manager: _Manager, /) -> _Manager:
        audited_managers.append(manager)
        return manager

    return register
