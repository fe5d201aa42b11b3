"""What is taken of every device, kept as columns so that a whole pool can be searched in one stroke.

Rule 1: a device is used whole, in shares, or in MIG instances: never in two of these ways at once.
Rule 2: what is taken of a device never sums above it; `take` raises rather than overlap.
Rule 3: what is held for somebody is taken like anything else; only who it is held for may look through it.
Rule 4: a bar (out, cordoned, in outside use, node silent) stops new work and leaves what is there alone.
Rule 5: trying is just another value: inside `with cluster.trying():` everything can be changed, and at its
        end everything is as it was.

Not its business: where something should go (`placement`), and whether a device is fit (`health`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import WHOLE, Device, Instance, Node, Reason, Slice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Why a device takes no new work, from the most to the least telling; a bit each in `Cluster.barred`.
BARS = (Reason.NODE_SILENT, Reason.DEVICE_OUT, Reason.DEVICE_CORDONED, Reason.DEVICE_OUTSIDE_USE)
_BIT = {reason: 1 << place for place, reason in enumerate(BARS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a device with its part of the host: what a placement offers and what a slice occupies."""

    node: str
    #: Empty: host CPUs and memory only.
    device: str
    #: Thousandths of the device, charged; and bytes of its memory.
    milli: int
    vram: int
    #: Where it is a MIG instance; its `uuid` is empty where it has yet to be created.
    instance: Instance | None = None
    #: Host CPUs in thousandths of a core, and host memory in bytes.
    cpus: int = 0
    memory: int = 0
    #: The node's generation.
    generation: int = 0

    def slice(self, ident: str, lease: str, *, replaces: str = "") -> Slice:
        """Make a slice of this part, of the given id and lease."""
        return Slice(
            id=ident,
            lease=lease,
            device=self.device,
            node=self.node,
            milli=self.milli,
            vram=self.vram,
            instance=self.instance,
            cpus=self.cpus,
            memory=self.memory,
            replaces=replaces,
            generation=self.generation,
        )


