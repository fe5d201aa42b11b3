"""What is free, counted: for those who plan before they place.

Rule 1: only whole devices are counted; whether there is room for anything else, a placement says.
Rule 2: a mask says which devices a kind of slice could use: those that fit, and that take new work.

Not its business: where exactly something goes (`placement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core.model import WHOLE
from jupyter_gpupool.core.wants import Want, room

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.core.cluster import Cluster

#: True for each device (row, column) that a kind of slice could use.
Mask = np.ndarray


def usable(cluster: Cluster, want: Want) -> Mask:
    """Devices that a slice may use and that take new work."""
    mask: Mask = room(cluster, want).fits & (cluster.barred == 0)
    return mask


def overlap(cluster: Cluster, one: Want, other: Want) -> bool:
    """Whether there is a device that both could use, if it took new work."""
    if one == other:
        return True
    known = cluster.memo.setdefault("overlaps", {})
    assert isinstance(known, dict)
    if (one, other) not in known:
        known[one, other] = bool((room(cluster, one).fits & room(cluster, other).fits).any())
    return bool(known[one, other])


def wholly_free(cluster: Cluster, mask: Mask) -> int:
    """How many devices of a mask are wholly free."""
    return int(np.count_nonzero(mask & (cluster.free >= WHOLE)))


def wholly_free_devices(cluster: Cluster, mask: Mask) -> list[str]:
    """The devices of a mask that are wholly free, by node and index."""
    found = np.argwhere(mask & (cluster.free >= WHOLE)).tolist()
    return [cluster.devices_of(row)[column].uuid for row, column in found]


def other_than(cluster: Cluster, mask: Mask, devices: Iterable[str]) -> bool:
    """Whether a mask has devices with something free beside these."""
    left = mask & (cluster.free > 0)
    for device in devices:
        left[cluster.place_of(device)] = False
    return bool(left.any())


def wholly_free_by_node(cluster: Cluster, mask: Mask) -> dict[str, int]:
    """How many devices of a mask are wholly free on each node."""
    counts = (mask & (cluster.free >= WHOLE)).sum(axis=1).tolist()
    return {name: counts[row] for name, row in cluster.row_of.items()}


def all_of(cluster: Cluster, mask: Mask) -> bool:
    """Whether a mask leaves no device out."""
    return bool(np.count_nonzero(mask) == np.count_nonzero(cluster.vram))


def has(cluster: Cluster, mask: Mask, device: str) -> bool:
    """Whether a device is in a mask."""
    return bool(mask[cluster.place_of(device)])


def free_milli(cluster: Cluster) -> int:
    """Thousandths of devices that take new work and are free, together."""
    return int(np.where(cluster.barred == 0, cluster.free, 0).sum())


def most_of_host(cluster: Cluster, want: Want) -> tuple[int, int]:
    """The most host CPUs and memory that a slice would take on any node that it may use."""
    known = cluster.memo.setdefault("most_of_host", {})
    assert isinstance(known, dict)
    most: tuple[int, int] | None = known.get(want)
    if most is None:
        found = room(cluster, want)
        rows = found.fits.any(axis=1)
        cpus, memory = found.cpus[rows], found.memory[rows]
        most = known[want] = int(cpus.max(initial=want.cpus)), int(memory.max(initial=want.memory))
    return most


def most_charged(cluster: Cluster, want: Want) -> int:
    """The most thousandths that a slice would be charged on any device that it may use."""
    found = room(cluster, want)
    return max(1, int(found.charge[found.fits].max(initial=want.milli)))
