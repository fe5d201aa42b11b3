"""What is taken of every device, and by whom.

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

from jupyter_gpupool.core import islands, mig
from jupyter_gpupool.core.columns import Columns
from jupyter_gpupool.core.demand import Demand
from jupyter_gpupool.core.model import WHOLE, Device, Instance, Node, Reason, Slice
from jupyter_gpupool.core.parts import Part, Taken, part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BARS", "Cluster", "Part", "Taken", "part_of"]

#: Why a device takes no new work, from the most to the least telling; a bit each in `Cluster.barred`.
BARS = (Reason.NODE_SILENT, Reason.DEVICE_OUT, Reason.DEVICE_CORDONED, Reason.DEVICE_OUTSIDE_USE)
_BIT = {reason: 1 << place for place, reason in enumerate(BARS)}


@dataclass(slots=True)
class _Seat:
    """A device in its place in the columns."""

    device: Device
    row: int
    column: int
    geometry: mig.Geometry | None
    #: MIG instances that were there before the pool, and are offered as they are.
    offers: tuple[Instance, ...] = ()
    #: What is taken of it, by key.
    taken: dict[str, Taken] = field(default_factory=dict)
    #: Why it takes no new work: reason -> words for a person.
    bars: dict[Reason, str] = field(default_factory=dict)


class Cluster(Columns):
    """All nodes of a pool, and what is taken of them."""

    def __init__(self, *, width: int = 8) -> None:
        """Start empty, with room for `width` devices a node; it grows as needed."""
        super().__init__(width)
        self.nodes: dict[str, Node] = {}
        #: What is usually asked for; the pool lets it `observe` each request.
        self.demand = Demand()
        self.topologies: dict[str, islands.Topology] = {}
        #: Devices with MIG instances that are offered as they are.
        self.offering: dict[str, None] = {}
        self._in_order: dict[str, tuple[Device, ...]] = {}
        self._seats: dict[str, _Seat] = {}
        self._taken: dict[str, Taken] = {}
        self._held: dict[str, None] = {}
        self._by_holder: dict[str, dict[str, None]] = {}
        self._undo: list[Callable[[], object]] | None = None

    # --------------------------------------------------------------------------------------------- nodes

    def add_node(self, node: Node) -> None:
        """Take in a node, all of it free.

        Raises:
            ValueError: A node of that name, or one of its devices, is here already.
        """
        known = [device.uuid for device in node.devices if device.uuid in self._seats]
        if node.name in self.nodes or known:
            raise ValueError(f"node {node.name} or its devices {known} are in the pool already")
        self._enter(node, {})

    def _enter(self, node: Node, made: dict[str, set[int]]) -> None:
        """Put a node into the columns; `made`: by device the instances (as bits) of the pool's making."""
        if self._undo is not None:
            raise RuntimeError("nodes neither come nor go inside a try")
        row = self._new_row(node.name, len(node.devices))
        devices = max(1, len(node.devices))
        self.nodes[node.name] = node
        self.cpus[row], self.memory[row] = node.cpus, node.memory
        self.cpus_part[row], self.memory_part[row] = node.cpus // devices, node.memory // devices
        self.devices[row] = len(node.devices)
        ordered = tuple(sorted(node.devices, key=lambda each: (each.index, each.uuid)))
        self._in_order[node.name] = ordered
        topology = self.topologies[node.name] = islands.topology_of(ordered)
        self.island[row, : len(ordered)] = topology.islands
        self.linked[row, : len(ordered)] = topology.linked
        for column, device in enumerate(ordered):
            self._seat(device, row, column, made.get(device.uuid, set()))
        self._rows_changed()

    def _seat(self, device: Device, row: int, column: int, made: set[int]) -> None:
        geometry = mig.geometry_of(device) if device.mig else None
        offers = tuple(
            each
            for each in device.instances
            if geometry and geometry.legal(each) and mig.bits(each) not in made and not each.made
        )
        self._seats[device.uuid] = _Seat(device, row, column, geometry, offers)
        if offers:
            self.offering[device.uuid] = None
        self.free[row, column] = WHOLE
        self.vram[row, column] = device.memory
        self.model[row, column] = self._number(device.model)
        self.fixed[row, column] = sum(map(mig.bits, offers)) if device.mig_managed else -1
        # A device in MIG mode of a kind that is not known is there, and can be used in no way.
        self.geometry[row, column] = self._geometry_number(geometry) if geometry else -int(device.mig)

    def remove_node(self, name: str) -> tuple[str, ...]:
        """Forget a node with all that was taken of it; returns the keys of that.

        Raises:
            KeyError: No such node.
        """
        node = self.nodes.pop(name)
        keys = tuple(key for key, taken in self._taken.items() if taken.part.node == name)
        for key in keys:
            self._forget(key)
        for device in node.devices:
            del self._seats[device.uuid]
            self.offering.pop(device.uuid, None)
        del self.topologies[name], self._in_order[name]
        self._clear_row(name)
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
        made: dict[str, set[int]] = {}
        for taken in kept:
            if taken.part.instance and taken.part.instance.made:
                made.setdefault(taken.part.device, set()).add(mig.bits(taken.part.instance))
        self.remove_node(node.name)
        self._enter(node, made)
        for seat in seats:
            for reason, why in seat.bars.items() if seat.device.uuid in self._seats else ():
                self.bar(seat.device.uuid, reason, why)
        return tuple(taken.key for taken in kept if not self._took_again(taken))

    def _took_again(self, taken: Taken) -> bool:
        if taken.part.device and taken.part.device not in self._seats:
            return False
        try:
            self.take(taken.key, taken.holder, taken.part, held=taken.held)
        except ValueError:  # it is another kind of device now: MIG mode went on or off
            return False
        return True

    # ----------------------------------------------------------------------------------- taking, freeing

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
        taken = Taken(key, holder, part, held)
        if part.device:
            seat = self._seats[part.device]
            self.wholes -= self._check(seat, part) == WHOLE
            self.free[row, seat.column] -= part.milli
            self.mask[row, seat.column] |= mig.bits(part.instance)
            self.shares[row, seat.column] += part.milli < WHOLE
            seat.taken[key] = taken
        self.cpus[row] -= part.cpus
        self.memory[row] -= part.memory
        self._taken[key] = taken
        if held:
            self._held[key] = None
        self._by_holder.setdefault(holder, {})[key] = None
        self._changed(row)
        if self._undo is not None:
            self._undo.append(lambda: self._free(key))

    def _check(self, seat: _Seat, part: Part) -> int:
        """How much of a device is free, if a part of it is."""
        uuid, free = seat.device.uuid, int(self.free[seat.row, seat.column])
        if not 0 < part.milli <= free:
            raise ValueError(f"{part.milli} thousandths of {uuid} are not free: {free} are")
        if part.instance is None and not seat.device.mig:
            return free
        if part.instance is None or seat.geometry is None or not seat.geometry.legal(part.instance):
            raise ValueError(f"{uuid} cannot be used so: {part.instance}")
        if int(self.mask[seat.row, seat.column]) & mig.bits(part.instance):
            raise ValueError(f"the memory slices of {part.instance} of {uuid} are not free")
        return free

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
            column = self._seats[part.device].column
            self.free[row, column] = free = int(self.free[row, column]) + part.milli
            self.wholes += free == WHOLE
            self.mask[row, column] &= ~mig.bits(part.instance)
            self.shares[row, column] -= part.milli < WHOLE
        self.cpus[row] += part.cpus
        self.memory[row] += part.memory
        self._forget(key)
        self._changed(row)
        return taken

    def _forget(self, key: str) -> None:
        taken = self._taken.pop(key)
        self._held.pop(key, None)
        if taken.part.device:
            self._seats[taken.part.device].taken.pop(key, None)
        mine = self._by_holder[taken.holder]
        del mine[key]
        if not mine:
            del self._by_holder[taken.holder]

    # ----------------------------------------------------------------------------------- bars and doubts

    def bar(self, target: str, reason: Reason, why: str = "") -> None:
        """Let a device, or all devices of a node, take no new work.

        Raises:
            KeyError: No such device or node, or the reason is none of `BARS`.
        """
        for seat in self._targets(target):
            self._set_bars(seat, {**seat.bars, reason: why})

    def unbar(self, target: str, reason: Reason) -> None:
        """Take one bar away from a device, or from all devices of a node.

        Raises:
            KeyError: No such device or node.
        """
        for seat in self._targets(target):
            self._set_bars(seat, {each: why for each, why in seat.bars.items() if each is not reason})

    def _set_bars(self, seat: _Seat, bars: dict[Reason, str]) -> None:
        bits = sum(_BIT[reason] for reason in bars)
        before, seat.bars = seat.bars, bars
        if bits != self.barred[seat.row, seat.column]:
            self.barred[seat.row, seat.column] = bits
            self.bars = (self.epoch, self.bars[1] + 1)
            self._changed(seat.row)
        if self._undo is not None:
            self._undo.append(lambda: self._set_bars(seat, before))

    def doubt(self, device: str, doubtful: bool = True) -> None:  # noqa: FBT001, FBT002 (a flag by nature)
        """Use a device only where nothing else fits (it is being watched), or as any other again."""
        seat = self._seats[device]
        if bool(self.doubtful[seat.row, seat.column]) is not doubtful:
            self.doubtful[seat.row, seat.column] = int(doubtful)
            self.doubts += 1 if doubtful else -1
            self._changed(seat.row)

    def _targets(self, target: str) -> list[_Seat]:
        if target in self._seats:
            return [self._seats[target]]
        return [self._seats[device.uuid] for device in self.nodes[target].devices]

    # -------------------------------------------------------------------------------------------- trying

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Change anything inside (take, release, bar); at the end all is as it was. May be nested."""
        outer, self._undo = self._undo, []
        moment = self.moment
        try:
            yield
        finally:
            undo, self._undo = self._undo, None
            for step in reversed(undo):
                step()
            self._undo = outer
            self.moment = moment

    # ------------------------------------------------------------------------------------------- looking

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

    def held(self) -> tuple[Taken, ...]:
        """Everything that is held for somebody."""
        return tuple(self._taken[key] for key in sorted(self._held))

    def bars_of(self, device: str) -> dict[Reason, str]:
        """Why a device takes no new work."""
        return dict(self._seats[device].bars)

    def free_offers(self, device: str, profile: str) -> tuple[Instance, ...]:
        """MIG instances of a profile that are offered as they are and are free."""
        seat = self._seats[device]
        mask = int(self.mask[seat.row, seat.column])
        return tuple(each for each in seat.offers if each.profile == profile and not mask & mig.bits(each))

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
        return self._in_order[self.names[row]]

    def free_of(self, device: str) -> int:
        """Thousandths of a device that are neither taken nor barred."""
        row, column = self.place_of(device)
        return 0 if self.barred[row, column] else int(self.free[row, column])

    def validate(self) -> None:
        """Count again from the bottom; raises AssertionError where the columns say otherwise."""
        for uuid, seat in self._seats.items():
            self._validate_device(uuid, seat)
        assert self.wholes == np.count_nonzero(self.free >= WHOLE)
        assert self.doubts == np.count_nonzero(self.doubtful)
        on_node: dict[str, list[Part]] = {name: [] for name in self.row_of}
        for taken in self._taken.values():
            on_node[taken.part.node].append(taken.part)
        for name, row in self.row_of.items():
            here = on_node[name]
            assert self.cpus[row] == self.nodes[name].cpus - sum(part.cpus for part in here), name
            assert self.memory[row] == self.nodes[name].memory - sum(part.memory for part in here), name

    def _validate_device(self, uuid: str, seat: _Seat) -> None:
        parts = [taken.part for taken in seat.taken.values()]
        assert self.free[seat.row, seat.column] == WHOLE - sum(part.milli for part in parts) >= 0, uuid
        mask = 0
        for part in parts:
            assert not mask & mig.bits(part.instance), f"{uuid}: instances overlap"
            assert (part.instance is not None) == seat.device.mig, f"{uuid}: in MIG instances and otherwise"
            mask |= mig.bits(part.instance)
        assert self.mask[seat.row, seat.column] == mask, uuid
        shared = len(parts) > 1 and not seat.device.mig
        assert not (shared and any(part.milli == WHOLE for part in parts)), f"{uuid}: whole and shared"
