"""Those who wait for news: however many they are, each is woken only when there is some for them.

Strategy: one task waits for the controller's changes and asks each waiter's own cheap question. Waking them
all at each change, to look for themselves, would cost more than everything else when there are hundreds.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.controller.face import ControllerFace

#: Seconds after which the questions are asked again even if nothing has changed.
ROUND_S = 5.0


class Waiters:
    """All who wait.

    Args:
        controller: Whose changes they wait for.
    """

    def __init__(self, controller: ControllerFace) -> None:
        self._controller = controller
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._task: asyncio.Task[None] | None = None

    async def until(self, ready: Callable[[], bool], end: float) -> bool:
        """Wait until `ready` says so, and return whether it did.

        Args:
            ready: Asked after each change of the controller's; cheap.
            end: The event loop's time after which not to wait any longer.
        """
        if ready():
            return True
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = ready
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._ask())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(end):
                    await future
        finally:
            del self._waiting[future]
        return future.done() and not future.cancelled()

    async def _ask(self) -> None:
        """Ask everybody's question after each change, for as long as there is anybody."""
        while self._waiting:
            for future, ready in self._waiting.items():
                if not future.done() and ready():
                    future.set_result(None)
            await self._controller.changed(ROUND_S)

    def close(self) -> None:
        """Stop to ask."""
        if self._task:
            self._task.cancel()
