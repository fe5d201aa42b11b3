"""What is left over, and what that is worth to those who usually ask.

Rule 1: *waste* of a node: of its free thousandths those that a usual request could not use, averaged over the
        usual requests. Among places the one is best that adds least to it (the gradient of fragmentation;
        Weng et al., "Beware of Fragmentation", USENIX ATC 2023). Here also free parts count, by a quarter,
        that a usual request would leave because the node's CPUs or memory run out first.
Rule 2: *worth* of a gap on one device: what of it the usual shares can fill at best. Which measure of shares
        holds is found from the demand: of the dual feasible functions (Lueker 1983; Fekete and Schepers 2001)
        the one by which it needs the most devices.
Rule 3: *pressure* on a model: the demand that may come to it, over what is free of the models it may go to.
        Who can go elsewhere stays away from where it is high.
Rule 4: integers throughout: the same on every machine.

Not its business: which place is then taken (`ranking`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core.model import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.demand import Shape

#: Gaps are told apart by hundredths of a device.
STEP = 10
STEPS = WHOLE // STEP
#: So many of the most frequent kinds of request are looked at.
MOST = 96
#: Weights of the kinds sum to about this.
WEIGHT = 4096
#: Ratios are kept as multiples of 2 ** -16.
_SHIFT = 16


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual requests as columns, for devices of one size of memory."""

    #: Distinct amounts of a device that are asked for, and which of them each request asks for.
    levels: np.ndarray
    level: np.ndarray
    #: Devices, host CPUs and MiB of host memory that a request wants on one node.
    number: np.ndarray
    cpus: np.ndarray
    memory: np.ndarray
    #: Thousandths of devices that a CPU, or a MiB, of a node is good for (times 2 ** 16).
    per_cpu: np.ndarray
    per_mib: np.ndarray
    weight: np.ndarray
    #: By hundredths of a device: what a gap is worth.
    worth: np.ndarray


