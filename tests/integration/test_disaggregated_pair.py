"""A context and a generation worker in one process, over a tiny random model: the handoff and its faults."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from manager import WorkerName
from scheduler.messages import ErrorKind, Finished, ReportBatch
from scheduler.spec import FinishReason, SamplingParams
from serving.engine.batch import StepBatch, StepResult
from serving.engine.runner import Engine
from serving.inprocess import InprocessSinks
from tests.fakes.deployments import DOOR, Deployment
from tests.fakes.tiny_model import write_tiny_model

_PROMPTS = [[5] * 3, list(range(3, 35)), list(range(3, 36)), list(range(40, 240)), [*range(3, 33), 7, 8]]


def _config(*, mixed: bool = False, **sections: dict[str, object]) -> DeploymentConfig:
    small = {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": 16}
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": "float32"},
        "cache": small,
        "scheduler": {"max_batch_size": 16},
        "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
    }
    for name, values in sections.items():
        overrides[name] = {**overrides.get(name, {}), **values}
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pair(model_folder: Path, tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(_config(), model_folder, tmp_path)
    yield deployment
    deployment.settle_down()
    deployment.close()
    assert list(tmp_path.iterdir()) == [], "pool files are removed"


def _mixed_tokens(
    model_folder: Path, folder: Path, max_tokens: int, sampling: SamplingParams | None = None
) -> list[list[int]]:
    deployment = Deployment(_config(mixed=True), model_folder, folder)
    tokens = deployment.generate(_PROMPTS, max_tokens, sampling=sampling)
    deployment.settle_down()
    deployment.close()
    return tokens


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.9, seed=11, top_k=50, top_p=0.95)])
def test_disaggregated_tokens_are_those_of_a_mixed_worker(
    sampling: SamplingParams | None, pair: Deployment, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = _mixed_tokens(model_folder, tmp_path_factory.mktemp("mixed"), 20, sampling)
    assert pair.generate(_PROMPTS, 20, sampling=sampling) == expected
    counters = pair.cluster.workers[WorkerName("generation-0")].agent.counters()
    assert counters["receives_verified"] == len(_PROMPTS)


def test_a_request_that_its_first_token_ends_is_never_transferred(pair: Deployment) -> None:
    uid = pair.submit(_PROMPTS[1], 1)
    pair.run([uid])
    assert pair.finished[uid] is FinishReason.LENGTH
    assert pair.cluster.workers[WorkerName("generation-0")].agent.counters()["receives_started"] == 0
    assert pair.cluster.workers[WorkerName("context-0")].agent.counters()["leases_granted"] == 0


def test_a_prompt_seen_before_is_not_sent_again(pair: Deployment) -> None:
    first = pair.generate([_PROMPTS[3]], 4)
    moved = pair.cluster.workers[WorkerName("generation-0")].agent.counters()["bytes_received"]
    assert pair.generate([_PROMPTS[3]], 4) == first
    again = pair.cluster.workers[WorkerName("generation-0")].agent.counters()["bytes_received"]
    assert again - moved < moved / 4


@pytest.mark.parametrize("turns", range(0, 16))
def test_a_cancel_after_any_number_of_turns_leaves_everything_at_baseline(turns: int, pair: Deployment) -> None:
    uid = pair.submit(_PROMPTS[3], 30)
    other = pair.submit(_PROMPTS[1], 10)
    for _ in range(turns):
        pair.pump()
    pair.cluster.cancel(DOOR, [uid])
    (tokens,) = pair.run([other])
    assert len(tokens) == 10
    assert uid not in pair.finished


class _FailingEngine:
    """The real engine, which raises on chosen steps."""

    def __init__(self, engine: Engine, failing_steps: set[int]) -> None:
        self._engine = engine
        self._failing_steps = failing_steps
        self._num_steps = 0

    def step(self, batch: StepBatch) -> StepResult:
        self._num_steps += 1
        result = self._engine.step(batch)
        if self._num_steps in self._failing_steps:
            msg = "injected"
            raise RuntimeError(msg)
        return result


def _inject(deployment: Deployment, worker: str, failing_steps: set[int]) -> None:
    parts = deployment.cluster.workers[WorkerName(worker)]._loop._parts
    object.__setattr__(parts, "engine", _FailingEngine(parts.engine, failing_steps))  # type: ignore[arg-type]


@pytest.mark.parametrize("worker", ["context-0", "generation-0"])
def test_a_step_that_fails_once_is_retried_and_changes_no_token(worker: str, pair: Deployment) -> None:
    expected = pair.generate(_PROMPTS[:3], 6)
    _inject(pair, worker, {2, 4})
    assert pair.generate(_PROMPTS[:3], 6) == expected


def test_a_request_whose_steps_keep_failing_ends_with_an_engine_error(pair: Deployment) -> None:
    _inject(pair, "context-0", set(range(1, 100)))
    uid = pair.submit(_PROMPTS[1], 6)
    for _ in range(50):
        pair.pump()
    assert [(notice.uid, notice.kind) for notice in pair.notices] == [(uid, ErrorKind.ENGINE)]
    assert "injected" in pair.notices[0].message


def test_the_account_never_runs_ahead_of_the_reports(pair: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    # A heartbeat may go out while the loop sends: with the new account and without its reports, a request
    # that has ended here looks lost to the reconcile.
    worker = pair.cluster.workers[WorkerName("generation-0")]
    seen_while_sending: list[bool] = []
    send = InprocessSinks.send_reports

    def watched(sinks: InprocessSinks, batch: ReportBatch) -> None:
        ended = [report.attempt_id for report in batch.reports if isinstance(report, Finished)]
        seen_while_sending.extend(attempt_id in worker.snapshot().running for attempt_id in ended)
        send(sinks, batch)

    monkeypatch.setattr(InprocessSinks, "send_reports", watched)
    pair.generate(_PROMPTS[:2], 3)
    assert seen_while_sending == [True, True]


@pytest.mark.parametrize("mixed", [True, False])
def test_a_block_that_begins_like_a_cached_one_is_copied_and_changes_no_token(
    mixed: bool, model_folder: Path, tmp_path: Path
) -> None:
    prompts = [
        list(range(3, 35)),
        [*range(3, 28), *range(60, 80)],
        [*range(3, 10), *range(90, 120)],
        list(range(3, 30)),
    ]
    results = []
    for reuse in (False, True):
        folder = tmp_path / f"{reuse}"
        folder.mkdir()
        config = _config(mixed=mixed, cache={"enable_block_reuse": reuse})
        deployment = Deployment(config, model_folder, folder)
        results.append([deployment.generate([prompt], 8)[0] for prompt in prompts])
        first = next(iter(deployment.cluster.workers.values()))
        assert (first.manager.stats().prefix_hit_tokens > 32) == reuse
        deployment.settle_down()
        deployment.close()
    assert results[0] == results[1]
