"""Where: which parts of which devices a request gets, or why none.

Rule 1: feasible, then ranked, then chosen. What is not feasible has a `Refusal` that says why.
Rule 2: all slices that are asked for, or none.
Rule 3: fewest nodes, then fullest node, then first by name: the same cluster and request, the same answer.
Rule 4: slices of one lease go to different devices, unless `same_device` is asked for.
Rule 5: nothing here changes the cluster; the pool takes what it grants.

Not its business: who is next (`shares`), and whether somebody should give something back (`pool`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core.cluster import Cluster, Part
from jupyter_gpupool.core.model import WHOLE, Reason, Refusal, Request, Slice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MANY = 1 << 40


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for every slice that was asked for."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """No place now; `why_not` gives the long answer, a refusal for each candidate."""

    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """What of a request decides where one slice of it may go."""

    milli: int
    vram: int
    cpus: int
    memory: int
    models: tuple[str, ...]
    min_vram: int
    node: str
    exclude: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whole devices are wanted."""
        return self.milli >= WHOLE

    @property
    def host_only(self) -> bool:
        """No device is wanted: host CPUs and memory only."""
        return not self.milli and not self.vram


def want_of(request: Request, exclude: Iterable[str] = ()) -> Want:
    """Say what one slice of a request needs; `exclude` names more devices and nodes that it may not use."""
    return Want(
        milli=request.milli,
        vram=request.vram,
        cpus=request.cpus,
        memory=request.memory,
        models=tuple(sorted(filter(None, request.model.split("|")))),
        min_vram=request.min_vram,
        node=request.node,
        exclude=tuple(sorted({*request.exclude, *exclude})),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """Where a slice could go in an empty cluster, and what it takes there. Rows are nodes, columns devices."""

    #: The device is one that the request names, or leaves open.
    fits: np.ndarray
    #: Thousandths that the slice would be charged on that device.
    charge: np.ndarray
    #: Host CPUs and memory of one slice on that node.
    cpus: np.ndarray
    memory: np.ndarray


def room(cluster: Cluster, want: Want) -> Room:
    """Say what a slice takes on each device that it may use, whatever is taken there now."""
    key = ("room", want)
    found = cluster.memo.get(key)
    if not isinstance(found, Room):
        found = cluster.memo[key] = _room(cluster, want)
    return found


def _room(cluster: Cluster, want: Want) -> Room:
    fits = (cluster.vram >= max(1, want.vram, want.min_vram)) & (cluster.geometry == 0)
    if want.models:
        numbers = [cluster.model_number(name) for name in want.models]
        fits &= np.isin(cluster.model, [number for number in numbers if number])
    _exclude(cluster, want, fits)
    charge = np.full(fits.shape, want.milli, dtype=np.int64)
    if want.vram:
        # Rounded up: shares that sum to the device never sum above its memory.
        of_memory = -(-want.vram * WHOLE // np.maximum(cluster.vram, 1))
        charge = np.maximum(charge, np.minimum(of_memory, WHOLE))
    most = (charge * fits).max(axis=1, initial=0)
    cpus = np.full(len(fits), want.cpus) if want.cpus else cluster.cpus_part * most // WHOLE
    memory = np.full(len(fits), want.memory) if want.memory else cluster.memory_part * most // WHOLE
    return Room(fits, charge, cpus, memory)


def _exclude(cluster: Cluster, want: Want, fits: np.ndarray) -> None:
    if want.node:
        row = cluster.row_of.get(want.node)
        kept = None if row is None else fits[row].copy()
        fits[:] = False
        if row is not None:
            fits[row] = kept
    for name in want.exclude:
        if name in cluster.row_of:
            fits[cluster.row_of[name]] = False
        elif cluster.device(name):
            fits[cluster.place_of(name)] = False


def _capacity(cluster: Cluster, found: Room, usable: np.ndarray) -> np.ndarray:
    """How many slices each node has room for: devices, host CPUs and host memory."""
    counts = usable.sum(axis=1)
    for free, need in ((cluster.cpus, found.cpus), (cluster.memory, found.memory)):
        counts = np.minimum(counts, np.where(need > 0, free // np.maximum(need, 1), _MANY))
    least: np.ndarray = np.maximum(counts, 0)
    return least


def place(
    request: Request,
    cluster: Cluster,
    *,
    count: int = 0,
    allow: Iterable[str] = (),
    have: Sequence[Slice] = (),
) -> Placement | NoPlacement:
    """Find a place for `count` slices of a request (0: as many as it asks for at least).

    Args:
        request: What is wanted.
        cluster: Where; it is the same afterwards.
        count: Slices to place now.
        allow: Holders whose held parts may be used as if they were free.
        have: Slices that the lease keeps: the new ones keep to `same_node` and `nvlink` with them, and shares
            go to other devices.
    """
    with cluster.trying():
        for holder in allow:
            for held in cluster.held_for(holder):
                cluster.release(held.key)
        return _place(request, cluster, count or request.count, have)


def _place(request: Request, cluster: Cluster, count: int, have: Sequence[Slice]) -> Placement | NoPlacement:
    if not cluster.nodes:
        return NoPlacement((Refusal(reason=Reason.NO_NODES, sentence="No node has joined the pool yet."),))
    want = want_of(request, [] if request.same_device else [each.device for each in have])
    found = room(cluster, want)
    usable = found.fits & (cluster.barred == 0) & (cluster.free >= found.charge)
    if have and request.same_node:
        rows = np.zeros(len(usable), dtype=bool)
        rows[[cluster.row_of[each.node] for each in have if each.node in cluster.row_of]] = True
        usable &= rows[:, None]
    chosen: list[tuple[int, int]] | None = None
    if cluster.doubtful.any():
        chosen = _choose(request, cluster, found, usable & (cluster.doubtful == 0), count)
    if chosen is None:
        chosen = _choose(request, cluster, found, usable, count)
    if chosen is None:
        return NoPlacement((_no_room(request, count),))
    return Placement(tuple(_part(cluster, found, want, row, column) for row, column in chosen))


def _choose(
    request: Request, cluster: Cluster, found: Room, usable: np.ndarray, count: int
) -> list[tuple[int, int]] | None:
    """Rows and columns for `count` slices: one node if any has room, else the fewest."""
    room_for = _capacity(cluster, found, usable)
    chosen: list[tuple[int, int]] = []
    while len(chosen) < count:
        row = _best_row(request, cluster, usable, room_for, count - len(chosen))
        if row < 0:
            return None
        take = min(count - len(chosen), 1 if request.spread else int(room_for[row]))
        chosen += [(row, column) for column in _columns(cluster, usable[row], row, take)]
        room_for[row] = 0
    return chosen


def _best_row(
    request: Request, cluster: Cluster, usable: np.ndarray, room_for: np.ndarray, count: int
) -> int:
    """The fullest node with room for all that is left; else the one with the most room; -1: none."""
    together = room_for >= count
    if not together.any():
        if request.same_node or request.nvlink or not room_for.any():
            return -1
        together = room_for == room_for.max()
    # Fullest device, then fullest node, then first by name.
    tightest = np.where(usable, cluster.free, WHOLE + 1).min(axis=1)
    left = cluster.free.sum(axis=1)
    key = (tightest * (WHOLE * 64) + left) * len(left) + cluster.order()
    return int(np.argmin(np.where(together, key, np.iinfo(np.int64).max)))


def _columns(cluster: Cluster, usable: np.ndarray, row: int, count: int) -> list[int]:
    """The fullest of the usable devices of a node."""
    free = cluster.free[row]
    ranked = sorted((int(free[column]), int(column)) for column in np.flatnonzero(usable))
    return sorted(column for _, column in ranked[:count])


def _part(cluster: Cluster, found: Room, want: Want, row: int, column: int) -> Part:
    node = cluster.nodes[cluster.names[row]]
    device = cluster.devices_of(row)[column]
    milli = int(found.charge[row, column])
    return Part(
        node=node.name,
        device=device.uuid,
        milli=milli,
        vram=want.vram or device.memory * milli // WHOLE,
        cpus=int(found.cpus[row]),
        memory=int(found.memory[row]),
        generation=node.generation,
    )


def _no_room(request: Request, count: int) -> Refusal:
    what = f"{count} x {request.milli / WHOLE:g} GPU" if request.milli else f"{count} x {request.vram} bytes"
    return Refusal(reason=Reason.NO_ROOM, sentence=f"No room for {what} on what is free now.")


def feasible_ever(request: Request, cluster: Cluster) -> tuple[Refusal, ...]:
    """Say why the pool can never hold a request, whatever is free; () if it can."""
    if not cluster.nodes:
        return ()
    want = want_of(request)
    found = room(cluster, want)
    refusal = (
        _unknown_model(want, cluster)
        or _unknown_node(want, cluster)
        or _too_much_memory(want, cluster)
        or _contradiction(request, found)
        or _too_much_host(cluster, found)
        or _too_many(request, cluster, found)
    )
    return (refusal,) if refusal else ()


def _unknown_model(want: Want, cluster: Cluster) -> Refusal | None:
    unknown = [name for name in want.models if not cluster.model_number(name)]
    if not unknown:
        return None
    there = ", ".join(sorted(cluster.models))
    return Refusal(
        reason=Reason.UNKNOWN_MODEL,
        sentence=f"No GPU of the pool is a {unknown[0]}.",
        advice=f"Its models are: {there}.",
        field="model",
    )


def _unknown_node(want: Want, cluster: Cluster) -> Refusal | None:
    if not want.node or want.node in cluster.row_of:
        return None
    there = ", ".join(sorted(cluster.nodes))
    return Refusal(
        reason=Reason.UNKNOWN_NODE,
        sentence=f"The pool has no node {want.node}.",
        advice=f"Its nodes are: {there}.",
        field="node",
    )


def _too_much_memory(want: Want, cluster: Cluster) -> Refusal | None:
    most = int(cluster.vram.max(initial=0))
    for name, asked in (("vram", want.vram), ("min_vram", want.min_vram)):
        if asked > most:
            return Refusal(
                reason=Reason.TOO_MUCH_MEMORY,
                sentence=f"No GPU of the pool has {asked / 1e9:.4g} GB of memory: {most / 1e9:.4g} GB is the most.",
                advice=f"Ask for at most {most // 10**9}GB.",
                field=name,
            )
    return None


def _contradiction(request: Request, found: Room) -> Refusal | None:
    if found.fits.any():
        return None
    asked = [name for name in ("model", "min_vram", "vram", "node", "exclude") if getattr(request, name)]
    return Refusal(
        reason=Reason.CONTRADICTION,
        sentence=f"No GPU of the pool meets {', '.join(asked)} together.",
        advice=f"Leave out one of {', '.join(asked)}.",
        field=asked[0] if asked else "",
    )


def _hosts(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """Host CPUs and memory of each row's node when it is empty."""
    nodes = [cluster.nodes.get(name) for name in cluster.names]
    spare = len(cluster.free) - len(nodes)
    cpus = [node.cpus if node else 0 for node in nodes] + [0] * spare
    memory = [node.memory if node else 0 for node in nodes] + [0] * spare
    return np.array(cpus, dtype=np.int64), np.array(memory, dtype=np.int64)


def _too_much_host(cluster: Cluster, found: Room) -> Refusal | None:
    cpus, memory = _hosts(cluster)
    possible = found.fits.any(axis=1)
    if (possible & (cpus >= found.cpus) & (memory >= found.memory)).any():
        return None
    most_cpus, most_memory = int(cpus[possible].max()), int(memory[possible].max())
    over = "memory" if (possible & (cpus >= found.cpus)).any() else "cpus"
    return Refusal(
        reason=Reason.TOO_MUCH_HOST,
        sentence="No node has the CPUs and host memory that one slice asks for.",
        advice=f"A node has at most {most_cpus / 1000:g} CPUs and {most_memory / 1e9:.4g} GB.",
        field=over,
    )


def _too_many(request: Request, cluster: Cluster, found: Room) -> Refusal | None:
    cpus, memory = _hosts(cluster)
    counts = found.fits.sum(axis=1)
    for free, need in ((cpus, found.cpus), (memory, found.memory)):
        counts = np.minimum(counts, np.where(need > 0, free // np.maximum(need, 1), _MANY))
    together = request.same_node or request.nvlink
    most = int(counts.max() if together else counts.sum())
    if request.count <= most or request.same_device:
        return None
    where = "on one node" if together else "in the pool"
    return Refusal(
        reason=Reason.TOO_MANY_GPUS,
        sentence=f"{request.count} GPUs: there are at most {most} such {where}.",
        advice=f"Ask for at most {most}" + (", or without same_node and nvlink." if together else "."),
        field="gpus",
    )
