"""The way from this server to the pool: found when it is first needed, and again when it was lost.

Rule 1: that there is no pool is a state with a reason. For a moment it is answered from memory, so that many
        browser tabs do not each wait for a host that does not answer.
Rule 2: nothing blocks the server's event loop: searching reads files and may start a pool, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._find import find
from jupyter_gpupool._http import Address, AsyncConnection, Call, PoolError, Trouble, load

if TYPE_CHECKING:
    from collections.abc import Callable

#: Errors that are about the way, not about what was asked.
LOST = {
    Trouble.UNREACHABLE,
    Trouble.NOT_A_POOL,
    Trouble.WRONG_TOKEN,
    Trouble.WRONG_CERTIFICATE,
    Trouble.BAD_CONFIG,
    Trouble.NOT_STARTED,
}
#: Seconds between the first tries to find a pool that was lost; they double.
FIRST_RETRY_S = 0.5


class State(StrEnum):
    """How this server stands with its pool."""

    LOOKING = "looking"
    STARTING = "starting"
    CONNECTED = "connected"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What the settings say of which pool; empty: the client's own search."""

    url: str = ""
    token_file: str = ""
    ca_file: str = ""
    start: bool = False

    def find(self, *, start: bool) -> Address:
        """Find the pool; reads files, and with `start` may start processes.

        Raises:
            PoolError: There is none.
        """
        token = _text(self.token_file) if self.token_file else None
        return find(self.url or None, token, self.ca_file or None, start=start)


def _text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise PoolError(
            Trouble.BAD_CONFIG,
            f"The token file {path} cannot be read ({why}).",
            "Correct GPUPoolServer.token_file.",
        ) from error


class Link:
    """The way to the pool.

    Args:
        where: What the settings say.
        retry_s: At most so many seconds between two tries.
        changed: Called when the state is another.
    """

    def __init__(self, where: Where, retry_s: float, changed: Callable[[], object]) -> None:
        self._where = where
        self._retry_s = retry_s
        self._changed = changed
        self._connection: AsyncConnection | None = None
        self._lock = asyncio.Lock()
        self._next_try = 0.0
        self._tries = 0
        self._start = where.start
        #: Set whenever it is worth a try; cleared as one begins: what is asked for meanwhile is the next.
        self.wake = asyncio.Event()
        self.state = State.LOOKING
        self.error: PoolError | None = None

    @property
    def can_start(self) -> bool:
        """Whether an embedded pool could be started, as there is no other."""
        return self.error is not None and self.error.reason == Trouble.NOT_STARTED

    def pause(self) -> float:
        """Return after how many seconds the pool is to be looked for again."""
        return max(0.0, self._next_try - time.monotonic())

    def try_now(self, *, start: bool = False) -> None:
        """Look for the pool at the next call, whatever has just been tried.

        Args:
            start: Start an embedded pool if there is none.
        """
        self._next_try, self._tries = 0.0, 0
        if start:
            self._start = True
            self._set(State.STARTING, None)
        self.wake.set()

    async def send(self, call: Call) -> Any:
        """Make a call and return its answer's JSON.

        Raises:
            PoolError: The pool says no, or there is none.
        """
        connection = await self._connected()
        try:
            answer = await connection.send(call)
        except PoolError as error:
            if error.reason in LOST:
                await self._lose(error, connection)
            else:
                self._won()
            raise
        self._won()
        return answer

    async def _connected(self) -> AsyncConnection:
        async with self._lock:
            if self._connection is not None:
                return self._connection
            if self.error is not None and self.pause():
                raise _again(self.error)
            self.wake.clear()
            try:
                self._connection = await asyncio.to_thread(self._open)
            except PoolError as error:
                await self._lose(error, None)
                raise
            return self._connection

    def _open(self) -> AsyncConnection:
        load()
        start, self._start = self._start, self._where.start
        return AsyncConnection(self._where.find(start=start))

    async def _lose(self, error: PoolError, connection: AsyncConnection | None) -> None:
        if connection is self._connection:
            self._connection = None
            if not self.wake.is_set():
                self._rest()
                self._set(State.LOST, error)
        if connection is not None:
            with contextlib.suppress(Exception):  # what is lost may be closed in any way
                await connection.close()

    def _rest(self) -> None:
        self._next_try = time.monotonic() + min(self._retry_s, FIRST_RETRY_S * 2 ** min(self._tries, 10))
        self._tries += 1

    def _won(self) -> None:
        self._tries = 0
        self._set(State.CONNECTED, None)

    def _set(self, state: State, error: PoolError | None) -> None:
        before = (self.state, str(self.error or ""))
        self.state, self.error = state, error
        if before != (state, str(error or "")):
            self._changed()

    async def close(self) -> None:
        """Close what is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def _again(error: PoolError) -> PoolError:
    """Say an error once more: a raised exception keeps what it was raised through."""
    return PoolError(error.reason, error.sentence, error.advice, error.field)
