"""`pdserve bench serve|goodput|compare`: their options. Nothing heavy is imported before one of them runs."""

import argparse
import os
from pathlib import Path
from typing import Any

_POOL_BYTES = 1 << 30


def add_load_benches(bench: "argparse._SubParsersAction[Any]") -> None:
    """Describe them to the parser of `pdserve bench`."""
    _add_serve(bench.add_parser("serve", help="latency and throughput of a running server"))
    _add_goodput(bench.add_parser("goodput", help="the highest request rate that a deployment serves well"))
    _add_compare(bench.add_parser("compare", help="one deployment after another under the same load"))


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8, help="clients of the closed loop")
    parser.add_argument("--rate", type=float, help="instead: Poisson arrivals, so many a second")
    parser.add_argument(
        "--trace", type=Path, help="instead: arrivals, lengths and shared blocks of a trace (JSON lines)"
    )
    parser.add_argument("--scale", type=int, default=16, help="a trace's lengths are divided by it")
    parser.add_argument("--speed", type=float, default=1.0, help="a trace's arrivals come this many times as fast")
    parser.add_argument("--prompt-tokens", default="128", metavar="N|LEAST:MOST")
    parser.add_argument("--output-tokens", default="32", metavar="N|LEAST:MOST")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_serve)


def _add_deployment_options(parser: argparse.ArgumentParser, deployments: list[str]) -> None:
    """Which deployments, and what all of them share."""
    parser.add_argument(
        "--deployments",
        nargs="+",
        default=deployments,
        metavar="NAME",
        help="disaggregated[@N+N], mixed[@ROWS], vllm, vllm-pair, http://HOST:PORT",
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder that every engine reads")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument(
        "--cores", type=int, nargs="+", default=sorted(os.sched_getaffinity(0)), help="for each deployment"
    )
    parser.add_argument("--pool-bytes", type=int, default=_POOL_BYTES, help="for keys and values, all workers together")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--results", type=Path, help="keep finished measurements in this file, and go on from it")
    parser.add_argument("--logs", type=Path, default=Path("build/bench"), help="what the servers print")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")


def _add_goodput(parser: argparse.ArgumentParser) -> None:
    _add_deployment_options(parser, ["disaggregated", "mixed"])
    parser.add_argument("--workloads", nargs="+", default=["64/64", "256/64", "1024/32"], metavar="PROMPT/OUTPUT")
    parser.add_argument("--ttft", type=float, default=3.0, help="seconds to the first token, at most")
    parser.add_argument("--tpot", type=float, default=0.15, help="mean seconds per further token, at most")
    parser.add_argument("--share", type=float, default=0.9, help="of the requests that must meet both")
    parser.add_argument("--requests", type=int, default=40, help="at each rate")
    parser.add_argument("--highest-rate", type=float, default=8.0, help="requests per second, tried first")
    parser.add_argument("--precision", type=float, default=1.15, help="the rate is found within this factor")
    parser.set_defaults(run=_goodput)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_deployment_options(parser, ["disaggregated", "mixed"])
    parser.add_argument("--load", choices=("streams", "long-prompts"), default="streams")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="at a time")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=12, help="of each load, at least two per stream")
    parser.add_argument("--long-prompt", type=int, default=1_500, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=60.0, help="that long prompts arrive")
    parser.add_argument("--rounds", type=int, default=1, help="of everything, each with a seed of its own")
    parser.add_argument("--report", type=Path, help="write this HTML page, and its plots beside it")
    parser.set_defaults(run=_compare)


def _serve(arguments: argparse.Namespace) -> int:
    from serving.bench import serve
    from serving.bench.load import Lengths

    arguments.prompt_tokens = Lengths.parse(arguments.prompt_tokens)
    arguments.output_tokens = Lengths.parse(arguments.output_tokens)
    return serve.run(arguments)


def _goodput(arguments: argparse.Namespace) -> int:
    from serving.bench import goodput

    arguments.workloads = [goodput.Workload.parse(text) for text in arguments.workloads]
    return goodput.run(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    from serving.bench import compare

    return compare.run(arguments)
