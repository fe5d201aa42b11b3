"""This process, as far as a pool must know it, and its environment once it has a lease's device.

CUDA reads CUDA_VISIBLE_DEVICES when it is initialised, once for the life of a process: what comes later it
does not see. So whether it is initialised is asked of the driver library itself, whoever has loaded it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from jupyter_gpupool._http import PoolError, Trouble

#: What the driver answers to whoever asks before `cuInit`.
_NOT_INITIALISED = 3


def this_process(lease: str) -> dict[str, Any]:
    """Return PID, start time (clock ticks since boot) and boot of this process.

    Args:
        lease: The lease's name, for the sentence of a no.

    Raises:
        PoolError: It cannot have a lease's device.
    """
    if initialised():
        raise PoolError(
            Trouble.CUDA_INITIALISED,
            "CUDA is initialised in this process already: it keeps the devices that it sees.",
            f"Restart the kernel, and run `%gpupool attach {lease}` before anything that uses a GPU.",
        )
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise PoolError(
            Trouble.NOT_LINUX,
            "Only a process on Linux can be attached to a lease.",
            "Cells (`%%gpupool`) and `lease.client()` reach its devices from anywhere.",
        ) from error
    return {"pid": os.getpid(), "started": int(fields[19]), "boot": boot}


def initialised() -> bool:
    """Return whether CUDA, real or simulated, is initialised in this process."""
    simulated = sys.modules.get("jupyter_gpupool.driver.simulated.cuda")
    if getattr(simulated, "_context", None) is not None:
        return True
    try:
        loaded = "libcuda.so" in Path("/proc/self/maps").read_text()
        if not loaded:
            return False
        count = ctypes.c_int()
        answer: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    except OSError:
        return False
    return answer != _NOT_INITIALISED


def take(answer: dict[str, Any]) -> None:
    """Make the devices of a lease those that this process, and what it starts, sees."""
    os.environ.update(answer["environ"])
