"""Dask's P2P shuffles, kept off workers that are about to leave.

A shuffle gives each of its outputs to a worker when it begins, running or not, and starts anew when one of
these workers
leaves: every input task runs twice. So a worker leaves when its shuffles are through, and no new one takes it
in.
"""

from __future__ import annotations

from typing import Any

from distributed.shuffle._core import barrier_key
from distributed.shuffle._scheduler_plugin import ShuffleSchedulerPlugin


class LeaseShuffles(ShuffleSchedulerPlugin):
    """Dask's shuffle plugin, which leaves out the workers that are leaving.

    It overrides a private method of Dask's. Should that go, shuffles take leaving workers in again, and the
    only harm is that a drain has to wait for them.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        #: Addresses of workers that are about to leave.
        self.leaving: set[str] = set()

    def _calculate_worker_for(self, spec: Any) -> Any:
        barrier = self.scheduler.tasks[barrier_key(spec.id)]
        staying = set(self.scheduler.workers) - self.leaving
        if barrier.worker_restrictions or not staying or not self.leaving:
            return super()._calculate_worker_for(spec)
        # What it does with a user's own restriction is exactly what is wanted: outputs shared with a shuffle
        # that runs already stay where that one has them, all others go to these workers.
        barrier.worker_restrictions = staying
        try:
            return super()._calculate_worker_for(spec)
        finally:
            barrier.worker_restrictions = None

    def involves(self, address: str) -> bool:
        """Whether a shuffle that is under way needs this worker.

        Args:
            address: The worker's.
        """
        return any(
            address in shuffle.participating_workers or address in shuffle.run_spec.worker_for.values()
            for shuffle in self.active_shuffles.values()
        )

    def restarts(self, address: str) -> list[Any]:
        """Return the tasks, run or running, that run again when this worker leaves a shuffle under way.

        Args:
            address: The worker's.
        """
        found = []
        for shuffle in self.active_shuffles.values():
            if address in shuffle.participating_workers:
                barrier = self.scheduler.tasks[barrier_key(shuffle.id)]
                found += [*barrier.dependencies, barrier, *barrier.dependents]
        return [task for task in found if task.state in ("memory", "processing")]
