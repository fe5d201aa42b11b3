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

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core.model import MIB, WHOLE, Instance, MigProfile

if TYPE_CHECKING:
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
#: More than any loss.
_NEVER = 1 << 56


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
def room(geometry: Geometry, profile: MigProfile) -> np.ndarray:
    """By the slices that are taken (as bits): how many instances of a profile have room together."""
    spans = [span(start, profile.size) for start in profile.starts]
    full = 1 << geometry.slots
    table = [0] * full
    for mask in range(full - 1, -1, -1):
        table[mask] = max((1 + table[mask | each] for each in spans if not mask & each), default=0)
    return np.array([min(count, profile.most or count) for count in table], dtype=np.int64)


@functools.lru_cache(maxsize=256)
def limited(geometry: Geometry, profile: MigProfile) -> bool:
    """A device may have fewer instances of the profile than there is room for."""
    endless = dataclasses.replace(profile, most=0)
    return 0 < profile.most < int(room(geometry, endless)[0])


@functools.lru_cache(maxsize=64)
def rooms(geometry: Geometry) -> np.ndarray:
    """The same for all of its plain profiles, in their order; a row each."""
    return np.array([room(geometry, each) for each in plain(geometry)])


@functools.lru_cache(maxsize=64)
def plain(geometry: Geometry) -> tuple[MigProfile, ...]:
    """Its profiles without those that add an engine ("+me")."""
    return tuple(each for each in geometry.profiles if "+" not in each.name)


@dataclass(frozen=True, slots=True)
class Places:
    """By the slices that are taken: where an instance of a profile goes best, and what is lost by it."""

    #: -1: nowhere
    start: np.ndarray
    loss: np.ndarray


@functools.lru_cache(maxsize=256)
def _moves(geometry: Geometry, profile: MigProfile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By the slices taken and the start (from the top): what is taken then, if it may be, own room lost."""
    spans = np.array([span(start, profile.size) for start in reversed(profile.starts)])
    before = np.arange(1 << geometry.slots)[:, None]
    after, legal, own = before | spans, before & spans == 0, room(geometry, profile)
    return after, legal, own[before] - own[after]


def places(geometry: Geometry, profile: MigProfile, value: np.ndarray) -> Places:
    """Work out the best place of a profile for every state of a device.

    Args:
        geometry: Of which kind of device.
        profile: Of what.
        value: By the slices that are taken: what the rest is worth to others.
    """
    after, legal, own = _moves(geometry, profile)
    # First what keeps most room for more of the same, so that a gang never blocks itself; then for others;
    # then from the top down.
    loss = np.where(legal, (own << 44) + value[:, None] - value[after], _NEVER)
    best = loss.argmin(axis=1)
    each = np.arange(len(best))
    starts = np.array(tuple(reversed(profile.starts)))
    return Places(np.where(legal[each, best], starts[best], -1), loss[each, best])


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
