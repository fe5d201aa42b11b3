"""Whose fault a worker's death was: held against its tasks only when the node says it was not the GPU's.

Dask counts the death of a worker against every task that it had, and fails a task after `allowed-failures` of
them. So three GPUs that fall off the bus would kill a program that did nothing wrong. Here the tasks run
again at once, and are blamed when the host of the dead worker says what its node thinks of the device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from distributed.protocol.pickle import dumps
from distributed.scheduler import KilledWorker

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger(__name__)

#: Seconds after which a death is forgotten of which no host has said anything.
_FORGOTTEN = 60
#: States in which a task is still to be run, and can fail.
_OPEN = ("processing", "queued", "no-worker")


class Deaths:
    """The deaths of workers that nobody has been blamed for yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        #: Slice -> (its dead worker, the tasks that it had).
        self._open: dict[str, tuple[WorkerState, list[TaskState]]] = {}

    def note(self, worker: WorkerState, tasks: list[TaskState]) -> None:
        """Note that a worker is gone without having been told to go.

        Args:
            worker: The worker; its name is its slice's id.
            tasks: What it had to do.
        """
        if tasks:
            death = self._open[str(worker.name)] = worker, tasks
            self._scheduler.loop.call_later(_FORGOTTEN, self._forget, str(worker.name), death)

    def _forget(self, part: str, death: tuple[WorkerState, list[TaskState]]) -> None:
        """Blame nobody where the host is gone as well: a node has failed, or the end was wanted."""
        if self._open.get(part) is death:
            del self._open[part]

    def settle(self, part: str, *, hardware: bool) -> None:
        """Blame the tasks of a dead worker, or nobody.

        Args:
            part: The slice.
            hardware: The node says that the GPU has failed.
        """
        worker, tasks = self._open.pop(part, (None, []))
        if worker is None or hardware:
            return
        for task in tasks:
            there = self._scheduler.tasks.get(task.key) is task
            if there and task.state in _OPEN:
                self._blame(task, worker)

    def _blame(self, task: TaskState, worker: WorkerState) -> None:
        task.suspicious += 1
        task.prefix.suspicious += 1
        allowed = self._scheduler.allowed_failures
        if task.suspicious <= allowed:
            return
        logger.error("task %s has failed: %d workers died while they ran it", task.key, task.suspicious)
        self._fail(task, KilledWorker(task.key, worker.clean(), allowed))

    def _fail(self, task: TaskState, error: KilledWorker) -> None:
        stimulus = f"gpupool-killed-worker-{task.key}-{task.suspicious}"
        elsewhere = task.processing_on
        recommendations = self._scheduler.transition(
            task.key, "erred", exception=dumps(error), cause=task.key, stimulus_id=stimulus
        )
        if elsewhere is not None:
            message = {"op": "free-keys", "keys": [task.key], "stimulus_id": stimulus}
            self._scheduler.worker_send(elsewhere.address, message)
        self._scheduler.transitions(recommendations, stimulus)
