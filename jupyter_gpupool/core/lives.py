"""The life of a lease: what follows from what its owner and its processes say.

Rule 1: `pending → starting → active → draining → ended(why)`; every state has one way in.
Rule 2: a lease is active when its scheduler answers and all its first slices run.
Rule 3: moving off a device is grant elsewhere, drain, release: three steps, never one. Only where the
        device is gone is the old worker taken out in the same stroke.
Rule 4: a slice is free only when its agent has seen all its processes gone.
Rule 5: what is reported twice, late, or of something unknown changes nothing.

Not its business: who is next (`grants`, `shares`), and what happens to devices (`nodes`).
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from jupyter_gpupool.core import claims, grants, idle, replace
from jupyter_gpupool.core.mig import bits
from jupyter_gpupool.core.model import (
    DestroyInstance,
    DrainMode,
    EndLease,
    LeaseState,
    Notice,
    Reason,
    Refusal,
    RefuseRequest,
    Slice,
    SliceState,
    StopSlice,
)
from jupyter_gpupool.core.state import HOLDING, WORKING, Lease, Leaving, SchedulerState, gpus

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import (
        InstanceCreated,
        InstanceFailed,
        LeaseFailed,
        LeaseFreed,
        LeaseHolds,
        LeaseReleased,
        LeaseStarted,
        RequestWithdrawn,
        SliceDrained,
        SliceFailed,
        SliceStarted,
    )
    from jupyter_gpupool.core.strokes import State

#: So many failed starts in a row end a lease: its environment is broken, not the devices.
MOST_FAILURES = 3
#: Of so many tasks that a deadline has cut off their owner is told the names.
MOST_NAMED = 10


def refuse(state: State, lease: str, reason: Reason, sentence: str, advice: str = "") -> None:
    """Say no to an owner's wish; nothing changes."""
    state.emit(
        RefuseRequest, lease=lease, refusals=(Refusal(reason=reason, sentence=sentence, advice=advice),)
    )


def find(state: State, ident: str) -> Lease | None:
    """The lease of that id if it has not ended; else its owner gets a no."""
    lease = state.leases.get(ident)
    if lease is None:
        refuse(
            state,
            ident,
            Reason.UNKNOWN_LEASE,
            f"There is no lease {ident}.",
            "List your leases for their ids.",
        )
    elif lease.state is LeaseState.ENDED or (lease.state is LeaseState.DRAINING and not lease.suspending):
        refuse(state, ident, Reason.LEASE_OVER, f"{lease.request.name} has ended or is ending: {lease.why}.")
    else:
        return lease
    return None


# --------------------------------------------------------------------------------------- its owner's wishes


def on_withdrawn(state: State, event: RequestWithdrawn) -> None:
    """Its owner takes a request back."""
    lease = find(state, event.lease)
    if lease:
        end(state, lease, "withdrawn by its owner")


def on_released(state: State, event: LeaseReleased) -> None:
    """Its owner, or an administrator, gives a lease back."""
    lease = find(state, event.lease)
    if lease:
        end(state, lease, event.why)


def end(state: State, lease: Lease, why: str) -> None:
    """End a lease: its scheduler, its workers, its claim on anything."""
    claims.drop(state, lease)
    settle_books(state, lease)
    if lease.state in HOLDING:
        lease.ran += state.now - lease.granted_at
    lease.why = why
    lease.suspending = False
    lease.state = LeaseState.DRAINING
    lease.ends_at = state.now
    state.unname(lease)
    if lease.scheduler is not SchedulerState.NONE:
        lease.scheduler = SchedulerState.ENDING
        state.emit(EndLease, lease=lease.id, why=why)
    for slice_ in list(lease.slices.values()):
        stop(state, lease, slice_)
    state.place(lease)
    state.stirred = True
    state.touch(lease)
    finish(state, lease)


def settle_books(state: State, lease: Lease) -> None:
    """Want nothing more for a lease, and count nothing of it for its user's share."""
    for ident in list(lease.needs):
        replace.forgo(state, lease, ident)
    for ident in list(lease.charges):
        state.unserve(lease, ident)


