"""Whole deployments in one process, made of the real parts: what integration tests drive."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from configs import DeploymentConfig
from scheduler.messages import DoorNotice
from scheduler.spec import (
    DoorName,
    FinishReason,
    RequestSpec,
    RequestUid,
    SamplingParams,
    StopParams,
)
from serving.inprocess import build_cluster

DOOR = DoorName("door")
_PUMP_LIMIT_S = 600.0


class Deployment:
    """A cluster and the one client of it: submits requests, collects their tokens."""

    def __init__(
        self,
        config: DeploymentConfig,
        model_folder: Path,
        pool_folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        config_of: Mapping[str, DeploymentConfig] = MappingProxyType({}),
    ) -> None:
        """Build every worker that `config` asks for."""
        self.config = config
        self._uids = itertools.count()
        self._tokens: dict[RequestUid, list[int]] = {}
        self.drops_repeats = False
        """As a door does (C9), where an attempt may be begun again while its last tokens are on their way."""
        self.specs: dict[RequestUid, RequestSpec] = {}
        self.cached_tokens: dict[RequestUid, int] = {}
        """As a door's usage has it: what the first worker that computed the prompt found."""
        self.finished: dict[RequestUid, FinishReason] = {}
        self.notices: list[DoorNotice] = []
        self.cluster = build_cluster(config, model_folder, pool_folder, clock, config_of)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, sampling: SamplingParams | None = None, ignore_eos: bool = True
    ) -> RequestUid:
        """Queue one request; greedy unless told otherwise."""
        uid = RequestUid(f"request-{next(self._uids)}")
        spec = RequestSpec(
            uid=uid,
            door=DOOR,
            prompt_token_ids=tuple(prompt),
            sampling=sampling or SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        )
        assert self.cluster.submit(DOOR, [spec]).refused == ()
        self._tokens[uid] = []
        self.specs[uid] = spec
        return uid

    def submit_choices(
        self,
        prompt: Sequence[int],
        num_choices: int,
        max_tokens: int,
        sampling: SamplingParams,
        stop: StopParams | None = None,
    ) -> list[RequestUid]:
        """Queue the choices of one prompt together, as a door does."""
        group = f"group-{next(self._uids)}"
        specs = [
            RequestSpec(
                uid=RequestUid(f"{group}/{choice}"),
                door=DOOR,
                prompt_token_ids=tuple(prompt),
                sampling=replace(sampling, choice=choice),
                stop=stop or StopParams(max_tokens=max_tokens, ignore_eos=True),
                group=group,
            )
            for choice in range(num_choices)
        ]
        assert self.cluster.submit(DOOR, specs).refused == ()
        for spec in specs:
            self._tokens[spec.uid] = []
            self.specs[spec.uid] = spec
        return [spec.uid for spec in specs]

    def counts(self, name: str) -> int:
        """A counter, summed over the workers."""
        return sum(worker.snapshot().counters.get(name, 0) for worker in self.cluster.workers.values())

    def central_counts(self) -> dict[str, int]:
        """The counters of the central scheduler."""
        counters = self.cluster.central.state(time.monotonic())["counters"]
        assert isinstance(counters, dict)
        return counters

    def tokens_of(self, uid: RequestUid) -> list[int]:
        """What has reached the client so far."""
        return self._tokens[uid]

    def pump(self) -> bool:
        """One turn of everything; collects what reached the door."""
        busy = self.cluster.pump()
        for batch in self.cluster.take_tokens():
            for event in batch.events:
                if self.drops_repeats and event.position < len(self._tokens[event.uid]):
                    assert self._tokens[event.uid][event.position] == event.token_id, "a repeat is the same token"
                    continue
                assert event.position == len(self._tokens[event.uid]), "tokens arrive in order, once"
                self._tokens[event.uid].append(event.token_id)
                if event.durations is not None and event.durations.cached_tokens is not None:
                    self.cached_tokens.setdefault(event.uid, event.durations.cached_tokens)
                if event.finish_reason is not None:
                    assert event.uid not in self.finished, "one last token"
                    self.finished[event.uid] = event.finish_reason
        self.notices += self.cluster.take_notices()
        return busy

    def run(self, uids: Sequence[RequestUid]) -> list[list[int]]:
        """Pump until all of `uids` have finished; returns their tokens."""
        deadline_s = time.monotonic() + _PUMP_LIMIT_S
        while not all(uid in self.finished for uid in uids):
            if not self.pump():
                time.sleep(0.0005)
            assert self.notices == []
            assert time.monotonic() < deadline_s, self.cluster.central.state(time.monotonic())
        return [self._tokens[uid] for uid in uids]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **fields: object) -> list[list[int]]:
        """Submit all at once and run them."""
        sampling = fields.get("sampling")
        assert sampling is None or isinstance(sampling, SamplingParams)
        return self.run([self.submit(prompt, max_tokens, sampling=sampling) for prompt in prompts])

    def settle_down(self) -> None:
        """Pump until idle, audit every manager, and prove that every pool is at its baseline (I12)."""
        while self.pump():
            pass
        for worker in self.cluster.workers.values():
            worker.manager.audit()
            stats = worker.manager.stats()
            assert stats.index_slots_free == stats.index_slots_total
            for pages in stats.tiers.values():
                assert pages.free + pages.cached == pages.total
                assert pages.in_use == pages.leased == pages.reserved == pages.quarantined == 0

    def close(self) -> None:
        """Stop every worker."""
        self.cluster.close()
