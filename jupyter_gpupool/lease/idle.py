"""Whether a lease does anything: a claim, which counts only together with its devices' utilisation.

Idle is a lease without tasks to run and without calls of its clients. A client that is merely connected keeps
nothing: its heartbeats do not count, nor does what it, a dashboard or an adaptive cluster looks at by itself.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

if TYPE_CHECKING:
    from collections.abc import Callable

#: Milliseconds between two looks, and from the last work to the claim that there is none; less where the
#: lease's own time-out is short.
_LOOK, _QUIET = 5_000, 10_000
#: Seconds after which an idle lease says so again: the controller may have died meanwhile.
_AGAIN = 60.0
#: Scheduler operations that a person's code calls without their being tasks.
CALLS = (
    *("broadcast", "proxy", "run_function", "scatter", "gather", "update_data", "replicate", "rebalance"),
    *("retry", "restart", "restart_workers", "retire_workers", "set_restrictions", "set_resources"),
    *("register_scheduler_plugin", "unregister_scheduler_plugin", "benchmark_hardware"),
    *("register_worker_plugin", "unregister_worker_plugin"),
    *("register_nanny_plugin", "unregister_nanny_plugin"),
    *("set_metadata", "log_event", "start_task_metadata", "stop_task_metadata"),
    *("publish_put", "publish_get", "publish_delete", "publish_list"),
    *("queue_create", "queue_put", "queue_get", "variable_set", "variable_get", "event_set", "event_wait"),
)


class IdleWatch:
    """Says when a lease has become idle, and when it works again.

    Args:
        scheduler: The lease's.
        say: Called with a report.
        timeout: After how many milliseconds the pool counts the lease as idle; 0 or less: nothing special.
    """

    def __init__(self, scheduler: Any, say: Callable[[dict[str, Any]], None], timeout: int = 0) -> None:
        self._quiet = min(_QUIET, timeout // 2) if timeout > 0 else _QUIET
        self._scheduler = scheduler
        self._say = say
        self._last = time.monotonic()
        self._transitions = scheduler.transition_counter
        self._said_idle = False
        self._said_at = 0.0
        self._callback = PeriodicCallback(self.look, min(_LOOK, max(100, self._quiet // 2)))

    def start(self) -> None:
        """Begin to watch."""
        for name in CALLS:
            if name in self._scheduler.handlers:
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
        elif self._is_to_say(time.monotonic()):
            self._said_idle, self._said_at = True, time.monotonic()
            self._say({"report": "idle", "since": int(self._last * 1000)})

    def _is_to_say(self, now: float) -> bool:
        if self._said_idle:
            return now - self._said_at >= _AGAIN
        return (now - self._last) * 1000 >= self._quiet

    def _is_busy(self) -> bool:
        scheduler = self._scheduler
        before, self._transitions = self._transitions, scheduler.transition_counter
        if before != self._transitions or scheduler.queued or scheduler.unrunnable:
            return True
        return any(worker.processing for worker in scheduler.workers.values())