def suspend(state: State, lease: Lease, deadline: int, why: str, reclaim: int = 0) -> None:
    """Take back all slices of a lease; its scheduler, queued tasks, name and place in the queue stay."""
    settle_books(state, lease)
    lease.ran += state.now - lease.granted_at
    lease.state, lease.suspending, lease.why = LeaseState.DRAINING, True, why
    lease.ends_at = deadline
    lease.idle_since = lease.idle_steps = 0
    for slice_ in list(lease.slices.values()):
        if slice_.state in WORKING:
            lease.leaving[slice_.id] = Leaving(
                mode=DrainMode.SUSPEND, deadline=deadline, why=why, reclaim=reclaim
            )
            grants.drain(state, lease, slice_)
    state.place(lease)
    state.touch(lease)
    finish(state, lease)


def stop(state: State, lease: Lease, slice_: Slice) -> None:
    """End a slice's processes."""
    if slice_.state is SliceState.STOPPING:
        return
    if not grants.created(slice_):
        free(state, lease, slice_)
        return
    if slice_.id in lease.extra:
        state.unserve(lease, slice_.id)
    state.set_slice(lease, slice_, SliceState.STOPPING)
    state.emit(StopSlice, lease=lease.id, slice=slice_.id, node=slice_.node)
    state.place(lease)


def finish(state: State, lease: Lease) -> None:
    """Close the books on a lease that has nothing left, or let it wait again if it was suspended."""
    if lease.state is not LeaseState.DRAINING or lease.slices:
        return
    if lease.suspending:
        lease.suspending, lease.state = False, LeaseState.SUSPENDED
        lease.holds, lease.holds_count, lease.holds_size = (), 0, 0
        lease.ends_at = 0
        state.place(lease)
        state.touch(lease)
        words = "it goes on, with its queued tasks, when it is its turn again"
        state.tell(lease, Notice.SUSPENDED, f"{lease.request.name} is suspended; {words}.")
    elif lease.scheduler is SchedulerState.NONE:
        lease.state, lease.ended_at = LeaseState.ENDED, state.now
        state.touch(lease)
        state.retire(lease)
        state.tell(lease, Notice.ENDED, f"{lease.request.name} has ended: {lease.why}.")


# ----------------------------------------------------------------------------------- its processes' reports


def on_lease_started(state: State, event: LeaseStarted) -> None:
    """Its scheduler answers."""
    lease = state.leases.get(event.lease)
    if lease and lease.scheduler is SchedulerState.STARTING:
        lease.scheduler = SchedulerState.UP
        lease.address = event.address
        state.touch(lease)
        activate(state, lease)


def on_lease_failed(state: State, event: LeaseFailed) -> None:
    """Its scheduler did not start, or was lost: it is started anew with all its workers, a few times."""
    lease = state.leases.get(event.lease)
    if not lease or lease.scheduler not in (SchedulerState.STARTING, SchedulerState.UP):
        return
    lease.failures += 1
    lost, lease.scheduler, lease.address = lease.scheduler is SchedulerState.UP, SchedulerState.NONE, ""
    state.touch(lease)
    if not lost or lease.failures >= MOST_FAILURES:
        fail(state, lease, event.why)
        return
    anew = "it is started anew when the lease goes on"
    if lease.state in HOLDING:
        anew = "it and its workers are started anew"
        lease.state = LeaseState.STARTING
        live = [state.set_slice(lease, slice_, SliceState.STARTING) for slice_ in lease.live()]
        grants.start_scheduler(state, lease, live)
        state.place(lease)
    told = f"The scheduler of {lease.request.name} was lost ({event.why}); {anew}."
    state.tell(lease, Notice.FAILED, f"{told} Futures from before are lost: submit them again.")


def fail(state: State, lease: Lease, why: str) -> None:
    """End a lease that cannot be started."""
    state.tell(lease, Notice.FAILED, f"{lease.request.name} could not be started: {why}")
    end(state, lease, f"failed: {why}")


