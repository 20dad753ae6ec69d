"""Chrome's trace event format, which Perfetto opens: lanes per process, requests as flows between them.

Times of several processes are put on one clock by the middle of the question and its answer, so that lanes may be
shifted against each other by half a round trip. Stretches that overlap get lanes of their own: the format wants those
of one lane to nest. Format: "Trace Event Format", Google, 2016 (the JSON object form).
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.spec import RequestUid
from serving.tracing.history import StepRecord, StretchRecord, WorkerHistory

Event = dict[str, object]

CENTRAL = "central"
_STEPS_LANE = 1
_LIVES_LANE = 2
_LANES_PER_GROUP = 10_000
_GROUPS: Mapping[str, tuple[int, str]] = {
    "chunk": (1, "chunk"),
    "transfer": (2, "transfer"),
    "paused": (3, "suspended"),
    "generation": (4, "decode"),
    "context": (5, "prefill"),
    "offer": (6, "waits"),
    "queue": (6, "waits"),
    CENTRAL: (6, "waits"),
}
"""Of a stretch's name: its group of lanes, and what the lanes are called."""
_IN_FLOW = frozenset({"chunk", "transfer", "generation"})
"""What a request's arrows connect."""


@dataclass(frozen=True, slots=True)
class AnchoredHistory:
    """What a process told, and when that was on the clock of whoever asked.

    Attributes:
        told_at_s: the middle between question and answer.
    """

    history: WorkerHistory
    told_at_s: float


class _Slice(NamedTuple):
    began_ns: int
    ended_ns: int
    process: str
    stretch: StretchRecord


def chrome_trace(histories: Sequence[AnchoredHistory]) -> dict[str, object]:
    """The whole document, ready for JSON. Times count from the earliest beginning in it."""
    origin_s = min((began_s for each in histories for began_s in _beginnings(each)), default=0.0)
    processes = _Processes([each.history for each in histories])
    events: list[Event] = []
    slices: list[_Slice] = []
    for each in histories:
        base_ns = _ns(each.told_at_s - origin_s)
        pid = processes.pid(each.history.process)
        for step in each.history.steps:
            events += _step_events(step, base_ns, pid)
        events += _life_events(each.history, base_ns, processes)
        slices += _slices(each.history, base_ns)
    events += _stretch_events(slices, processes)
    return {"traceEvents": processes.names() + events, "displayTimeUnit": "ms"}


class _Processes:
    """Numbers and names of processes and lanes."""

    def __init__(self, histories: Sequence[WorkerHistory]) -> None:
        known = {history.process for history in histories} | {CENTRAL}
        known |= {process for history in histories for process, *_ in history.events}
        order = sorted(known, key=lambda name: (name != CENTRAL, name))
        self._pids = {name: number for number, name in enumerate(order, start=1)}
        self._roles = {history.process: history.role for history in histories}
        self._lanes: dict[tuple[int, int], str] = {}

    def pid(self, process: str) -> int:
        """Its number in the document."""
        return self._pids[process]

    def lane(self, pid: int, tid: int, name: str) -> int:
        """Name a lane; returns its number."""
        self._lanes[pid, tid] = name
        return tid

    def names(self) -> list[Event]:
        """Metadata: what processes and lanes are called, and their order."""
        events = []
        for name, pid in self._pids.items():
            role = self._roles.get(name)
            shown = name if role is None else f"{name} ({role.value})"
            events += [_meta("process_name", pid, 0, name=shown), _meta("process_sort_index", pid, 0, sort_index=pid)]
            lanes = {_STEPS_LANE: "steps", _LIVES_LANE: "lives"}
            lanes |= {tid: lane for (owner, tid), lane in self._lanes.items() if owner == pid}
            for tid, lane in lanes.items():
                events += [
                    _meta("thread_name", pid, tid, name=lane),
                    _meta("thread_sort_index", pid, tid, sort_index=tid),
                ]
        return events


