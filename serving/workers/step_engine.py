"""`StepEngine`: what the loop of a worker needs of an engine."""

from typing import Protocol

from serving.engine.batch import StepBatch, StepResult


class StepEngine(Protocol):
    """What the loop needs of the engine."""

    def step(self, batch: StepBatch) -> StepResult:
        """Compute the rows, write their KV, draw the tokens. May raise; nothing is retained then."""
        ...
