"""The process of a slice's shell, as its host sees it: started, listened to, signalled and ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import secrets
import signal
import socket
from typing import TYPE_CHECKING, Any

import dask

from jupyter_gpupool.lease.shell_line import Message, pack, read

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

#: Seconds that it has to start, and to end by itself.
_START, _END = 60.0, 2.0
#: Seconds for its last words to arrive.
_LAST = 1.0
#: Bytes that the host reads ahead.
_AHEAD = 2**20


class ShellProcess:
    """One shell; when it has ended another one is made."""

    def __init__(self, hear: Callable[[Message], Awaitable[None]], ended: Callable[[str], None]) -> None:
        #: Tells this shell's namespace from that of any other.
        self.id = secrets.token_hex(8)
        #: No cell has run in it.
        self.fresh = True
        self.python = ""
        #: Why it is ended, where the host does so.
        self.why = ""
        self._hear, self._ended = hear, ended
        self._process: Any = None
        self._handle = -1
        self._writer: asyncio.StreamWriter
        self._watching: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    async def start(self, spec: dict[str, Any]) -> None:
        """Start it and wait until it takes cells.

        Args:
            spec: As `shell.main` takes it.

        Raises:
            OSError: It could not be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            method = dask.config.get("distributed.worker.multiprocessing-method")
            context: Any = multiprocessing.get_context(method)
            self._process = context.Process(target=_main, args=(spec, theirs), name="gpupool-shell")
            await asyncio.to_thread(self._process.start)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_AHEAD)
        self._handle = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._handle, self._on_gone)
        try:
            ready = await asyncio.wait_for(read(reader), _START)
        except TimeoutError:
            ready = None
        if ready is None:
            await self.end()
            raise OSError("the shell did not start; `gpupool logs` of the lease shows what it wrote")
        self.python = ready.get("python", "")
        self._watching = asyncio.create_task(self._watch(asyncio.create_task(self._listen(reader))))

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return not self._gone.is_set()

    async def send(self, message: Message) -> None:
        """Send it something; waits while it does not read."""
        with contextlib.suppress(OSError):
            self._writer.write(pack(message))
            await self._writer.drain()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it alone: neither to what it has started nor to who has its PID later."""
        if self.alive:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, number)

    async def end(self) -> None:
        """End it; it has a moment to do so by itself."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), _END)
                break
        if self._watching is not None:
            await asyncio.shield(self._watching)
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (message := await read(reader)) is not None:
            await self._hear(message)

    async def _watch(self, listening: asyncio.Task[None]) -> None:
        """Say that it has ended, after what it has said last."""
        await self._gone.wait()
        # What it has forked may hold the line open for ever.
        await asyncio.wait({listening}, timeout=_LAST)
        listening.cancel()
        self._writer.close()
        self._ended(await self._why())

    def _on_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self._gone.set()

    async def _why(self) -> str:
        await asyncio.to_thread(self._process.join, 1)
        code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = " (perhaps for want of memory)" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{memory}"
        return f"its process ended with status {code}"


def _main(spec: dict[str, Any], line: socket.socket) -> None:
    # Here, not in the host: IPython is loaded only where a cell runs.
    importlib.import_module("jupyter_gpupool.lease.shell").main(spec, line)
