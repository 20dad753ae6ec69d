"""Conversations, disaggregated: a turn is computed where earlier ones are cached; its tokens are those of any run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from manager import WorkerName
from scheduler.spec import SamplingParams
from serving.engine.batch import StepBatch, StepResult
from serving.workers.step_engine import StepEngine
from tests.fakes.deployments import Deployment
from tests.fakes.tiny_model import write_tiny_model

_BLOCK = 16
_TURNS = 5
_ANSWER = 21
_FIRST = [(7 * k) % 250 + 3 for k in range(100)]
_GREEDY = SamplingParams(temperature=0.0)
_SEEDED = SamplingParams(temperature=0.9, seed=11, top_k=50)


def _asked(turn: int) -> list[int]:
    """What the user says in a later turn."""
    return [(11 * turn + 3 * k) % 250 + 3 for k in range(19 + turn)]


def _config(*, mixed: bool = False, **sections: dict[str, object]) -> DeploymentConfig:
    overrides: dict[str, dict[str, object]] = {
        "engine": {"dtype": "float32"},
        "cache": {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": 16},
        "scheduler": {"max_batch_size": 16},
        "cluster": {} if mixed else {"context_workers": 2, "generation_workers": 2},
    }
    for name, values in sections.items():
        overrides[name] = {**overrides.get(name, {}), **values}
    return load_deployment("local-mixed" if mixed else "local-cpu", overrides)


class _CountingEngine:
    """The real engine, and the rows that it computed."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.num_rows = 0

    def step(self, batch: StepBatch) -> StepResult:
        self.num_rows += sum(len(rows.token_ids) for rows in batch.sequences)
        return self._engine.step(batch)


@dataclass
class Chat:
    """What five turns came to.

    Attributes:
        answers: tokens of each turn.
        computed: per turn, prompt positions that engines of all workers computed.
        cached: per turn, cached tokens as usage shows them.
        new: per turn, tokens that no earlier turn contained.
        lengths: of the prompts.
    """

    answers: list[list[int]]
    computed: list[int]
    cached: list[int]
    new: list[int]
    lengths: list[int]


def _count_rows(deployment: Deployment) -> list[_CountingEngine]:
    engines = []
    for worker in deployment.cluster.workers.values():
        parts = worker._loop._parts
        engines.append(_CountingEngine(parts.engine))
        object.__setattr__(parts, "engine", engines[-1])
    return engines


def _chat(deployment: Deployment, sampling: SamplingParams = _GREEDY) -> Chat:
    engines = _count_rows(deployment)
    chat = Chat([], [], [], [], [])
    prompt: list[int] = []
    for turn in range(_TURNS):
        asked = _asked(turn) if turn else _FIRST
        prompt = [*prompt, *(chat.answers[-1] if turn else []), *asked]
        before = sum(engine.num_rows for engine in engines)
        uid = deployment.submit(prompt, _ANSWER, sampling=sampling)
        (answer,) = deployment.run([uid])
        rows = sum(engine.num_rows for engine in engines) - before
        chat.answers.append(answer)
        chat.computed.append(rows - (len(answer) - 1))  # the first token is drawn with the prompt's last row
        chat.cached.append(deployment.cached_tokens[uid])
        chat.new.append(len(asked))
        chat.lengths.append(len(prompt))
        while deployment.pump():
            pass  # what was cached is told
    deployment.settle_down()
    return chat


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def deployments(model_folder: Path, tmp_path: Path) -> Iterator["_Deployments"]:
    made = _Deployments(model_folder, tmp_path)
    yield made
    for deployment in made.made:
        deployment.settle_down()
        deployment.close()


class _Deployments:
    """Makes deployments that end with the test."""

    def __init__(self, model_folder: Path, folder: Path) -> None:
        self.made: list[Deployment] = []
        self._model_folder = model_folder
        self._folder = folder

    def make(self, config: DeploymentConfig) -> Deployment:
        folder = self._folder / str(len(self.made))
        folder.mkdir()
        self.made.append(Deployment(config, self._model_folder, folder))
        return self.made[-1]


def _assert_only_news_are_computed(chat: Chat) -> None:
    for computed, cached, new, length in zip(chat.computed, chat.cached, chat.new, chat.lengths, strict=True):
        assert computed <= new + _BLOCK
        assert cached == length - computed


