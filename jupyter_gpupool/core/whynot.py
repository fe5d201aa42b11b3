"""Why a request has no place now: a refusal for each candidate, and the nearest thing that would work.

Rule 1: every device and node that was left out has a reason with a name, the first that holds in the order of
        `_CHECKS`.
Rule 2: the nearest thing is one that would start now, tried and not guessed: fewer, without one constraint,
        or smaller.

Not its business: what can never be had (`never`), and how long to wait (`explain`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import instances, mig, ranking
from jupyter_gpupool.core.cluster import BARS
from jupyter_gpupool.core.model import WHOLE, Device, Reason, Refusal, Request
from jupyter_gpupool.core.never import asked, gigabytes
from jupyter_gpupool.core.placement import Placement, place
from jupyter_gpupool.core.wants import Room, Want, room, want_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jupyter_gpupool.core.cluster import Cluster

_WORDS = {
    Reason.NODE_SILENT: "its node is silent",
    Reason.DEVICE_OUT: "it is out of service",
    Reason.DEVICE_CORDONED: "it is cordoned",
    Reason.DEVICE_OUTSIDE_USE: "it is in use outside the pool",
}
#: Constraints that a person might do without, and what to say then.
_WITHOUT: tuple[tuple[str, object, str], ...] = (
    ("same_node", False, "without same_node"),
    ("nvlink", False, "without nvlink"),
    ("node", "", "on another node"),
    ("exclude", (), "without exclude"),
    ("model", "", "of another model"),
    ("min_vram", 0, "without min_vram"),
)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A device, and what is asked of it."""

    cluster: Cluster
    want: Want
    found: Room
    device: Device
    row: int
    column: int

    @property
    def free(self) -> int:
        """Thousandths that are free."""
        return int(self.cluster.free[self.row, self.column])

    @property
    def charge(self) -> int:
        """Thousandths that are wanted."""
        return int(self.found.charge[self.row, self.column])


def why_not(
    request: Request, cluster: Cluster, *, count: int = 0, allow: Iterable[str] = ()
) -> tuple[Refusal, ...]:
    """Say why a request has no place now: in sum, with the nearest thing that would do; then each candidate.

    Args:
        request: What is wanted.
        cluster: Where; it is the same afterwards.
        count: Slices that are wanted now (0: as many as it asks for at least).
        allow: Holders whose held parts may be used.
    """
    holders = tuple(allow)
    number = count or request.count
    if not cluster.nodes:
        found = place(request, cluster)
        return () if isinstance(found, Placement) else found.refusals
    with cluster.trying():
        for holder in holders:
            for held in cluster.held_for(holder):
                cluster.release(held.key)
        each = tuple(_candidates(request, cluster))
        return (_in_sum(request, cluster, number, each), *each)


def _in_sum(request: Request, cluster: Cluster, count: int, each: tuple[Refusal, ...]) -> Refusal:
    reasons: dict[Reason, int] = {}
    for refusal in each:
        reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
    parts = ", ".join(
        f"{number} {_IN_SUM[reason]}" for reason, number in reasons.items() if reason in _IN_SUM
    )
    only = next(iter(reasons)) if len(reasons) == 1 and len(each) == len(cluster.nodes) else Reason.NO_ROOM
    return Refusal(
        reason=Reason.NO_MIG_ROOM if request.mig else only if only in _BY_NODE else Reason.NO_ROOM,
        sentence=f"No room for {asked(request, count)} now" + (f": {parts}." if parts else "."),
        advice=nearest(request, cluster, count=count),
    )


# -------------------------------------------------------------------------------- candidate by candidate


def _candidates(request: Request, cluster: Cluster) -> Iterator[Refusal]:
    want = want_of(request)
    found = room(cluster, want)
    for name in sorted(cluster.nodes):
        row = cluster.row_of[name]
        refused = 0
        devices = cluster.devices_of(row)
        for column, device in enumerate(devices):
            refusal = _refusal(_Candidate(cluster, want, found, device, row, column))
            refused += refusal is not None
            if refusal:
                yield refusal
        if refused < len(devices):
            yield _node_refusal(request, cluster, want, found, row)


def _refusal(candidate: _Candidate) -> Refusal | None:
    for check in _CHECKS:
        said = check(candidate)
        if said:
            reason, words = said
            name = f"{candidate.device.node}/gpu{candidate.device.index}"
            return Refusal(reason=reason, sentence=f"{name}: {words}.", subject=candidate.device.uuid)
    return None


