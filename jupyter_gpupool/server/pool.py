"""The pool as this server has it: the way to it, looks at it, its news, tickets; one for all handlers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._http import PoolError
from jupyter_gpupool.server.link import Link, State, Where
from jupyter_gpupool.server.looks import Devices, Looks
from jupyter_gpupool.server.news import News
from jupyter_gpupool.server.tickets import Tickets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ServerPool:
    """The pool of one server.

    Args:
        where: Which pool.
        emit: Puts data on the event bus, by the name of its schema.
        fresh_s: For so many seconds a look serves everybody.
        poll_s: For so many seconds the pool is asked to hold a question for news.
        retry_s: At most so many seconds between two tries to reach it.
        ticket_s: How long a dashboard's address works, in seconds.
    """

    def __init__(
        self,
        where: Where,
        emit: Callable[[str, Mapping[str, Any]], None],
        *,
        fresh_s: float,
        poll_s: float,
        retry_s: float,
        ticket_s: float,
    ) -> None:
        self._emit = emit
        self.link = Link(where, retry_s, self._changed)
        self.looks = Looks(self.link, fresh_s)
        self.devices = Devices(self.link, fresh_s)
        self.news = News(self.link, emit, self.forget, poll_s)
        self.tickets = Tickets(ticket_s)
        #: What fetches the pages of dashboards, once one is opened.
        self.fetcher: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask for news, if that has not begun; called in the server's event loop."""
        if self._task is None:
            self._task = asyncio.ensure_future(self.news.run())

    async def close(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if self.fetcher is not None:
            self.fetcher.close()
            self.fetcher = None
        await self.link.close()

    def forget(self) -> None:
        """Give no answer any more that was asked for before now: something has changed."""
        self.looks.forget()
        self.devices.forget()

    def try_now(self, *, start: bool) -> None:
        """Look for the pool now, or start one on this machine."""
        self.link.try_now(start=start)
        self.start()

    async def stand(self) -> dict[str, Any]:
        """Say how this server stands with its pool, and what the pool says of itself."""
        pool = None
        if self.link.state not in (State.STARTING, State.LOST):
            with contextlib.suppress(PoolError):
                pool = await self.looks.read("/v1/pool")
        return {**self._state(), "can_start": self.link.can_start, "pool": pool}

    def _state(self) -> dict[str, Any]:
        state, error = self.link.state, self.link.error
        return {
            "state": str(state),
            "reason": str(error.reason) if error else "",
            "sentence": error.sentence if error else "",
            "advice": error.advice if error else "",
        }

    def _changed(self) -> None:
        if self.link.state is State.LOST:
            self.looks.forget()
            self.devices.forget(pool=True)
        self._emit("pool", {**self._state(), "missed": False})
