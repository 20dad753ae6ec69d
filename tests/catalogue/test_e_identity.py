"""Kind E: identity, streaming and usage."""

import json
from pathlib import Path

import httpx
import pytest

from configs import CentralConfig
from configs.scheduling import DispatchPolicy
from manager import RequestId, WorkerName
from scheduler.messages import ErrorKind, TokenEvent
from scheduler.spec import AttemptId
from tests.fakes.door import CONTEXT_LENGTH, open_door, run_async
from tests.fakes.handoff_worker import WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.tiny_tokenizer import make_tokenizer_folder
from tests.fakes.transfer_transport import GatedTransport

GENERATION_FIRST = CentralConfig(dispatch=DispatchPolicy.GENERATION_FIRST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tiny"))


def _error(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert isinstance(error, dict)
    return error


def test_e01_a_retry_has_an_id_of_its_own_and_the_first_owners_pages_are_released() -> None:
    world = HandoffWorld(WorldShape(is_gated=True, context_workers=2))
    reader = world["generation-0"]
    assert isinstance(reader.transport, GatedTransport)
    reader.transport.fail_next = "injected"
    stream = world.submit(range(100, 112), 4)
    world.turns_until(lambda: reader.agent.num_active == 1)
    (first,) = (request.attempt_id for request in reader.scheduler.running)
    (owner,) = (name for name, worker in world.workers.items() if worker.agent.num_leases)
    world.turns_until(lambda: stream.num_resubmissions == 1)
    for _ in range(3):
        world.turn()
    assert first not in world[owner].loop._context_side._leases
    assert reader.scheduler.get(first) is None
    world.turns_until(lambda: bool(reader.scheduler.running))
    (second,) = (request.attempt_id for request in reader.scheduler.running)
    assert second != first
    # What the first one's agent still says, it says of the first id: nothing of the second moves.
    assert reader.scheduler.on_received(RequestId(first), 1, reader.now_s()) is None
    assert reader.scheduler.get(AttemptId(second)) is not None
    world.run()
    assert stream.ends == ["finished"]
    world.settle_down()


def _cached_tokens(shape: WorldShape) -> list[list[int]]:
    world = HandoffWorld(shape)
    seen = []
    for prompt in (range(100, 117), range(100, 117), [*range(100, 108), *range(300, 310)], range(900, 905)):
        stream = world.submit(prompt, 3)
        world.run()
        assert all(0 <= cached <= len(stream.spec.prompt_token_ids) for cached in stream.cached_tokens)
        seen.append(stream.cached_tokens)
    world.settle_down()
    return seen


@pytest.mark.parametrize("central", [CentralConfig(), GENERATION_FIRST])
def test_e03_cached_tokens_count_reuse_once_and_alike_in_one_worker_and_in_two(central: CentralConfig) -> None:
    mixed = _cached_tokens(WorldShape(context_workers=0, generation_workers=0, mixed_workers=1, pages=32))
    pair = _cached_tokens(WorldShape(pages=32, central=central))
    assert [set(cached) for cached in mixed] == [{0}, {16}, {8}, {0}]
    assert [set(cached) for cached in pair] == [set(cached) for cached in mixed]


@pytest.mark.parametrize("central", [CentralConfig(), GENERATION_FIRST])
def test_e06_the_context_side_draws_one_token_and_the_generation_side_has_the_limits_as_asked(
    central: CentralConfig,
) -> None:
    world = HandoffWorld(WorldShape(central=central))
    owner, reader = world["context-0"], world["generation-0"]
    stream = world.submit(range(100, 112), 7)
    specs = set()
    tokens_of_owner = 0
    for _ in range(60):
        for worker in (owner, reader):
            specs |= {request.spec for request in (*worker.scheduler.running, *worker.scheduler.waiting)}
        world.deliver_door()
        owner.run_loop()
        tokens_of_owner += sum(len(getattr(message, "events", ())) for message in owner.outgoing)
        world.turn()
    assert specs == {stream.spec}, "one spec, never rewritten"
    assert tokens_of_owner == 1
    assert (stream.ends, len(stream.accepted)) == (["finished"], 7)


@run_async
async def _an_early_fault_has_its_own_code_and_a_late_one_is_an_event(folder: Path) -> None:
    async with open_door(folder) as door:
        door.cluster.refusals = [ErrorKind.QUEUE_FULL]
        assert _error(await door.complete(stream=True), 429)
    async with open_door(folder, is_pumping=False, request_timeout_s=0.05) as door:
        _error(await door.complete(stream=True), 504)  # nothing was sent: the head can still tell
    async with open_door(folder, request_timeout_s=0.2) as door:
        num_events = 0

        def first_only(event: TokenEvent) -> tuple[TokenEvent, ...]:
            nonlocal num_events
            num_events += 1
            return (event,) if event.position == 0 else ()

        door.cluster.delivers = first_only
        answer = await door.complete(stream=True, max_tokens=8, ignore_eos=True)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert num_events > 1
        assert lines[-1] == "[DONE]"
        assert "error" in json.loads(lines[-2])
        assert "choices" in json.loads(lines[0])


def test_e07_the_head_waits_for_the_first_event_and_later_faults_are_events(folder: Path) -> None:
    _an_early_fault_has_its_own_code_and_a_late_one_is_an_event(folder)


@run_async
async def _a_long_prompt_is_a_400_and_the_next_request_is_served(folder: Path) -> None:
    async with open_door(folder) as door:
        for answer in (
            await door.complete(prompt=[5] * (CONTEXT_LENGTH + 1)),
            await door.complete(prompt=[5] * (CONTEXT_LENGTH + 1), stream=True),
            await door.chat("long " * CONTEXT_LENGTH),
        ):
            assert _error(answer, 400)["code"] == "context_length_exceeded"
        assert door.cluster.submissions == []
        assert (await door.complete(max_tokens=2)).status_code == 200


def test_e11_an_over_long_prompt_is_context_length_exceeded_and_the_engine_lives(folder: Path) -> None:
    _a_long_prompt_is_a_400_and_the_next_request_is_served(folder)


@run_async
async def _what_is_submitted_without_max_tokens(folder: Path) -> None:
    async with open_door(folder) as door:
        assert (await door.complete(ignore_eos=True)).status_code == 200
        assert (await door.chat(ignore_eos=True)).status_code == 200
        completion, chat = (specs[0] for specs in door.cluster.submissions)
        assert completion.stop.max_tokens == 16
        assert chat.stop.max_tokens == CONTEXT_LENGTH - len(chat.prompt_token_ids)


def test_e12_without_max_tokens_a_completion_gets_16_and_a_chat_the_rest_of_the_context(folder: Path) -> None:
    _what_is_submitted_without_max_tokens(folder)


@pytest.mark.parametrize("failing", ["context-0", "generation-0"])
def test_e13_when_one_side_fails_the_other_is_cancelled(failing: str) -> None:
    world = HandoffWorld(WorldShape(central=GENERATION_FIRST))
    owner, reader = world["context-0"], world["generation-0"]
    stream = world.submit(range(100, 112), 4)
    world.deliver_door()
    reader.run_loop()
    world.deliver_from("generation-0")
    owner.run_loop()  # the prompt is computed; the ticket is on its way to a reserved place
    assert owner.agent.num_leases == reader.agent.num_reservations == 1
    attempt_id = reader.scheduler.running[0].attempt_id
    if failing == "context-0":
        world.kill("context-0", num_sent=0)
        world.central.worker_lost(WorkerName("context-0"), "killed", world.now_s)
        world._take_commands()
        reader.run_loop()
        assert reader.scheduler.get(attempt_id) is None
        assert RequestId(attempt_id) not in reader.agent._reservations._deadlines_s
    else:
        world.deliver_from("context-0")
        world.kill("generation-0", num_sent=0)
        world.central.worker_lost(WorkerName("generation-0"), "killed", world.now_s)
        world._take_commands()
        owner.run_loop()
        assert owner.leftovers() == []
    world.supervise()
    world.run()
    assert stream.ends == ["finished"]
    world.settle_down()
