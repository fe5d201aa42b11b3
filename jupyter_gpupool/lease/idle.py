"""Whether a lease does anything: a claim, which counts only together with its devices' utilisation.

Idle is a lease without tasks to run and without calls on its workers. A client that is merely connected keeps
nothing.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

if TYPE_CHECKING:
    from collections.abc import Callable

#: Milliseconds between two looks, and from the last work to the claim that there is none.
_LOOK, _QUIET = 5_000, 10_000
#: Scheduler operations that are work done for a person without being tasks.
CALLS = ("broadcast", "scatter", "gather", "run_function", "replicate", "rebalance", "update_data")


class IdleWatch:
    """Says when a lease has become idle, and when it works again."""

    def __init__(self, scheduler: Any, say: Callable[[dict[str, Any]], None]) -> None:
        self._scheduler = scheduler
        self._say = say
        self._last = time.monotonic()
        self._transitions = scheduler.transition_counter
        self._said_idle = False
        self._callback = PeriodicCallback(self.look, _LOOK)

    def start(self) -> None:
        """Begin to watch."""
        for name in CALLS:
            self._scheduler.handlers[name] = self.noted(self._scheduler.handlers[name])
        self._callback.start()

    def stop(self) -> None:
        """End watching."""
        self._callback.stop()

    def touch(self) -> None:
        """Note that the lease does something."""
        self._last = time.monotonic()
        if self._said_idle:
            self._said_idle = False
            self._say({"report": "busy"})

    def noted(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an operation of the scheduler's, so that it counts as work."""

        @functools.wraps(handler)  # Dask looks at what a handler takes
        def noted(*arguments: Any, **options: Any) -> Any:
            self.touch()
            return handler(*arguments, **options)

        return noted

    def look(self) -> None:
        """Look at the scheduler, and say what has changed."""
        if self._is_busy():
            self.touch()
        elif not self._said_idle and (time.monotonic() - self._last) * 1000 >= _QUIET:
            self._said_idle = True
            self._say({"report": "idle", "since": int(self._last * 1000)})

    def _is_busy(self) -> bool:
        scheduler = self._scheduler
        before, self._transitions = self._transitions, scheduler.transition_counter
        if before != self._transitions or scheduler.queued or scheduler.unrunnable:
            return True
        return any(worker.processing for worker in scheduler.workers.values())