_Said = tuple[Reason, str] | None


def _excluded(candidate: _Candidate) -> _Said:
    want, device = candidate.want, candidate.device
    if want.node and device.node != want.node:
        return Reason.EXCLUDED, f"it is not on {want.node}"
    if device.node in want.exclude or device.uuid in want.exclude:
        return Reason.EXCLUDED, "it is excluded"
    return None


def _wrong_model(candidate: _Candidate) -> _Said:
    models = candidate.want.models
    if models and candidate.device.model not in models:
        return Reason.WRONG_MODEL, f"it is a {candidate.device.model}"
    return None


def _too_little(candidate: _Candidate) -> _Said:
    if candidate.device.memory < max(candidate.want.vram, candidate.want.min_vram):
        return Reason.TOO_LITTLE_MEMORY, f"it has {gigabytes(candidate.device.memory)}"
    return None


def _mode(candidate: _Candidate) -> _Said:
    if candidate.want.instance and not candidate.device.mig:
        return Reason.NO_MIG, "it is not in MIG mode"
    if candidate.device.mig and not candidate.want.instance:
        return Reason.NO_MIG, "it is in MIG mode, and given in MIG instances only"
    if candidate.want.instance and not candidate.charge:
        return Reason.NO_MIG, "it has no such MIG profile"
    return None


def _barred(candidate: _Candidate) -> _Said:
    bars = candidate.cluster.bars_of(candidate.device.uuid)
    for reason in BARS:
        if reason in bars:
            return reason, f"{_WORDS[reason]}" + (f" ({bars[reason]})" if bars[reason] else "")
    return None


def _held(candidate: _Candidate) -> _Said:
    held = [taken for taken in candidate.cluster.taken_of(candidate.device.uuid) if taken.held]
    if held and candidate.free < candidate.charge <= candidate.free + sum(each.part.milli for each in held):
        return Reason.DEVICE_HELD, "it is held for somebody else"
    return None


def _no_instance(candidate: _Candidate) -> _Said:
    if not candidate.want.instance:
        return None
    if instances.best(candidate.cluster, candidate.found, candidate.row, candidate.column):
        return None
    return Reason.NO_MIG_ROOM, "it has no room for such a MIG instance"


def _busy(candidate: _Candidate) -> _Said:
    if candidate.want.instance or candidate.free >= candidate.charge:
        return None
    shared = any(taken.part.milli < WHOLE for taken in candidate.cluster.taken_of(candidate.device.uuid))
    if candidate.charge == WHOLE:
        return (Reason.DEVICE_SHARED, "it is in shares") if shared else (Reason.DEVICE_BUSY, "it is leased")
    if not shared:
        return Reason.DEVICE_WHOLE, "it is leased whole"
    free, charge = candidate.free / WHOLE, candidate.charge / WHOLE
    return Reason.DEVICE_BUSY, f"{free:g} of it is free, {charge:g} is wanted"


_CHECKS: tuple[Callable[[_Candidate], _Said], ...] = (
    _excluded,
    _wrong_model,
    _too_little,
    _mode,
    _barred,
    _held,
    _no_instance,
    _busy,
)
_IN_SUM = {
    Reason.NODE_SILENT: "on silent nodes",
    Reason.DEVICE_OUT: "out of service",
    Reason.DEVICE_CORDONED: "cordoned",
    Reason.DEVICE_OUTSIDE_USE: "in use outside the pool",
    Reason.DEVICE_HELD: "held for others",
    Reason.DEVICE_BUSY: "in use",
    Reason.DEVICE_SHARED: "in shares",
    Reason.DEVICE_WHOLE: "leased whole",
    Reason.NO_MIG_ROOM: "without room for it",
}
_BY_NODE = (Reason.NO_CPUS, Reason.NO_HOST_MEMORY, Reason.NOT_SAME_NODE, Reason.NOT_LINKED)


