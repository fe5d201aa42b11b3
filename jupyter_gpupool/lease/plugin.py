"""What a lease's scheduler does for the pool: lets workers go without losing work, and says how it fares.

It takes the agent's orders, and hears the lease's own workers where one finds its device failed or its
process spoilt.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin
from distributed.core import Status

from jupyter_gpupool.core.model import DrainMode
from jupyter_gpupool.lease import shell_relay
from jupyter_gpupool.lease.deaths import Deaths
from jupyter_gpupool.lease.drain import STIMULUS, Drained, Retirement, Suspension, drop
from jupyter_gpupool.lease.farewell import say_farewell
from jupyter_gpupool.lease.holdings import Holdings
from jupyter_gpupool.lease.idle import IdleWatch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from jupyter_gpupool.lease.link import Link

logger = logging.getLogger(__name__)

#: Seconds that the error of a spoilt worker's task has to reach the scheduler before the worker is taken out.
_ERROR_FIRST = 1.0
#: Of so many drained slices an agent that is new is told.
_TOLD = 100


class LeasePlugin(SchedulerPlugin):
    """The pool's hand in a lease's scheduler.

    Args:
        idle_timeout: The lease's, in milliseconds; 0: the pool's, below 0: none.
    """

    name = "gpupool"

    def __init__(self, idle_timeout: int = 0) -> None:
        self._idle_timeout = idle_timeout
        self._state: dict[str, Any] = {"report": "starting"}
        self._link: Link | None = None
        self._scheduler: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Its clients are being told that it ends.
        self._told: asyncio.Task[None] | None = None
        self._retiring: dict[str, Retirement] = {}
        self._dropping: dict[str, asyncio.Task[None]] = {}
        #: What it cost to drain each slice; a worker of one of these is never let in again.
        self._drained: dict[str, Drained] = {}
        self.deaths: Deaths
        self.idle: IdleWatch
        self.holdings: Holdings

    # -------------------------------------------------------------------------------------------- the agent's

    def state(self) -> dict[str, Any]:
        """Everything that a new agent must know."""
        told = list(self._drained.items())[-_TOLD:]
        return {**self._state, "drained": [_report(part, drained) for part, drained in told]}

    def attach(self, link: Link) -> None:
        """Say what happens over this link."""
        self._link = link

    def serves(self, address: str, dashboard: str) -> None:
        """Note that the scheduler answers."""
        self._state = {"report": "ready", "address": address, "dashboard": dashboard}

    def failed(self, why: str) -> None:
        """Note that the scheduler could not be started."""
        self._state = {"report": "failed", "why": why}

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out an agent's order, which may come twice."""
        if order["order"] == "drain":
            self._drain(
                order["slice"], order["mode"], int(order.get("deadline_in") or 0), order.get("why", "")
            )
        elif order["order"] == "end":
            self.end(order.get("why", ""))

    def end(self, why: str = "") -> None:
        """End the lease's scheduler, once its clients have been told why; it may be called again."""
        if self._told is None:
            self._told = self._do(say_farewell(self._scheduler, why))
            self._do(self._end(self._told))

    async def _end(self, told: asyncio.Task[None]) -> None:
        await told
        await self._scheduler.close(reason="lease-ended")

    def end_at_once(self) -> None:
        """End the process as SIGTERM does, as soon as the lease's clients have been told why."""
        self.end()
        if self._told is not None:
            self._told.add_done_callback(lambda _: os._exit(128 + signal.SIGTERM))

    # ------------------------------------------------------------------------------------------- Dask's hooks

    async def start(self, scheduler: Any) -> None:
        """Hook: the scheduler starts."""
        self._scheduler = scheduler
        self.deaths = Deaths(scheduler)
        self.idle = IdleWatch(scheduler, self._say, self._idle_timeout)
        self.idle.start()
        self.holdings = Holdings(scheduler, self._say)
        self.holdings.start()
        scheduler.handlers.update(
            gpupool_lost=self.lost,
            gpupool_death=self.death,
            gpupool_spoilt=self.spoilt,
            gpupool_tasks=self.tasks,
            **shell_relay.handlers(scheduler, self.idle),
        )
        answer = scheduler.stream_handlers.get("steal-response")

        def on_answer(*, key: Any, state: str | None, stimulus_id: str, worker: str | None = None) -> None:
            if stimulus_id.startswith(STIMULUS):
                self._answered(key, state, stimulus_id, worker)
            elif answer is not None:
                answer(key=key, state=state, stimulus_id=stimulus_id, worker=worker)

        scheduler.stream_handlers["steal-response"] = on_answer

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Hook: a worker has registered. One whose slice has been drained gets no task and is sent away."""
        found = scheduler.workers[worker]
        if str(found.name) in self._drained or str(found.name) in self._dropping:
            scheduler.handle_worker_status_change(Status.closing_gracefully, found, f"{STIMULUS}late")
            self._do(self._send_away(found))
        else:
            self._do(self._meet(worker))

    async def _meet(self, worker: str) -> None:
        """Connect to a new worker before the first who waits for a result has to wait for that too."""
        pool = self._scheduler.rpc
        with contextlib.suppress(OSError):
            pool.reuse(worker, await pool.connect(worker))

    async def before_close(self) -> None:
        """Hook: the scheduler ends."""
        if self._scheduler is not None:  # it has started
            self.idle.stop()
            self.holdings.stop()

    def tasks(self) -> dict[str, int]:
        """Answer with how many tasks there are in each state; by groups, as there may be a million."""
        found: dict[str, int] = {}
        for group in self._scheduler.task_groups.values():
            for state, many in group.states.items():
                if many and state not in ("released", "forgotten"):
                    found[str(state)] = found.get(str(state), 0) + many
        return found

    # --------------------------------------------------------------------------- what the lease's workers say

    async def lost(self, part: str, why: str) -> None:
        """Take out a worker whose node says that its device has failed.

        Args:
            part: The slice.
            why: The verdict's sentence.
        """
        # Said when the pool orders the drain, which follows from the same verdict.
        await self._drop(part, why)

    async def death(self, part: str, *, hardware: bool) -> None:
        """Hear whose fault a worker's death was.

        Args:
            part: The slice.
            hardware: The node says that the device has failed.
        """
        self.deaths.settle(part, hardware=hardware)

    async def spoilt(self, part: str, key: Any, why: str) -> None:
        """Take out a worker whose process is spoilt; its host starts it anew on the same device.

        Args:
            part: The slice.
            key: The task whose error told of it, and must be heard first.
            why: For the log.
        """
        worker = self._find(part)
        if worker is None:
            return
        scheduler = self._scheduler
        scheduler.handle_worker_status_change(Status.closing_gracefully, worker, f"{STIMULUS}spoilt")
        deadline = time.monotonic() + _ERROR_FIRST
        while time.monotonic() < deadline:
            if all(task.key != key for task in worker.processing):
                break
            await asyncio.sleep(0.01)
        await drop(scheduler, worker, why, close=False)

    # ----------------------------------------------------------------------------------------------- draining

    def _drain(self, part: str, mode: str, deadline_in: int, why: str) -> None:
        if part in self._drained:
            self._say(_report(part, self._drained[part]))
        elif mode == DrainMode.NOW:
            self._do(self._now(part, why))
        elif part not in self._retiring:
            suspend = mode == DrainMode.SUSPEND
            self._do(self._finish(part, deadline_in / 1000, why, suspend=suspend))

    async def _send_away(self, worker: Any) -> None:
        await drop(self._scheduler, worker, "its slice has been drained")

    async def _now(self, part: str, why: str) -> None:
        await self._drop(part, why)
        self._say(_report(part, self._drained[part]))

    async def _drop(self, part: str, why: str) -> None:
        """Take a slice's worker out; the worker itself and the pool may ask for it at the same time."""
        if part not in self._dropping:
            self._dropping[part] = self._do(self._take_out(part, why))
        await asyncio.shield(self._dropping[part])

    async def _take_out(self, part: str, why: str) -> None:
        worker = self._find(part)
        drained = Drained() if worker is None else await drop(self._scheduler, worker, why)
        self._drained.setdefault(part, drained)

    async def _finish(self, part: str, deadline_s: float, why: str, *, suspend: bool) -> None:
        worker = self._find(part)
        drained = Drained()
        if worker is not None:
            kind, stays = Suspension if suspend else Retirement, functools.partial(self._say_stays, part)
            retirement = self._retiring[part] = kind(self._scheduler, worker, deadline_s, why, stays)
            try:
                drained = await retirement.run()
            finally:
                del self._retiring[part]
        # Meanwhile the device may have failed for good, and the worker have been dropped.
        if part in self._dropping:
            await asyncio.shield(self._dropping[part])
        self._drained.setdefault(part, drained)
        self._say(_report(part, self._drained[part]))

    def _say_stays(self, part: str, actors: dict[Any, str], seconds: float) -> None:
        said = {str(key): why for key, why in actors.items()}
        self._say({"report": "stays", "slice": part, "actors": said, "seconds": int(seconds)})

    def _answered(self, key: Any, state: str | None, stimulus: str, worker: str | None) -> None:
        for part, retirement in self._retiring.items():
            found = self._find(part)
            if found is not None and found.address == worker:
                retirement.answered(key, state, stimulus)

    def _find(self, part: str) -> Any:
        """Find the worker of a slice; None if there is none now."""
        return self._scheduler.workers.get(self._scheduler.aliases.get(part))

    def _say(self, report: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(report)

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an order could not be carried out", exc_info=task.exception())


def _report(part: str, drained: Drained) -> dict[str, Any]:
    said = {"forced": drained.forced, "lost": drained.lost, "work": round(drained.work_s * 1000)}
    return {"report": "drained", "slice": part, **said}
