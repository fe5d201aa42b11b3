"""A slice's host runs `%%gpupool` cells: it lets notebooks in one after the other and stops what they run.

Rule 1: the host itself runs no user's code and reads nothing that a cell says, so it always answers: an
        interrupt reaches a shell whose C code keeps everything else waiting.
Rule 2: a cell runs for a notebook that is connected. When that is gone the cell is interrupted, as it would
        be with its kernel; what is to run on by itself is a Dask task.
Rule 3: an interrupt to which Python has reacted is the cell's to deal with. Only a shell that does not even
        notice one is ended, and then its namespace is said to be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from jupyter_gpupool.core.faults import Fault, is_hardware
from jupyter_gpupool.core.model import Verdict
from jupyter_gpupool.lease.link import ask
from jupyter_gpupool.lease.settings import PATIENCE
from jupyter_gpupool.lease.shell_process import ShellProcess

if TYPE_CHECKING:
    from jupyter_gpupool.lease.shell_line import Message

logger = logging.getLogger(__name__)

#: Seconds after which a shell that has not noticed an interrupt is ended.
UNHEARD = 3.0
#: Seconds between two words to the scheduler that the lease is in use.
_TOUCH = 4.0


class CellServer:
    """Runs the cells of one slice.

    Args:
        nanny: The Nanny of the slice's worker, on whose port notebooks call.
        spec: The host's.
    """

    def __init__(self, nanny: Any, spec: dict[str, Any]) -> None:
        self._nanny = nanny
        self._spec = spec
        self._turn = asyncio.Lock()
        self._shell: ShellProcess | None = None
        self._starting = asyncio.Lock()
        #: Why the last shell has ended.
        self._why = ""
        self._cell: _Cell | None = None
        self._ending: set[asyncio.Task[None]] = set()
        nanny.handlers["gpupool_cells"] = self._serve

    async def close(self) -> None:
        """End the shell."""
        if self._shell is not None:
            await self._shell.end()

    async def _serve(self, comm: Any) -> Any:
        """Serve one notebook, for as long as it stays connected."""
        visit = _Visit(comm, self)
        try:
            await visit.welcome(await self.shell(), self._why)
            while not comm.closed():
                await visit.obey(await comm.read())
        except OSError as error:
            logger.info("a notebook has gone: %s", error)
        finally:
            visit.leave()
            comm.abort()
        return Status.dont_reply

    async def shell(self) -> ShellProcess:
        """Answer with the shell; one that has ended is replaced.

        A cell that is withdrawn meanwhile leaves a shell for the next one, rather than half a process.
        """
        return await asyncio.shield(self._started())

    async def _started(self) -> ShellProcess:
        async with self._starting:
            if self._shell is None or not self._shell.alive:
                shell = ShellProcess(self._hear, lambda why: self._lost(shell, why))
                await shell.start(self._spec)
                self._shell = shell
            return self._shell

    async def run(self, visit: _Visit, order: Message) -> None:
        """Run a notebook's cell when it is its turn."""
        if self._cell is not None and self._cell.visit is not visit:
            await visit.say({"say": "waits"})
        async with self._turn:
            shell = await self.shell()
            if order.get("shell") not in ("", None, shell.id):
                await visit.welcome(shell, self._why)
                await visit.say({"say": "lost", "why": self._why or "it was started anew"})
                return
            cell = self._cell = _Cell(visit, shell, str(order.get("cell", "")))
            shell.fresh = False
            keeping = asyncio.create_task(self._keep(visit))
            try:
                await shell.send(order)
                await visit.say({"say": "begins"})  # what the cell is sent comes after the cell
                await cell.over.wait()
            finally:
                keeping.cancel()
                self._cell = None
            if cell.spoilt:
                shell.why = cell.spoilt
                await asyncio.shield(shell.end())

    async def _keep(self, visit: _Visit) -> None:
        """Have a lease count as used for as long as somebody waits for a cell on it."""
        while not visit.gone:
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._nanny.scheduler.gpupool_touch(), PATIENCE)
            await asyncio.sleep(_TOUCH)

    async def _hear(self, message: Message) -> None:
        """Pass on what the shell says."""
        cell = self._cell
        if cell is None:
            return  # a process that a cell has left running goes on talking
        if message["say"] == "running":
            cell.running.set()
            return
        if message["say"] == "interrupted":
            cell.noticed.set()
            return
        if "fault" in message:
            cell.spoilt = await self._judge(message)
        if message["say"] == "done":
            message["cell"] = cell.name
        await cell.visit.say(message)
        if message["say"] == "done":
            if cell.spoilt:
                await cell.visit.say({"say": "lost", "why": cell.spoilt})
            cell.over.set()

    async def _judge(self, message: Message) -> str:
        """Have the node look at the device after an error that may be the GPU's, as a task's error has it."""
        question = {"report": "suspect", "slice": self._spec["slice"], **_about(message)}
        answer = await ask(self._spec["socket"], question, PATIENCE) or {}
        verdict = Verdict(answer.get("verdict", Verdict.FINE))
        if is_hardware(Fault(message["fault"]), verdict):
            return answer.get("sentence") or "its GPU has failed"
        return "its CUDA context was spoilt by the error above"

    def _lost(self, shell: ShellProcess, why: str) -> None:
        """Note that a shell has ended."""
        self._why = shell.why or why
        logger.warning("the namespace of the slice's cells is gone: %s", self._why)
        cell = self._cell
        if cell is not None and cell.shell is shell and not cell.over.is_set():
            cell.visit.tell({"say": "lost", "why": self._why})
            cell.over.set()

    def interrupt(self, visit: _Visit) -> bool:
        """Interrupt a notebook's cell if that is what runs, or as soon as it does."""
        cell = self._cell
        if cell is None or cell.visit is not visit:
            return False
        task = asyncio.create_task(_stop(cell))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return True

    async def pass_on(self, visit: _Visit, message: Message) -> None:
        """Send the running cell what it waits for."""
        cell = self._cell
        if cell is not None and cell.visit is visit:
            await cell.shell.send(message)


