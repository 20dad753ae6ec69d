"""The handoff state machine explorer: from a seed, everything that can happen to a handoff, in any order.

A seed gives a small deployment (`shape_of`) and a list of events (`events_of`), both plain data. Every event is
total: where it does not apply it does nothing, so that any part of a failing list can be run by itself, and
`smallest_failure` finds a short one. After every event the invariants are checked; at the end faults stop, and
everything must come to its end, once, with nothing held.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from configs import CentralConfig, SchedulerConfig, SchedulingPolicy, TransferConfig
from configs.scheduling import DispatchPolicy
from tests.fakes.handoff_worker import HandoffWorker, WorldShape
from tests.fakes.handoff_world import HandoffWorld
from tests.fakes.transfer_transport import GatedTransport

NUM_EVENTS = 200
_MAX_OPEN = 9
_DRAIN_S = 600.0


class Event(NamedTuple):
    """One event; `pick` chooses whom it happens to, `detail` how."""

    name: str
    pick: int
    detail: int


def shape_of(seed: int) -> WorldShape:
    """The deployment of a seed: pools, windows, tiers, dispatch and wire all vary."""
    random = Random(f"shape {seed}")
    is_mixed = random.random() < 0.1
    pages = random.choice([5, 6, 8, 12, 20])
    return WorldShape(
        context_workers=0 if is_mixed else random.choice([1, 1, 2]),
        generation_workers=0 if is_mixed else random.choice([1, 2, 2]),
        mixed_workers=2 if is_mixed else 0,
        pages=pages,
        host_pages=random.choice([0, 0, 4, 12]),
        max_sequences=random.choice([2, 4]),
        window_pages=random.choice([None, 1, 3, 6]),
        is_gated=random.random() < 0.5,
        scheduler=SchedulerConfig(
            max_num_tokens=random.choice([8, 24]),
            max_batch_size=2,
            chunk_unit_tokens=4,
            policy=random.choice(list(SchedulingPolicy)),
            recompute_remote_min_tokens=random.choice([0, 0, 12]),
        ),
        transfer=TransferConfig(lease_duration_s=2.0, reservation_duration_s=random.choice([1.5, 4.0])),
        central=CentralConfig(
            dispatch=random.choice(list(DispatchPolicy)),
            max_offers_per_generation_worker=random.choice([2, 8]),
            max_running_per_context_worker=random.choice([1, 8]),
            door_deadline_s=5.0,
        ),
    )


def events_of(seed: int, count: int = NUM_EVENTS) -> list[Event]:
    """The events of a seed."""
    random = Random(f"events {seed}")
    names, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    # A seed leaves some faults out, so that others get further before the next one strikes.
    for name in (
        "kill",
        "replace_central",
        "pause",
        "advance_long",
        "fail_step",
        "fail_read",
        "lose_question",
        "break_wire",
    ):
        if random.random() < 0.4:
            weights[names.index(name)] = 0
    return [
        Event(name, random.randrange(1 << 16), random.randrange(1 << 16))
        for name in random.choices(names, weights, k=count)
    ]


def run(
    shape: WorldShape,
    events: Sequence[Event],
    after: Callable[[Event], None] | None = None,
    *,
    world: HandoffWorld | None = None,
) -> HandoffWorld:
    """Run the events, checking after each, then let everything end. Raises whatever was found.

    Args:
        shape: of the world, unless there is one already.
        events: what happens.
        after: called after every event.
        world: a fresh one of this shape, for who wants to look at it meanwhile.
    """
    world = HandoffWorld(shape) if world is None else world
    for event in events:
        _ACTIONS[event.name](world, event)
        world.check()
        if after is not None:
            after(event)
    drain(world)
    return world


def drain(world: HandoffWorld) -> None:
    """Faults stop; whatever is open must end, and everybody be at the baseline (I2, I12)."""
    for worker in world.workers.values():
        worker.is_paused = False
        worker.engine.fails_in = None
        worker.copies.fails_stage = worker.copies.fails_fill = False
        if isinstance(worker.transport, GatedTransport):
            worker.transport.may_finish = worker.transport.may_stop = True
            worker.transport.raise_in = set()
            worker.transport.fail_next = ""
    end_s = world.now_s + _DRAIN_S
    while world.door.open_streams or world.leftovers():
        state = world.central.state(world.now_s)["central"]
        assert world.now_s < end_s, f"open {world.door.open_streams}, held {world.leftovers()}, central {state}"
        world.supervise()
        for _ in range(3):
            world.turn()
        world.advance(0.3)
    world.check()


def smallest_failure(shape: WorldShape, events: Sequence[Event], max_runs: int = 400) -> list[Event]:
    """A short part of `events` that still fails, by leaving out ever smaller pieces."""
    kept, size, runs = list(events), max(1, len(events) // 2), 0
    while size and runs < max_runs:
        start, removed = 0, False
        while start < len(kept) and runs < max_runs:
            candidate = kept[:start] + kept[start + size :]
            runs += 1
            if fails(shape, candidate):
                kept, removed = candidate, True
            else:
                start += size
        size = size if removed and size > 1 else size // 2
    return kept


def fails(shape: WorldShape, events: Sequence[Event]) -> BaseException | None:
    """What running the events raises."""
    try:
        run(shape, events)
    except Exception as error:  # whatever it is, it is what we look for
        return error
    return None


def explore(seed: int) -> HandoffWorld:
    """Run one seed. Raises AssertionError with the seed and a short list of events that fail."""
    logging.getLogger("pdserve.worker").setLevel(logging.CRITICAL)
    logging.getLogger("kvtransfer.receive").setLevel(logging.CRITICAL)
    shape, events = shape_of(seed), events_of(seed)
    try:
        return run(shape, events)
    except Exception as error:
        short = smallest_failure(shape, events)
        found = fails(shape, short)
        lines = "\n".join(f"    {event!r}," for event in short)
        cause = f"seed {seed}: {type(error).__name__}: {error}\nof {shape}"
        msg = f"{cause}\n{len(short)} events are enough:\n{lines}\nthen: {found}"
        raise AssertionError(msg) from error


def counts_of(world: HandoffWorld) -> Counter[str]:
    """What happened in a run, to show that a set of seeds reaches everything."""
    totals: Counter[str] = Counter()
    for worker in (*world.workers.values(), *world.past_lives):
        totals.update(worker.loop._make_snapshot().counters)
    totals.update(world.central.state(world.now_s)["counters"])
    streams = world.door.streams.values()
    totals["streams"] = len(streams)
    totals["resubmissions"] = sum(stream.num_resubmissions for stream in streams)
    totals["killed"] = len(world.past_lives)
    totals["terms"] = world.central.term - 1
    totals.update(f"stream {end.split(':')[0]}" for stream in streams for end in stream.ends)
    return totals


# -- events ------------------------------------------------------------------------------------------------


def _worker(world: HandoffWorld, event: Event) -> HandoffWorker:
    workers = list(world.workers.values())
    return workers[event.pick % len(workers)]


def _submit(world: HandoffWorld, event: Event) -> None:
    if len(world.door.open_streams) >= _MAX_OPEN:
        return
    most = next(iter(world.workers.values())).manager.max_request_tokens
    max_tokens = 1 + event.detail % 7
    length = 1 + event.pick % max(1, min(18, most - max_tokens))
    family = event.detail % 3
    # Prompts of a family begin alike, so that blocks are shared; some are the same to the end.
    tail = 0 if event.detail % 5 == 0 else 100 * (event.pick % 7)
    prompt = [family * 50 + at if at < 6 else family * 50 + at + tail for at in range(length)]
    world.submit(prompt, max_tokens, priority=event.detail % 2)


def _abort(world: HandoffWorld, event: Event) -> None:
    streams = list(world.door.streams.values())
    if streams:
        world.abort(streams[-1 - event.pick % min(8, len(streams))])


def _loop(world: HandoffWorld, event: Event) -> None:
    worker = _worker(world, event)
    for _ in range(1 + event.detail % 4):
        worker.run_loop()


def _poll(world: HandoffWorld, event: Event) -> None:
    worker = _worker(world, event)
    for _ in range(1 + event.detail % 3):
        worker.poll()


def _move(world: HandoffWorld, event: Event) -> None:
    _worker(world, event).move_bytes()


def _deliver(world: HandoffWorld, event: Event) -> None:
    world.deliver_from(_worker(world, event).identity.name, 1 + event.detail % 3)


def _deliver_door(world: HandoffWorld, event: Event) -> None:
    world.deliver_door(1 + event.detail % 3)


def _turn(world: HandoffWorld, event: Event) -> None:
    for _ in range(1 + event.detail % 4):
        world.turn()


def _ask(world: HandoffWorld, event: Event) -> None:
    if world.questions:
        world.ask(world.questions[event.pick % len(world.questions)])


def _bring_answer(world: HandoffWorld, event: Event) -> None:
    if world.questions:
        question = world.questions[event.pick % len(world.questions)]
        world.bring_answer(question)
        if event.detail % 4 == 0 and question.owner in world.workers:
            world.ask(question)  # the question arrives once more, after its answer


def _lose_question(world: HandoffWorld, event: Event) -> None:
    if world.questions:
        question = world.questions[event.pick % len(world.questions)]
        question.is_lost = True
        world.bring_answer(question)


def _advance(world: HandoffWorld, event: Event) -> None:
    world.advance([0.05, 0.3, 0.6, 1.2][event.detail % 4])


def _advance_long(world: HandoffWorld, event: Event) -> None:
    world.advance([1.6, 2.2, 6.0][event.detail % 3])


def _kill(world: HandoffWorld, event: Event) -> None:
    worker = _worker(world, event)
    world.kill(worker.identity.name, num_sent=event.detail % (len(worker.outgoing) + 1))


def _replace_central(world: HandoffWorld, event: Event) -> None:
    world.replace_central(loses_notices=bool(event.detail % 2))


def _pause(world: HandoffWorld, event: Event) -> None:
    _worker(world, event).is_paused = True


def _resume(world: HandoffWorld, event: Event) -> None:
    for worker in world.workers.values():
        worker.is_paused = False


def _supervise(world: HandoffWorld, event: Event) -> None:
    world.supervise()


def _fail_step(world: HandoffWorld, event: Event) -> None:
    _worker(world, event).engine.fails_in = event.detail % 3


def _fail_copy(world: HandoffWorld, event: Event) -> None:
    copies = _worker(world, event).copies
    if event.detail % 2:
        copies.fails_stage = True
    else:
        copies.fails_fill = True


def _fail_read(world: HandoffWorld, event: Event) -> None:
    transport = _worker(world, event).transport
    if isinstance(transport, GatedTransport):
        transport.fail_next = "injected"


def _break_wire(world: HandoffWorld, event: Event) -> None:
    transport = _worker(world, event).transport
    if isinstance(transport, GatedTransport):
        transport.raise_in = [{"poll"}, {"read"}, {"cancel"}, set()][event.detail % 4]


def _gate(world: HandoffWorld, event: Event) -> None:
    transport = _worker(world, event).transport
    if isinstance(transport, GatedTransport):
        transport.may_finish, transport.may_stop = bool(event.detail % 2), bool(event.detail // 2 % 2)


_ACTIONS: Mapping[str, Callable[[HandoffWorld, Event], None]] = {
    "submit": _submit,
    "abort": _abort,
    "loop": _loop,
    "poll": _poll,
    "move": _move,
    "deliver": _deliver,
    "deliver_door": _deliver_door,
    "turn": _turn,
    "ask": _ask,
    "bring_answer": _bring_answer,
    "lose_question": _lose_question,
    "advance": _advance,
    "advance_long": _advance_long,
    "kill": _kill,
    "replace_central": _replace_central,
    "pause": _pause,
    "resume": _resume,
    "supervise": _supervise,
    "fail_step": _fail_step,
    "fail_copy": _fail_copy,
    "fail_read": _fail_read,
    "break_wire": _break_wire,
    "gate": _gate,
}

_WEIGHTS: Mapping[str, int] = {
    "submit": 14,
    "abort": 3,
    "loop": 14,
    "poll": 10,
    "move": 4,
    "deliver": 10,
    "deliver_door": 10,
    "turn": 4,
    "ask": 5,
    "bring_answer": 5,
    "lose_question": 1,
    "advance": 6,
    "advance_long": 3,
    "kill": 2,
    "replace_central": 1,
    "pause": 2,
    "resume": 3,
    "supervise": 3,
    "fail_step": 2,
    "fail_copy": 1,
    "fail_read": 2,
    "break_wire": 1,
    "gate": 4,
}
