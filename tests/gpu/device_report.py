"""Speed of the engine on a device, as one JSON object: `python -m tests.gpu.device_report --device cuda`."""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from serving.engine.batch import StepBatch
from serving.engine.model_folder import load_model_config
from serving.engine.runner import Engine
from serving.engine.weights import load_weights
from tests.fakes.engine_rows import GROUP, HandFedSequence
from tests.fakes.tiny_model import write_tiny_model
from tests.gpu.test_device import SMOLLM2_SHAPES

_BLOCKS = 40  # of 16 tokens, a sequence
_BATCHES = (1, 8, 32)
_WARM_UP, _STEPS = 3, 20


def measure(device: str, dtype: torch.dtype, folder: Path) -> dict[str, float]:
    """Tokens per second of decode at some batch sizes, and of a 512-token prefill."""
    config = load_model_config(folder)
    shape = (max(_BATCHES) * _BLOCKS, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    engine = Engine(config, load_weights(folder, config, dtype, device), {GROUP: pool})
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(3, config.vocab_size, (_BLOCKS * 16,), generator=generator).tolist()
    sequences = [
        HandFedSequence(f"s{n}", token_ids, range(n * _BLOCKS, (n + 1) * _BLOCKS)) for n in range(max(_BATCHES))
    ]
    speeds = {"prefill_512_tok_s": 512 / _seconds(engine, StepBatch([sequences[0].rows(0, 512)]))}
    for batch in _BATCHES:
        rows = StepBatch([sequence.rows(512, 513) for sequence in sequences[:batch]])
        speeds[f"decode_{batch}_tok_s"] = batch / _seconds(engine, rows)
    return {name: round(speed, 1) for name, speed in speeds.items()}


def _seconds(engine: Engine, batch: StepBatch) -> float:
    """Median seconds of a step; a step ends with its tokens on the host, so no synchronisation is missing."""
    seconds = []
    for index in range(_WARM_UP + _STEPS):
        started_s = time.perf_counter()
        engine.step(batch)
        if index >= _WARM_UP:
            seconds.append(time.perf_counter() - started_s)
    return sorted(seconds)[len(seconds) // 2]


def main() -> None:
    """Measure float32 and bfloat16; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=SMOLLM2_SHAPES["num_layers"])
    arguments = parser.parse_args()
    is_cuda = arguments.device.startswith("cuda")
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(arguments.device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "num_layers": arguments.layers,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_tiny_model(Path(temporary) / "random", **(SMOLLM2_SHAPES | {"num_layers": arguments.layers}))
        for dtype in (torch.float32, torch.bfloat16):
            report[str(dtype).removeprefix("torch.")] = measure(arguments.device, dtype, folder)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
