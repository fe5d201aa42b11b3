"""How the simulated GPUs can be cut by MIG: NVIDIA's published profiles and their legal places.

This is the simulated hardware's own knowledge, which it tells by NVML as a real driver does. From NVIDIA's
MIG user guide and listings of `nvidia-smi mig -lgipp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_gpupool.driver.simulated.models import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of GPU instance."""

    #: NVML's constant for the kind, and the number that its calls take.
    kind: int
    id: int
    #: Compute slices, and what follows the name.
    slices: int
    suffix: str
    #: Memory slices, and where it may start.
    size: int
    starts: tuple[int, ...]
    #: How many there can be.
    most: int

    def name(self, model: Model) -> str:
        """Its name on a model: "1g.10gb"."""
        return f"{self.slices}g.{SIZES[model.mig][self.size](model.mig_gb)}gb{self.suffix}"

    def memory(self, model: Model) -> int:
        """Its memory in MiB: the size in its name less what the driver keeps."""
        return model.mig_memory[self.size]

    def multiprocessors(self, model: Model) -> int:
        """Its part of the device's."""
        whole = 7 if model.mig == "seven" else 4
        return model.multiprocessors * self.slices // whole // 2 * 2


def _times(factor: int) -> Any:
    return lambda gigabytes: gigabytes * factor


#: Gigabytes in the name by memory slices; an H200's are rounded by NVIDIA: 18, 35, 71, 141.
SIZES: dict[str, dict[int, Any]] = {
    "seven": {
        1: _times(1),
        2: lambda gigabytes: 35 if gigabytes == 18 else 2 * gigabytes,
        4: lambda gigabytes: 71 if gigabytes == 18 else 4 * gigabytes,
        8: lambda gigabytes: 141 if gigabytes == 18 else 8 * gigabytes,
    },
    "four": {1: _times(1), 2: _times(2), 4: _times(4)},
}

#: By table; the order is NVIDIA's.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "": (),
    "seven": (
        Shape(kind=0x0, id=19, slices=1, suffix="", size=1, starts=(0, 1, 2, 3, 4, 5, 6), most=7),
        Shape(kind=0x7, id=20, slices=1, suffix="+me", size=1, starts=(0, 1, 2, 3, 4, 5, 6), most=1),
        Shape(kind=0x9, id=15, slices=1, suffix="", size=2, starts=(0, 2, 4, 6), most=4),
        Shape(kind=0x1, id=14, slices=2, suffix="", size=2, starts=(0, 2, 4), most=3),
        Shape(kind=0x2, id=9, slices=3, suffix="", size=4, starts=(0, 4), most=2),
        Shape(kind=0x3, id=5, slices=4, suffix="", size=4, starts=(0,), most=1),
        Shape(kind=0x4, id=0, slices=7, suffix="", size=8, starts=(0,), most=1),
    ),
    "four": (
        Shape(kind=0x0, id=14, slices=1, suffix="", size=1, starts=(0, 1, 2, 3), most=4),
        Shape(kind=0x7, id=21, slices=1, suffix="+me", size=1, starts=(0, 1, 2, 3), most=1),
        Shape(kind=0x1, id=5, slices=2, suffix="", size=2, starts=(0, 2), most=2),
        Shape(kind=0x8, id=6, slices=2, suffix="+me", size=2, starts=(0, 2), most=1),
        Shape(kind=0x3, id=0, slices=4, suffix="", size=4, starts=(0,), most=1),
    ),
}

#: Of any device.
MOST_INSTANCES = 7


def shape(model: Model, number: int) -> Shape | None:
    """The shape with a profile number."""
    return next((each for each in SHAPES[model.mig] if each.id == number), None)


def free_places(device: dict[str, Any], wanted: Shape) -> list[int]:
    """Where an instance of a shape can be made beside those that exist, lowest first."""
    taken = {
        slot for each in device["instances"] for slot in range(each["start"], each["start"] + each["size"])
    }
    same = sum(each["profile_id"] == wanted.id for each in device["instances"])
    if same >= wanted.most or len(device["instances"]) >= MOST_INSTANCES:
        return []
    return [start for start in wanted.starts if not taken & set(range(start, start + wanted.size))]
