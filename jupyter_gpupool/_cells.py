"""The way from a notebook to the shells of a lease: connections, and which of them stands for which place.

Rule 1: the connections live in a thread of their own with its own loop; the thread that runs the notebook's
        cell waits on a queue, so an interrupt finds it wherever it is.
Rule 2: a place (0, 1, …) keeps its slice for as long as the lease has it; a replacement takes the place of
        what it replaces.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, Self

from jupyter_gpupool._steps import security

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

Message = dict[str, Any]

#: Seconds to reach a slice's host directly; where only the scheduler's port is open it passes the words on.
DIRECT = 1.0
#: Seconds to wait for a scheduler, for a slice that is being started, and for a shell.
REACH, FIND, START = 10.0, 2.0, 60.0
#: Seconds in which a piece of a value must be on its way.
SEND = 60.0
#: Messages that wait for the notebook before no more are read, and for the other side before none is taken.
_AHEAD, _UNSENT = 256, 4


class Unreachable(Exception):  # noqa: N818 - it is a state
    """A shell cannot be reached; the sentence says why."""


class Places:
    """Which slice stands at which place of a lease.

    >>> places = Places()
    >>> places.update(["a/0", "a/1"])
    ['a/0', 'a/1']
    >>> places.update(["a/1", "a/2"])
    ['a/2', 'a/1']
    """

    def __init__(self) -> None:
        self._slices: list[str] = []

    def update(self, now: Iterable[str]) -> list[str]:
        """Take in what the lease has now, in order, and answer with the slices by place."""
        there = list(now)
        new = [each for each in there if each not in self._slices]
        kept = [each if each in there else (new.pop(0) if new else "") for each in self._slices]
        self._slices = [each for each in kept if each] + new
        return list(self._slices)


class Loop:
    """A loop in a thread of its own, for as long as the process lives."""

    _only: Self | None = None

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="gpupool-cells", daemon=True)
        self._thread.start()

    @classmethod
    def get(cls) -> Self:
        """Return the loop of this process, started when it is first needed."""
        if cls._only is None:
            cls._only = cls()
            atexit.register(cls._only.stop)
        return cls._only

    def run(self, work: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """Run something there and wait for it."""
        waiting = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return waiting.result(timeout)
        except BaseException:
            waiting.cancel()
            raise

    @classmethod
    def end(cls) -> None:
        """End the thread, if there is one; the next `get` starts another."""
        only, cls._only = cls._only, None
        if only is not None:
            atexit.unregister(only.stop)
            only.stop()

    def stop(self) -> None:
        """End the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(2)


class Way:
    """A connection to the shell of one slice."""

    def __init__(self, comm: Any, hello: Message, direct: bool) -> None:  # noqa: FBT001 - made below only
        self._comm = comm
        #: Whose namespace is there.
        self.hello = hello
        #: Whether it goes to the slice's host itself, rather than through the scheduler.
        self.direct = direct
        #: What the shell says, with this way before it; the notebook's cell puts in its own queue.
        self.inbox: queue.SimpleQueue[tuple[Way, Message]] = queue.SimpleQueue()
        self._unsent: asyncio.Queue[Message] = asyncio.Queue(_UNSENT)
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read())
        self._writing = loop.create_task(self._write())

    @classmethod
    def open(cls, connection: dict[str, Any], part: str) -> Way:
        """Connect.

        Args:
            connection: Address and credentials of the lease, as the pool gives them.
            part: The slice.

        Raises:
            Unreachable: There is no such slice now, or it does not answer.
        """
        way: Way = Loop.get().run(_open(connection, part))
        return way

    @property
    def is_open(self) -> bool:
        """Whether the other side is there."""
        return not self._comm.closed() and not self._reading.done() and not self._writing.done()

    def send(self, message: Message) -> None:
        """Send something, and wait until it is on its way; it is lost where the other side is gone."""
        if self.is_open:
            Loop.get().run(self._unsent.put(message), SEND)

    def close(self) -> None:
        """Hang up; a cell that runs is interrupted."""
        Loop.get().run(self._close(), 5)

    async def _close(self) -> None:
        for task in (self._reading, self._writing):
            task.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)
        self._comm.abort()

    async def _write(self) -> None:
        # A task of its own: whatever interrupts who sends, a message goes as a whole.
        with contextlib.suppress(OSError):
            while True:
                await self._comm.write(await self._unsent.get())

    async def _read(self) -> None:
        try:
            while True:
                message = await self._comm.read()
                self.inbox.put((self, message))  # the inbox of now: each cell has its own
                while self.inbox.qsize() > _AHEAD:  # noqa: ASYNC110 - the other side of the queue is a thread
                    await asyncio.sleep(0.002)
        except OSError:
            self.inbox.put((self, {"say": "cut"}))


async def _open(connection: dict[str, Any], part: str) -> Way:
    from distributed.comm import connect

    args = security(connection).get_connection_args("client")
    try:
        scheduler = await connect(connection["address"], timeout=REACH, **args)
    except OSError as error:
        raise Unreachable(f"the scheduler of the lease does not answer ({error})") from error
    comm = scheduler
    try:
        comm, direct = await _reach(scheduler, part, args)
        async with asyncio.timeout(START):
            hello = await comm.read()
    except BaseException as error:
        scheduler.abort()
        comm.abort()
        if isinstance(error, OSError):  # a time-out is one
            raise Unreachable(f"slice {part} does not answer ({error or 'no word in time'})") from error
        raise
    if comm is not scheduler:
        scheduler.abort()
    return Way(comm, hello, direct)


async def _reach(scheduler: Any, part: str, args: Message) -> tuple[Any, bool]:
    """Find a slice's host and call it."""
    try:
        async with asyncio.timeout(REACH):
            return await _nearest(scheduler, await _find(scheduler, part), part, args)
    except TimeoutError:
        raise Unreachable(
            f"the scheduler of the lease has not said within {REACH:g} s where slice {part} is: code that "
            "runs on it (`run_on_scheduler`) may hold it up"
        ) from None


async def _nearest(scheduler: Any, host: str, part: str, args: Message) -> tuple[Any, bool]:
    """Call the slice's host, or else have the scheduler do so."""
    from distributed.comm import connect

    try:
        comm = await connect(host, timeout=DIRECT, **args)
    except OSError:
        await scheduler.write({"op": "gpupool_cells", "part": part, "reply": False})
        return scheduler, False
    await comm.write({"op": "gpupool_cells", "reply": False})
    return comm, True


async def _find(scheduler: Any, part: str) -> str:
    """Ask for the address of a slice's host; it may be just starting."""
    loop = asyncio.get_running_loop()
    end = loop.time() + FIND
    while True:
        await scheduler.write({"op": "gpupool_where", "part": part})
        found = await scheduler.read()
        if isinstance(found, str) and found:
            return found
        if loop.time() > end:
            raise Unreachable(f"slice {part} has no worker now")
        await asyncio.sleep(0.1)