@pytest.mark.parametrize("sampling", [_GREEDY, _SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("dispatch", ["context_first", "generation_first"])
def test_of_a_turn_only_what_is_new_is_computed_and_tokens_are_those_of_a_mixed_and_a_cold_run(
    dispatch: str, sampling: SamplingParams, deployments: _Deployments
) -> None:
    deployment = deployments.make(_config(central={"dispatch": dispatch}))
    chat = _chat(deployment, sampling)
    _assert_only_news_are_computed(chat)
    routing = deployment.cluster.central.state(0.0)["routing"]
    assert routing["local_prefills"] == _TURNS - 1
    transfers = [worker.agent.counters()["receives_verified"] for worker in deployment.cluster.workers.values()]
    assert sum(transfers) == 1, "the first turn alone is handed over"

    mixed = _chat(deployments.make(_config(mixed=True)), sampling)
    _assert_only_news_are_computed(mixed)
    cold = _chat(deployments.make(_config(mixed=True, cache={"enable_block_reuse": False})), sampling)
    assert cold.computed == cold.lengths
    assert chat.answers == mixed.answers == cold.answers


@pytest.mark.parametrize("dispatch", ["context_first", "generation_first"])
def test_of_a_turn_longer_than_a_local_prompt_may_be_only_what_is_new_is_computed(
    dispatch: str, deployments: _Deployments
) -> None:
    router: dict[str, object] = {"local_prefill_max_tokens": 8}
    deployment = deployments.make(_config(central={"dispatch": dispatch}, router=router))
    chat = _chat(deployment)
    _assert_only_news_are_computed(chat)
    routing = deployment.cluster.central.state(0.0)["routing"]
    assert routing["local_turns"] == _TURNS - 1
    cold = _chat(deployments.make(_config(mixed=True, cache={"enable_block_reuse": False})))
    assert chat.answers == cold.answers


def test_conversations_stay_on_their_workers_side_by_side(deployments: _Deployments) -> None:
    deployment = deployments.make(_config())
    prompts: list[list[int]] = [[(number * 31 + 5 * k) % 250 + 3 for k in range(90)] for number in range(4)]
    for turn in range(3):
        answers = deployment.generate(prompts, _ANSWER)
        prompts = [[*prompt, *answer, *_asked(turn)] for prompt, answer in zip(prompts, answers, strict=True)]
        while deployment.pump():
            pass
    hits = [_local_counts(deployment, name) for name in ("generation-0", "generation-1")]
    assert [received for received, _ in hits] == [2, 2], "the first turns are spread by load"
    assert deployment.cluster.central.state(0.0)["routing"]["local_prefills"] == 8


def _local_counts(deployment: Deployment, name: str) -> tuple[int, int]:
    worker = deployment.cluster.workers[WorkerName(name)]
    return worker.agent.counters()["receives_verified"], worker.manager.stats().prefix_hit_tokens


def test_a_turn_that_says_much_is_handed_over_and_only_its_new_blocks_are_sent(deployments: _Deployments) -> None:
    deployment = deployments.make(_config(router={"local_prefill_max_tokens": 0}))
    chat = _chat(deployment)
    moved = _bytes_received(deployment)
    pages = sum(length // _BLOCK + 1 for length in chat.lengths)
    page_bytes = next(iter(deployment.cluster.workers.values())).manager.geometry.pool_groups[0].page_bytes
    assert moved <= page_bytes * (chat.lengths[-1] // _BLOCK + 1 + _TURNS) < page_bytes * pages / 2
    assert all(cached for cached in chat.cached[1:]), "the context worker has the earlier prompts"
    cold = _chat(deployments.make(_config(mixed=True, cache={"enable_block_reuse": False})))
    assert chat.answers == cold.answers


def _bytes_received(deployment: Deployment) -> int:
    return sum(worker.agent.counters()["bytes_received"] for worker in deployment.cluster.workers.values())


def test_a_successor_routes_by_what_workers_list_to_it(deployments: _Deployments) -> None:
    deployment = deployments.make(_config())
    prompts: Sequence[list[int]] = [_FIRST]
    (answer,) = deployment.generate(prompts, _ANSWER)
    deployment.cluster.replace_central({})
    while deployment.pump():
        pass
    index = deployment.cluster.central.state(0.0)["routing"]["index"]
    assert index["listings"] == 4
    assert index["blocks"] >= len(_FIRST) // _BLOCK
    deployment.generate([[*_FIRST, *answer, *_asked(1)]], _ANSWER)
    assert deployment.cluster.central.state(0.0)["routing"]["local_prefills"] == 1
