"""`pdserve simulate`: its options. The simulation itself, and torch with it, is imported only to be run."""

import argparse
import json
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe `pdserve simulate` to its parser."""
    parser.add_argument(
        "--trace", type=Path, help="arrivals as JSON lines in Mooncake's format; without it, random ones"
    )
    parser.add_argument("--scale", type=int, default=16, help="lengths of the trace are divided by this")
    parser.add_argument("--output-scale", type=int, default=0, help="output lengths by this; 0: as the prompts")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals of the trace come this much faster")
    parser.add_argument("--requests", type=int, default=200, help="the first so many of the trace, or random ones")
    parser.add_argument("--rate", type=float, default=4.0, help="random arrivals per second")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and faults")
    parser.add_argument("--context-workers", type=int, default=4)
    parser.add_argument("--generation-workers", type=int, default=4)
    parser.add_argument(
        "--cost", choices=("decode-bound", "smollm2-cpu"), default="smollm2-cpu", help="how long steps take"
    )
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens of one block")
    parser.add_argument("--context-pages", type=int, default=2048, help="device pages of one context worker")
    parser.add_argument("--generation-pages", type=int, default=2048, help="device pages of one generation worker")
    parser.add_argument("--host-pages", type=int, default=0, help="host pages of one worker")
    parser.add_argument(
        "--router",
        choices=("round_robin", "least_tokens", "power_of_two", "prefix_aware"),
        default="prefix_aware",
        help="how workers are chosen",
    )
    parser.add_argument(
        "--prefix-weight", type=float, default=1.0, help="load that a cached token outweighs, in tokens"
    )
    parser.add_argument(
        "--local-prefill", type=int, default=64, help="a generation worker computes a prompt that lacks so many tokens"
    )
    parser.add_argument("--batch", type=int, default=64, help="requests in one step")
    parser.add_argument("--bandwidth", type=float, default=3.0, help="GB/s that one worker receives")
    parser.add_argument("--transfer-failures", type=float, default=0.0, help="share of transfers that fail")
    parser.add_argument("--transfer-stalls", type=float, default=0.0, help="share of transfers that stall")
    parser.add_argument("--step-failures", type=float, default=0.0, help="share of steps that raise")
    parser.add_argument("--deaths", type=int, default=0, help="workers that die and come back")
    parser.add_argument("--audit-every", type=int, default=1, help="passes between audits of a manager; 0: none")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print. Raises ValueError or FileNotFoundError for options and traces that cannot be used."""
    from serving.simulation.options import simulate

    results = simulate(arguments)
    print(json.dumps(results.as_json()) if arguments.json else results.as_table())
    return 0
