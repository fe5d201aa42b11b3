"""What of a request decides where one slice of it may go, and what it would take there.

Rule 1: what is charged of a device is the larger of the shares of its compute and of its memory, rounded up:
        so the shares of a device never sum above its memory either.
Rule 2: unless asked otherwise a slice gets the part of its node's CPUs and memory that it has of the devices.
Rule 3: a device in MIG mode is used in instances or not at all; others never in instances.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.core.cluster import Cluster
    from jupyter_gpupool.core.model import MigProfile, Request

#: More than there ever is of anything that is counted here.
MANY = 1 << 40


@dataclass(frozen=True, slots=True)
class Want:
    """What one slice of a request needs."""

    milli: int
    vram: int
    cpus: int
    memory: int
    models: tuple[str, ...]
    min_vram: int
    node: str
    exclude: tuple[str, ...]
    #: MIG profile by name, or an instance by need; of those that suit the n-th smallest.
    mig: str = ""
    isolated: bool = False
    nth: int = 0
    #: Several slices may sit on one device.
    stack: bool = False
    #: Much is kept by want.
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out the hash once."""
        what = (self.milli, self.vram, self.cpus, self.memory, self.models, self.min_vram, self.node)
        more = (self.exclude, self.mig, self.isolated, self.nth, self.stack)
        object.__setattr__(self, "_hash", hash((what, more)))

    def __hash__(self) -> int:
        """The same for equal wants."""
        return self._hash

    @property
    def instance(self) -> bool:
        """A MIG instance is wanted."""
        return bool(self.mig) or self.isolated

    @property
    def whole(self) -> bool:
        """Whole devices are wanted."""
        return self.milli >= WHOLE and not self.instance

    @property
    def host_only(self) -> bool:
        """No device is wanted: host CPUs and memory only."""
        return not self.milli and not self.vram and not self.instance


def want_of(request: Request, exclude: Iterable[str] = ()) -> Want:
    """Say what one slice of a request needs; `exclude` names more devices and nodes that it may not use."""
    instance = bool(request.mig) or request.isolated
    return Want(
        milli=0 if instance and request.milli >= WHOLE else request.milli,
        vram=request.vram,
        cpus=request.cpus,
        memory=request.memory,
        models=tuple(sorted(filter(None, request.model.split("|")))),
        min_vram=request.min_vram,
        node=request.node,
        exclude=tuple(sorted({*request.exclude, *exclude})),
        mig=request.mig,
        isolated=request.isolated,
        stack=instance or request.same_device,
    )


@dataclass(frozen=True, slots=True)
class Room:
    """Where a slice could go in an empty cluster, and what it takes there. Rows: nodes, columns: devices."""

    #: The device is one that the request names, or leaves open.
    fits: np.ndarray
    #: Thousandths that the slice would be charged on that device.
    charge: np.ndarray
    #: Host CPUs and memory of one slice on that node.
    cpus: np.ndarray
    memory: np.ndarray
    #: By number of geometry the MIG profile that it would be.
    profiles: tuple[MigProfile | None, ...] = ()


def room(cluster: Cluster, want: Want) -> Room:
    """Say what a slice takes on each device that it may use, whatever is taken there now."""
    rooms = cluster.memo.setdefault("rooms", {})
    assert isinstance(rooms, dict)
    found = rooms.get(want)
    if found is None:
        if len(rooms) >= 512:
            rooms.pop(next(iter(rooms)))
        found = rooms[want] = _room(cluster, want)
    assert isinstance(found, Room)
    return found


def _room(cluster: Cluster, want: Want) -> Room:
    fits = suits(cluster, want) & named(cluster, want)
    if want.instance:
        return _instance_room(cluster, want, fits)
    charge = np.full(fits.shape, want.milli, dtype=np.int64)
    if want.vram:
        of_memory = -(-want.vram * WHOLE // np.maximum(cluster.vram, 1))
        charge = np.maximum(charge, np.minimum(of_memory, WHOLE))
    return Room(fits, charge, *_host(cluster, want, fits, charge))


def _instance_room(cluster: Cluster, want: Want, fits: np.ndarray) -> Room:
    profiles: list[MigProfile | None] = [None]
    charges = [0]
    for geometry in cluster.geometries[1:]:
        assert geometry is not None
        suiting = mig.suiting(geometry, want.mig, want.vram, want.milli)[want.nth :]
        profiles.append(suiting[0] if suiting else None)
        charges.append(geometry.milli(suiting[0]) if suiting else 0)
    charge = np.array(charges, dtype=np.int64)[np.maximum(cluster.geometry, 0)]
    fits = fits & (charge > 0)
    return Room(fits, charge, *_host(cluster, want, fits, charge), tuple(profiles))


def _host(
    cluster: Cluster, want: Want, fits: np.ndarray, charge: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Host CPUs and memory of a slice: as asked, or its part of the node."""
    most = (charge * fits).max(axis=1, initial=0)
    cpus = np.full(len(fits), want.cpus) if want.cpus else cluster.cpus_part * most // WHOLE
    memory = np.full(len(fits), want.memory) if want.memory else cluster.memory_part * most // WHOLE
    return cpus, memory


def suits(cluster: Cluster, want: Want) -> np.ndarray:
    """Devices of the right kind: model, memory, and in MIG mode or not."""
    kind = cluster.geometry > 0 if want.instance else cluster.geometry == 0
    fits: np.ndarray = kind & (cluster.vram >= max(1, want.vram, want.min_vram))
    if want.models:
        fits &= np.isin(cluster.model, [cluster.model_number(name) or -1 for name in want.models])
    return fits


def named(cluster: Cluster, want: Want) -> np.ndarray:
    """Devices that the request's node and exclusions leave."""
    fits = np.ones(cluster.free.shape, dtype=bool)
    if want.node:
        row = cluster.row_of.get(want.node, -1)
        fits[np.arange(len(fits)) != row] = False
    for name in want.exclude:
        if name in cluster.row_of:
            fits[cluster.row_of[name]] = False
        elif cluster.device(name):
            fits[cluster.place_of(name)] = False
    return fits


def by_host(counts: np.ndarray, *free_and_need: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """How many of so many slices a node's host has room for; (free, need of one) for CPUs and for memory."""
    for free, need in free_and_need:
        counts = np.minimum(counts, np.where(need > 0, free // np.maximum(need, 1), MANY))
    least: np.ndarray = np.maximum(counts, 0)
    return least
