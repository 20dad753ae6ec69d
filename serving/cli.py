"""The `pdserve` command. Every subcommand takes `--json` for scripts."""

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from configs import TRANSPORTS, DeploymentConfig, DTypeName, KernelSet, load_deployment, parse_setting, preset_names
from serving.bench.commands import add_load_benches
from serving.chaos.command import add_options as add_chaos_options
from serving.engine.errors import ModelError
from serving.engine.fetch import default_cache_dir, resolve_model
from serving.engine.hub import is_hub_id
from serving.ray_environment import set_ray_environment
from serving.simulation.command import add_options as add_simulate_options
from serving.tracing.command import add_options as add_trace_options

_WATCH_INTERVAL_S = 0.1
_SIGNAL_EXIT_BASE = 128  # as a shell reports a command that a signal ended
_DTYPES = ("auto", "float32", "bfloat16")
_POLICIES = ("round_robin", "least_tokens", "power_of_two", "prefix_aware")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Expected errors are one line on stderr, never a stack trace."""
    arguments, rest = _parser().parse_known_args(argv)
    if rest and arguments.run is not _bench_manager:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    run: Callable[[argparse.Namespace], int] = arguments.run
    # A command that is told to end leaves through its `finally` blocks, as at Ctrl-C: there it ends what it started.
    former = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_SIGNAL_EXIT_BASE + number))
    try:
        return run(arguments)
    except (ModelError, FileNotFoundError, ValueError) as error:
        return _fail(str(error))
    finally:
        signal.signal(signal.SIGTERM, former)


def _fail(message: str) -> int:
    print(f"pdserve: {message}", file=sys.stderr)
    return 1


# -- parser --------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdserve", description="Disaggregated prefill/decode LLM server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="start a server; Ctrl-C stops everything it started"))
    bench = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="WHAT")
    add_load_benches(bench)
    _add_bench_engine(bench.add_parser("engine", help="tokens per second of the engine, beside the machine's limits"))
    _add_bench_transport(bench.add_parser("transport", help="bytes per second of each transport"))
    _add_bench_handoff(bench.add_parser("handoff", help="microseconds of a handoff and of the central scheduler"))
    manager = bench.add_parser("manager", help="cost of the KV cache manager's calls", add_help=False)
    manager.set_defaults(run=_bench_manager)
    _add_bench_scheduler(bench.add_parser("scheduler", help="microseconds of a scheduling pass"))
    add_chaos_options(commands.add_parser("chaos", help="a server whose processes are killed while it serves"))
    trace = commands.add_parser("trace", help="what a running server did").add_subparsers(required=True, metavar="WHAT")
    add_trace_options(trace.add_parser("export", help="write a file that Perfetto opens"))
    add_simulate_options(commands.add_parser("simulate", help="a deployment in virtual time, from a seed"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    presets = ", ".join(preset_names())
    parser.add_argument("--config", default="local-cpu", help=f"a YAML file or a preset: {presets}")
    parser.add_argument("--model", help="a known model's name, a hub id, a Hugging Face folder, or a GGUF file")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where models are kept")
    parser.add_argument("--context-workers", type=int, help="number of prefill workers")
    parser.add_argument("--generation-workers", type=int, help="number of decode workers")
    parser.add_argument("--mixed-workers", type=int, help="number of workers that do both, instead of the former")
    parser.add_argument("--router", choices=_POLICIES, help="how workers are chosen")
    parser.add_argument("--local-prefill", type=int, help="prompt tokens that a decode worker computes itself")
    parser.add_argument("--threads", type=int, help="threads of one worker")
    parser.add_argument("--dtype", choices=_DTYPES)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting, in YAML"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, help="how pages move between workers")
    parser.add_argument("--doors", type=int, help="number of processes that answer on the port")
    parser.add_argument("--otlp-endpoint", metavar="URL", help="an OpenTelemetry collector for traces (OTLP/HTTP)")
    parser.add_argument("--ray-address", help="join this Ray cluster instead of starting one")
    parser.add_argument("--json", action="store_true", help="print the ready line as JSON")
    parser.set_defaults(run=_serve)


def _add_bench_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="a fetched model's name, a folder, or a GGUF file")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where models are kept")
    parser.add_argument("--dtype", choices=_DTYPES[1:], nargs="+", default=list(_DTYPES[1:]))
    parser.add_argument("--kernels", choices=list(KernelSet), type=KernelSet, default=KernelSet.AUTO)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64], help="sequences that decode together")
    parser.add_argument("--context", type=int, default=128, help="their tokens")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_bench_engine)


def _add_bench_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_bench_transport)


def _add_bench_handoff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_bench_handoff)


def _add_bench_scheduler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256], help="decodes in the step")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10, 1_000, 10_000], help="blocked requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against-vllm", type=Path, metavar="PYTHON", help="one with vLLM: its scheduler beside ours")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_bench_scheduler)


# -- serve ---------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    set_ray_environment()
    from serving.cluster import Cluster, StartError  # after the environment is set, and only where it is needed

    overrides = _overrides(arguments)
    for setting in arguments.set:
        section, key, value = parse_setting(setting)
        overrides.setdefault(section, {})[key] = value
    config = load_deployment(arguments.config, overrides)
    if is_hub_id(config.engine.model) and not config.server.served_model_name:
        # As its folder is named without the organisation, and clients know the whole id.
        config = replace(config, server=replace(config.server, served_model_name=config.engine.model))
    model_folder = resolve_model(config.engine.model, arguments.cache_dir, show_progress=True)
    cluster = Cluster(config, model_folder)
    # Until the server is ready a signal ends the start at once; `start` stops what it had started.
    _on_signals(lambda number: sys.exit(_SIGNAL_EXIT_BASE + number))
    try:
        port = cluster.start()
    except StartError as error:
        return _fail(str(error))
    stopped, hurried = threading.Event(), threading.Event()
    # The first signal lets open requests end, the second one does not wait for them.
    _on_signals(lambda _: (hurried if stopped.is_set() else stopped).set())
    try:
        _print_ready(config, model_folder, port, as_json=arguments.json)
        while not stopped.wait(_WATCH_INTERVAL_S):
            reason = cluster.watch()
            if reason is not None:
                return _fail(reason)
        cluster.drain(hurried.is_set)
    finally:
        cluster.stop()
    return 0


def _on_signals(act: Callable[[int], object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: act(caught))


def _overrides(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    given: dict[str, dict[str, object]] = {
        "engine": {"model": arguments.model, "dtype": arguments.dtype, "num_threads": arguments.threads},
        "cluster": {
            "context_workers": arguments.context_workers,
            "generation_workers": arguments.generation_workers,
            "mixed_workers": arguments.mixed_workers,
            "ray_address": arguments.ray_address,
        },
        "transfer": {"transport": arguments.transport},
        "server": {
            "host": arguments.host,
            "port": arguments.port,
            "doors": arguments.doors,
            "otlp_endpoint": arguments.otlp_endpoint,
        },
        "router": {"policy": arguments.router, "local_prefill_max_tokens": arguments.local_prefill},
    }
    if arguments.mixed_workers and arguments.context_workers is None and arguments.generation_workers is None:
        given["cluster"] |= {"context_workers": 0, "generation_workers": 0}
    return {
        section: {key: value for key, value in values.items() if value is not None} for section, values in given.items()
    }


def _print_ready(config: DeploymentConfig, model_folder: Path, port: int, *, as_json: bool) -> None:
    host = config.server.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    model = config.server.served_model_name or model_folder.name
    if as_json:
        print(json.dumps({"ready": True, "url": url, "model": model}), flush=True)
        return
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is a prefill?"}]})
    print(f"pdserve is ready on {url} (model {model}); Ctrl-C stops it. Try:", flush=True)
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


# -- bench ---------------------------------------------------------------------------------------------


def _bench_engine(arguments: argparse.Namespace) -> int:
    from serving.bench.engine import EngineBench, describe, run_engine_bench  # torch is not for every command

    bench = EngineBench(
        folder=resolve_model(arguments.model, arguments.cache_dir, show_progress=not arguments.json),
        batch_sizes=tuple(arguments.batch),
        context=arguments.context,
        prefill=arguments.prefill,
        rounds=arguments.rounds,
        num_threads=arguments.threads,
    )
    rows = []
    for dtype in arguments.dtype:
        for exact in (True, False):
            rows.append(run_engine_bench(bench, DTypeName(dtype), arguments.kernels, exact=exact))
            if not arguments.json:
                print(describe(rows[-1]))
    if arguments.json:
        print(json.dumps({"engine": rows}))
    return 0


def _bench_transport(arguments: argparse.Namespace) -> int:
    from serving.bench import transport

    results = transport.run()
    if arguments.json:
        print(json.dumps(results))
    else:
        for row in results:
            print(row)
    return 0


def _bench_manager(arguments: argparse.Namespace) -> int:
    from serving.bench import manager  # has a parser of its own

    report = manager.run(arguments.rest)
    if "--json" in arguments.rest:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:24} {value}")
    return 0


def _bench_handoff(arguments: argparse.Namespace) -> int:
    from serving.bench import handoff

    return handoff.run(arguments)


def _bench_scheduler(arguments: argparse.Namespace) -> int:
    from serving.bench import scheduler

    return scheduler.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
