"""Start what a deployment needs, wait until it answers, and end it with everything that it started."""

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from serving.bench.load.client import Target
from serving.bench.load.deployments import Deployment, ServerCommand

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.25
_LAST_LINES = 12


class DeploymentError(Exception):
    """A server ended or stayed silent; the message has the end of its log."""


@dataclass(frozen=True, slots=True)
class _Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@asynccontextmanager
async def running(deployment: Deployment, logs: Path) -> AsyncIterator[Target]:
    """A client of the deployment, which runs as long as the block.

    Args:
        deployment: what to start; one that runs already is only connected to.
        logs: a folder for what the servers print.

    Raises:
        DeploymentError: it did not come up.
    """
    servers: list[_Server] = []
    try:
        for index, command in enumerate(deployment.commands):
            servers.append(_start(command, logs / f"{deployment.name}-{index}.log"))
        urls = [deployment.url] if deployment.url else [server.url for server in servers]
        for server in servers:
            await _wait_until_it_answers(server)
        target = deployment.connect(urls, await _model_name(urls[0]))
        try:
            yield target
        finally:
            await target.close()
    finally:
        _stop(servers)


def _start(command: ServerCommand, log: Path) -> _Server:
    port = _free_port()
    settings = [f"{name}={value}" for name, value in command.environment.items()]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["env", *settings, *command.argv, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if command.cores:
        os.sched_setaffinity(process.pid, command.cores)  # before it had time to start threads; children inherit it
    return _Server(process, f"http://127.0.0.1:{port}", log)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def _wait_until_it_answers(server: _Server) -> None:
    deadline_s = asyncio.get_running_loop().time() + _START_TIMEOUT_S
    async with httpx.AsyncClient(base_url=server.url, timeout=5.0) as client:
        while True:
            if server.process.poll() is not None:
                msg = f"the server ended with {server.process.returncode}:\n{_last_lines(server.log)}"
                raise DeploymentError(msg)
            try:
                if (await client.get("/health")).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass
            if asyncio.get_running_loop().time() > deadline_s:
                msg = f"no answer within {_START_TIMEOUT_S:.0f} s:\n{_last_lines(server.log)}"
                raise DeploymentError(msg)
            await asyncio.sleep(_POLL_S)


async def _model_name(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
    name: str = models["data"][0]["id"]
    return name


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:])


def _stop(servers: Sequence[_Server]) -> None:
    """SIGTERM, then SIGKILL for what stays; children too, which a killed parent would leave behind."""
    started = [psutil.Process(server.process.pid) for server in servers if server.process.poll() is None]
    everything = started + [child for parent in started for child in parent.children(recursive=True)]
    for process in started:
        process.terminate()  # SIGINT is ignored by what was started in a background job
    _, alive = psutil.wait_procs(everything, timeout=_STOP_TIMEOUT_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)
