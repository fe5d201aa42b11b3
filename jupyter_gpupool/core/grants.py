"""What is given: parts of devices to what waits, replacements to leases that lost a slice.

Rule 1: a grant is exact and whole: all slices of a request at once, or none.
Rule 2: a replacement goes before everything that waits, and is charged in the place of what it replaces.
Rule 3: nobody passes a hard limit; one who is at theirs does not hold up those behind them.

Not its business: where exactly (`placement`), and how a lease ends (`lives`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jupyter_gpupool.core import placement
from jupyter_gpupool.core.model import (
    ANY,
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
from jupyter_gpupool.core.shares import CPUS, MEMORY
from jupyter_gpupool.core.state import HOLDING, Lease, Leaving, SchedulerState, State, gpus

if TYPE_CHECKING:
    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.model import Request


def settle(state: State) -> None:
    """Give whatever can be given now, until nothing more follows."""
    if not state.stirred:
        return
    state.stirred = False
    replace_missing(state)
    hopeless: set[tuple[object, ...]] = set()
    for ident in sorted(state.waiting, key=lambda each: (state.leases[each].request.arrived, each)):
        lease = state.leases[ident]
        kind = shape(lease.request)
        if kind in hopeless or at_limit(state, lease.request):
            continue
        found = placement.place(lease.request, state.cluster)
        if isinstance(found, placement.Placement):
            grant(state, lease, found.parts)
        else:
            hopeless.add(kind)


def shape(request: Request) -> tuple[object, ...]:
    """All that decides where a request can go: two of one shape fit or fail together."""
    return (
        request.count,
        request.milli,
        request.vram,
        request.mig,
        request.isolated,
        request.cpus,
        request.memory,
        request.model,
        request.min_vram,
        request.same_node,
        request.nvlink,
        request.node,
        request.exclude,
        request.spread,
        request.same_device,
    )


def amounts(request: Request, count: int) -> list[tuple[str, int]]:
    """What a request would be charged against limits, as far as it is known before it has a place."""
    found = [(ANY, request.milli * count), (CPUS, request.cpus * count), (MEMORY, request.memory * count)]
    if request.model and "|" not in request.model:
        found.append((request.model, request.milli * count))
    return [(key, amount) for key, amount in found if amount]


def at_limit(state: State, request: Request) -> bool:
    """Whether a hard limit keeps the request waiting."""
    leaf = state.tree.user(request.project, request.user)
    return state.tree.over_limit(leaf, amounts(request, request.count), ever=False) is not None


def grant(state: State, lease: Lease, parts: tuple[Part, ...]) -> None:
    """Make a waiting request a lease on these parts."""
    slices = [new_slice(state, lease, part) for part in parts]
    state.waiting.pop(lease.id, None)
    lease.state = LeaseState.STARTING
    lease.granted_at = state.now
    lease.ends_at = state.now + lease.request.time_limit
    lease.scheduler = SchedulerState.STARTING
    lease.why = "its scheduler and workers are being started"
    state.at(expiry_warning(lease), "lease", lease.id)
    state.touch(lease)
    ready = tuple(each for each in slices if created(each))
    state.emit(StartLease, lease=lease.id, request=lease.request, slices=ready)
    create_instances(state, slices)
    state.tell(
        lease,
        Notice.GRANTED,
        f"{lease.request.name} has {gpus(milli(slices))} on {state.device_names(slices)}.",
    )


def expiry_warning(lease: Lease) -> int:
    """When the owner is warned of the end: 15 minutes ahead, or a tenth of a shorter lease."""
    return lease.ends_at - min(15 * 60_000, (lease.ends_at - lease.granted_at) // 10)


def milli(slices: list[Slice]) -> int:
    """Thousandths of GPUs of some slices together."""
    return sum(each.milli for each in slices)


def new_slice(state: State, lease: Lease, part: Part, *, replaces: str = "") -> Slice:
    """Occupy and charge a part for a lease."""
    slice_ = part.slice(f"{lease.id}/{lease.number}", lease.id, replaces=replaces)
    lease.number += 1
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


# --------------------------------------------------------------------------------------------- replacements


def leave(state: State, lease: Lease, slice_: Slice, leaving: Leaving) -> None:
    """Move the work of a slice elsewhere: grant, drain, release. Said again, the more urgent counts."""
    if slice_.state is SliceState.STOPPING:
        return
    known = lease.leaving.get(slice_.id)
    if known and (known.mode, -known.deadline) >= (leaving.mode, -leaving.deadline):
        return
    lease.leaving[slice_.id] = leaving
    state.at(leaving.deadline, "lease", lease.id)
    state.touch(lease)
    if slice_.state is SliceState.DRAINING:
        order_drain(state, lease, slice_)
        return
    if lease.state in HOLDING:
        want(state, lease, slice_, slice_.device)
        replace_lease(state, lease)
    hopeless = leaving.mode is DrainMode.NOW and slice_.id in lease.needs
    if hopeless or state.now >= leaving.deadline:
        drain(state, lease, slice_)


def want(state: State, lease: Lease, slice_: Slice, device: str) -> None:
    """Put a lost slice first in line for what becomes free; `device` is to be avoided."""
    if slice_.id in lease.needs or replaced(lease, slice_.id):
        return
    ident = slice_.id
    if slice_.replaces in lease.leaving:
        # A replacement that failed: what it was to replace is still there and still to be replaced.
        ident = slice_.replaces
        lease.charges[ident] = lease.charges.pop(slice_.id)
    lease.needs[ident] = device
    state.needy[lease.id] = None
    state.stirred = True


def replaced(lease: Lease, ident: str) -> bool:
    """The slice has a replacement already."""
    return any(each.replaces == ident for each in lease.slices.values())


def drain(state: State, lease: Lease, slice_: Slice) -> None:
    """Take a slice's worker out of its lease, once."""
    if slice_.state in (SliceState.STARTING, SliceState.RUNNING):
        order_drain(state, lease, state.set_slice(lease, slice_, SliceState.DRAINING))
        if slice_.id in lease.needs:
            _tell_fewer(state, lease)


