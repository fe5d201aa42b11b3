"""MIG: what a device can be cut into, where an instance may be, and where it does the least harm.

Rule 1: a place is exact: memory slices `[start, start + size)`. Two instances never share a slice.
Rule 2: what the driver says of its profiles counts. The tables here are NVIDIA's published ones, for devices
        whose driver says nothing and for the tests.
Rule 3: an instance is charged the memory slices that it takes, so that a device's sum is never above it.
Rule 4: among legal places the one is taken that leaves the most room for what is asked for: a careless 1g
        at 0 forbids the 4g and the 7g. Equal ones from the top down.

Not its business: which device (`ranking`), and the driver's calls (`driver.partitions`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core.model import MIB, WHOLE, Instance, MigProfile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_gpupool.core.model import Device

_Shape = tuple[int, str, int, tuple[int, ...], int]
#: Columns: compute slices, suffix of the name, memory slices, starts, how many there can be.
_SEVEN: tuple[_Shape, ...] = (
    (1, "", 1, (0, 1, 2, 3, 4, 5, 6), 7),
    (1, "+me", 1, (0, 1, 2, 3, 4, 5, 6), 1),
    (1, "", 2, (0, 2, 4, 6), 4),
    (2, "", 2, (0, 2, 4), 3),
    (3, "", 4, (0, 4), 2),
    (4, "", 4, (0,), 1),
    (7, "", 8, (0,), 1),
)
_FOUR: tuple[_Shape, ...] = (
    (1, "", 1, (0, 1, 2, 3), 4),
    (1, "+me", 1, (0, 1, 2, 3), 1),
    (2, "", 2, (0, 2), 2),
    (2, "+me", 2, (0, 2), 1),
    (4, "", 4, (0,), 1),
)
#: Beginning of the model's short name, its GB at most, shapes, and by memory slices: GB in the name, MiB.
_MODELS = (
    ("A100", 50, _SEVEN, {1: (5, 4864), 2: (10, 9856), 4: (20, 19968), 8: (40, 40192)}),
    ("A100", 90, _SEVEN, {1: (10, 9856), 2: (20, 19968), 4: (40, 40192), 8: (80, 80384)}),
    ("H100", 90, _SEVEN, {1: (10, 9856), 2: (20, 19968), 4: (40, 40192), 8: (80, 80384)}),
    ("H100", 110, _SEVEN, {1: (12, 11264), 2: (24, 22528), 4: (47, 47104), 8: (94, 94208)}),
    ("H200", 160, _SEVEN, {1: (18, 16384), 2: (35, 33280), 4: (71, 71168), 8: (141, 143360)}),
    ("B200", 200, _SEVEN, {1: (23, 21504), 2: (45, 43520), 4: (90, 88064), 8: (180, 180224)}),
    ("A30", 30, _FOUR, {1: (6, 5952), 2: (12, 12032), 4: (24, 24002)}),
)
#: How often each kind is asked for before anything is known, by memory slices.
_PRIOR = {1: 4, 2: 3, 4: 2, 8: 1}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a kind of device can be cut into."""

    profiles: tuple[MigProfile, ...]

    @property
    def slots(self) -> int:
        """Memory slices of the whole device."""
        return max(each.size + max(each.starts) for each in self.profiles)

    def profile(self, name: str) -> MigProfile | None:
        """The profile of that name."""
        return next((each for each in self.profiles if each.name == name), None)

    def milli(self, profile: MigProfile) -> int:
        """Thousandths of the device that an instance is charged."""
        return profile.size * WHOLE // self.slots

    def legal(self, instance: Instance) -> bool:
        """The device has such a profile, and it may start there."""
        found = self.profile(instance.profile)
        return found is not None and found.size == instance.size and instance.start in found.starts


def geometry_of(device: Device) -> Geometry | None:
    """What a device can be cut into, as its driver says or as its model's are; None: not known."""
    return Geometry(device.profiles) if device.profiles else built_in(device.model, device.memory)


@functools.cache
def built_in(model: str, memory: int) -> Geometry | None:
    """The published geometry of a model with that many bytes of memory, if there is one."""
    for name, most, shapes, sizes in _MODELS:
        if model.upper().replace("GB200", "B200").startswith(name) and memory <= most * 10**9:
            return Geometry(tuple(_profile(shape, *sizes[shape[2]]) for shape in shapes))
    return None


def _profile(shape: _Shape, gigabytes: int, mib: int) -> MigProfile:
    compute, suffix, size, starts, most = shape
    name = f"{compute}g.{gigabytes}gb{suffix}"
    return MigProfile(name=name, size=size, starts=starts, compute=compute, memory=mib * MIB, most=most)


