"""Which MIG instance of which device: those that exist, and those to be made.

Rule 1: one that exists and is offered as it is goes before one to be made.
Rule 2: else the place that costs others least; of those the fullest device.

Not its business: what may be where on one device (`mig`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import Instance

if TYPE_CHECKING:
    from jupyter_gpupool.core.cluster import Cluster
    from jupyter_gpupool.core.wants import Room


def rooms(cluster: Cluster, found: Room, rows: np.ndarray) -> np.ndarray:
    """How many instances each device of these rows has room for, those that exist included."""
    counts: np.ndarray = _look_up(cluster, found, rows, "room", 0) + _offered(cluster, found, rows)
    return counts


def cost(cluster: Cluster, found: Room, rows: np.ndarray) -> np.ndarray:
    """What the best instance on each device costs others; meaningless where there is no room."""
    offered = _offered(cluster, found, rows) > 0
    loss = np.where(offered, -1, _look_up(cluster, found, rows, "loss", 0))
    masks = cluster.mask[rows] | cluster.fixed[rows]
    unused: np.ndarray = 16 - sum((masks >> slot & 1 for slot in range(16)), start=np.zeros_like(masks))
    costs: np.ndarray = loss * 32 + unused
    return costs


def best(cluster: Cluster, found: Room, row: int, column: int) -> Instance | None:
    """The instance that a device would give; None where it has no room."""
    number = int(cluster.geometry[row, column])
    geometry, profile = cluster.geometries[number], found.profiles[number]
    if number <= 0 or geometry is None or profile is None:
        return None
    offers = cluster.free_offers(cluster.devices_of(row)[column].uuid, profile.name)
    if offers:
        return max(offers, key=lambda each: each.start)
    mask = int(cluster.mask[row, column] | cluster.fixed[row, column]) & (1 << geometry.slots) - 1
    start = int(mig.places(geometry, profile, weights(cluster)).start[mask])
    if start < 0:
        return None
    return Instance(profile=profile.name, start=start, size=profile.size, memory=profile.memory, made=True)


def weights(cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """How often each profile is asked for."""
    key = ("profiles", cluster.demand.generation)
    found = cluster.memo.get(key)
    if not isinstance(found, tuple):
        counts: dict[str, int] = {}
        for shape, times in cluster.demand.usual:
            if shape.mig and shape.mig != "?":
                counts[shape.mig] = counts.get(shape.mig, 0) + times
        found = cluster.memo[key] = mig.weights_of(counts)
    return found


def _look_up(cluster: Cluster, found: Room, rows: np.ndarray, table: str, nothing: int) -> np.ndarray:
    """What a table says of each device of these rows by the memory slices that are not to be had."""
    masks, kinds = cluster.mask[rows] | cluster.fixed[rows], cluster.geometry[rows]
    values = np.full(masks.shape, nothing, dtype=np.int64)
    for number, profile in enumerate(found.profiles):
        geometry = cluster.geometries[number]
        if geometry is None or profile is None:
            continue
        at = kinds == number
        places = mig.places(geometry, profile, weights(cluster))
        values[at] = getattr(places, table)[masks[at] & (1 << geometry.slots) - 1]
    return values


def _offered(cluster: Cluster, found: Room, rows: np.ndarray) -> np.ndarray:
    """How many free instances of the wanted profile each device of these rows offers as they are."""
    counts = np.zeros((len(rows), cluster.width), dtype=np.int64)
    for place, row in enumerate(rows) if cluster.offering else ():
        for column, device in enumerate(cluster.devices_of(int(row))):
            profile = found.profiles[int(cluster.geometry[row, column])] if device.mig else None
            if profile is not None and device.uuid in cluster.offering:
                counts[place, column] = len(cluster.free_offers(device.uuid, profile.name))
    return counts
