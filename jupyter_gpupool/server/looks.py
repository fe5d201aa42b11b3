"""Looks at the pool that serve everybody who asks at the same time, however many browser tabs there are.

Rule 1: the same question is with the pool once at a time, and its answer is good for a moment.
Rule 2: after a change through this server, or news from the pool, no older answer is given.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._http import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_gpupool.server.link import Link

#: So many answers are kept before those that are too old are let go.
KEPT = 100


@dataclass(slots=True)
class _Look:
    task: asyncio.Task[Any]
    #: Until when its answer is good; set when it is there.
    until: float = field(default=float("inf"))


class Looks:
    """Reads of the pool's API.

    Args:
        link: The way to the pool.
        fresh_s: For so many seconds an answer is good.
    """

    def __init__(self, link: Link, fresh_s: float) -> None:
        self._link = link
        self._fresh_s = fresh_s
        self._looks: dict[tuple[str, ...], _Look] = {}

    async def read(self, path: str, params: Mapping[str, str] | None = None, *, wait: float = 0.0) -> Any:
        """Read a path of the API, together with whoever asks for the same.

        Args:
            path: The path.
            params: The query.
            wait: Seconds that the pool is asked to hold the answer back.

        Raises:
            PoolError: The pool says no, or there is none.
        """
        key = (path, *(f"{name}={value}" for name, value in sorted((params or {}).items())))
        look = self._looks.get(key)
        if look is None or time.monotonic() > look.until:
            if len(self._looks) > KEPT:
                self._tidy()
            call = Call(method="GET", path=path, params=params or {}, wait=wait, repeatable=False)
            look = self._looks[key] = _Look(asyncio.ensure_future(self._link.send(call)))
            look.task.add_done_callback(lambda task: self._done(look, task, wait))
        return await asyncio.shield(look.task)

    def _done(self, look: _Look, task: asyncio.Task[Any], wait: float) -> None:
        failed = task.cancelled() or task.exception() is not None
        look.until = 0.0 if failed or wait else time.monotonic() + self._fresh_s

    def _tidy(self) -> None:
        now = time.monotonic()
        self._looks = {key: look for key, look in self._looks.items() if look.until > now}

    def forget(self) -> None:
        """Give no answer any more that was asked for before now."""
        self._looks.clear()


class Devices:
    """The pool's devices as last read, with this server's own numbers of their changes.

    The numbers begin with the time of the server's start, so that those of an earlier one are all older. They
    are not the pool's, for a server may come to another pool.

    Args:
        link: The way to the pool.
        fresh_s: For so many seconds a look serves everybody.
    """

    def __init__(self, link: Link, fresh_s: float) -> None:
        self._link = link
        self._fresh_s = fresh_s
        self._first = self.sequence = time.time_ns() // 1_000_000
        #: The pool's own number, to ask with; 0: ask for all.
        self._theirs = 0
        self._look: asyncio.Task[None] | None = None
        self._until = 0.0
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self._gone: dict[str, int] = {}
        self.simulated = False

    async def answer(self, since: int = 0) -> dict[str, Any]:
        """Return what is new after `since`, everything where that is no number of this server's.

        Raises:
            PoolError: The pool cannot be read.
        """
        if self._look is None or (self._look.done() and time.monotonic() > self._until):
            self._look = asyncio.ensure_future(self._renew())
        await asyncio.shield(self._look)
        full = not self._first < since <= self.sequence
        return {
            "devices": [row for at, row in self._rows.values() if full or at > since],
            "gone": [] if full else sorted(uuid for uuid, at in self._gone.items() if at > since),
            "sequence": self.sequence,
            "full": full,
            "simulated": self.simulated,
        }

    def forget(self, *, pool: bool = False) -> None:
        """Give no answer any more that was asked for before now; with `pool`, ask it for all."""
        self._look = None
        if pool:
            self._theirs = 0

    async def _renew(self) -> None:
        me, asked, self._until = asyncio.current_task(), self._theirs, 0.0
        params = {"since": str(asked)} if asked else {}
        answer = await self._link.send(
            Call(method="GET", path="/v1/devices", params=params, expects="sequence", repeatable=False)
        )
        if asked == self._theirs:  # else a later look was quicker
            self._take(answer, full=not asked)
        if me is self._look:
            self._until = time.monotonic() + self._fresh_s

    def _take(self, answer: dict[str, Any], *, full: bool) -> None:
        self._theirs, self.simulated = answer["sequence"], answer["simulated"]
        rows = {row["uuid"]: row for row in answer["devices"]}
        gone = set(self._rows) - set(rows) if full else set(answer["gone"]) & set(self._rows)
        if rows or gone or self.sequence == self._first:
            self.sequence += 1
        for uuid, row in rows.items():
            self._gone.pop(uuid, None)
            self._rows[uuid] = (self.sequence, row)
        for uuid in gone:
            del self._rows[uuid]
            self._gone[uuid] = self.sequence
        order = sorted(self._rows.items(), key=lambda each: (each[1][1]["node"], each[1][1]["index"]))
        self._rows = dict(order)
