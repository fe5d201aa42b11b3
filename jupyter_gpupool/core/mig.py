"""MIG profiles and their legal placements, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Device, Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a model of GPU can be cut into."""

    name: str
    #: Memory slices.
    slots: int


def geometry_of(device: Device) -> Geometry | None:
    """The geometry of a device's model."""
    del device
    return None


def number_of(geometry: Geometry | None) -> int:
    """A number above 0 for a geometry."""
    return 0 if geometry is None else 1


def bits(instance: Instance | None) -> int:
    """The memory slices of an instance, as bits."""
    return 0 if instance is None else ((1 << instance.size) - 1) << instance.start