def _node_refusal(request: Request, cluster: Cluster, want: Want, found: Room, row: int) -> Refusal:
    """Why a node with suitable free devices does not do."""
    name = cluster.names[row]
    cpus, memory = int(cluster.cpus[row]), int(cluster.memory[row])
    need_cpus, need_memory = int(found.cpus[row]), int(found.memory[row])
    if cpus < need_cpus:
        words = f"{max(cpus, 0) / 1000:g} CPUs are free, {need_cpus / 1000:g} are wanted"
        return Refusal(reason=Reason.NO_CPUS, sentence=f"{name}: {words}.", subject=name)
    if memory < need_memory:
        words = f"{gigabytes(max(memory, 0))} of host memory are free, {gigabytes(need_memory)} are wanted"
        return Refusal(reason=Reason.NO_HOST_MEMORY, sentence=f"{name}: {words}.", subject=name)
    at = np.array([row])
    usable = ranking.usable_devices(cluster, want, found, at, doubtful=True)
    fits = int(ranking.capacity(cluster, want, found, at, usable)[0])
    reason = Reason.NOT_SAME_NODE if request.same_node else Reason.NO_ROOM
    if request.nvlink and fits >= request.count:
        reason, words = Reason.NOT_LINKED, f"NVLink does not connect {request.count} of its free GPUs"
    else:
        words = f"it has room for {fits} only"
    return Refusal(reason=reason, sentence=f"{name}: {words}.", subject=name)


# ------------------------------------------------------------------------------------------- the nearest


def nearest(request: Request, cluster: Cluster, *, count: int = 0) -> str:
    """The nearest thing that would start now, in one sentence; "" if nothing would.

    Args:
        request: What has no place.
        cluster: Where.
        count: Slices that are wanted now (0: as many as it asks for at least).
    """
    number = count or request.count
    for tried, words in _alternatives(request, cluster, number):
        found = place(tried, cluster)
        if isinstance(found, Placement):
            nodes = sorted({part.node for part in found.parts})
            where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes"
            verb = "are" if tried.count > 1 else "is"
            return f"{_capital(asked(tried, tried.count))}{words} {verb} free on {where}."
    return ""


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _alternatives(request: Request, cluster: Cluster, count: int) -> Iterator[tuple[Request, str]]:
    wanted = dataclasses.replace(request, count=count, max_count=0, min_count=0)
    most = _most(wanted, cluster)
    if 0 < most < count:
        yield dataclasses.replace(wanted, count=most), ""
    for name, value, words in _WITHOUT:
        if getattr(wanted, name) != value:
            yield dataclasses.replace(wanted, **{name: value}), f" {words}"  # type: ignore[arg-type]
    one = dataclasses.replace(wanted, count=1, same_node=False, nvlink=False)
    for smaller in _smaller(one, cluster):
        yield smaller, ""


def _most(request: Request, cluster: Cluster) -> int:
    """How many slices of the kind would have a place now."""
    want = want_of(request)
    rooms = ranking.ranking(cluster, want, 1, doubtful=True).room
    together = request.same_node or request.nvlink
    most = int(rooms.max(initial=0) if together else rooms.sum())
    while most > 0 and request.nvlink and not _placed(request, cluster, most):
        most -= 1
    return most


def _placed(request: Request, cluster: Cluster, count: int) -> bool:
    return isinstance(place(request, cluster, count=count), Placement)


def _smaller(request: Request, cluster: Cluster) -> Iterator[Request]:
    """The same, smaller: MIG profiles below the one that is wanted; the largest share that is free."""
    if request.mig or request.isolated:
        for name in _profiles_below(request, cluster):
            yield dataclasses.replace(request, mig=name, isolated=False, vram=0)
        return
    want = dataclasses.replace(want_of(request), milli=1, vram=0)
    given = room(cluster, want).fits & (cluster.barred == 0)
    largest = int(np.where(given, cluster.free, 0).max(initial=0))
    if 0 < largest < max(request.milli, 1) or (largest and request.vram):
        yield dataclasses.replace(request, milli=largest, vram=0, cpus=0, memory=0)


def _profiles_below(request: Request, cluster: Cluster) -> list[str]:
    found: dict[str, tuple[int, int]] = {}
    for geometry in cluster.geometries[1:]:
        if geometry is None:
            continue
        wanted = mig.suiting(geometry, request.mig, request.vram, 0)
        most = wanted[0].size if wanted else geometry.slots
        for each in mig.plain(geometry):
            if each.size < most or (each.size == most and wanted and each.compute < wanted[0].compute):
                found[each.name] = (each.size, each.compute)
    return sorted(found, key=lambda name: (found[name], name), reverse=True)
