"""Consolidation, on an administrator's request: small slices move together so that whole GPUs come free.

Rule 1: only slices of leases that lose nothing by it move: elastic or idle ones of which no scheduler says
        that something would be lost with their workers.
Rule 2: a device is cleared whole or not at all, onto devices of the same model that are in use already; all
        new slices are granted in the stroke in which the old ones begin to leave.
Rule 3: a move is as ever: grant elsewhere, drain, release. Running tasks end first, however long they take.
Rule 4: whoever has a hard limit is charged for no more than before, of GPUs, CPUs or memory: the part of a
        node that goes with a slice may be larger elsewhere.
Rule 5: emptier devices are cleared first; ties break by UUID. The same pool gives the same plan.

Not its business: whether whole GPUs are wanted. Whoever asks knows why.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_gpupool.core import grants, lives, placement
from jupyter_gpupool.core.model import WHOLE, DrainMode, LeaseState, Notice, Reason, Slice, SliceState
from jupyter_gpupool.core.nodes import slices_on, tell_administrators
from jupyter_gpupool.core.replace import avoiding
from jupyter_gpupool.core.state import Leaving

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import ConsolidationAsked
    from jupyter_gpupool.core.parts import Part
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State


@dataclass(frozen=True, slots=True)
class Move:
    """A slice, and the part that it is to go to."""

    lease: Lease
    slice: Slice
    part: Part


@dataclass(slots=True)
class Plan:
    """What is to move, and which devices come free by it."""

    moves: list[Move] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)


def plan(state: State) -> Plan:
    """Think a consolidation through; nothing has changed afterwards."""
    found = Plan()
    with state.cluster.trying():
        for uuid in _in_use_or_bar(state):
            if uuid in {move.part.device for move in found.moves}:
                continue  # what was moved here must not move again
            moves = _clear(state, uuid, found)
            if moves:
                found.moves += moves
                found.freed.append(uuid)
                state.cluster.bar(uuid, Reason.DEVICE_CORDONED)
                for move in moves:
                    state.cluster.take(f"consolidation of {move.slice.id}", "", move.part)
    return found


def _in_use_or_bar(state: State) -> list[str]:
    """Devices all of whose slices may move, the emptiest first; empty devices are closed: they stay whole."""
    found: list[tuple[int, str]] = []
    for uuid in sorted(state.devices):
        taken = state.cluster.taken_of(uuid)
        if not taken:
            state.cluster.bar(uuid, Reason.DEVICE_CORDONED)
            continue
        there = [*slices_on(state, uuid)]
        movable = len(there) == len(taken) and all(_may_move(*each) for each in there)
        if movable and not state.cluster.bars_of(uuid):
            found.append((sum(each.part.milli for each in taken), uuid))
    return [uuid for _, uuid in sorted(found)]


def _may_move(lease: Lease, slice_: Slice) -> bool:
    """A part of a device whose lease loses nothing when it moves."""
    spare = bool(lease.idle_since) or lease.request.max_count > lease.request.count
    settled = lease.state is LeaseState.ACTIVE and slice_.state is SliceState.RUNNING
    busy = slice_.id in lease.leaving or slice_.replaces in lease.slices or lease.holds_count
    return spare and settled and not busy and slice_.milli < WHOLE


def _clear(state: State, uuid: str, found: Plan) -> list[Move]:
    """Places elsewhere for all slices of a device; [] where one has none."""
    moves: list[Move] = []
    with state.cluster.trying():
        state.cluster.bar(uuid, Reason.DEVICE_CORDONED)
        for lease, slice_ in slices_on(state, uuid):
            part = _place(state, lease, slice_, [*found.moves, *moves])
            if part is None:
                return []
            state.cluster.take(f"clearing {len(moves)}", "", part)
            moves.append(Move(lease, slice_, part))
    return moves


def _place(state: State, lease: Lease, slice_: Slice, moves: list[Move]) -> Part | None:
    """A part for a slice that moves, given where the others of its lease are and will be."""
    goes = {move.slice.id: move.part for move in moves}
    have = [
        dataclasses.replace(each, device=goes[each.id].device, node=goes[each.id].node)
        if each.id in goes
        else each
        for each in lease.live()
        if each.id != slice_.id
    ]
    same = dataclasses.replace(lease.request, model=state.model_of(slice_.device))
    found = placement.place(avoiding(same, slice_.device), state.cluster, count=1, have=have)
    if not isinstance(found, placement.Placement):
        return None
    [part] = found.parts
    return None if state.leaf(lease.request).limited and _is_more(part, slice_) else part


def _is_more(part: Part, slice_: Slice) -> bool:
    """Whether a part takes more of anything that has limits than the slice that would move there."""
    return part.milli > slice_.milli or part.cpus > slice_.cpus or part.memory > slice_.memory


def on_asked(state: State, _event: ConsolidationAsked) -> None:
    """An administrator wants whole GPUs."""
    found = plan(state)
    if not found.moves:
        nothing = "Nothing can be moved that would free a GPU."
        advice = "Only shares and MIG instances of elastic and idle leases that would lose nothing move."
        lives.refuse(state, "", Reason.NO_ROOM, nothing, advice)
        return
    for move in found.moves:
        _move(state, move)
    freed = ", ".join(state.device_name(uuid) for uuid in found.freed)
    tell_administrators(state, f"Consolidation: {len(found.moves)} slices move, which frees {freed}.")


def _move(state: State, move: Move) -> None:
    lease, slice_ = move.lease, move.slice
    why = "consolidation: a whole GPU is to come free"
    lease.leaving[slice_.id] = Leaving(mode=DrainMode.FINISH, deadline=lease.ends_at, why=why)
    fresh = grants.new_slice(state, lease, move.part, replaces=slice_.id, extra=slice_.id in lease.extra)
    state.place(lease)
    grants.add_slice(state, lease, fresh)
    places = f"from {state.device_name(slice_.device)} to {state.device_name(fresh.device)}"
    state.tell(lease, Notice.MIGRATING, f"{lease.request.name}: work moves {places} ({why}).")
