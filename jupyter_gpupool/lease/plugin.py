"""What a lease's scheduler does for the pool: lets workers go without losing work, and says how it fares."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from distributed import SchedulerPlugin

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from jupyter_gpupool.lease.link import Link


class LeasePlugin(SchedulerPlugin):
    """The pool's hand in a lease's scheduler."""

    name = "gpupool"

    def __init__(self) -> None:
        self._state: dict[str, Any] = {"report": "starting"}
        self._link: Link | None = None
        self._scheduler: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def state(self) -> dict[str, Any]:
        """Everything that a new agent must know."""
        return self._state

    def attach(self, link: Link) -> None:
        """Say what happens over this link."""
        self._link = link

    def serves(self, address: str, dashboard: str) -> None:
        """Note that the scheduler answers."""
        self._state = {"report": "ready", "address": address, "dashboard": dashboard}

    def failed(self, why: str) -> None:
        """Note that the scheduler could not be started."""
        self._state = {"report": "failed", "why": why}

    async def start(self, scheduler: Any) -> None:
        """Dask's hook: the scheduler starts."""
        self._scheduler = scheduler

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out an agent's order."""
        if order.get("order") == "end":
            self._do(self._scheduler.close(reason="lease-ended"))

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