def on_slice_started(state: State, event: SliceStarted) -> None:
    """A worker has registered with the lease's scheduler."""
    found = state.slice_of(event.slice)
    if not found or found[1].state is not SliceState.STARTING:
        return
    lease, slice_ = found
    lease.failures = 0
    state.set_slice(lease, slice_, SliceState.RUNNING)
    old = lease.slices.get(slice_.replaces)
    while old and old.id in lease.leaving:
        # It may itself have been to replace one that is still there.
        replace.drain(state, lease, old)
        state.tell(
            lease,
            Notice.MIGRATED,
            f"{lease.request.name} now works on {state.device_name(slice_.device)} "
            f"instead of {state.device_name(old.device)}.",
        )
        old = lease.slices.get(old.replaces)
    activate(state, lease)


def activate(state: State, lease: Lease) -> None:
    """A lease whose scheduler answers and whose slices all run is active."""
    running = all(each.state is not SliceState.STARTING for each in lease.slices.values())
    running = running and bool(lease.live() or not lease.needs)
    if lease.state is LeaseState.STARTING and lease.scheduler is SchedulerState.UP and running:
        lease.state, lease.why = LeaseState.ACTIVE, ""
        lease.started_at = lease.started_at or state.now
        state.stirred = state.stirred or bool(lease.wanted > lease.sure)
        state.touch(lease)
        state.tell(lease, Notice.STARTED, f"{lease.request.name} is ready.")


def on_slice_failed(state: State, event: SliceFailed) -> None:
    """A worker could not be started, or has died for good: another one elsewhere, a few times."""
    found = state.slice_of(event.slice)
    if not found or found[1].state not in (SliceState.STARTING, SliceState.RUNNING, SliceState.DRAINING):
        return
    lease, slice_ = found
    lease.failures += 1
    stop(state, lease, slice_)
    if lease.state not in HOLDING:
        return
    if lease.failures >= MOST_FAILURES:
        fail(state, lease, event.why)
    elif slice_.state is not SliceState.DRAINING:
        replace.want(state, lease, slice_, slice_.device)


def on_slice_drained(state: State, event: SliceDrained) -> None:
    """The lease's scheduler has let a worker go; its processes can end."""
    found = state.slice_of(event.slice)
    if not found or found[1].state is not SliceState.DRAINING:
        return
    lease, slice_ = found
    leaving, charge = lease.leaving.get(slice_.id), lease.charges.get(slice_.id)
    if event.work > 0 and leaving and charge and leaving.reclaim:
        state.ledger.cost(leaving.reclaim, lease.request, charge, event.work)
    stop(state, lease, slice_)
    if event.forced or event.lost:
        cut = _cut_off(event.forced) if event.forced else ""
        lost = f"lost for good: {', '.join(event.lost)}" if event.lost else ""
        says = f"{lease.request.name}: {'; '.join(filter(None, (cut, lost)))}."
        data = json.dumps({"forced": event.forced, "lost": event.lost})
        state.tell(lease, Notice.MIGRATED, says, data)


def on_holds(state: State, event: LeaseHolds) -> None:
    """A lease has other scattered data and actors than before."""
    lease = state.leases.get(event.lease)
    fresh = (event.parts, event.count, event.size)
    if lease and lease.state in HOLDING and fresh != (lease.holds, lease.holds_count, lease.holds_size):
        lease.holds, lease.holds_count, lease.holds_size = fresh
        state.touch(lease)


def _cut_off(keys: tuple[str, ...]) -> str:
    """Name the tasks that the deadline has cut off; of very many, the first."""
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    named = ", ".join(keys[:MOST_NAMED]) + more
    return f"{len(keys)} running tasks were cut off at the deadline and run again elsewhere: {named}"


def free(state: State, lease: Lease, slice_: Slice) -> None:
    """A slice is over: its part is free, or becomes somebody's replacement."""
    unasked = slice_.state in (SliceState.STARTING, SliceState.RUNNING)
    if unasked and lease.state in HOLDING:
        replace.want(state, lease, slice_, "")
    made = slice_.instance is not None and slice_.instance.uuid and slice_.instance.made
    state.vacate(lease, slice_)
    state.touch(lease)
    if made:
        state.emit(
            DestroyInstance, slice=slice_.id, node=slice_.node, device=slice_.device, instance=slice_.instance
        )
    finish(state, lease)


