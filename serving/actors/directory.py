"""`Directory`: actors by name, in the deployment's namespace; and what every actor's process needs first.

Handles are looked up by name, so that an actor which came back after a death is found again.
"""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from kvtransfer.errors import PeerError
from serving.door_peers import LIFE_MARK

CENTRAL_NAME = "central"
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

    def find(self, name: str) -> Any:
        """The handle of an actor, by its name or that of one of its lives. Raises PeerError when there is none."""
        name = name.partition(LIFE_MARK)[0]
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
        self._handles.pop(name, None)
