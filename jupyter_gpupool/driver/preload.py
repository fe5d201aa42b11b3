"""Preload of every Dask worker that the pool starts, on real and on simulated GPUs.

Pass it as `CUDAWorker(preload=["jupyter_gpupool.driver.preload"])`: dask-cuda always passes a list of its
own, so that Dask never looks at `distributed.worker.preload` of the configuration.

NVML polling by Dask is off in the pool's processes (`distributed.diagnostics.nvml: False`; it stalls a worker
whose GPU is lost). dask-cuda's own preload, which makes the CUDA context, then finds NVML not initialised and
gives up with "Unable to start CUDA Context". So this one, which comes first, initialises NVML. Nothing is
silenced: a context that cannot be made is still logged.
"""

from __future__ import annotations

import logging
from typing import Any

from jupyter_gpupool.driver import simulated

logger = logging.getLogger(__name__)


def dask_setup(worker: Any) -> None:
    """Make NVML ready in this worker process before dask-cuda makes its CUDA context."""
    simulated.dask_setup(worker)
    from jupyter_gpupool.driver import nvml

    reason = nvml.prepare()
    if reason:
        logger.warning("The worker starts without NVML: %s", reason)
