"""What a slice's device does, in the figures of Dask's dashboard: Dask itself does not ask the driver.

Rule 1: memory is the slice's. Of a whole device it is all that is used there; of a share or a MIG instance it
        is what the slice's own processes have, out of what it may have: a neighbour's is not its business.
Rule 2: utilisation is the device's, for the driver does not tell it by process; in MIG mode there is none.
Rule 3: a device that answers with an error has no figures.

Not its business: when there is a reading (`reader`), and how the dashboard gets the figures (`lease.gauges`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.core.model import Reading, Slice


def figures(part: Slice, reading: Reading, owner: Callable[[int], str]) -> dict[str, Any]:
    """Write what a reading says of a slice; empty where it says nothing.

    Args:
        part: The slice, on the reading's device.
        reading: What was read of the device.
        owner: Says whose a process is: a slice's id, or another text.
    """
    if reading.error:
        return {}
    used = reading.memory_used
    if part.instance is not None or part.milli < WHOLE:
        used = sum(size for pid, size in reading.processes if owner(pid) == part.id)
    return {"utilisation": reading.utilisation, "memory_used": used or 0, "memory": part.vram}