def on_lease_freed(state: State, event: LeaseFreed) -> None:
    """A lease's scheduler process is gone."""
    lease = state.leases.get(event.lease)
    if lease and lease.scheduler is SchedulerState.ENDING:
        lease.scheduler = SchedulerState.NONE
        state.touch(lease)
        if lease.state in HOLDING:  # it was ended for new keys
            grants.start_scheduler(state, lease, lease.live())
        finish(state, lease)


def on_instance_created(state: State, event: InstanceCreated) -> None:
    """A MIG instance exists: its worker can start."""
    found = state.slice_of(event.slice)
    if not found:
        _give_up_instance(state, event)
        return
    lease, slice_ = found
    instance = slice_.instance
    if not instance or instance.uuid:
        return
    instance = dataclasses.replace(instance, uuid=event.uuid, gpu_instance=event.gpu_instance)
    lease.slices[slice_.id] = fresh = dataclasses.replace(slice_, instance=instance)
    state.touch(lease)
    grants.add_slice(state, lease, fresh)


def _give_up_instance(state: State, event: InstanceCreated) -> None:
    """Destroy an instance whose slice is gone by now, unless its place has been granted anew.

    Whoever has the place then finds the instance there, or is refused and goes elsewhere.
    """
    record = state.devices.get(event.device)
    if record is None or event.instance is None:
        return
    taken = [each.part.instance for each in state.cluster.taken_of(event.device)]
    if not any(bits(each) & bits(event.instance) for each in taken):
        state.emit(
            DestroyInstance,
            slice=event.slice,
            node=record.device.node,
            device=event.device,
            instance=dataclasses.replace(event.instance, uuid=event.uuid, made=True),
        )


def on_instance_failed(state: State, event: InstanceFailed) -> None:
    """A MIG instance could not be created: somewhere else, a few times."""
    found = state.slice_of(event.slice)
    if not found or grants.created(found[1]):
        return
    lease, slice_ = found
    lease.failures += 1
    if lease.failures >= MOST_FAILURES:
        fail(state, lease, event.why)
        return
    replace.want(state, lease, slice_, slice_.device)
    free(state, lease, slice_)


# ----------------------------------------------------------------------------------------------------- time


def due(state: State, ident: str) -> None:
    """Something of a lease may be due: its end, the warning before, a step of the idle rule, a deadline."""
    lease = state.leases.get(ident)
    if lease is None:
        return
    if lease.state in HOLDING and state.now >= lease.ends_at:
        end(state, lease, "its time limit was reached")
        return
    for slice_id in list(lease.leaving):
        _leave_by(state, lease, lease.slices[slice_id])
    if lease.state in HOLDING:
        _warn(state, lease)
        idle.step(state, lease)


def _leave_by(state: State, lease: Lease, slice_: Slice) -> None:
    """Drain what is to be gone by now; end by force what was to be drained long ago."""
    if lease.state in HOLDING and state.now >= lease.leaving[slice_.id].deadline:
        replace.drain(state, lease, slice_)
    if slice_.state is SliceState.DRAINING and state.now >= grants.overdue(lease, slice_):
        stop(state, lease, slice_)


def _warn(state: State, lease: Lease) -> None:
    if not lease.warned and state.now >= grants.expiry_warning(lease):
        lease.warned = True
        left = -(-(lease.ends_at - state.now) // 60_000)
        state.tell(lease, Notice.EXPIRING, f"{lease.request.name} ends in {left} min; extend it to keep it.")
        state.at(lease.ends_at, "lease", lease.id)
        state.touch(lease)


def lost(state: State, lease: Lease, slice_: Slice, why: str) -> None:
    """A slice's node or device is gone, and with it the last that could be heard of its processes."""
    asked = slice_.state in (SliceState.DRAINING, SliceState.STOPPING)
    if not asked and lease.state in HOLDING:
        replace.want(state, lease, slice_, slice_.device)
        state.tell(lease, Notice.MIGRATING, f"{lease.request.name} lost {gpus(slice_.milli)}: {why}.")
    state.vacate(lease, slice_)
    state.touch(lease)
    finish(state, lease)
