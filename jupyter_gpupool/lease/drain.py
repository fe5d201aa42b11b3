"""How a worker leaves its lease: at once where its device is gone, or its tasks ended and its data moved.

`retire_workers` alone would not do: it has no deadline, starts running tasks a second time elsewhere, leaves
queued ones stuck, moves no data at all where there is an actor, and gives up where no other worker is there
yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin
from distributed.active_memory_manager import (
    ActiveMemoryManagerExtension,
    ActiveMemoryManagerPolicy,
    Suggestion,
)
from distributed.core import Status

from jupyter_gpupool.lease.actors import ActorMoves

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger(__name__)

#: Seconds between two looks at a worker that is leaving; longer where it has many results to look through.
_LOOK, _LONG_LOOK, _MANY = 0.1, 2.0, 20_000
#: Seconds that a result has to arrive where it is copied to, before it is copied again.
_AGAIN = 10.0
#: States of a task that is not done; the last ones: that is to be run.
_OPEN = ("released", "waiting", "processing", "queued", "no-worker")
#: Beginning of the stimulus of our own requests for a task back from a worker.
STIMULUS = "gpupool-drain-"


@dataclass
class Drained:
    """What it cost to let a worker go."""

    #: Keys of tasks that the deadline cut off; they run a second time elsewhere.
    forced: list[str] = field(default_factory=list)
    #: Keys of what is lost for good: scattered data, actors.
    lost: list[str] = field(default_factory=list)
    #: Keys of what the scheduler has had begun or done, and now has done again.
    undone: list[str] = field(default_factory=list)
    #: Seconds of work that is to be done again, as far as the scheduler knows.
    work_s: float = 0.0


async def drop(scheduler: Scheduler, worker: WorkerState, why: str, *, close: bool = True) -> Drained:
    """Take a worker out at once; its tasks run again elsewhere, and nobody is blamed.

    Args:
        scheduler: The lease's.
        worker: The worker.
        why: For the log.
        close: Tell it to end; otherwise its host starts it anew.
    """
    drained = Drained(lost=[str(task.key) for task in _unique(worker) if _is_lost(task)])
    logger.warning("worker %s (%s) leaves at once: %s", worker.name, worker.address, why)
    stimulus = f"{STIMULUS}drop-{time.time()}"
    scheduler.handle_worker_status_change(Status.closing_gracefully, worker, stimulus)
    lift_restrictions(scheduler, worker.address)
    undone = _Undone(stimulus)
    scheduler.add_plugin(undone, name=stimulus)
    try:
        await scheduler.remove_worker(worker.address, expected=True, close=close, stimulus_id=stimulus)
    finally:
        scheduler.remove_plugin(name=stimulus)
    drained.undone = undone.again(scheduler)
    return drained


class _Undone(SchedulerPlugin):
    """Notes the tasks that run again because of one stimulus: on the worker that leaves, and elsewhere.

    A task on another worker runs again where its input was lost, or the shuffle that it belongs to.
    """

    def __init__(self, stimulus: str) -> None:
        self._stimulus = stimulus
        self._keys: dict[Any, None] = {}

    def transition(self, key: Any, start: str, finish: str, *_: Any, stimulus_id: str, **__: Any) -> None:
        """Hook: a task changes."""
        if stimulus_id == self._stimulus and start in ("processing", "memory") and finish in _OPEN:
            self._keys[key] = None

    def again(self, scheduler: Scheduler) -> list[str]:
        """Those that are to be run now; what nobody needs any more is not."""
        known = ((key, scheduler.tasks.get(key)) for key in self._keys)
        return [str(key) for key, task in known if task is not None and task.state in _OPEN[1:]]


def lift_restrictions(scheduler: Scheduler, address: str) -> None:
    """Let tasks that may run only on this worker run on any: they would wait for ever.

    Args:
        scheduler: The lease's.
        address: The worker that leaves.
    """
    freed: dict[Any, Any] = {}
    for task in scheduler.tasks.values():
        if task.worker_restrictions and address in task.worker_restrictions:
            others = task.worker_restrictions & set(scheduler.workers) - {address}
            task.worker_restrictions = others or None
            if task.state == "no-worker" and scheduler.running:
                freed[task.key] = "processing"
    scheduler.transitions(freed, f"{STIMULUS}lift-{time.time()}")


def _unique(worker: WorkerState) -> list[TaskState]:
    """What is in no other worker's memory; of an actor here others only have the means to call it."""
    return [task for task in worker.has_what if len(task.who_has or ()) == 1 or task in worker.actors]


