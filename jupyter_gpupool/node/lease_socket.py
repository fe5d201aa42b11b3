"""Where a lease's processes reach their agent: one UNIX socket for each, JSON lines, for its owner only.

What comes in is a claim of code that a user runs: a line that is too long or is no JSON object ends the
connection, and whoever connects must be the lease's OS user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

#: Bytes of the longest line that is read.
_LONGEST = 2**20
#: pid, uid and gid of the other side, as SO_PEERCRED gives them.
_CREDENTIALS = struct.Struct("3i")

#: What a worker says on a connection of its own, beside that of its host.
_ASIDE = ("suspect", "first_task", "layers")

#: Takes one report; what it answers, if anything, is sent back on the same connection.
Hear = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


class LeaseSocket:
    """One listening socket."""

    def __init__(self, path: Path, uid: int, hear: Hear) -> None:
        self._path = path
        self._uid = uid
        self._hear = hear
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: The connection on which the process says how it fares, and takes orders.
        self._main: asyncio.StreamWriter | None = None
        self._unsent: list[dict[str, Any]] = []

    async def open(self) -> None:
        """Listen, in place of an agent that did so before."""
        self._path.unlink(missing_ok=True)
        line = socket.socket(socket.AF_UNIX)
        line.bind(str(self._path))
        # Before anybody can connect: the file is its owner's alone, and nobody follows a link here.
        self._path.chmod(0o600)
        if os.geteuid() == 0 and self._uid != 0:
            os.chown(self._path, self._uid, -1, follow_symlinks=False)
        self._server = await asyncio.start_unix_server(self._serve, sock=line, limit=_LONGEST)

    def send(self, order: dict[str, Any]) -> None:
        """Send an order to the process, now or as soon as it is connected."""
        if self._main is None or self._main.is_closing():
            self._unsent.append(order)
        else:
            self._main.write(_encode(order))

    def mention(self, order: dict[str, Any]) -> None:
        """Send what is worth nothing later: who is not connected, or does not read, is not told."""
        line = self._main
        if line is not None and not line.is_closing() and not line.transport.get_write_buffer_size():
            line.write(_encode(order))

    async def close(self) -> None:
        """Hang up and stop listening; the next agent listens at the same path."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        self._writers.add(writer)
        try:
            if _peer(writer) in (self._uid, 0):
                await self._listen(reader, writer)
        except ValueError as error:
            logger.warning("a process of a lease said what cannot be read: %s", error)
        except (OSError, asyncio.CancelledError):
            pass  # it has ended, or this agent does
        finally:
            self._writers.discard(writer)
            if self._main is writer:
                self._main = None
            writer.close()
            if task is not None:
                self._tasks.discard(task)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")  # noqa: TRY004 - as of other lines that cannot be read
            if message.get("report") not in _ASIDE and self._main is not writer:
                self._take_orders(writer)
            try:
                answer = await self._hear(message)
            except Exception:
                # Whatever a claim brings about, the next one is heard.
                logger.exception("what a process of a lease said could not be taken: %.200r", message)
                continue
            if answer is not None:
                writer.write(_encode(answer))
                with contextlib.suppress(OSError):
                    await writer.drain()

    def _take_orders(self, writer: asyncio.StreamWriter) -> None:
        """This is the connection of the process itself, not one for a single question."""
        self._main = writer
        unsent, self._unsent = self._unsent, []
        for order in unsent:
            self.send(order)


def _peer(writer: asyncio.StreamWriter) -> int:
    line = writer.get_extra_info("socket")
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