@dataclass
class _Cell:
    """The cell that runs."""

    visit: _Visit
    shell: ShellProcess
    #: What its notebook calls it.
    name: str
    #: It has ended; Python has noticed an interrupt.
    over: asyncio.Event = field(default_factory=asyncio.Event)
    noticed: asyncio.Event = field(default_factory=asyncio.Event)
    #: The shell has begun with it: a signal before that would hit none, or the one before.
    running: asyncio.Event = field(default_factory=asyncio.Event)
    #: Why the shell cannot be used after it.
    spoilt: str = ""


async def _stop(cell: _Cell) -> None:
    """Interrupt a cell, and end a shell whose C code does not let Python notice it."""
    await _first(cell.running, cell.over)
    if cell.over.is_set():
        return  # what runs now is another's
    cell.noticed.clear()
    cell.shell.signal(signal.SIGINT)
    if not await _first(cell.noticed, cell.over):
        cell.shell.why = (
            f"C code in the cell did not react to an interrupt within {UNHEARD:g} s and was ended"
        )
        await cell.shell.end()


async def _first(*events: asyncio.Event) -> bool:
    """Wait until one of them has happened; False if none does in time."""
    ends = [asyncio.create_task(each.wait()) for each in events]
    done, _ = await asyncio.wait(ends, timeout=UNHEARD, return_when=asyncio.FIRST_COMPLETED)
    for each in ends:
        each.cancel()
    return bool(done)


class _Visit:
    """One notebook's connection."""

    def __init__(self, comm: Any, cells: CellServer) -> None:
        self._comm = comm
        self._cells = cells
        self._running: asyncio.Task[None] | None = None
        #: What the notebook calls the cell that runs, or waits.
        self._name = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.gone = False

    async def welcome(self, shell: ShellProcess, why: str) -> None:
        """Say whose namespace this is."""
        hello = {"say": "hello", "shell": shell.id, "fresh": shell.fresh, "python": shell.python}
        await self.say({**hello, "why": why})

    async def obey(self, message: Message) -> None:
        """Do what the notebook says."""
        do = message.get("do")
        if do == "run":
            self._name = str(message.get("cell", ""))
            self._running = asyncio.create_task(self._cells.run(self, message))
            self._tasks.add(self._running)
            self._running.add_done_callback(self._failed)
        elif do == "interrupt":
            await self._interrupt()
        elif do in ("part", "kept", "found", "failed"):
            await self._cells.pass_on(self, message)

    async def say(self, message: Message) -> None:
        """Say something to the notebook; it may be gone."""
        if not self.gone:
            try:
                await self._comm.write(message)
            except OSError:
                self.leave()

    def tell(self, message: Message) -> None:
        """Say something where nobody can wait."""
        task = asyncio.create_task(self.say(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """Have the cell of a notebook that is gone stop."""
        if not self.gone:
            self.gone = True
            self._withdraw()

    async def _interrupt(self) -> None:
        if self._withdraw():
            await self.say({"say": "done", "ok": False, "cell": self._name})

    def _withdraw(self) -> bool:
        """Interrupt the cell; True if it still waits for its turn, and now does not any more."""
        if self._cells.interrupt(self) or self._running is None or self._running.done():
            return False
        self._running.cancel()
        self._running = None  # so that it is said once
        return True

    def _failed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a cell could not be run", exc_info=error)
            self.tell({"say": "lost", "why": str(error)})


def _about(message: Message) -> Message:
    return {"fault": message["fault"], "error": str(message.get("error", ""))[:1000]}
