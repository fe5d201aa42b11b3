"""The line between a process of a lease and its node's agent: JSON lines over a UNIX socket.

The agent listens, the process connects and, when the agent has died, connects anew until the next one listens
at the same path. What is said first on each connection is the process's whole state, so nothing said in
between is missed. An agent that never comes back (its pool was deleted) leaves nobody who would end the
process: after a day without one (configurable) it ends itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: Seconds between two tries to reach an agent that is away: the first, and the longest.
_SOON, _LATE = 0.2, 1.0
#: Bytes of the longest line that either side reads.
LONGEST = 2**20


class Link:
    """One connection to the agent, kept up for as long as the process lives.

    Args:
        path: The socket on which the agent listens.
        state: Says everything that a new agent must know.
        obey: Carries out an agent's order.
        alone: Called once when there has been no agent for so long that none will come.
        alone_s: Seconds of that; they do not pass while the machine sleeps.
    """

    def __init__(
        self,
        path: str,
        state: Callable[[], dict[str, Any]],
        obey: Callable[[dict[str, Any]], None],
        *,
        alone: Callable[[], None],
        alone_s: float,
    ) -> None:
        self._path = path
        self._alone, self._alone_s = alone, alone_s
        #: Says everything that a new agent must know; sent first on every connection.
        self._state = state
        self._obey = obey
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.create_task(self._keep())

    def send(self, report: dict[str, Any]) -> None:
        """Say something now; without an agent it is dropped, as the state tells it again later."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(report))

    async def close(self) -> None:
        """Say what is left and hang up."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
                await asyncio.wait_for(self._writer.wait_closed(), 1)

    async def _keep(self) -> None:
        pause, heard = _SOON, time.monotonic()
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=LONGEST)
                pause = _SOON
                self.send(self._state())
                try:
                    await self._listen(reader)
                finally:
                    heard = time.monotonic()
                    self._writer.close()
            except (OSError, ValueError) as error:
                logger.debug("no agent at %s: %s", self._path, error)
            if time.monotonic() - heard > self._alone_s:
                logger.warning("there was no agent for %.0f s: this process ends itself", self._alone_s)
                self._alone()
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LATE)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                self._obey(json.loads(line))
            except Exception:
                # An order that fails must not cut the line on which the next one comes.
                logger.exception("the agent's order could not be carried out: %.200r", line)


async def ask(path: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """Ask the agent one thing on a connection of its own; None without an answer in time.

    Args:
        path: The socket.
        question: A report that the agent answers.
        timeout_s: Seconds to wait for the answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST)
            try:
                writer.write(encode(question))
                line = await reader.readline()
            finally:
                writer.close()
        answer = json.loads(line) if line else None
    except (OSError, ValueError, TimeoutError):
        return None
    return answer if isinstance(answer, dict) else None


async def tell(path: str, report: dict[str, Any]) -> None:
    """Tell the agent one thing on a connection of its own; nobody minds if there is none.

    Args:
        path: The socket.
        report: What to tell.
    """
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(encode(report))
        writer.close()
        await writer.wait_closed()


def encode(message: dict[str, Any]) -> bytes:
    """Write a message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