def _is_safe(task: TaskState, worker: WorkerState, scheduler: Scheduler) -> bool:
    """Whether a worker that stays has a copy; none has of an actor."""
    return task not in worker.actors and bool((task.who_has or set()) & scheduler.running - {worker})


def _is_gone(task: TaskState, worker: WorkerState) -> bool:
    """Whether a result is in nobody else's memory, and can be computed again."""
    return (
        not (task.who_has or set()) - {worker} and task.state in ("memory", "released") and not _is_lost(task)
    )


def _is_lost(task: TaskState) -> bool:
    """Whether it cannot be computed again."""
    return bool(task.actor) or not task.run_spec


class _Move(ActiveMemoryManagerPolicy):
    """Copy what is only on leaving workers to workers that stay; an actor stays behind."""

    def __init__(self, address: str) -> None:
        self._address = address
        #: Key -> when it was asked for; nothing else tells that a copy is under way.
        self._asked: dict[Any, float] = {}

    def run(self) -> Generator[Suggestion, WorkerState | None, None]:
        scheduler = self.manager.scheduler
        worker = scheduler.workers.get(self._address)
        now = time.monotonic()
        for task in list(worker.has_what) if worker else ():
            if task.actor or _is_safe(task, worker, scheduler):
                continue
            if now - self._asked.get(task.key, -_AGAIN) >= _AGAIN and (yield Suggestion("replicate", task)):
                self._asked[task.key] = now


