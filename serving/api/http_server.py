"""`DoorServer`: builds a door (tokenizer, frontend, app) and serves it with uvicorn on the caller's event loop."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import uvicorn

from configs import DeploymentConfig
from scheduler.spec import DoorName
from serving.api.app import create_app
from serving.api.head_deadline import HeadDeadlineProtocol
from serving.door_peers import DoorPeers, place_of
from serving.endpoint import SchedulerEndpoint
from serving.engine.model_folder import load_model_config
from serving.frontend import Frontend
from serving.generation_request import DoorSettings
from serving.tokenizer import Tokenizer
from serving.tracing.otlp import OtlpTraces

_BACKLOG = 2048
_MAX_SEED = 1 << 63
_GRACE_S = 2  # for open connections when the server stops
_DRAIN_POLL_S = 0.02
_OVER_DEADLINE_S = 30.0  # the central scheduler's own deadline fires first


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn that leaves signals to the process that owns it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


class DoorServer:
    """One door's HTTP server; `frontend` takes what workers and the central scheduler send."""

    def __init__(
        self,
        endpoint: SchedulerEndpoint,
        config: DeploymentConfig,
        model_folder: Path,
        door: DoorName,
        max_request_tokens: int,
        *,
        peers: DoorPeers | None = None,
    ) -> None:
        """Load the tokenizer; nothing listens yet. Raises TracingUnavailableError.

        Args:
            endpoint: the way to the central scheduler.
            config: of the deployment.
            model_folder: a Hugging Face folder.
            door: this door's name.
            max_request_tokens: prompt and output tokens that every worker's pools can hold.
            peers: the other doors; None when there are none.
        """
        model = load_model_config(model_folder)
        name = config.server.served_model_name or model_folder.name
        settings = DoorSettings(
            model_name=name,
            context_length=model.max_position,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_request_tokens=max_request_tokens,
            request_timeout_s=config.central.request_deadline_s + _OVER_DEADLINE_S,
            restart_patience_s=config.central.restart_grace_s,
            resubmit_patience_s=config.central.restart_grace_s,
            kept_timelines=config.server.kept_timelines,
        )
        self.frontend = Frontend(
            endpoint,
            Tokenizer.load(model_folder),
            door,
            settings,
            clock=time.monotonic,
            seed_source=lambda: secrets.randbelow(_MAX_SEED),
        )
        self._traces = self._start_traces(config.server.otlp_endpoint, name, place_of(door))
        app = create_app(self.frontend, config.server, version("pdserve"), peers=peers)
        self._drain_timeout_s = config.server.drain_timeout_s
        self._address = (config.server.host, config.server.port)
        self._shares_port = config.server.doors > 1
        self._server = _EmbeddedServer(
            uvicorn.Config(
                app,
                http=HeadDeadlineProtocol,
                ws="none",
                log_level="warning",
                timeout_graceful_shutdown=_GRACE_S,
                server_header=False,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def _start_traces(self, endpoint: str, model: str, door: str) -> OtlpTraces | None:
        if not endpoint:
            return None
        traces = OtlpTraces(endpoint, model, door, clock=time.monotonic, wall_clock_ns=time.time_ns)
        self.frontend.trace_sink = traces.export
        return traces

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError when it cannot be had."""
        host, port = self._address
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
            # Alone, a second server on this port must fail.
            reuse_port=self._shares_port,
        )
        # Accepted connections inherit it. Without it, an answer's body waits for the client's delayed ACK of its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)
        bound_port: int = listener.getsockname()[1]
        return bound_port

    async def drain(self) -> bool:
        """Refuse new requests (503 with Retry-After) and let open ones end, answers included.

        Returns:
            Whether all ended within `drain_timeout_s`. `stop` afterwards ends the rest.
        """
        self.frontend.start_draining()
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while self.frontend.num_unanswered:  # noqa: ASYNC110 -- once in a life, and it has no event
                    await asyncio.sleep(_DRAIN_POLL_S)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Close open streams and stop listening; may be called twice."""
        await self.frontend.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None
        if self._traces is not None:
            # It may wait for the collector.
            await asyncio.to_thread(self._traces.close)
            self._traces = None
