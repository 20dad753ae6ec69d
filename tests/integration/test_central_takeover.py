"""The central scheduler is replaced in the middle of everything, over the real workers and a tiny model (C6)."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from configs import DispatchPolicy, load_deployment
from manager import WorkerName
from scheduler.messages import CancelAttempt, CommandBatch
from scheduler.spec import AttemptId, RequestSpec, RequestUid, SamplingParams, Term
from tests.fakes.deployments import DOOR, Deployment
from tests.fakes.tiny_model import write_tiny_model

_PROMPTS = [[index * 3 + 3 + step % 7 for step in range(4 + 11 * index)] for index in range(8)]
_MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=list(DispatchPolicy))
def pair(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(
        load_deployment(
            "local-cpu",
            {
                "engine": {"dtype": "float32"},
                "cache": {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": 16},
                "scheduler": {"max_batch_size": 16, "max_num_tokens": 64, "chunk_unit_tokens": 16},
                "central": {"dispatch": request.param, "max_running_per_context_worker": 3},
                "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
            },
        ),
        model_folder,
        tmp_path,
    )
    deployment.drops_repeats = True
    yield deployment
    deployment.settle_down()
    deployment.close()


def _claims(deployment: Deployment, uids: Sequence[RequestUid]) -> list[RequestSpec]:
    return [
        replace(deployment.specs[uid], accepted_token_ids=tuple(deployment.tokens_of(uid)), is_continuation=True)
        for uid in uids
        if uid not in deployment.finished
    ]


def test_streams_go_on_without_gap_or_change_however_often_the_central_scheduler_is_replaced(pair: Deployment) -> None:
    solo = [pair.generate([prompt], _MAX_TOKENS)[0] for prompt in _PROMPTS]
    uids = [pair.submit(prompt, _MAX_TOKENS) for prompt in _PROMPTS]
    deadline_s = time.monotonic() + 60
    replaced = 0
    for turn in itertools.count():
        pair.pump()
        if all(uid in pair.finished for uid in uids):
            break
        if turn % 3 == 2:
            pair.cluster.replace_central({DOOR: _claims(pair, uids)})
            replaced += 1
        assert time.monotonic() < deadline_s
    assert [pair.tokens_of(uid) for uid in uids] == solo
    assert replaced >= 3
    assert pair.cluster.central.state(time.monotonic())["counters"]["divergences"] == 0


def test_a_worker_refuses_and_counts_commands_of_the_term_before(pair: Deployment) -> None:
    pair.generate([_PROMPTS[1]], 2)
    pair.cluster.replace_central({DOOR: []})
    pair.settle_down()
    worker = pair.cluster.workers[WorkerName("generation-0")]
    worker.post(CommandBatch(Term(1), (CancelAttempt(AttemptId("1.1")),), 99))
    pair.settle_down()
    assert worker.snapshot().counters["refused_terms"] == 1
    assert pair.generate([_PROMPTS[1]], 2)


def test_a_request_that_was_given_up_while_nobody_listened_is_cancelled_by_the_successor(pair: Deployment) -> None:
    uid = pair.submit(_PROMPTS[2], 200)
    while len(pair.tokens_of(uid)) < 3:
        pair.pump()
    pair.cluster.replace_central({DOOR: []})
    pair.settle_down()
    assert pair.cluster.central.state(time.monotonic())["counters"]["orphans"] >= 1


def test_sampling_and_stops_of_an_adopted_request_are_those_of_the_attempt_that_runs(pair: Deployment) -> None:
    sampling = SamplingParams(temperature=0.9, seed=5)
    expected = pair.generate([_PROMPTS[3]], 6, sampling=sampling)[0]
    uid = pair.submit(_PROMPTS[3], 6, sampling=sampling)
    while not pair.tokens_of(uid):
        pair.pump()
    pair.cluster.replace_central({DOOR: _claims(pair, [uid])})
    assert pair.run([uid])[0] == expected