def bits(instance: Instance | None) -> int:
    """The memory slices of an instance, as bits."""
    return 0 if instance is None else span(instance.start, instance.size)


def span(start: int, size: int) -> int:
    """Memory slices `[start, start + size)`, as bits."""
    return ((1 << size) - 1) << start


def suiting(geometry: Geometry, name: str, memory: int, milli: int) -> tuple[MigProfile, ...]:
    """The profiles that meet a request, the smallest first.

    Args:
        geometry: Of which device.
        name: The profile by name; "": by need.
        memory: bytes that it must have at least.
        milli: Thousandths of the device that it must be at least.
    """
    if name:
        found = geometry.profile(name)
        return (found,) if found and found.memory >= memory else ()
    fit = [
        each
        for each in geometry.profiles
        if each.memory >= memory and each.size * WHOLE >= milli * geometry.slots and "+" not in each.name
    ]
    return tuple(sorted(fit, key=lambda each: (each.size, each.compute, each.name)))


@functools.lru_cache(maxsize=256)
def room(geometry: Geometry, profile: MigProfile) -> tuple[int, ...]:
    """By the slices that are taken (as bits): how many instances of a profile have room together."""
    spans = [span(start, profile.size) for start in profile.starts]
    full = 1 << geometry.slots
    table = [0] * full
    for mask in range(full - 1, -1, -1):
        table[mask] = max((1 + table[mask | each] for each in spans if not mask & each), default=0)
    return tuple(min(count, profile.most or count) for count in table)


@functools.lru_cache(maxsize=64)
def worth(geometry: Geometry, weights: tuple[tuple[str, int], ...] = ()) -> tuple[int, ...]:
    """By the slices that are taken: what the rest is worth to those who usually ask.

    For each profile the slices that its instances could fill, weighted by how often it is asked for.
    """
    asked = dict(weights)
    total = [0] * (1 << geometry.slots)
    for profile in geometry.profiles:
        if "+" in profile.name:
            continue
        weight = _PRIOR.get(profile.size, 1) + asked.get(profile.name, 0) * 10
        for mask, count in enumerate(room(geometry, profile)):
            total[mask] += weight * count * profile.size
    return tuple(total)


@dataclass(frozen=True, slots=True)
class Places:
    """By the slices that are taken: where an instance goes best, what is lost by it, and how many fit."""

    #: -1: nowhere
    start: np.ndarray
    loss: np.ndarray
    room: np.ndarray


@functools.lru_cache(maxsize=256)
def places(geometry: Geometry, profile: MigProfile, weights: tuple[tuple[str, int], ...] = ()) -> Places:
    """Work out the best place of a profile for every state of a device."""
    value, own = worth(geometry, weights), room(geometry, profile)
    start = np.full(len(value), -1, dtype=np.int64)
    loss = np.zeros(len(value), dtype=np.int64)
    for mask in range(len(value)):
        free = [at for at in profile.starts if not mask & span(at, profile.size)]
        after = {at: mask | span(at, profile.size) for at in free}
        # First what keeps most room for more of the same, then for others, then from the top down.
        best = min(free, key=lambda at: (-own[after[at]], -value[after[at]], -at), default=-1)
        if best >= 0:
            start[mask], loss[mask] = best, value[mask] - value[after[best]]
    return Places(start, loss, np.array(own, dtype=np.int64))


def layouts(geometry: Geometry) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Every legal layout, the empty one first: sorted (profile, start) of its instances."""
    found: dict[tuple[tuple[str, int], ...], None] = {(): None}

    def grow(layout: tuple[tuple[str, int], ...], mask: int) -> None:
        for profile in geometry.profiles:
            same = sum(name == profile.name for name, _ in layout)
            for start in profile.starts:
                bits_ = span(start, profile.size)
                larger = tuple(sorted((*layout, (profile.name, start))))
                if not mask & bits_ and same < (profile.most or WHOLE) and larger not in found:
                    found[larger] = None
                    grow(larger, mask | bits_)

    grow((), 0)
    return tuple(found)


def weights_of(counts: Mapping[str, int], most: int = 16) -> tuple[tuple[str, int], ...]:
    """Counts of profiles that were asked for, as sixteenths of the largest: so they seldom change."""
    top = max(counts.values(), default=0)
    coarse = ((name, -(-count * most // top)) for name, count in sorted(counts.items()) if count > 0)
    return tuple(coarse) if top else ()
