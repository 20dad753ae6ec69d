"""`ReportOrder`: Ray may run the calls of an asynchronous actor in another order than they were made."""

from manager import Epoch, WorkerName
from scheduler.messages import ReportBatch


class ReportOrder:
    """Gives each worker's report batches back in the order of their numbers, which start at 1 in every epoch."""

    def __init__(self) -> None:
        """Nothing has arrived."""
        self._epochs: dict[WorkerName, Epoch] = {}
        self._taken: dict[WorkerName, int] = {}
        self._early: dict[WorkerName, dict[int, ReportBatch]] = {}

    def begin(self, worker: WorkerName, epoch: Epoch, num_taken: int) -> list[ReportBatch]:
        """A life whose first `num_taken` batches need not be seen any more; returns those whose turn has come."""
        if epoch < self._epochs.get(worker, epoch):
            return []
        if epoch != self._epochs.get(worker):
            self._epochs[worker] = epoch
            self._taken[worker], self._early[worker] = 0, {}
        self._taken[worker] = max(self._taken[worker], num_taken)
        early = self._early[worker]
        for sequence in [sequence for sequence in early if sequence <= self._taken[worker]]:
            del early[sequence]
        return self._due(worker)

    def push(self, batch: ReportBatch) -> list[ReportBatch]:
        """Take a batch; returns those whose turn has come. Older lives pass through: they are refused later."""
        worker = batch.worker
        if batch.epoch < self._epochs.get(worker, batch.epoch):
            return [batch]
        if batch.epoch != self._epochs.get(worker):
            self._epochs[worker] = batch.epoch
            self._taken[worker], self._early[worker] = 0, {}
        if batch.sequence > self._taken[worker]:
            self._early[worker][batch.sequence] = batch
        return self._due(worker)

    def _due(self, worker: WorkerName) -> list[ReportBatch]:
        early, ready = self._early[worker], []
        while (due := early.pop(self._taken[worker] + 1, None)) is not None:
            self._taken[worker] += 1
            ready.append(due)
        return ready
