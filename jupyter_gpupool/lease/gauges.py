"""GPU figures for Dask's dashboard, from the node's reader: Dask's own look at NVML is off in a lease.

That look stalls a worker when the driver hangs, and keeps a Nanny from restarting one when a GPU is lost. So
the node tells the host of a slice what it has read, the host its worker, and the worker's heartbeat carries
it to the scheduler under the names that Dask's pages look for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Worker
    from distributed.scheduler import Scheduler

#: Seconds after which a reading says nothing any more: some polls have been missed.
STALE = 60.0
#: Name of a metric on Dask's GPU page -> name of the node's figure.
METRICS = {
    "gpu_utilization": "utilisation",
    "gpu_memory_used": "memory_used",
    "gpu-memory-total": "memory",
}
#: Beside these, the name under which Dask's page about RMM looks for the same.
GROUP = "gpu"
#: The page that Dask lists only where its own look at NVML is on, and the one that it stands before.
PAGE, NEXT = "gpu", "profile"


class Gauges:
    """What one worker says of its GPU with each heartbeat.

    Args:
        worker: Its metrics are added to.
        memory: Bytes that its slice has; 0: not known.
    """

    def __init__(self, worker: Worker, memory: int = 0) -> None:
        self._read: dict[str, Any] = {}
        self._at = float("-inf")
        for name, figure in METRICS.items():
            worker.metrics[name] = self._says(figure)
        worker.metrics[GROUP] = lambda _: {
            "utilization": self.get("utilisation"),
            "memory-used": self.get("memory_used"),
        }
        if memory:
            worker.startup_information[GROUP] = lambda _: {"memory-total": memory}

    def show(self, figures: dict[str, Any]) -> None:
        """Take what the node has read.

        Args:
            figures: As `node.gauges.figures` writes them.
        """
        self._read, self._at = figures, time.monotonic()

    def get(self, figure: str) -> Any:
        """Give a figure of the last reading.

        Raises:
            LookupError: There is none, or it is too old; Dask leaves the metric out then.
        """
        if time.monotonic() - self._at > STALE:
            raise LookupError(f"there is no reading with {figure} of the last {STALE:.0f} s")
        return self._read[figure]

    def _says(self, figure: str) -> Callable[[Worker], Any]:
        return lambda _worker: self.get(figure)


def list_page(scheduler: Scheduler) -> None:
    """Have the GPU page among those at the top of the dashboard.

    Args:
        scheduler: Whose dashboard.
    """
    from distributed.dashboard.scheduler import template_variables

    pages = template_variables(scheduler)["pages"]
    if PAGE not in pages:
        pages.insert(pages.index(NEXT), PAGE)
