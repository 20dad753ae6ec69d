"""Rows about sides that differ: what can be re-laid out arrives byte for byte, what cannot is refused by name."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from configs import DeploymentConfig, load_deployment
from kvtransfer.agent import TransferAgent
from kvtransfer.messages import PoolLayout, ReceiveOutcome, ReceiveResult, TransferTicket
from kvtransfer.transports.inprocess import InProcessRegistry, InProcessTransport
from manager import Epoch, RequestId, WorkerName
from scheduler.messages import ErrorKind
from tests.fakes.deployments import Deployment
from tests.fakes.sided_pools import NUM_TOKENS, Side, known_bytes
from tests.fakes.tiny_model import write_tiny_model
from tests.fakes.transfer_peers import FakePeers
from tests.fakes.transfer_values import CONFIG, EPOCH

DEGREES = (1, 2, 4)
BLOCKS = (16, 32, 64)


def _receive(source: Side, destination: Side) -> list[ReceiveOutcome]:
    """Every rank of the destination receives from every rank of the source, by agents and a transport."""
    registry, peers, outcomes = InProcessRegistry(), FakePeers(), []
    for owner_rank, reader_rank in itertools.product(range(source.degree), range(destination.degree)):
        pair = f"{owner_rank}-{reader_rank}"
        owner_name, reader_name = WorkerName(f"owner-{pair}"), WorkerName(f"reader-{pair}")
        owner_transport, reader_transport = (InProcessTransport(registry, name) for name in (owner_name, reader_name))
        owner_transport.register(source.memories[owner_rank])
        reader_transport.register(destination.memories[reader_rank])
        owner = TransferAgent(owner_transport, peers, CONFIG, source.layouts[owner_rank], owner_name, EPOCH)
        reader = TransferAgent(
            reader_transport, peers, CONFIG, destination.layouts[reader_rank], reader_name, Epoch(EPOCH + 1)
        )
        peers.agents[owner_name] = owner
        lease = source.ticket(owner_rank, source.pages()).lease
        owner.hold(lease, peers.now_s)
        ticket: TransferTicket = owner.make_ticket(lease)
        reader.start_receive(RequestId(pair), ticket, destination.pages(), peers.now_s)
        while reader.num_active:
            reader.poll(peers.now_s)
        outcomes += [outcome for outcome in reader.take_outcomes() if isinstance(outcome, ReceiveOutcome)]
    return outcomes


@pytest.mark.parametrize("degrees", list(itertools.product(DEGREES, DEGREES)))
@pytest.mark.parametrize("blocks", list(itertools.product(BLOCKS, BLOCKS)))
def test_a10_pages_between_unlike_degrees_and_block_sizes_arrive_byte_for_byte(
    degrees: tuple[int, int], blocks: tuple[int, int]
) -> None:
    source, destination = Side(degrees[0], blocks[0], seed=1), Side(degrees[1], blocks[1], seed=2)
    content = known_bytes()
    source.put(content)
    outcomes = _receive(source, destination)
    assert {outcome.result for outcome in outcomes} == {ReceiveResult.VERIFIED}
    for expected, found in zip(content, destination.get(), strict=True):
        assert np.array_equal(found[:, :, :, :NUM_TOKENS], expected)


_REFUSED: Mapping[str, object] = {
    "model_fingerprint": "another",
    "num_kv_heads": 8,
    "head_dim": 16,
    "tokens_per_block": 24,
    "dtype": "float16",
    "layout_version": 99,
    "exactness_class": "another",
}


def _first_group(layout: PoolLayout, **changes: object) -> PoolLayout:
    first, *rest = layout.groups
    return dataclasses.replace(layout, groups=(dataclasses.replace(first, **changes), *rest))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [*_REFUSED, "layer_ids", "window", "num_sink_tokens"])
@pytest.mark.parametrize("block", [16, 32])
def test_c18_an_incompatible_pair_is_refused_by_the_name_of_what_differs(field: str, block: int) -> None:
    """Between like sides and between such as could be re-laid out, whatever else may differ."""
    source, destination = Side(1, 16, seed=1), Side(1, block, seed=2)
    source.put(known_bytes())
    ours = destination.layouts[0]
    if field in _REFUSED:
        changed, name = dataclasses.replace(ours, **{field: _REFUSED[field]}), field  # type: ignore[arg-type]
    else:
        value = {"layer_ids": (0, 9), "window": 128, "num_sink_tokens": 4}[field]
        changed, name = _first_group(ours, **{field: value}), field
    destination.layouts[0] = changed
    before = destination.memories[0].copy()
    (outcome,) = _receive(source, destination)
    assert outcome.result is ReceiveResult.FAILED
    assert name in outcome.message
    assert "here and" in outcome.message
    assert outcome.num_bytes == 0
    assert np.array_equal(destination.memories[0], before)


def _config(*, dtype: str) -> DeploymentConfig:
    return load_deployment(
        "local-cpu",
        {
            "engine": {"dtype": dtype},
            "router": {"local_prefill_max_tokens": 0},  # what is tested is the handoff
            "cache": {"tiers": [{"tier": "device", "quota_bytes": 4 << 20}], "max_sequences": 16},
            "scheduler": {"max_batch_size": 16},
        },
    )


def test_c18_workers_of_unlike_dtypes_refuse_each_other_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    config_of = {"context-0": _config(dtype="float32"), "generation-0": _config(dtype="bfloat16")}
    model = write_tiny_model(tmp_path / "model")
    (tmp_path / "pools").mkdir()
    deployment = Deployment(_config(dtype="float32"), model, tmp_path / "pools", config_of=config_of)
    uid = deployment.submit(list(range(3, 60)), 4)
    while not deployment.notices:
        deployment.pump()
    (notice,) = deployment.notices
    assert (notice.uid, notice.kind) == (uid, ErrorKind.TRANSFER)
    assert "dtype is 'bfloat16' here and 'float32' at the peer" in notice.message
    deployment.settle_down()
    deployment.close()
