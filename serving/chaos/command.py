"""`pdserve chaos`: its options."""

import argparse
import json
import tempfile
from pathlib import Path

_POOL_BYTES = 128 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe `pdserve chaos` to its parser."""
    parser.add_argument("--seconds", type=float, default=120.0, help="how long processes are killed and stopped")
    parser.add_argument("--seed", type=int, default=0, help="of requests, kills and aborting clients")
    parser.add_argument("--streams", type=int, default=16, help="at a time")
    parser.add_argument("--least", type=int, default=3, help="times that each kind of process meets each signal")
    parser.add_argument("--stop-seconds", type=float, default=10.0, help="how long a stopped process sleeps")
    parser.add_argument("--output-tokens", type=int, default=48, help="of the longest request")
    parser.add_argument("--config", default="local-cpu", help="a YAML file or a preset to start from")
    parser.add_argument("--model", help="as in `pdserve serve`")
    parser.add_argument("--pool-bytes", type=int, default=_POOL_BYTES, help="of one worker's device tier")
    parser.add_argument("--log", type=Path, help="keep the server's log in this file")
    parser.add_argument("--timelines", type=Path, help="write where the time of each interrupted stream went")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it and print the report; exit code 1 when anything went wrong that must not."""
    from serving.chaos.run import ChaosPlan, run_chaos

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "chaos.yaml"
        config.write_text(_config(arguments))
        report = run_chaos(
            ChaosPlan(
                config,
                arguments.log or Path(folder) / "server.log",
                arguments.seconds,
                arguments.seed,
                streams=arguments.streams,
                least=arguments.least,
                stop_s=arguments.stop_seconds,
                output_tokens=arguments.output_tokens,
                timelines_file=arguments.timelines,
            )
        )
    if arguments.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:20} {value}")
    faults = ("errors", "wrong_tokens", "pages_leaked", "audit_violations")
    return int(any(report[name] for name in faults))


def _config(arguments: argparse.Namespace) -> str:
    """Two workers of each role; a port of the system's choice."""
    import yaml

    from configs import read_document

    document = read_document(arguments.config)
    document["cluster"] = {**document.get("cluster", {}), "context_workers": 2, "generation_workers": 2}
    document["cluster"]["mixed_workers"] = 0
    # Attempts that are on their way from one worker to another are what there is to lose.
    document["router"] = {"local_prefill_max_tokens": 0, **document.get("router", {})}
    document["server"] = {**document.get("server", {}), "port": 0}
    cache = document.get("cache", {})
    document["cache"] = {**cache, "tiers": [{"tier": "device", "quota_bytes": arguments.pool_bytes}]}
    if arguments.model:
        document["engine"] = {**document.get("engine", {}), "model": arguments.model}
    return str(yaml.safe_dump(document))