def part_of(slice_: Slice) -> Part:
    """Say which part a slice occupies."""
    return Part(
        node=slice_.node,
        device=slice_.device,
        milli=slice_.milli,
        vram=slice_.vram,
        instance=slice_.instance,
        cpus=slice_.cpus,
        memory=slice_.memory,
        generation=slice_.generation,
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """A part that is not free: by whom, and whether it is only held for them."""

    key: str
    holder: str
    part: Part
    held: bool = False


@dataclass(slots=True)
class _Seat:
    """A device in its place in the columns."""

    device: Device
    row: int
    column: int
    geometry: mig.Geometry | None
    #: What is taken of it, by key.
    taken: dict[str, Taken] = field(default_factory=dict)
    #: Why it takes no new work: reason -> words for a person.
    bars: dict[Reason, str] = field(default_factory=dict)


class Cluster:
    """All nodes of a pool, and what is taken of them."""

    def __init__(self, *, width: int = 8) -> None:
        """Start empty, with room for `width` devices a node; it grows as needed."""
        self.nodes: dict[str, Node] = {}
        self.row_of: dict[str, int] = {}
        #: Row -> name of the node, "" where the row is unused.
        self.names: list[str] = []
        #: Counts up whenever a node comes or goes.
        self.epoch = 0
        #: What readers have worked out from what does not change while no node comes or goes.
        self.memo: dict[object, object] = {}
        #: Rows that have changed, in order; readers remember how far they have read (see `changes_since`).
        self._log: list[int] = []
        self._log_base = 0
        self._unused: list[int] = []
        self._seats: dict[str, _Seat] = {}
        self._taken: dict[str, Taken] = {}
        self._by_holder: dict[str, dict[str, None]] = {}
        self._undo: list[Callable[[], object]] | None = None
        self._models: list[str] = []
        self._order: np.ndarray | None = None
        self._make_columns(0, width)

    # --------------------------------------------------------------------------------------------- columns

    def _make_columns(self, rows: int, width: int) -> None:
        """(Re)make the columns; what was in them is copied."""
        old = getattr(self, "free", None)

        def grown(name: str, shape: tuple[int, ...], kind: type) -> np.ndarray:
            fresh: np.ndarray = np.zeros(shape, dtype=kind)
            if old is not None:
                before = getattr(self, name)
                fresh[tuple(slice(0, size) for size in before.shape)] = before
            return fresh

        grid, line = (rows, width), (rows,)
        #: Thousandths of each device that are not taken.
        self.free = grown("free", grid, np.int64)
        #: Bits of `BARS`; a device with any takes no new work.
        self.barred = grown("barred", grid, np.int64)
        #: Bytes of memory; 0: no device there.
        self.vram = grown("vram", grid, np.int64)
        #: Index of the model's name, from 1; 0: no device there.
        self.model = grown("model", grid, np.int64)
        #: Memory slices taken, as bits; and the geometry's number (0: not in MIG mode).
        self.mask = grown("mask", grid, np.int64)
        self.geometry = grown("geometry", grid, np.int64)
        #: Its verdict asks for a closer watch: used only where nothing else fits.
        self.doubtful = grown("doubtful", grid, np.int64)
        #: Free host CPUs (thousandths of a core) and host memory (bytes) of each node.
        self.cpus = grown("cpus", line, np.int64)
        self.memory = grown("memory", line, np.int64)
        #: The host part that goes with a whole device of the node, unless asked otherwise.
        self.cpus_part = grown("cpus_part", line, np.int64)
        self.memory_part = grown("memory_part", line, np.int64)

    @property
    def rows(self) -> int:
        """How many rows the columns have, unused ones included."""
        return len(self.names)

    @property
    def width(self) -> int:
        """How many devices a row has room for."""
        return int(self.free.shape[1])

    @property
    def models(self) -> tuple[str, ...]:
        """Names of models; the number of a model is its place here, from 1."""
        return tuple(self._models)

    def model_number(self, name: str) -> int:
        """Number of a model's name, 0 where no device here has it."""
        return self._models.index(name) + 1 if name in self._models else 0

    def order(self) -> np.ndarray:
        """Place of each row's node among all by name: the last tie-break everywhere."""
        if self._order is None or len(self._order) != len(self.free):
            ranked = sorted(range(self.rows), key=lambda row: (self.names[row] == "", self.names[row]))
            self._order = np.full(len(self.free), len(self.free), dtype=np.int64)
            self._order[ranked] = np.arange(len(ranked))
        return self._order

    def changes_since(self, mark: tuple[int, int]) -> tuple[tuple[int, int], list[int] | None]:
        """Rows changed since `mark`, each once, and the mark for next time; None: too long ago, take all.

        Begin with the mark `(-1, 0)`.
        """
        now = (self.epoch, self._log_base + len(self._log))
        if mark[0] != self.epoch or mark[1] < self._log_base:
            return now, None
        return now, list(dict.fromkeys(self._log[mark[1] - self._log_base :]))

    def _changed(self, row: int) -> None:
        if len(self._log) > 16384:
            del self._log[:8192]
            self._log_base += 8192
        self._log.append(row)

    # ----------------------------------------------------------------------------------------------- nodes

    def add_node(self, node: Node) -> None:
        """Take in a node, all of it free.

        Raises:
            ValueError: A node of that name, or one of its devices, is here already.
        """
        taken = [device.uuid for device in node.devices if device.uuid in self._seats]
        if node.name in self.nodes or taken:
            raise ValueError(f"node {node.name} or its devices {taken} are in the pool already")
        row = self._new_row(len(node.devices))
        self.names[row] = node.name
        self.row_of[node.name] = row
        self.nodes[node.name] = node
        devices = max(1, len(node.devices))
        self.cpus[row], self.memory[row] = node.cpus, node.memory
        self.cpus_part[row], self.memory_part[row] = node.cpus // devices, node.memory // devices
        for column, device in enumerate(sorted(node.devices, key=lambda each: (each.index, each.uuid))):
            self._seat(device, row, column)
        self._rows_changed()

    def _new_row(self, devices: int) -> int:
        if devices > self.width:
            self._make_columns(len(self.free), devices)
        if self._unused:
            return self._unused.pop()
        if self.rows == len(self.free):
            self._make_columns(max(8, 2 * self.rows), self.width)
        self.names.append("")
        return self.rows - 1

    def _seat(self, device: Device, row: int, column: int) -> None:
        if device.model not in self._models:
            self._models.append(device.model)
        geometry = mig.geometry_of(device) if device.mig else None
        self._seats[device.uuid] = _Seat(device, row, column, geometry)
        self.free[row, column] = WHOLE
        self.vram[row, column] = device.memory
        self.model[row, column] = self.model_number(device.model)
        self.geometry[row, column] = mig.number_of(geometry) if device.mig else 0

    def _rows_changed(self) -> None:
        if self._undo is not None:
            raise RuntimeError("nodes neither come nor go inside a try")
        self.epoch += 1
        self._order = None
        self.memo.clear()

    def remove_node(self, name: str) -> tuple[str, ...]:
        """Forget a node with all that was taken of it; returns the keys of that.

        Raises:
            KeyError: No such node.
        """
        row = self.row_of.pop(name)
        node = self.nodes.pop(name)
        keys = tuple(key for key, taken in self._taken.items() if taken.part.node == name)
        for key in keys:
            self._forget(key)
        for device in node.devices:
            del self._seats[device.uuid]
        for column in (
            self.free,
            self.barred,
            self.vram,
            self.model,
            self.mask,
            self.geometry,
            self.doubtful,
        ):
            column[row] = 0
        for line in (self.cpus, self.memory, self.cpus_part, self.memory_part):
            line[row] = 0
        self.names[row] = ""
        self._unused.append(row)
        self._rows_changed()
        return keys

    def update_node(self, node: Node) -> tuple[str, ...]:
        """Take in what a node reports now; returns the keys of what was taken of devices that it has no more.

        Bars are kept for devices that are still there.
        """
        if node.name not in self.nodes:
            self.add_node(node)
            return ()
        seats = [self._seats[device.uuid] for device in self.nodes[node.name].devices]
        kept = [taken for taken in self._taken.values() if taken.part.node == node.name]
        self.remove_node(node.name)
        self.add_node(node)
        for seat in seats:
            for reason, why in seat.bars.items() if seat.device.uuid in self._seats else ():
                self.bar(seat.device.uuid, reason, why)
        gone = []
        for taken in kept:
            if taken.part.device and taken.part.device not in self._seats:
                gone.append(taken.key)
            else:
                self.take(taken.key, taken.holder, taken.part, held=taken.held)
        return tuple(gone)

    # ------------------------------------------------------------------------------------- taking, freeing

    def occupy(self, slice_: Slice) -> None:
        """Take a slice's part of its device and node. See `take`."""
        self.take(slice_.id, slice_.lease, part_of(slice_))

    def hold(self, key: str, holder: str, part: Part) -> None:
        """Hold a part for a claimant or a reservation; `place(…, allow=…)` names whose it may use."""
        self.take(key, holder, part, held=True)

    def take(self, key: str, holder: str, part: Part, *, held: bool = False) -> None:
        """Take a part under a key.

        Host CPUs and memory may go below zero (a node that reports less than before keeps its slices);
        nothing new is placed there then.

        Raises:
            ValueError: The key is in use, or the part is not free.
            KeyError: No such device or node.
        """
        if key in self._taken:
            raise ValueError(f"{key} has its part already")
        row = self.row_of[part.node]
        if part.device:
            self._take_device(self._seats[part.device], part)
            self._seats[part.device].taken[key] = Taken(key, holder, part, held)
        self.cpus[row] -= part.cpus
        self.memory[row] -= part.memory
        self._taken[key] = Taken(key, holder, part, held)
        self._by_holder.setdefault(holder, {})[key] = None
        self._changed(row)
        if self._undo is not None:
            self._undo.append(lambda: self._free(key))

    def _take_device(self, seat: _Seat, part: Part) -> None:
        row, column = seat.row, seat.column
        free, bits = int(self.free[row, column]), mig.bits(part.instance)
        if not 0 < part.milli <= free or int(self.mask[row, column]) & bits:
            raise ValueError(f"{part.milli} thousandths of {seat.device.uuid} are not free: {free} are")
        if (part.instance is None) is (seat.geometry is not None):
            raise ValueError(f"{seat.device.uuid} is used in MIG instances or not at all: {part.instance}")
        self.free[row, column] = free - part.milli
        self.mask[row, column] |= bits

    def release(self, key: str) -> Taken:
        """Free what was taken under a key, and say what it was.

        Raises:
            KeyError: Nothing was taken under it.
        """
        taken = self._free(key)
        if self._undo is not None:
            self._undo.append(lambda: self.take(key, taken.holder, taken.part, held=taken.held))
        return taken

    def _free(self, key: str) -> Taken:
        taken = self._taken[key]
        part, row = taken.part, self.row_of[taken.part.node]
        if part.device:
            seat = self._seats[part.device]
            self.free[row, seat.column] += part.milli
            self.mask[row, seat.column] &= ~mig.bits(part.instance)
        self.cpus[row] += part.cpus
        self.memory[row] += part.memory
        self._forget(key)
        self._changed(row)
        return taken

    def _forget(self, key: str) -> None:
        taken = self._taken.pop(key)
        if taken.part.device:
            self._seats[taken.part.device].taken.pop(key, None)
        mine = self._by_holder[taken.holder]
        del mine[key]
        if not mine:
            del self._by_holder[taken.holder]

    # ------------------------------------------------------------------------------------------------ bars

    def bar(self, target: str, reason: Reason, why: str = "") -> None:
        """Let a device, or all devices of a node, take no new work.

        Raises:
            KeyError: No such device or node, or the reason is none of `BARS`.
        """
        for seat in self._targets(target):
            before = dict(seat.bars)
            seat.bars[reason] = why
            self._set_bars(seat, before)

    def unbar(self, target: str, reason: Reason) -> None:
        """Take one bar away from a device, or from all devices of a node.

        Raises:
            KeyError: No such device or node.
        """
        for seat in self._targets(target):
            before = dict(seat.bars)
            seat.bars.pop(reason, None)
            self._set_bars(seat, before)

    def _set_bars(self, seat: _Seat, before: dict[Reason, str]) -> None:
        self.barred[seat.row, seat.column] = sum(_BIT[reason] for reason in seat.bars)
        self._changed(seat.row)
        if self._undo is not None:
            self._undo.append(lambda: self._restore_bars(seat, before))

    def _restore_bars(self, seat: _Seat, bars: dict[Reason, str]) -> None:
        seat.bars = bars
        self.barred[seat.row, seat.column] = sum(_BIT[reason] for reason in bars)
        self._changed(seat.row)

    def doubt(self, device: str, doubtful: bool = True) -> None:  # noqa: FBT001, FBT002 - a flag by nature
        """Use a device only where nothing else fits (it is being watched), or as any other again."""
        seat = self._seats[device]
        self.doubtful[seat.row, seat.column] = int(doubtful)
        self._changed(seat.row)

    def _targets(self, target: str) -> list[_Seat]:
        if target in self._seats:
            return [self._seats[target]]
        return [self._seats[device.uuid] for device in self.nodes[target].devices]

    # ---------------------------------------------------------------------------------------------- trying

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Change anything inside (take, release, bar); at the end all is as it was. May be nested."""
        outer, self._undo = self._undo, []
        try:
            yield
        finally:
            undo, self._undo = self._undo, None
            for step in reversed(undo):
                step()
            self._undo = outer

    # --------------------------------------------------------------------------------------------- looking

    def taken(self, key: str) -> Taken | None:
        """What is taken under a key."""
        return self._taken.get(key)

    def taken_of(self, device: str) -> tuple[Taken, ...]:
        """What is taken of a device, by key."""
        seat = self._seats[device]
        return tuple(seat.taken[key] for key in sorted(seat.taken))

    def held_for(self, holder: str) -> tuple[Taken, ...]:
        """What is held (not occupied) for a claimant or reservation."""
        keys = sorted(self._by_holder.get(holder, {}))
        return tuple(self._taken[key] for key in keys if self._taken[key].held)

    def bars_of(self, device: str) -> dict[Reason, str]:
        """Why a device takes no new work."""
        return dict(self._seats[device].bars)

    def device(self, uuid: str) -> Device | None:
        """The device of that UUID."""
        seat = self._seats.get(uuid)
        return seat.device if seat else None

    def geometry_of(self, uuid: str) -> mig.Geometry | None:
        """The MIG geometry of a device, None where it is not in MIG mode (or of no known kind)."""
        return self._seats[uuid].geometry

    def place_of(self, uuid: str) -> tuple[int, int]:
        """Row and column of a device."""
        seat = self._seats[uuid]
        return seat.row, seat.column

    def devices_of(self, row: int) -> tuple[Device, ...]:
        """The devices of a row in the order of their columns."""
        node = self.nodes[self.names[row]]
        return tuple(sorted(node.devices, key=lambda each: (each.index, each.uuid)))

    def free_of(self, device: str) -> int:
        """Thousandths of a device that are neither taken nor barred."""
        row, column = self.place_of(device)
        return 0 if self.barred[row, column] else int(self.free[row, column])

    def validate(self) -> None:
        """Count again from the bottom; raises AssertionError where the columns say otherwise."""
        for uuid, seat in self._seats.items():
            parts = [taken.part for taken in seat.taken.values()]
            row, column = seat.row, seat.column
            assert self.free[row, column] == WHOLE - sum(part.milli for part in parts) >= 0, uuid
            mask = 0
            for part in parts:
                assert not mask & mig.bits(part.instance), f"{uuid}: instances overlap"
                assert (part.instance is None) == (seat.geometry is None), uuid
                mask |= mig.bits(part.instance)
            assert self.mask[row, column] == mask, uuid
        for name, row in self.row_of.items():
            here = [taken.part for taken in self._taken.values() if taken.part.node == name]
            assert self.cpus[row] == self.nodes[name].cpus - sum(part.cpus for part in here), name
            assert self.memory[row] == self.nodes[name].memory - sum(part.memory for part in here), name
