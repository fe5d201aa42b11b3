"""A faulty network between one agent and its controller: a TCP proxy that delays, stalls, cuts, repeats."""

from __future__ import annotations

import asyncio
import contextlib
import threading

#: Bytes of a connection's beginning that are kept, to be said once more.
KEPT = 4096
#: The two directions: from the agent to the controller, and back.
WAYS = ("up", "down")


class Proxy:
    """Passes everything on, until it is told otherwise. Runs in a thread of its own.

    Args:
        target: The controller's port on this machine.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay = 0.0
        self._refuses = False
        self._first = b""
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = self._do(self._listen())

    async def _listen(self) -> int:
        self._open = {way: asyncio.Event() for way in WAYS}
        for gate in self._open.values():
            gate.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.close()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        both = {writer, far_writer}
        self._writers |= both
        self._first = b""
        await asyncio.gather(
            self._pump("up", reader, far_writer),
            self._pump("down", far_reader, writer),
            return_exceptions=True,
        )
        self._writers -= both

    async def _pump(self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if way == "up" and len(self._first) < KEPT:
                    self._first += data[:KEPT]
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self._open[way].wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()

    # ------------------------------------------------------------------------------------------- what it does

    def stall(self, *ways: str) -> None:
        """Hold back all that goes these ways, and let the other way through."""
        self._do(self._set(ways, through=False))

    def heal(self) -> None:
        """Pass everything on again, what was held back first."""
        self.delay, self._refuses = 0.0, False
        self._do(self._set(WAYS, through=True))

    async def _set(self, ways: tuple[str, ...], *, through: bool) -> None:
        for way in ways:
            gate = self._open[way]
            gate.set() if through else gate.clear()

    def cut(self, *, refuse: bool) -> None:
        """Break all connections; with `refuse`, let none come until it is healed."""
        self._refuses = refuse
        self._do(self._break())

    async def _break(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def repeat(self) -> None:
        """Say the beginning of the newest connection once more, on a connection of its own."""
        self._do(self._repeat())

    async def _repeat(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.target)
            with contextlib.closing(writer):
                writer.write(self._first)
                async with asyncio.timeout(1):
                    await reader.read(KEPT)

    def close(self) -> None:
        """End it and all that goes through it."""
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        self._refuses = True
        await self._set(WAYS, through=True)
        await self._break()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