def _step_events(step: StepRecord, base_ns: int, pid: int) -> list[Event]:
    began_ns = base_ns - _ns(step.began_s_ago)
    shared: Event = {"pid": pid, "tid": _STEPS_LANE, "ts": began_ns / 1000}
    batch = {"context tokens": step.num_context_tokens, "decodes": step.num_generations}
    args = {
        "iteration": step.iteration,
        "contexts": step.num_contexts,
        **batch,
        "suspended": step.num_suspended,
        "recomputed": step.num_recomputed,
        "resumed": step.num_resumed,
    }
    return [
        {**shared, "ph": "X", "name": "step", "cat": "step", "dur": _ns(step.lasted_s) / 1000, "args": args},
        {**shared, "ph": "C", "name": "batch", "args": batch},
    ]


def _life_events(history: WorkerHistory, base_ns: int, processes: _Processes) -> list[Event]:
    return [
        {
            "ph": "i", "s": "p", "name": message, "cat": "life",
            "pid": processes.pid(process), "tid": _LIVES_LANE, "ts": (base_ns - _ns(s_ago)) / 1000,
        }
        for process, message, s_ago in history.events
    ]  # fmt: skip


def _slices(history: WorkerHistory, base_ns: int) -> Iterable[_Slice]:
    for stretch in history.stretches:
        process = CENTRAL if stretch.name == CENTRAL else history.process
        ended_ns = base_ns - _ns(stretch.began_s_ago - stretch.lasted_s)
        yield _Slice(base_ns - _ns(stretch.began_s_ago), ended_ns, process, stretch)


def _stretch_events(slices: list[_Slice], processes: _Processes) -> list[Event]:
    """Each in the first lane of its group that is free, and arrows along each request."""
    slices.sort(key=lambda each: each[:3])
    lanes = _FreeLanes()
    events: list[Event] = []
    flows: dict[RequestUid, list[tuple[int, int, int]]] = defaultdict(list)
    for began_ns, ended_ns, process, stretch in slices:
        group, lane = _GROUPS[stretch.name]
        pid, place = processes.pid(process), lanes.take((process, group), began_ns, ended_ns)
        tid = processes.lane(pid, group * _LANES_PER_GROUP + place, f"{lane} {place}")
        args: Event = {"request": stretch.uid, "attempt": stretch.attempt_id}
        if stretch.num_tokens:
            args["tokens"] = stretch.num_tokens
        events.append(
            {
                "ph": "X", "name": f"{lane} {stretch.uid}" if lane != "waits" else f"{stretch.name} {stretch.uid}",
                "cat": lane, "pid": pid, "tid": tid,
                "ts": began_ns / 1000, "dur": (ended_ns - began_ns) / 1000, "args": args,
            }
        )  # fmt: skip
        if stretch.name in _IN_FLOW:
            flows[stretch.uid].append((began_ns, pid, tid))
    for number, stops in enumerate(flows.values(), start=1):
        events += _flow_events(number, stops)
    return events


def _flow_events(number: int, stops: Sequence[tuple[int, int, int]]) -> list[Event]:
    if len(stops) == 1:
        return []
    phases = ["s", *"t" * (len(stops) - 2), "f"]
    return [
        {
            "ph": phase, "bp": "e", "id": number, "name": "request", "cat": "request",
            "pid": pid, "tid": tid, "ts": began_ns / 1000,
        }
        for phase, (began_ns, pid, tid) in zip(phases, stops, strict=True)
    ]  # fmt: skip


class _FreeLanes:
    """The lowest lane that is free, for stretches in the order of their beginnings."""

    def __init__(self) -> None:
        self._busy: dict[object, list[tuple[int, int]]] = defaultdict(list)
        self._free: dict[object, list[int]] = defaultdict(list)

    def take(self, key: object, began_ns: int, ended_ns: int) -> int:
        """A lane of `key` until `ended_ns`."""
        busy, free = self._busy[key], self._free[key]
        while busy and busy[0][0] <= began_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended_ns, lane))
        return lane


def _beginnings(anchored: AnchoredHistory) -> Iterable[float]:
    history, told_at_s = anchored.history, anchored.told_at_s
    for step in history.steps:
        yield told_at_s - step.began_s_ago
    for stretch in history.stretches:
        yield told_at_s - stretch.began_s_ago
    for _, _, s_ago in history.events:
        yield told_at_s - s_ago


def _meta(name: str, pid: int, tid: int, /, **args: object) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