def order_drain(state: State, lease: Lease, slice_: Slice) -> None:
    """Order a drain as its record says."""
    leaving = lease.leaving[slice_.id]
    deadline = 0 if leaving.mode is DrainMode.NOW else max(leaving.deadline, state.now)
    state.emit(
        DrainSlice, lease=lease.id, slice=slice_.id, mode=leaving.mode, deadline=deadline, why=leaving.why
    )


def _tell_fewer(state: State, lease: Lease) -> None:
    left, least = len(lease.live()), lease.request.min_count or lease.request.count
    goes = f"goes on with {left} of {lease.request.count} slices" if left >= least else "waits"
    sentence = f"{lease.request.name} {goes} until a replacement is free; it is first in line."
    state.tell(lease, Notice.SHRUNK, sentence)


def replace_missing(state: State) -> None:
    """Give replacements to those who wait for one, longest waiting first."""
    for ident in list(state.needy):
        replace_lease(state, state.leases[ident])


def replace_lease(state: State, lease: Lease) -> None:
    """Give a lease what it lost, as far as there is room."""
    for ident, device in list(lease.needs.items()):
        have = [each for each in lease.live() if each.id != ident]
        found = placement.place(avoiding(lease.request, device), state.cluster, count=1, have=have)
        if isinstance(found, placement.NoPlacement):
            found = placement.place(lease.request, state.cluster, count=1, have=have)
        if isinstance(found, placement.NoPlacement):
            continue
        del lease.needs[ident]
        fresh = new_slice(state, lease, found.parts[0], replaces=ident)
        add_slice(state, lease, fresh)
        state.tell(lease, Notice.MIGRATING, _moves(state, lease, device, fresh.device))
    if not lease.needs:
        state.needy.pop(lease.id, None)


def _moves(state: State, lease: Lease, old: str, new: str) -> str:
    """Say where work goes, and what is wrong where it was."""
    record = state.devices.get(old)
    gone = f" from {state.device_name(old)}" if record else ""
    why = (record.cordoned or record.sentence).rstrip(".") if record else ""
    return f"{lease.request.name}: work moves{gone} to {state.device_name(new)}{f' ({why})' if why else ''}."


def avoiding(request: Request, device: str) -> Request:
    """The same request, elsewhere."""
    return dataclasses.replace(request, exclude=(*request.exclude, device)) if device else request
