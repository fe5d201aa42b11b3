"""The worker class of a lease: Dask's worker, which can be told from others by what it leaves behind."""

from __future__ import annotations

import os
from typing import Any

from distributed import Worker

from jupyter_gpupool.lease import process
from jupyter_gpupool.lease.settings import HEARTBEAT


class LeaseWorker(Worker):
    """A worker of one slice."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # A Nanny's worker is forked from the launcher's forkserver: nothing but this says whose it is.
        if mark := os.environ.get(process.MARK, "").rstrip("."):
            process.enter(mark, {})
        super().__init__(*arguments, **options)

    async def heartbeat(self) -> None:
        """Say that the worker is alive, less often than Dask would."""
        await super().heartbeat()
        callback = self.periodic_callbacks["heartbeat"]
        callback.callback_time = max(callback.callback_time, HEARTBEAT)


def dask_setup(worker: Any) -> None:
    """Open NVML before dask-cuda's own preload needs it: Dask's monitoring, which would, is off."""
