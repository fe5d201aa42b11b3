"""Why a request has no place now: a refusal for each candidate, and the nearest thing that would work.

Rule 1: every device and node that was left out has a reason with a name, the first that holds in the order of
        `_CHECKS`.
Rule 2: the nearest thing is one that would start now, tried and not guessed: fewer, without one constraint,
        or smaller.

Not its business: what can never be had (`never`), and how long to wait (`explain`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import instances, mig, ranking
from jupyter_gpupool.core.cluster import BARS
from jupyter_gpupool.core.model import WHOLE, Device, Reason, Refusal, Request
from jupyter_gpupool.core.never import asked, gigabytes
from jupyter_gpupool.core.placement import Placement, place
from jupyter_gpupool.core.wants import Room, Want, named, room, want_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    if not any(node.devices for node in cluster.nodes.values()):
        return (Refusal(reason=Reason.NO_NODES, sentence="No node with GPUs has joined the pool yet."),)
    with _seen_by(cluster, allow):
        look = _Look(request, cluster)
        return (look.in_sum(count or request.count), *look.candidates())


def in_sum(request: Request, cluster: Cluster, *, count: int = 0, allow: Iterable[str] = ()) -> Refusal:
    """The first of what `why_not` says, at a small part of its cost in a large pool."""
    if not any(node.devices for node in cluster.nodes.values()):
        return why_not(request, cluster)[0]
    with _seen_by(cluster, allow):
        return _Look(request, cluster).in_sum(count or request.count)


@contextlib.contextmanager
def _seen_by(cluster: Cluster, holders: Iterable[str]) -> Iterator[None]:
    with cluster.trying():
        for held in [each for holder in holders for each in cluster.held_for(holder)]:
            cluster.release(held.key)
        yield


class _Look:
    """A look at all devices and nodes for one request."""

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self.request, self.cluster = request, cluster
        self.want = want_of(request)
        self.found = room(cluster, self.want)
        #: By device: place in `_CHECKS` of the first that holds; as many as there are: it would do.
        self.said = np.full(cluster.free.shape, len(_CHECKS), dtype=np.int64)
        for place_, (_, check, _) in enumerate(reversed(_CHECKS), start=1):
            self.said[check(self)] = len(_CHECKS) - place_
        self.said[cluster.vram == 0] = _NOTHING

    @property
    def lacking(self) -> np.ndarray:
        """Devices with less free than is wanted."""
        lacking: np.ndarray = self.cluster.free < self.found.charge
        return lacking & (not self.want.instance)

    def in_sum(self, count: int) -> Refusal:
        """Why in one sentence, and the nearest thing that would start now."""
        numbers = np.bincount(self.said[self.said >= 0], minlength=len(_CHECKS) + 1)
        told = {_CHECKS[place_][0]: int(numbers[place_]) for place_ in np.flatnonzero(numbers[:-1])}
        parts = ", ".join(
            f"{number} {_IN_SUM[reason]}" for reason, number in told.items() if reason in _IN_SUM
        )
        only = self._only() if numbers[-1] else None
        reason = Reason.NO_MIG_ROOM if self.want.instance else Reason.NO_ROOM
        return Refusal(
            reason=only or reason,
            sentence=f"No room for {asked(self.request, count)} now" + (f": {parts}." if parts else "."),
            advice=nearest(self.request, self.cluster, count=count),
        )

    def _only(self) -> Reason | None:
        """What all nodes with suitable free devices lack, if that is one thing."""
        rows = np.flatnonzero((self.said == len(_CHECKS)).any(axis=1))
        if (self.cluster.cpus[rows] < self.found.cpus[rows]).all():
            return Reason.NO_CPUS
        if (self.cluster.memory[rows] < self.found.memory[rows]).all():
            return Reason.NO_HOST_MEMORY
        return None

    def candidates(self) -> Iterator[Refusal]:
        """A refusal for each device that does not do, and each node whose devices do but that does not."""
        for name in sorted(self.cluster.nodes):
            row = self.cluster.row_of[name]
            for column, device in enumerate(self.cluster.devices_of(row)):
                if self.said[row, column] < len(_CHECKS):
                    yield self._refusal(device, row, column)
            if (self.said[row] == len(_CHECKS)).any():
                yield _node_refusal(self.request, self.cluster, self.want, self.found, row)

    def _refusal(self, device: Device, row: int, column: int) -> Refusal:
        reason, _, words = _CHECKS[self.said[row, column]]
        if callable(words):
            words = words(self, device, row, column)
        return Refusal(
            reason=reason, sentence=f"{device.node}/gpu{device.index}: {words}.", subject=device.uuid
        )


def _wrong_model(look: _Look) -> np.ndarray:
    numbers = [look.cluster.model_number(name) for name in look.want.models]
    wrong: np.ndarray = ~np.isin(look.cluster.model, numbers) & bool(numbers)
    return wrong


def _too_little(look: _Look) -> np.ndarray:
    little: np.ndarray = look.cluster.vram < max(look.want.vram, look.want.min_vram)
    return little


def _other_mode(look: _Look) -> np.ndarray:
    if look.want.instance:
        none: np.ndarray = (look.cluster.geometry <= 0) | (look.found.charge == 0)
        return none
    other: np.ndarray = look.cluster.geometry != 0
    return other


def _mode_words(look: _Look, device: Device, row: int, column: int) -> str:
    del row, column
    if not look.want.instance:
        return "it is in MIG mode, and given in MIG instances only"
    return "it has no such MIG profile" if device.mig else "it is not in MIG mode"


def _barred(reason: Reason) -> Callable[[_Look], np.ndarray]:
    return lambda look: look.cluster.barred & 1 << BARS.index(reason) != 0


def _bar_words(reason: Reason, words: str) -> Callable[[_Look, Device, int, int], str]:
    def said(look: _Look, device: Device, row: int, column: int) -> str:
        del row, column
        why = look.cluster.bars_of(device.uuid).get(reason, "")
        return f"{words} ({why})" if why else words

    return said


def _held(look: _Look) -> np.ndarray:
    held = np.zeros_like(look.cluster.free)
    for taken in look.cluster.held():
        if taken.part.device:
            held[look.cluster.place_of(taken.part.device)] += taken.part.milli
    found: np.ndarray = look.lacking & (look.cluster.free + held >= look.found.charge)
    return found


def _no_instance(look: _Look) -> np.ndarray:
    none = np.zeros(look.cluster.free.shape, dtype=bool)
    rows = np.array(sorted(look.cluster.row_of.values()))
    if look.want.instance:
        none[rows] = instances.rooms(look.cluster, look.found, rows) <= 0
    return none


def _in_shares(look: _Look) -> np.ndarray:
    shared: np.ndarray = look.lacking & (look.cluster.shares > 0) & look.want.whole
    return shared


def _leased_whole(look: _Look) -> np.ndarray:
    whole: np.ndarray = look.lacking & (look.cluster.shares == 0) & (not look.want.whole)
    return whole


def _busy_words(look: _Look, device: Device, row: int, column: int) -> str:
    del device
    if look.want.whole:
        return "it is leased"
    free, charge = look.cluster.free[row, column] / WHOLE, look.found.charge[row, column] / WHOLE
    return f"{free:g} of it is free, {charge:g} is wanted"


_Words = str | Callable[[_Look, Device, int, int], str]
#: In reading order: the reason, the devices that it holds of, and what is said of one.
_CHECKS: tuple[tuple[Reason, Callable[[_Look], np.ndarray], _Words], ...] = (
    (
        Reason.EXCLUDED,
        lambda look: ~named(look.cluster, look.want),
        "it is excluded, or not the node asked for",
    ),
    (Reason.WRONG_MODEL, _wrong_model, lambda _, device, *__: f"it is a {device.model}"),
    (Reason.TOO_LITTLE_MEMORY, _too_little, lambda _, device, *__: f"it has {gigabytes(device.memory)}"),
    (Reason.NO_MIG, _other_mode, _mode_words),
    *((reason, _barred(reason), _bar_words(reason, words)) for reason, words in _WORDS.items()),
    (Reason.DEVICE_HELD, _held, "it is held for somebody else"),
    (Reason.NO_MIG_ROOM, _no_instance, "it has no room for such a MIG instance"),
    (Reason.DEVICE_SHARED, _in_shares, "it is in shares"),
    (Reason.DEVICE_WHOLE, _leased_whole, "it is leased whole"),
    (Reason.DEVICE_BUSY, lambda look: look.lacking, _busy_words),
)
#: In `_Look.said`: there is no device.
_NOTHING = -1
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
