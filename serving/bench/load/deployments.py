"""Deployments that a bench can start: this server disaggregated or mixed, and its peers.

A name is `KIND` or `KIND@OPTION`:

    disaggregated             one context and one generation worker
    disaggregated@2+2         so many context and generation workers
    mixed                     one worker that uses all threads
    mixed@128                 the same with at most 128 rows in a step
    vllm                      vLLM on the CPU, aggregated
    vllm-pair                 two vLLM servers, prefill and decode, over NIXL
    http://HOST:PORT          a server that runs already
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.bench.load.client import OneServer, PrefillDecodePair, Target

_NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """One process to start.

    Attributes:
        argv: without the port.
        environment: on top of the bench's own.
        cores: it may run on; empty for all.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is started, and how a client talks to it.

    Attributes:
        commands: one per server; each gets `--port`.
        connect: from the urls, in the same order, and the model's name.
        url: of one that runs already; there is no command then.
    """

    name: str
    commands: tuple[ServerCommand, ...]
    connect: Callable[[Sequence[str], str], Target]
    url: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentChoice:
    """What all deployments of one comparison share.

    Attributes:
        model: a folder that every engine can read.
        cores: that each deployment may use, the same for all.
        vllm_python: an interpreter that has vLLM.
    """

    model: Path
    dtype: str
    cores: tuple[int, ...]
    pool_bytes: int
    vllm_python: Path | None = None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "DeploymentChoice":
        """As the command's options say."""
        return cls(arguments.model, arguments.dtype, tuple(arguments.cores), arguments.pool_bytes, arguments.vllm)


def make_deployment(name: str, choice: DeploymentChoice) -> Deployment:
    """Raises ValueError for a name that is none of those above, or that lacks what it needs."""
    kind, _, option = name.partition("@")
    if kind.startswith("http"):
        return Deployment(name, (), _connect_one, url=name)
    if kind == "disaggregated":
        contexts, _, generations = (option or "1+1").partition("+")
        roles = {"context_workers": int(contexts), "generation_workers": int(generations), "mixed_workers": 0}
        return Deployment(name, (_own(choice, roles, threads=1),), _connect_one)
    if kind == "mixed":
        roles = {"context_workers": 0, "generation_workers": 0, "mixed_workers": 1}
        command = _own(choice, roles, threads=len(choice.cores), rows=int(option) if option else None)
        return Deployment(name, (command,), _connect_one)
    if kind == "vllm":
        return Deployment(name, (_vllm(choice, choice.cores),), _connect_one)
    if kind == "vllm-pair":
        halves = choice.cores[: len(choice.cores) // 2], choice.cores[len(choice.cores) // 2 :]
        commands = tuple(_vllm(choice, cores, side_channel=5600 + rank) for rank, cores in enumerate(halves))
        return Deployment(name, commands, _connect_pair)
    msg = f"no deployment {name!r}; there are disaggregated[@N+N], mixed[@ROWS], vllm, vllm-pair, and http://…"
    raise ValueError(msg)


def _own(choice: DeploymentChoice, roles: Mapping[str, int], threads: int, rows: int | None = None) -> ServerCommand:
    workers = sum(roles.values())
    overrides = [f"cluster.{role}={count}" for role, count in roles.items()]
    overrides.append(f"cache.tiers=[{{tier: device, quota_bytes: {choice.pool_bytes // workers}}}]")
    if rows is not None:
        overrides += [f"scheduler.max_num_tokens={rows}", f"scheduler.chunk_unit_tokens={min(64, rows)}"]
    options = [part for override in overrides for part in ("--set", override)]
    serve = (sys.executable, "-m", "serving.cli", "serve", "--model", str(choice.model), "--dtype", choice.dtype)
    return ServerCommand((*serve, "--threads", str(threads), *options), cores=frozenset(choice.cores))


def _vllm(choice: DeploymentChoice, cores: Sequence[int], side_channel: int | None = None) -> ServerCommand:
    if choice.vllm_python is None:
        msg = "a vllm deployment needs --vllm PYTHON, an interpreter that has vLLM"
        raise ValueError(msg)
    argv = [str(choice.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    argv += ["--model", str(choice.model), "--dtype", choice.dtype, "--no-enable-prefix-caching"]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, choice.pool_bytes >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    if side_channel is not None:
        argv += ["--kv-transfer-config", _NIXL]
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel)
    return ServerCommand(tuple(argv), environment, frozenset(cores))


def _connect_one(urls: Sequence[str], model: str) -> Target:
    (url,) = urls
    return OneServer(url, model)


def _connect_pair(urls: Sequence[str], model: str) -> Target:
    prefill, decode = urls
    return PrefillDecodePair(prefill, decode, model)