class Retirement:
    """One worker that leaves with its tasks ended and its data moved, up to a deadline."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: WorkerState,
        deadline_s: float,
        why: str,
        stays: Callable[[dict[Any, str], float], None],
    ) -> None:
        """Prepare it.

        Args:
            scheduler: The lease's.
            worker: The worker.
            deadline_s: Seconds that it gets.
            why: For the log.
            stays: Called with the actors that cannot move and why, and the seconds that they are waited for.
        """
        self._scheduler = scheduler
        self._worker = worker
        self._deadline = time.monotonic() + deadline_s
        self._why = why
        #: Keys of tasks that the worker has begun, as it says.
        self._begun: set[Any] = set()
        self._actors = ActorMoves(scheduler, worker)
        self._stays, self._told = stays, 0
        self._memory = ActiveMemoryManagerExtension(
            scheduler, policies={_Move(worker.address)}, register=False, start=False
        )

    async def run(self) -> Drained:
        """Let the worker finish, and answer with what could not be."""
        logger.info("worker %s is to leave: %s", self._worker.name, self._why)
        shuffles = self._scheduler.extensions["shuffle"]
        shuffles.leaving.add(self._worker.address)
        try:
            # Outputs of a shuffle can be read on this worker only, so it works normally until they are.
            # Its data moves meanwhile: should the deadline come first, less is lost.
            while self._goes_on() and shuffles.involves(self._worker.address):
                self._move()
                await asyncio.sleep(self._pause())
            if self._goes_on():
                self._close_door()
            while self._goes_on() and self._has_more():
                self._take_back()
                self._move()
                await asyncio.sleep(self._pause())
            return await self._let_go()
        finally:
            self._actors.stop()
            shuffles.leaving.discard(self._worker.address)

    def answered(self, key: Any, state: str | None, stimulus: str) -> None:
        """Hear what became of a task that was asked back.

        Args:
            key: The task's.
            state: What the worker had it in; it has given it up unless it had begun.
            stimulus: Of the request.
        """
        if state in ("ready", "constrained", "waiting", "released", None):
            # The worker is no candidate any more, so it goes elsewhere, or waits where there is nobody.
            address = self._worker.address
            self._scheduler._reschedule(key, address, stimulus_id=stimulus)  # noqa: SLF001 - as stealing does
            self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)
        elif state in ("executing", "long-running"):
            self._begun.add(key)

    def _pause(self) -> float:
        return min(_LONG_LOOK, max(_LOOK, len(self._worker.has_what) / _MANY))

    def _goes_on(self) -> bool:
        there = self._scheduler.workers.get(self._worker.address) is self._worker
        return there and time.monotonic() < self._deadline

    def _close_door(self) -> None:
        """Let nothing new in: for the scheduler now, for the worker as soon as it hears."""
        stimulus = f"{STIMULUS}close-{time.time()}"
        self._scheduler.handle_worker_status_change(Status.closing_gracefully, self._worker, stimulus)
        lift_restrictions(self._scheduler, self._worker.address)
        message = {"op": "worker-status-change", "status": "closing_gracefully", "stimulus_id": stimulus}
        self._scheduler.worker_send(self._worker.address, message)

    def _move(self) -> None:
        """Move results and actors, and say once more when there is one more that cannot be moved."""
        self._memory.run_once()
        self._actors.run_once()
        if len(self._actors.stay) > self._told:
            self._told = len(self._actors.stay)
            self._stays(self._actors.stay, max(0.0, self._deadline - time.monotonic()))

    def _has_more(self) -> bool:
        moving = self._actors.under_way()
        return moving or bool(self._worker.processing) or any(True for _ in self._stranded())

    def _stranded(self) -> Iterator[TaskState]:
        """What no worker that stays has a copy of; an actor that does not move is waited for."""
        return (task for task in self._worker.has_what if not _is_safe(task, self._worker, self._scheduler))

    def _take_back(self) -> None:
        """Ask for the tasks that the worker has and has not begun; what it has begun, it ends."""
        for task in list(self._worker.processing):
            if task.key not in self._begun:
                stimulus = f"{STIMULUS}{self._worker.address}-{task.run_id}"
                message = {"op": "steal-request", "key": task.key, "stimulus_id": stimulus}
                self._scheduler.worker_send(self._worker.address, message)

    async def _let_go(self) -> Drained:
        if self._scheduler.workers.get(self._worker.address) is not self._worker:
            return Drained()  # it has gone by itself; Dask has seen to it
        again = self._cut_off()
        named, work_s = self._named(again), sum(self._took(task) for task in again)
        drained = await drop(self._scheduler, self._worker, self._why)
        drained.forced, drained.work_s = self._all_named(named, drained.undone), work_s
        return drained

    def _named(self, again: dict[TaskState, None]) -> list[str]:
        """What its owner is told that the deadline has cut off."""
        return [str(task.key) for task in again]

    def _all_named(self, named: list[str], undone: list[str]) -> list[str]:
        """Add what has run again elsewhere because of it."""
        return list(dict.fromkeys([*named, *undone]))

    def _took(self, task: TaskState) -> float:
        """How many seconds of work are undone with a task: those it has run, or took."""
        if task in self._worker.processing:
            return float(self._worker.executing.get(task, 0.0))
        return float(max(0.0, task.prefix.duration_average)) if task.prefix else 0.0

    def _cut_off(self) -> dict[TaskState, None]:
        """What runs again because the deadline has come, what it needs and nobody has any more included."""
        begun: list[TaskState] = [*self._worker.processing]
        begun += [task for task in self._stranded() if not _is_lost(task)]
        begun += self._scheduler.extensions["shuffle"].restarts(self._worker.address)
        found: dict[TaskState, None] = {}
        while begun:
            task = begun.pop()
            if task not in found:
                found[task] = None
                begun += [each for each in task.dependencies if _is_gone(each, self._worker)]
        return found


class Suspension(Retirement):
    """One worker of a lease that is suspended: all leave, so that there is nowhere to move data to.

    Finished results are computed again when the lease goes on, and nobody waits for that. What cannot be
    computed again stays up to the deadline: its owner has been told, and may fetch it.
    """

    def _move(self) -> None:
        """Move nothing."""

    def _has_more(self) -> bool:
        return bool(self._worker.processing) or any(_is_lost(task) for task in self._worker.has_what)

    def _named(self, again: dict[TaskState, None]) -> list[str]:
        return [str(task.key) for task in again if task in self._worker.processing]

    def _all_named(self, named: list[str], undone: list[str]) -> list[str]:
        del undone  # the whole lease stands still
        return named
