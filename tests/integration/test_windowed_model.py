"""A model with sliding and full layers: the tokens of transformers, whatever happens to its pages (I15)."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from configs import DeploymentConfig, load_deployment
from manager import WorkerName
from serving.engine.model_folder import load_model_config
from tests.fakes.deployments import Deployment
from tests.fakes.reference import ReferenceStep, agrees_with_reference, transformers_greedy
from tests.fakes.tiny_model import write_tiny_model

_WINDOW, _BLOCK = 40, 16
_LAYER_BYTES = 2 * 2 * _BLOCK * 16 * 4  # K and V, KV heads, tokens, head_dim, float32
_PROMPTS = [[(11 * n + 7 * k + k * k // 5) % 250 + 3 for k in range(90 + 31 * n)] for n in range(5)]
_NUM_TOKENS = 48
# Short prompts whose answers are long, so that all run at once and none has room.
_SHORT, _GROWTH = [prompt[: 20 + 4 * n] for n, prompt in enumerate(_PROMPTS)], 3 * _WINDOW
_AMPLE_BYTES = 4 << 20
# Two layer groups: of pages of one size, which share their slots, and of two sizes, each with its own pool.
_SHAPES = {"one pool": (_WINDOW, None), "two pools": (_WINDOW, None, _WINDOW), "no full layer": (_WINDOW, _WINDOW)}


@pytest.fixture(scope="module", params=_SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    windows = _SHAPES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=len(windows), layer_windows=windows)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[list[ReferenceStep]]:
    return [transformers_greedy(folder, prompt, _NUM_TOKENS) for prompt in _PROMPTS]


@pytest.fixture(scope="module")
def grown(folder: Path) -> list[list[ReferenceStep]]:
    """Of `_SHORT`, over several windows."""
    return [transformers_greedy(folder, prompt, _GROWTH) for prompt in _SHORT]


def _config(
    *,
    mixed: bool,
    chunk: int = 64,
    device_bytes: int = _AMPLE_BYTES,
    lower: Sequence[str] = (),
    dtype: str = "float32",
) -> DeploymentConfig:
    tiers = [{"tier": "device", "quota_bytes": device_bytes}]
    tiers += [{"tier": tier, "quota_bytes": device_bytes} for tier in lower]
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": dtype},
        "cache": {"tiers": tiers, "max_sequences": 6, "tokens_per_block": _BLOCK},
        "scheduler": {"max_batch_size": 6, "max_num_tokens": chunk, "chunk_unit_tokens": min(chunk, _BLOCK)},
        "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
    }
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


def _agree(answers: Sequence[Sequence[int]], reference: Sequence[Sequence[ReferenceStep]]) -> None:
    for tokens, steps in zip(answers, reference, strict=True):
        agrees_with_reference(tokens, steps)


def _counts(deployment: Deployment) -> Counter[str]:
    counts: Counter[str] = Counter()
    for worker in deployment.cluster.workers.values():
        counts.update(worker.snapshot().counters)
    return counts


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "disaggregated"])
@pytest.mark.parametrize("chunk", [7, 64])
def test_contexts_of_several_windows_in_chunks_of_any_size_give_the_tokens_of_transformers(
    folder: Path, reference: list[list[ReferenceStep]], tmp_path: Path, mixed: bool, chunk: int
) -> None:
    deployment = Deployment(_config(mixed=mixed, chunk=chunk), folder, tmp_path)

    _agree(deployment.generate(_PROMPTS, _NUM_TOKENS), reference)

    deployment.settle_down()
    deployment.close()


def test_a_transfer_takes_of_windowed_layers_what_the_window_shows_and_not_a_byte_more(
    folder: Path, reference: list[list[ReferenceStep]], tmp_path: Path
) -> None:
    deployment = Deployment(_config(mixed=False), folder, tmp_path)

    _agree(deployment.generate(_PROMPTS[-1:], _NUM_TOKENS), reference[-1:])

    length = len(_PROMPTS[-1])
    num_blocks = -(-length // _BLOCK)
    seen_blocks = num_blocks - (length - _WINDOW + 1) // _BLOCK
    worker = deployment.cluster.workers[WorkerName("generation-0")]
    num_layers = {group.window: group.num_layers for group in worker.manager.geometry.layer_groups}
    num_pages = num_blocks * num_layers.get(None, 0) + seen_blocks * num_layers[_WINDOW]
    counters = worker.agent.counters()
    assert counters["receives_verified"] == 1
    assert counters["bytes_received"] == num_pages * _LAYER_BYTES
    deployment.settle_down()
    deployment.close()


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "disaggregated"])
def test_a_conversations_next_turn_reuses_what_its_windows_show_and_gives_the_tokens_of_transformers(
    folder: Path, tmp_path: Path, mixed: bool
) -> None:
    deployment = Deployment(_config(mixed=mixed), folder, tmp_path)
    turn = _PROMPTS[-1]
    for _ in range(3):
        (tokens,) = deployment.generate([turn], _NUM_TOKENS)
        agrees_with_reference(tokens, transformers_greedy(folder, turn, _NUM_TOKENS))
        turn = [*turn, *tokens, *range(20, 37)]
    hits = sum(worker.manager.stats().prefix_hit_tokens for worker in deployment.cluster.workers.values())
    assert hits > 2 * len(_PROMPTS[-1]) - 2 * _BLOCK
    deployment.settle_down()
    deployment.close()


@pytest.mark.parametrize("lower", [("host",), ("host", "disk"), ()], ids=["host", "host and disk", "device only"])
def test_requests_that_lose_their_pages_give_the_tokens_of_transformers(
    folder: Path, grown: list[list[ReferenceStep]], tmp_path: Path, lower: tuple[str, ...]
) -> None:
    # Without full layers a request stops growing at four pages, so that less is lost; with them it has thirteen.
    grows = None in load_model_config(folder).layer_windows
    device_bytes = (40 if grows else 24) * _LAYER_BYTES
    deployment = Deployment(_config(mixed=True, device_bytes=device_bytes, lower=lower), folder, tmp_path)

    _agree(deployment.generate(_SHORT, _GROWTH), grown)

    counts = _counts(deployment)
    seen = [counts["suspensions"], counts["resumes"]] if lower else [counts["recomputes"]]
    assert min(seen) >= (2 if grows else 1), seen
    deployment.settle_down()
    deployment.close()


def test_bfloat16_gives_one_answer_however_windowed_pages_are_computed_and_moved(folder: Path, tmp_path: Path) -> None:
    small = 20 * _LAYER_BYTES
    configs = [
        _config(mixed=True, chunk=512, dtype="bfloat16"),
        _config(mixed=False, chunk=7, dtype="bfloat16"),
        _config(mixed=True, dtype="bfloat16", device_bytes=small, lower=("host",)),
        _config(mixed=False, dtype="bfloat16", device_bytes=small, lower=("disk",)),
    ]
    answers = []
    for number, config in enumerate(configs):
        pools = tmp_path / f"{number}"
        pools.mkdir()
        deployment = Deployment(config, folder, pools)
        answers.append(deployment.generate(_SHORT, 60))
        deployment.settle_down()
        deployment.close()
    assert all(answer == answers[0] for answer in answers)


def _greedy_with_sinks(folder: Path, prompt: list[int], num_tokens: int, num_sinks: int) -> list[ReferenceStep]:
    """Transformers' forward pass, given masks in which windowed layers see the sinks, too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, steps = list(prompt), []
    for _ in range(num_tokens):
        places = torch.arange(len(tokens))
        distance = places[:, None] - places
        causal = distance >= 0
        windowed = causal & ((distance < _WINDOW) | (places < num_sinks))
        masks = {"full_attention": causal[None, None], "sliding_attention": windowed[None, None]}
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), attention_mask=masks, use_cache=False).logits[0, -1]
        best = logits.topk(2)
        steps.append(ReferenceStep(int(best.indices[0]), float(best.values[0] - best.values[1])))
        tokens.append(steps[-1].token_id)
    return steps


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "disaggregated"])
def test_sinks_are_seen_from_every_window(tmp_path: Path, mixed: bool) -> None:
    windows = (_WINDOW, None, _WINDOW)
    plain = write_tiny_model(tmp_path / "plain", num_layers=3, layer_windows=windows)
    folder = write_tiny_model(tmp_path / "sinks", num_layers=3, layer_windows=windows, num_sink_tokens=20)
    expected = _greedy_with_sinks(plain, _PROMPTS[2], 24, num_sinks=20)
    without = _greedy_with_sinks(plain, _PROMPTS[2], 24, num_sinks=0)
    assert [step.token_id for step in expected] != [step.token_id for step in without], "sinks must matter here"
    pools = tmp_path / "pools"
    pools.mkdir()
    deployment = Deployment(_config(mixed=mixed, chunk=48), folder, pools)

    (tokens,) = deployment.generate([_PROMPTS[2]], 24)

    agrees_with_reference(tokens, expected)
    deployment.settle_down()
    deployment.close()
