"""`pdserve trace export`: its options, and the question to a running server."""

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path

_TIMEOUT_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe `pdserve trace export` to its parser."""
    parser.add_argument("--out", type=Path, required=True, help="the file; open it at https://ui.perfetto.dev")
    parser.add_argument("--seconds", type=float, default=60.0, help="how far to look back")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--api-key", default="", help="where the server wants one")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and write the file.

    Raises:
        ValueError: the server cannot be reached or refuses.
    """
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    request = urllib.request.Request(f"{arguments.url}/trace?seconds={arguments.seconds}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        msg = f"{arguments.url} answered {error.code}: {error.read().decode(errors='replace')[:300]}"
        raise ValueError(msg) from error
    except urllib.error.URLError as error:
        msg = f"{arguments.url} cannot be reached: {error.reason}"
        raise ValueError(msg) from error
    arguments.out.write_bytes(body)
    events = json.loads(body)["traceEvents"]
    processes = sorted({event["args"]["name"] for event in events if event["name"] == "process_name"})
    if arguments.json:
        print(json.dumps({"file": str(arguments.out), "events": len(events), "processes": processes}))
    else:
        print(f"{len(events)} events of {', '.join(processes)} in {arguments.out}; open it at https://ui.perfetto.dev")
    return 0
