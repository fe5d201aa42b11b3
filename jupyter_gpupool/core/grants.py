"""Making a lease of a request: its slices, its charges, the orders to start it.

Rule 1: a grant is exact and whole, and charged at once.
Rule 2: a MIG instance is created before a worker starts on it; everything else starts meanwhile.

Not its business: who gets what (`give`, `reclaim`, `replace`, `elastic`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import (
    MINUTE,
    AddSlice,
    CreateInstance,
    DrainMode,
    DrainSlice,
    LeaseState,
    Notice,
    Slice,
    SliceState,
    StartLease,
)
from jupyter_gpupool.core.state import WORKING, Lease, SchedulerState, gpus

if TYPE_CHECKING:
    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.strokes import State


def grant(state: State, lease: Lease, parts: tuple[Part, ...]) -> None:
    """Make a waiting request a lease on these parts, or let a suspended one go on there."""
    resumed = lease.state is LeaseState.SUSPENDED
    slices = [new_slice(state, lease, part) for part in parts]
    lease.state = LeaseState.STARTING
    lease.granted_at = state.now
    lease.ends_at = state.now + lease.left
    lease.warned = False
    lease.why = "its scheduler and workers are being started"
    state.place(lease)
    state.at(expiry_warning(lease), "lease", lease.id)
    state.touch(lease)
    if lease.scheduler is SchedulerState.NONE:
        start_scheduler(state, lease, slices)
        create_instances(state, slices)
    else:
        for each in slices:
            add_slice(state, lease, each)
    milli = sum(each.milli for each in slices)
    words = f"{'again ' if resumed else ''}{gpus(milli)} on {state.device_names(slices)}"
    notice = Notice.RESUMED if resumed else Notice.GRANTED
    state.tell(lease, notice, f"{lease.request.name} has {words}.")


def start_scheduler(state: State, lease: Lease, slices: list[Slice]) -> None:
    """Start a lease's scheduler, and beside it the workers of those slices that exist already."""
    lease.scheduler = SchedulerState.STARTING
    ready = tuple(each for each in slices if created(each))
    state.emit(StartLease, lease=lease.id, request=lease.request, slices=ready)


def expiry_warning(lease: Lease) -> int:
    """When the owner is warned of the end: 15 minutes ahead, or a tenth of a shorter lease."""
    return lease.ends_at - min(15 * MINUTE, (lease.ends_at - lease.granted_at) // 10)


def new_slice(state: State, lease: Lease, part: Part, *, replaces: str = "", extra: bool = False) -> Slice:
    """Occupy and charge a part for a lease."""
    slice_ = part.slice(f"{lease.id}/{lease.number}", lease.id, replaces=replaces)
    lease.number += 1
    if extra:
        lease.extra[slice_.id] = ""
    state.occupy(lease, slice_)
    state.charge(lease, slice_)
    state.touch(lease)
    return slice_


def created(slice_: Slice) -> bool:
    """A worker can start on it: it is no MIG instance that has yet to be created."""
    return slice_.instance is None or bool(slice_.instance.uuid)


def create_instances(state: State, slices: list[Slice]) -> None:
    """Order the MIG instances of slices that do not exist yet."""
    for each in slices:
        if each.instance is not None and not each.instance.uuid:
            state.emit(
                CreateInstance, slice=each.id, node=each.node, device=each.device, instance=each.instance
            )


def add_slice(state: State, lease: Lease, slice_: Slice) -> None:
    """Start a worker of a lease on a slice, once its MIG instance exists."""
    if created(slice_):
        state.emit(AddSlice, lease=lease.id, slice=slice_)
    else:
        create_instances(state, [slice_])


def drain(state: State, lease: Lease, slice_: Slice) -> None:
    """Take a slice's worker out of its lease as its record in `leaving` says, once."""
    if slice_.state in WORKING:
        order_drain(state, lease, state.set_slice(lease, slice_, SliceState.DRAINING))


def order_drain(state: State, lease: Lease, slice_: Slice) -> None:
    """Order a drain as its record says, and look whether it is over soon after its time."""
    leaving = lease.leaving[slice_.id]
    now = leaving.mode is DrainMode.NOW
    deadline = 0 if now else max(leaving.deadline, state.now)
    state.at(overdue(lease, slice_), "lease", lease.id)
    state.emit(
        DrainSlice, lease=lease.id, slice=slice_.id, mode=leaving.mode, deadline=deadline, why=leaving.why
    )


def overdue(lease: Lease, slice_: Slice) -> int:
    """When a drain that has not been heard of again is ended by force."""
    return lease.leaving[slice_.id].deadline + PATIENCE


#: How long after its deadline a drain may still report, in milliseconds.
PATIENCE = MINUTE
