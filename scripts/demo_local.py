"""The tour for a new reader: one request through two workers and a scheduler, in this process, without Ray.

Prints every event of the request's life as it happens: who did what, after how many milliseconds.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from configs import load_deployment
from scheduler.spec import DoorName, RequestSpec, RequestUid, SamplingParams, StopParams
from serving.engine.fetch import default_cache_dir, resolve_model
from serving.inprocess import InprocessCluster, build_cluster
from serving.tokenizer import Tokenizer

PROMPT = "The three primary colours are"


def main() -> int:
    """Run the demo."""
    config = load_deployment("local-cpu", {"cache": {"tiers": [{"tier": "device", "quota_bytes": 400 << 20}]}})
    folder = resolve_model(config.engine.model, default_cache_dir())
    tokenizer = Tokenizer.load(folder)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as pools:
        cluster = build_cluster(config, folder, Path(pools))
        run(cluster, tokenizer)
        cluster.close()
    return 0


class _Narrator(logging.Handler):
    """Says every transition but the ones that a token causes."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if "token" not in record.getMessage().split(":")[0]:
            self._say("", record.getMessage())


def run(cluster: InprocessCluster, tokenizer: Tokenizer) -> None:
    """Send the prompt and print what happens until the last token."""
    prompt = tuple(tokenizer.encode(PROMPT))
    door, uid = DoorName("demo"), RequestUid("demo-0")
    started_s = time.monotonic()

    def say(who: str, what: str) -> None:
        print(f"{(time.monotonic() - started_s) * 1000:8.1f} ms  {who:13} {what}")

    transitions = logging.getLogger("pdserve.transition")
    transitions.setLevel(logging.DEBUG)
    transitions.addHandler(_Narrator(say))
    say("door", f"submits {len(prompt)} tokens: {PROMPT!r}")
    sampling, stop = SamplingParams(temperature=0.0), StopParams(max_tokens=16)
    cluster.submit(door, [RequestSpec(uid, door, prompt, sampling, stop)])
    finished = False
    while not finished:
        cluster.pump()
        for batch in cluster.take_tokens():
            for event in batch.events:
                text = tokenizer.decode([event.token_id])
                say(batch.worker, f"token {event.position}: {text!r} {event.finish_reason or ''}")
                finished = event.finish_reason is not None


if __name__ == "__main__":
    sys.exit(main())
