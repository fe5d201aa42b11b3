"""Which MIG instance of which device: those that exist, and those to be made.

Rule 1: one that exists and is offered as it is goes before one to be made.
Rule 2: else the place that costs others least; of those the fullest device.

Not its business: what may be where on one device (`mig`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.learned import learned
from jupyter_gpupool.core.model import Instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.cluster import Cluster
    from jupyter_gpupool.core.model import MigProfile
    from jupyter_gpupool.core.wants import Room

#: Weights are kept as multiples of 2 ** -20.
_SHIFT = 20


def rooms(cluster: Cluster, found: Room, rows: np.ndarray) -> np.ndarray:
    """How many instances each device of these rows has room for, those that exist included."""
    counts = _offered(cluster, found, rows)
    for geometry, profile, at, masks in _kinds(cluster, found, rows):
        room = mig.room(geometry, profile)[masks]
        if mig.limited(geometry, profile):
            room = np.minimum(room, profile.most - _there(cluster, profile, rows)[at])
        counts[at] += room
    return counts


def _there(cluster: Cluster, profile: MigProfile, rows: np.ndarray) -> np.ndarray:
    """How many instances of a profile each device of these rows has already."""
    counts = np.zeros((len(rows), cluster.width), dtype=np.int64)
    for place, row in enumerate(rows):
        for column, device in enumerate(cluster.devices_of(int(row))):
            parts = [taken.part for taken in cluster.taken_of(device.uuid)]
            counts[place, column] = sum(
                part.instance is not None and part.instance.profile == profile.name for part in parts
            )
    return counts


def cost(cluster: Cluster, found: Room, rows: np.ndarray) -> np.ndarray:
    """What the best instance on each device costs others; meaningless where there is no room."""
    costs = np.zeros((len(rows), cluster.width), dtype=np.int64)
    for geometry, profile, at, masks in _kinds(cluster, found, rows):
        unused = geometry.slots - sum((masks >> slot & 1 for slot in range(geometry.slots)), start=0 * masks)
        loss = mig.places(geometry, profile, _value(cluster, geometry)).loss[masks]
        costs[at] = loss * 32 + unused
    costs[_offered(cluster, found, rows) > 0] = -1
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
    start = int(mig.places(geometry, profile, _value(cluster, geometry)).start[mask])
    if start < 0:
        return None
    return Instance(profile=profile.name, start=start, size=profile.size, memory=profile.memory, made=True)


def _kinds(
    cluster: Cluster, found: Room, rows: np.ndarray
) -> Iterator[tuple[mig.Geometry, MigProfile, np.ndarray, np.ndarray]]:
    """Per geometry: the wanted profile, which devices have it, and of these the slices that are taken."""
    masks, kinds = cluster.mask[rows] | cluster.fixed[rows], cluster.geometry[rows]
    for number, profile in enumerate(found.profiles):
        geometry = cluster.geometries[number]
        if geometry is not None and profile is not None:
            at = kinds == number
            yield geometry, profile, at, masks[at] & (1 << geometry.slots) - 1


def _value(cluster: Cluster, geometry: mig.Geometry) -> np.ndarray:
    """By the slices that are taken: what the rest of a device is worth to those who usually ask.

    A profile's room counts by how often it is asked for, over how much room for it there is in all: what is
    scarce is dear. (The gradient of the sum of the logarithms of the rooms.)
    """
    now = (cluster.mark(), cluster.demand.generation)
    kept = cluster.memo.get(("values", geometry))
    if isinstance(kept, tuple) and kept[0] == now:
        found: np.ndarray = kept[1]
        return found
    table = mig.rooms(geometry)
    at = (cluster.geometry == cluster.geometries.index(geometry)) & (cluster.barred == 0)
    masks = (cluster.mask | cluster.fixed)[at] & (1 << geometry.slots) - 1
    there = table @ np.bincount(masks, minlength=1 << geometry.slots)
    value: np.ndarray = (learned(cluster).profiles(geometry) << _SHIFT) // (1 + there) @ table
    cluster.memo["values", geometry] = (now, value)
    return value


def _offered(cluster: Cluster, found: Room, rows: np.ndarray) -> np.ndarray:
    """How many free instances of the wanted profile each device of these rows offers as they are."""
    counts = np.zeros((len(rows), cluster.width), dtype=np.int64)
    for place, row in enumerate(rows) if cluster.offering else ():
        for column, device in enumerate(cluster.devices_of(int(row))):
            profile = found.profiles[int(cluster.geometry[row, column])] if device.mig else None
            if profile is not None and device.uuid in cluster.offering:
                counts[place, column] = len(cluster.free_offers(device.uuid, profile.name))
    return counts
