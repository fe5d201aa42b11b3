"""Simulated NVIDIA machines beneath the real `pynvml`: everything above the driver library is the real thing.

`create` makes them, `environment` puts a process onto a node, `install` puts the simulated driver under
`pynvml` in that process, `Machine` changes them while work runs, and `dask_setup` (a Dask worker preload)
lets faults hurt. Tasks may use `malloc`, `free`, `fault` and `busy` where real ones would call CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.driver.simulated.cuda import (
    CUDARuntimeError,
    OutOfMemoryError,
    active,
    allocated,
    busy,
    check,
    fault,
    free,
    malloc,
)
from jupyter_gpupool.driver.simulated.machine import Machine
from jupyter_gpupool.driver.simulated.models import MODELS
from jupyter_gpupool.driver.simulated.state import configured, create, environment

if TYPE_CHECKING:
    from jupyter_gpupool.driver.simulated.library import Library

__all__ = [
    "MODELS",
    "CUDARuntimeError",
    "Machine",
    "OutOfMemoryError",
    "active",
    "allocated",
    "busy",
    "check",
    "create",
    "dask_setup",
    "environment",
    "fault",
    "free",
    "install",
    "malloc",
]

_installed: Library | None = None


def install() -> bool:
    """Put the simulated driver under `pynvml` in this process, where its environment names one.

    Returns:
        Whether this process is on a simulated machine.
    """
    global _installed  # noqa: PLW0603 (pynvml has one library a process)
    found = configured()
    if found is None:
        return False
    if _installed is None or (str(_installed.state.path), _installed.node) != found:
        from jupyter_gpupool.driver import nvml
        from jupyter_gpupool.driver.simulated import load

        _installed = load.library(*found)
        nvml.use_library(_installed)
    return True


def dask_setup(worker: Any) -> None:
    """Preload of a Dask worker: the simulated driver, and faults that hurt its tasks and results."""
    if install():
        from jupyter_gpupool.driver import nvml
        from jupyter_gpupool.driver.simulated import tasks

        nvml.prepare()
        tasks.attach(worker)
