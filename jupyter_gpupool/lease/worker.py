"""The worker class of a lease: holds back a task's error while it is not known whether the GPU has failed.

Dask sees a failing GPU first as a task error, and a task error is final. So an error that looks like CUDA's
waits, in the task's own slot, until the worker's node has read and judged the device. If it is the GPU's, the
worker leaves and the task runs elsewhere; if it is the program's, the error passes on, and a process that
CUDA has spoilt is started anew before it takes another task.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from distributed import Status, Worker
from distributed.comm import CommClosedError
from distributed.core import clean_exception
from distributed.worker_state_machine import ExecuteFailureEvent, RescheduleEvent

from jupyter_gpupool.core.faults import SUSPECT, classify_error, is_hardware, needs_restart, runs_again
from jupyter_gpupool.core.model import Verdict
from jupyter_gpupool.lease import limits, process
from jupyter_gpupool.lease.actors import WorkerActors
from jupyter_gpupool.lease.early import address_from
from jupyter_gpupool.lease.gauges import Gauges
from jupyter_gpupool.lease.link import ask, tell
from jupyter_gpupool.lease.settings import HEARTBEAT, PATIENCE
from jupyter_gpupool.versions import ENVIRONMENT, versions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from distributed.worker_state_machine import StateMachineEvent

logger = logging.getLogger(__name__)

#: Seconds that running tasks get to end before a restart that the node asks for; their errors are held by
#: then.
LAST_TASKS = PATIENCE + 1
#: Seconds for the last task's message to leave, and below which a process counts as restarted already.
FLUSHED, FRESH = 0.1, 2.0


class StartError(RuntimeError):
    """A worker could not be started; the sentence says why."""


def why_not(cause: BaseException) -> str:
    """Say why a worker could not be started.

    Args:
        cause: What was raised meanwhile.

    >>> why_not(ValueError("rmm_pool_size is too large"))
    'a worker could not be started: ValueError: rmm_pool_size is too large'
    """
    if isinstance(cause, ModuleNotFoundError):
        return (
            f"the workers' Python, {sys.executable} on {socket.gethostname()}, has no module {cause.name!r}: "
            "install it there, or leave it out of pre_import"
        )
    return f"a worker could not be started: {type(cause).__name__}: {cause}"


class LeaseWorker(Worker):
    """A worker of one slice."""

    def __init__(self, *arguments: Any, early: Connection | None = None, **options: Any) -> None:
        # A Nanny's worker is forked from the launcher's forkserver: nothing but this says whose it is.
        if mark := os.environ.get(process.MARK, "").rstrip("."):
            process.enter(mark, os.environ["GPUPOOL_LOG"], {})
        limits.watch_imports()
        #: Its node has paused it: it takes more GPU memory than its share has.
        self._held = False
        #: Brings the scheduler's address, where it was not known yet.
        self._early = early
        super().__init__(*arguments, **options)
        self._socket = os.environ.get("GPUPOOL_SOCKET", "")
        self._worked = False
        #: It is to end, and must not take another task.
        self._leaving = False
        #: Its device has failed: it is not started anew.
        self._lost = False
        self._began = time.monotonic()
        self._beating = False
        self.handlers["gpupool_restart"] = self.restart_anew
        self.actors = WorkerActors(self)
        self.handlers["gpupool_hold"] = self.hold
        self.gauges = Gauges(self, int(os.environ.get("GPUPOOL_GPU_MEMORY") or 0))
        self.handlers["gpupool_reading"] = self.show

    async def start(self) -> Any:
        """Start; where that fails say why: the cause of Dask's own error is lost on its way to the host."""
        try:
            return await super().start()
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise StartError(why_not(error.__cause__)) from error

    async def _register_with_scheduler(self) -> None:
        """Register, as soon as there is a scheduler."""
        if self._early is not None:
            pipe, self._early = self._early, None
            self.scheduler = self.rpc(await address_from(pipe))
        await super()._register_with_scheduler()

    async def get_startup_information(self) -> dict[str, Any]:
        """Say with the registration what this worker has: clients learn it without asking."""
        return {**await super().get_startup_information(), ENVIRONMENT: self.environment()}

    def environment(self) -> dict[str, Any]:
        """Say what this worker has, and what it was to have where its node has it."""
        found = {"python": sys.executable, "folder": os.getcwd()}  # noqa: PTH109 - a text is compared
        wished = json.loads(os.environ.get("GPUPOOL_WISHES") or "{}")
        missed = {name: each for name, each in wished.items() if each != found.get(name)}
        return {"slice": str(self.name), "versions": dict(versions()), "missed": missed}

    @property
    def status(self) -> Any:
        """Dask's status; a worker that is held stays paused, whatever Dask's memory monitor says."""
        return Worker.status.fget(self)

    @status.setter
    def status(self, value: Any) -> None:
        held = self._held and value == Status.running
        Worker.status.fset(self, Status.paused if held else value)

    async def hold(self, *, hold: bool) -> None:
        """Take no further task, or go on, as the node says.

        Args:
            hold: Whether to stop.
        """
        self._held = hold
        if self._status in (Status.running, Status.paused):
            self.status = Status.paused if hold else Status.running

    async def show(self, *, figures: dict[str, Any]) -> None:
        """Take what the node has read of the GPU, for the dashboard.

        Args:
            figures: As `node.gauges.figures` writes them.
        """
        self.gauges.show(figures)

    async def heartbeat(self) -> None:
        """Say that the worker is alive, less often than Dask would, and not any more once it leaves.

        The scheduler would answer that it knows no such worker, and then its Nanny would end as well.
        """
        if self._leaving:
            return
        self._beating = True
        try:
            await super().heartbeat()
        finally:
            self._beating = False
        callback = self.periodic_callbacks["heartbeat"]
        callback.callback_time = max(callback.callback_time, HEARTBEAT)

    async def execute(self, key: Any, *, stimulus_id: str) -> StateMachineEvent:
        """Run a task; hold its error back while the GPU is suspected."""
        if not self._worked:
            self._worked = True
            report = {"report": "first_task", "slice": self.name}
            self._ongoing_background_tasks.call_soon(tell, self._socket, report)
        event = await super().execute(key, stimulus_id=stimulus_id)
        if not isinstance(event, ExecuteFailureEvent):
            return event
        if await self._judge(_unpack(event.exception), key):
            return RescheduleEvent(key=key, stimulus_id=f"gpupool-device-failed-{time.time()}")
        return event

    async def get_data(
        self, comm: Any, keys: Any, who: str | None = None, serializers: list[str] | None = None
    ) -> Any:
        """Serve results; where one cannot be read off the GPU any more the worker counts as gone."""
        try:
            return await super().get_data(_Strict(comm), keys, who, serializers)
        except OSError:
            raise
        except Exception as error:
            if classify_error(error) not in SUSPECT:
                return await super().get_data(
                    comm, keys, who, serializers
                )  # as Dask has it: the peer is told
            await self._judge(error, None)
            comm.abort()
            raise CommClosedError(f"results on {self.name} cannot be read: {error}") from error

    async def actor_execute(self, actor: Any = None, **options: Any) -> dict[str, Any]:
        """Call an actor; its caller gets its error, and the node hears of one that may be the GPU's."""
        with self.actors.asked():
            if address := await self.actors.whereabouts(actor):
                return await self.actors.pass_on(address, "actor_execute", {"actor": actor, **options})
            with self.actors.calling(actor):
                answer: dict[str, Any] = await super().actor_execute(actor=actor, **options)
        if answer.get("status") == "error":
            self._ongoing_background_tasks.call_soon(self._judge, _unpack(answer["exception"]), None)
        return answer

    async def actor_attribute(self, actor: Any = None, **options: Any) -> dict[str, Any]:
        """Read an attribute of an actor, which may have moved."""
        with self.actors.asked():
            if address := await self.actors.whereabouts(actor):
                return await self.actors.pass_on(address, "actor_attribute", {"actor": actor, **options})
        answer: dict[str, Any] = super().actor_attribute(actor=actor, **options)
        return answer

    async def _judge(self, error: BaseException, key: Any) -> bool:
        """Say whether an error is the GPU's, so that its task runs again.

        The worker is out of the lease then where the GPU has failed, and else is started anew on it.
        """
        fault = classify_error(error)
        if fault not in SUSPECT:
            return False
        question = {"report": "suspect", "slice": self.name, "fault": fault, "error": f"{error}"[:1000]}
        answer = await ask(self._socket, question, PATIENCE) or {}
        verdict = Verdict(answer.get("verdict", Verdict.FINE))
        logger.warning("%s looks like the GPU's fault; its node says: %s", error, verdict)
        if is_hardware(fault, verdict):
            await self._leave(answer.get("sentence", ""))
            return True
        again = runs_again(fault, hardware=bool(answer.get("hardware")))
        if needs_restart(fault) and not self._leaving:
            self._shut_door()
            why = f"its CUDA context is spoilt ({fault})"
            # A task that runs again has no error that the scheduler must hear of first.
            self._ongoing_background_tasks.call_soon(self._start_anew, why, None if again else key)
        return again

    async def restart_anew(self, why: str) -> None:
        """Start this process anew because its node says so, though perhaps no task has failed.

        What runs ends first, so that a task whose error is on its way is heard, and runs once. A process that
        has just begun is the one that the node wants.
        """
        if not self._leaving and time.monotonic() - self._began > FRESH:
            self._shut_door()
            self._ongoing_background_tasks.call_soon(self._after_what_runs, why)

    async def _after_what_runs(self, why: str) -> None:
        deadline = time.monotonic() + LAST_TASKS
        while self.state.executing_count and time.monotonic() < deadline:  # noqa: ASYNC110 - Dask has no event
            await asyncio.sleep(0.02)
        await asyncio.sleep(FLUSHED)
        if not self._lost:
            await self._start_anew(why, None)

    def _shut_door(self) -> None:
        """Take no further task; unlike a pause, this is not undone by the memory monitor."""
        self._leaving = True
        if self._status == Status.running:
            self.status = Status.closing_gracefully

    async def _leave(self, why: str) -> None:
        """Have the scheduler take this worker out before a task goes back: it would be sent here again."""
        self._shut_door()
        self._lost = True
        try:
            await asyncio.wait_for(self.scheduler.gpupool_lost(part=self.name, why=why), PATIENCE)
        except (OSError, TimeoutError):
            logger.exception("the scheduler could not be told that this worker's GPU has failed")

    async def _start_anew(self, why: str, key: Any) -> None:
        """Have this process replaced on the same GPU; its CUDA context answers wrongly from now on."""
        while self._beating:  # noqa: ASYNC110 - Dask has no event
            await asyncio.sleep(0.01)
        try:
            await self.scheduler.gpupool_spoilt(part=self.name, key=key, why=why)
        finally:
            # The answer finds nobody here any more.
            with contextlib.suppress(OSError):
                async with self.rpc(self.nanny) as nanny:
                    await nanny.restart(reason=why)


def _unpack(exception: Any) -> BaseException:
    """Read a task's exception as Dask has packed it; its causes are in it."""
    return clean_exception(getattr(exception, "data", exception))[1] or Exception()


class _Strict:
    """A comm that raises where a result cannot be serialised; Dask's sends the traceback instead."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def write(self, message: Any, serializers: list[str] | None = None, on_error: str = "raise") -> Any:
        del on_error
        return await self._comm.write(message, serializers=serializers, on_error="raise")