def usual(demand: tuple[tuple[Shape, int], ...], vram: int, widest: int) -> Usual:
    """Put the usual requests into columns.

    Args:
        demand: Shapes and how often they were asked for.
        vram: bytes of memory of a device.
        widest: Devices of the largest node: larger gangs take several nodes.
    """
    kinds: dict[tuple[int, int, int, int], int] = {}
    for kind, times in _kinds(demand, vram, widest):
        kinds[kind] = kinds.get(kind, 0) + times
    frequent = sorted(kinds, key=lambda kind: (-kinds[kind], kind))[:MOST]
    total = sum(kinds[kind] for kind in frequent)
    weights = [max(1, kinds[kind] * WEIGHT // total) for kind in frequent]
    charge, number, cpus, memory = (np.array(each, dtype=np.int64) for each in zip(*frequent, strict=True))
    levels, level = np.unique(charge, return_inverse=True)
    size = charge * number << _SHIFT
    shares: dict[int, int] = {}
    for (milli, *_), times in kinds.items():
        if milli < WHOLE:
            shares[-(-milli // STEP)] = shares.get(-(-milli // STEP), 0) + times
    return Usual(
        levels=levels,
        level=level,
        number=number,
        cpus=cpus,
        memory=memory,
        per_cpu=np.where(cpus > 0, size // np.maximum(cpus, 1), 1 << 36),
        per_mib=np.where(memory > 0, size // np.maximum(memory, 1), 1 << 36),
        weight=np.array(weights, dtype=np.int64),
        worth=gap_worth(tuple(sorted(shares.items()))),
    )


def _kinds(
    demand: tuple[tuple[Shape, int], ...], vram: int, widest: int
) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """(charge, number, CPUs, MiB) wanted on one node, and how often."""
    for shape, times in demand:
        charge = max(shape.milli, -(-shape.vram * WHOLE // max(vram, 1)))
        if shape.mig or not charge or (shape.vram > vram and shape.milli < WHOLE):
            continue
        number = min(shape.count, widest)
        nodes = -(-shape.count // widest)
        yield (min(charge, WHOLE), number, shape.cpus * number, shape.memory * number), times * nodes


def waste(usual_: Usual, free: np.ndarray, cpus: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Say what of some nodes' free devices the usual requests could not use.

    Args:
        usual_: The usual requests.
        free: Free thousandths; a row a node, a column a device.
        cpus: Free thousandths of a core of each node.
        memory: Free MiB of host memory of each node.

    Returns:
        For each node thousandths of devices times `WEIGHT` times 4.
    """
    idle = free.sum(axis=1)
    enough = free[:, :, None] >= usual_.levels
    number = enough.sum(axis=1)[:, usual_.level]
    lost = idle[:, None] - (free[:, :, None] * enough).sum(axis=1)[:, usual_.level]
    cpus, memory = np.maximum(cpus, 0), np.maximum(memory, 0)
    host = np.minimum(
        np.maximum(cpus, 1)[:, None] * usual_.per_cpu, np.maximum(memory, 1)[:, None] * usual_.per_mib
    )
    host >>= _SHIFT
    stranded = np.maximum(idle[:, None] - host - lost, 0)
    fits = (number >= usual_.number) & (cpus[:, None] >= usual_.cpus) & (memory[:, None] >= usual_.memory)
    found: np.ndarray = np.where(fits, 4 * lost + stranded, 4 * idle[:, None]) @ usual_.weight
    return found


@functools.lru_cache(maxsize=64)
def gap_worth(shares: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Say what a gap on a device is worth, by its hundredths: thousandths of the value of a whole device.

    Args:
        shares: Sizes of the usual shares in hundredths, and how often they are asked for.
    """
    best = max(_measures(), key=lambda measure: sum(measure[size] * times for size, times in shares))
    worth = [0] * (STEPS + 1)
    for gap in range(1, STEPS + 1):
        fillings = [best[size] + worth[gap - size] for size, _ in shares if size <= gap]
        worth[gap] = max([worth[gap - 1], *fillings])
    return np.array(worth, dtype=np.int64)


@functools.cache
def _measures() -> tuple[tuple[int, ...], ...]:
    """Dual feasible functions by hundredths: shares that fit on one device never measure above it."""
    rounded = [_rounded(part) for part in range(2, STEPS // 2 + 1)]
    stepped = [_stepped(count) for count in range(1, 16)]
    cut = [_cut(part) for part in range(1, STEPS // 2 + 1)]
    return tuple(rounded + stepped + cut)


def _rounded(part: int) -> tuple[int, ...]:
    """Small shares rounded down to so many hundredths, and what large ones leave rounded down as well."""
    count = STEPS // part
    doubled = (
        count
        if 2 * size == STEPS
        else 2 * (size // part)
        if 2 * size < STEPS
        else 2 * (count - (STEPS - size) // part)
        for size in range(STEPS + 1)
    )
    return tuple(each * WHOLE // (2 * count) for each in doubled)


def _stepped(count: int) -> tuple[int, ...]:
    """So many equal steps up to a whole device; what fits exactly keeps its size."""
    steps = [divmod(size * (count + 1), STEPS) for size in range(STEPS + 1)]
    return tuple(step * WHOLE // count if rest else size * STEP for size, (step, rest) in enumerate(steps))


def _cut(part: int) -> tuple[int, ...]:
    """Shares of fewer hundredths count nothing, and those that leave fewer are a whole device."""
    return tuple(
        WHOLE if size > STEPS - part else size * STEP if size >= part else 0 for size in range(STEPS + 1)
    )


def pressure(demand: dict[frozenset[int], int], free: dict[int, int]) -> dict[int, int]:
    """Say how sought after each model is: thousandths of what is free of it, if as much comes as is free.

    Args:
        demand: Sets of models that requests would take, and thousandths of devices asked for of each set.
        free: Thousandths that are free of each model.
    """
    asked, there = sum(demand.values()), sum(free.values())
    found = dict.fromkeys(free, 0)
    for models, amount in demand.items():
        choice = max(sum(free.get(model, 0) for model in models), WHOLE // 2)
        for model in models & found.keys():
            found[model] += amount * there * WHOLE // (asked * choice)
    return found
