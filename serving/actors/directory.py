"""`Directory`: actors by name, in the deployment's namespace; and what every actor's process needs first.

Handles are looked up by name, so that an actor which came back after a death is found again. Which actor is the central
scheduler is what it says itself, when it begins a term.
"""

import contextlib
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from kvtransfer.errors import PeerError
from scheduler.spec import Term
from serving.door_peers import LIFE_MARK

CENTRAL_NAME = "central"
"""The central scheduler, whichever of its actors that is at present."""
CENTRAL_ACTORS = ("central-0", "central-1")
"""One has the term, the other stands by; where none stands by there is only the first."""
_SWITCH_INTERVAL_S = 0.0005  # the loop and Ray's threads share the interpreter lock; the default is 5 ms


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """What every actor of a deployment must know of its surroundings."""

    namespace: str
    run_folder: Path
    log_level: int = logging.INFO


def prepare_process(place: ActorPlace, name: str) -> None:
    """What every actor's process needs first: a log format, and threads that take turns quickly."""
    logging.basicConfig(level=place.log_level, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


class Directory:
    """Finds actors by name, and remembers them."""

    def __init__(self, namespace: str) -> None:
        """Look in `namespace`."""
        self._namespace = namespace
        self._handles: dict[str, Any] = {}  # Ray's handles have no static type
        self._central = CENTRAL_ACTORS[0]
        self._central_term = Term(0)

    def follow_central(self, actor: str, term: Term) -> bool:
        """This actor says that it has the term; an older one than is followed changes nothing.

        Returns:
            Whether another life has the term now than before.
        """
        is_news = term > self._central_term
        if is_news:
            self._central, self._central_term = actor, term
        return is_news

    @property
    def followed_term(self) -> Term:
        """Of the actor that is followed; 0 before any has spoken."""
        return self._central_term

    def centrals(self) -> list[Any]:
        """Handles of all actors that may have the term, for who does not know yet which has it."""
        found = []
        for name in CENTRAL_ACTORS:
            with contextlib.suppress(PeerError):
                found.append(self.find(name))
        return found

    def find(self, name: str) -> Any:
        """The handle of an actor, by its name or that of one of its lives. Raises PeerError when there is none."""
        name = self._actor(name)
        handle = self._handles.get(name)
        if handle is None:
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError as error:
                msg = f"no actor named {name!r}: {error}"
                raise PeerError(msg) from error
            self._handles[name] = handle
        return handle

    def forget(self, name: str) -> None:
        """Look it up again next time."""
        self._handles.pop(self._actor(name), None)

    def _actor(self, name: str) -> str:
        return self._central if name == CENTRAL_NAME else name.partition(LIFE_MARK)[0]
