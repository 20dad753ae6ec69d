"""`FaultInjector`: raises at the n-th inner step of the code under test, before or after the step has happened."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest


class InjectedFaultError(Exception):
    """What a faulty step raises."""


class FaultInjector:
    """Counts calls of chosen methods and makes one of them fail.

    Attributes:
        num_steps: calls counted since `arm`.
        has_failed: whether a step was made to fail.
        log: names of the steps counted, in order.
    """

    def __init__(self) -> None:
        """Nothing fails yet."""
        self.num_steps = 0
        self.has_failed = False
        self.log: list[str] = []
        self._fail_at = 0
        self._is_after = False
        self._is_armed = False

    def arm(self, fail_at: int = 0, *, after: bool = False) -> None:
        """Count from now on; the `fail_at`-th step (from 1) fails, `after` it has happened or before."""
        self.num_steps, self.log, self.has_failed = 0, [], False
        self._fail_at, self._is_after, self._is_armed = fail_at, after, True

    def disarm(self) -> None:
        """Count and fail no more."""
        self._is_armed = False

    def wrap(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, counted."""

        @wraps(step)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self._is_armed:
                return step(*args, **kwargs)
            self.num_steps += 1
            self.log.append(name)
            fails = self.num_steps == self._fail_at
            self.has_failed |= fails
            if fails and not self._is_after:
                raise InjectedFaultError(name)
            result = step(*args, **kwargs)
            if fails:
                raise InjectedFaultError(name)
            return result

        return counted


@contextmanager
def injected(steps: Sequence[tuple[type, str]]) -> Iterator[FaultInjector]:
    """Make every named method of the classes a step that can fail."""
    injector = FaultInjector()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in steps:
            patch.setattr(owner, name, injector.wrap(f"{owner.__name__}.{name}", getattr(owner, name)))
        yield injector
