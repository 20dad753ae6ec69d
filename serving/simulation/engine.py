"""`SimulatedEngine`: draws tokens by a rule and takes virtual time for it.

The token at a position is a function of the request's seed and that position only, so the door can tell a
lost, repeated or invented token whatever happened to the request on its way.
"""

from collections.abc import Callable
from random import Random

from serving.engine.batch import StepBatch, StepResult
from serving.simulation.cost_model import CostModel

_FIRST_DRAWN_TOKEN = 1 << 30
"""Above every token of a prompt, so that no drawn block is shared by accident."""


def drawn_token(seed: int, position: int) -> int:
    """What a request draws at a position."""
    return _FIRST_DRAWN_TOKEN + (seed * 1_000_003 + position * 7_919) % (1 << 29)


class StepFaultError(Exception):
    """The injected failure of a step."""


class SimulatedEngine:
    """A `StepEngine` without arithmetic."""

    def __init__(
        self, cost: CostModel, spend: Callable[[float], None], random: Random, step_failure_share: float
    ) -> None:
        """Args.

        cost: how long steps take.
        spend: moves the worker's clock on.
        random: of the faults.
        step_failure_share: steps that raise, when their time is over.
        """
        self._cost = cost
        self._spend = spend
        self._random = random
        self._step_failure_share = step_failure_share

    def step(self, batch: StepBatch) -> StepResult:
        """Take the step's time; draw for every row that draws. Raises StepFaultError by chance."""
        self._spend(self._cost.seconds(batch))
        if self._step_failure_share and self._random.random() < self._step_failure_share:
            msg = f"injected: a step of {len(batch.sequences)} sequences"
            raise StepFaultError(msg)
        return StepResult(
            {
                rows.request_id: drawn_token(rows.sampling.seed, rows.sampling.position)
                for rows in batch.sequences
                if rows.sampling is not None
            }
        )
