"""Blocks of a long prompt are read while the rest of it is computed: what is exposed, and that nothing else changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import DeploymentConfig, load_deployment
from kvtransfer.messages import SettleReply
from manager import WorkerName
from tests.fakes.deployments import DOOR, Deployment
from tests.fakes.tiny_model import write_tiny_model

CHUNK = 256
NUM_CHUNKS = 7
PROMPT = [(13 * k + k * k // 7) % 250 + 3 for k in range(CHUNK * NUM_CHUNKS)]
SHORTER = PROMPT[300 : 300 + 2 * CHUNK + 40]
CONTEXT, GENERATION = WorkerName("context-0"), WorkerName("generation-0")


def _config(*, overlap: bool = True, block: int = 16, dispatch: str = "generation_first") -> DeploymentConfig:
    return load_deployment(
        "local-cpu",
        {
            "engine": {"dtype": "float32"},
            "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
            "cache": {
                "tiers": [{"tier": "device", "quota_bytes": 8 << 20}],
                "max_sequences": 16,
                "tokens_per_block": block,
            },
            "scheduler": {"max_batch_size": 16, "max_num_tokens": CHUNK},
            "central": {"dispatch": dispatch},
            "transfer": {"overlap": overlap},
        },
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "full": write_tiny_model(tmp_path_factory.mktemp("full"), max_position=4096),
        "windowed": write_tiny_model(
            tmp_path_factory.mktemp("windowed"), num_layers=2, layer_windows=(300, None), max_position=4096
        ),
    }


@pytest.fixture
def pair(folders: dict[str, Path], tmp_path: Path) -> Iterator[Deployment]:
    deployment = Deployment(_config(), folders["full"], tmp_path)
    yield deployment
    _settle_down(deployment)
    deployment.close()


def _counters(deployment: Deployment, worker: WorkerName) -> dict[str, int]:
    return dict(deployment.cluster.workers[worker].snapshot().counters)


def _settle_down(deployment: Deployment) -> None:
    deployment.settle_down()
    worker = deployment.cluster.workers[CONTEXT]
    assert worker.agent.num_leases == worker._loop._context_side.parts.num_leases == 0
    assert deployment.cluster.workers[GENERATION].agent.num_reservations == 0
    side = deployment.cluster.workers[GENERATION]._loop._generation_side
    assert (side._filling, side._parts, side._handoffs) == ({}, {}, {})


def test_of_seven_chunks_only_the_last_is_exposed(pair: Deployment) -> None:
    pair.generate([PROMPT], 4)
    counters = _counters(pair, GENERATION)
    moved, exposed = counters["bytes_received"], counters["exposed_bytes"]
    block = moved * 16 // len(PROMPT)
    assert moved == counters["bytes_verified"]
    assert 0 < exposed <= moved / NUM_CHUNKS + block
    assert _counters(pair, CONTEXT)["parts_offered"] == NUM_CHUNKS - 1
    assert counters["parts_received"] >= 1
    pages = pair.cluster.workers[GENERATION].manager.geometry.layer_groups[0].page_bytes
    assert moved == pages * (len(PROMPT) // 16), "every block is sent once"


@pytest.mark.parametrize("model", ["full", "windowed"])
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 16)])
def test_tokens_and_bytes_are_those_without_overlap(
    model: str, blocks: tuple[int, int], folders: dict[str, Path], tmp_path: Path
) -> None:
    found = []
    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        config_of = {
            "context-0": _config(overlap=overlap, block=blocks[0]),
            "generation-0": _config(overlap=overlap, block=blocks[1]),
        }
        deployment = Deployment(config_of["context-0"], folders[model], folder, config_of=config_of)
        tokens = deployment.generate([PROMPT, SHORTER, PROMPT[:100]], 8)
        found.append((tokens, _counters(deployment, GENERATION)["bytes_verified"]))
        assert (_counters(deployment, CONTEXT)["parts_offered"] > 0) == overlap
        assert (_counters(deployment, GENERATION)["parts_received"] > 0) == overlap
        _settle_down(deployment)
        deployment.close()
    (expected, without_overlap), (tokens, with_overlap) = found
    assert tokens == expected
    if model == "windowed" and blocks == (16, 32):
        # What the reader's larger blocks hold beside the window is still there early on, and gone at the end.
        assert without_overlap <= with_overlap < without_overlap * 1.05
    else:
        assert without_overlap == with_overlap


def test_a_context_without_a_reader_offers_no_parts(folders: dict[str, Path], tmp_path: Path) -> None:
    deployment = Deployment(_config(dispatch="context_first"), folders["full"], tmp_path)
    deployment.generate([SHORTER], 4)
    assert _counters(deployment, CONTEXT)["parts_offered"] == 0
    counters = _counters(deployment, GENERATION)
    assert counters["exposed_bytes"] == counters["bytes_verified"] > 0
    _settle_down(deployment)
    deployment.close()


@pytest.mark.parametrize("turns", range(14))
def test_a_cancel_after_any_number_of_turns_ends_reservation_and_leases_exactly(turns: int, pair: Deployment) -> None:
    uid = pair.submit(PROMPT, 30)
    other = pair.submit(SHORTER, 6)
    for _ in range(turns):
        pair.pump()
    pair.cluster.cancel(DOOR, [uid])
    (tokens,) = pair.run([other])
    assert len(tokens) == 6
    assert uid not in pair.finished


def test_a_part_whose_settle_is_refused_is_read_again_with_the_final_ticket(
    pair: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pair.generate([PROMPT], 6)
    agent = pair.cluster.workers[CONTEXT].agent
    settle, refused = agent.settle, []

    def refuse_parts(*arguments: object) -> SettleReply:
        request = pair.cluster.workers[CONTEXT]._loop._context_side
        if arguments[0] in request.parts._leases:
            refused.append(arguments[0])
            return SettleReply.EXPIRED
        return settle(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(agent, "settle", refuse_parts)
    other = [token + 1 for token in PROMPT]
    first = pair.generate([other], 6)
    assert refused
    monkeypatch.undo()
    pair.generate([SHORTER], 2)
    assert pair.generate([PROMPT], 6) == expected
    assert pair.generate([other], 6) == first


def test_parts_do_not_outlive_a_context_that_fails(pair: Deployment) -> None:
    uid = pair.submit(PROMPT, 6)
    side = pair.cluster.workers[CONTEXT]._loop._context_side
    while not side.parts.num_leases:
        pair.pump()
    (request,) = (
        request for request in pair.cluster.workers[CONTEXT]._loop._scheduler.running if request.spec.uid == uid
    )
    request.failed_steps = 10**6
    parts = pair.cluster.workers[CONTEXT]._loop._parts
    engine = parts.engine

    class Broken:
        def step(self, batch: object) -> object:
            msg = f"injected {batch is None}"
            raise RuntimeError(msg)

    object.__setattr__(parts, "engine", Broken())
    while not pair.notices:
        pair.pump()
    assert side.parts.num_leases == 0
    object.__setattr__(parts, "engine", engine)
