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

from jupyter_gpupool.core import grants
from jupyter_gpupool.core.model import (
    DestroyInstance,
    EndLease,
    LeaseState,
    Notice,
    Reason,
    Refusal,
    RefuseRequest,
    Slice,
    SliceState,
    StartLease,
    StopSlice,
)
from jupyter_gpupool.core.state import HOLDING, Lease, SchedulerState, State, gpus

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import (
        InstanceCreated,
        InstanceFailed,
        LeaseBusy,
        LeaseExtended,
        LeaseFailed,
        LeaseFreed,
        LeaseIdle,
        LeaseKept,
        LeaseReleased,
        LeaseStarted,
        RequestWithdrawn,
        SliceDrained,
        SliceFailed,
        SliceStarted,
    )

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
    elif lease.state in (LeaseState.ENDED, LeaseState.DRAINING):
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


def on_extended(state: State, event: LeaseExtended) -> None:
    """Its owner asks for more time."""
    lease = find(state, event.lease)
    if not lease:
        return
    limit = lease.request.time_limit + event.by
    most = max_time(state, lease.request.project)
    if event.by <= 0 or limit > most:
        refuse(
            state,
            lease.id,
            Reason.TIME_LIMIT,
            f"{limit / 3_600_000:g} hours in all are more than the {most / 3_600_000:g} that are allowed.",
            f"Ask for at most {(most - lease.request.time_limit) / 3_600_000:g} more hours.",
        )
        return
    lease.request = dataclasses.replace(lease.request, time_limit=limit)
    if lease.granted_at:
        lease.ends_at += event.by
        lease.warned = False
        state.at(grants.expiry_warning(lease), "lease", lease.id)
    state.touch(lease)


def max_time(state: State, project: str) -> int:
    """The longest time limit of a project's leases, in milliseconds."""
    known = state.tree.projects.get(project)
    return (known.max_time if known else 0) or state.defaults.max_time


def end(state: State, lease: Lease, why: str) -> None:
    """End a lease: its scheduler, its workers, its claim on anything."""
    state.waiting.pop(lease.id, None)
    state.needy.pop(lease.id, None)
    for ident in list(lease.needs):
        del lease.needs[ident]
        if ident not in lease.slices:
            state.discharge(lease, ident)
    lease.why = why
    lease.state = LeaseState.DRAINING
    state.unname(lease)
    state.stirred = True
    state.touch(lease)
    if lease.scheduler is not SchedulerState.NONE:
        lease.scheduler = SchedulerState.ENDING
        state.emit(EndLease, lease=lease.id, why=why)
    for slice_ in list(lease.slices.values()):
        stop(state, lease, slice_)
    finish(state, lease)


def stop(state: State, lease: Lease, slice_: Slice) -> None:
    """End a slice's processes."""
    if slice_.state is SliceState.STOPPING:
        return
    if not grants.created(slice_):
        free(state, lease, slice_)
        return
    state.set_slice(lease, slice_, SliceState.STOPPING)
    state.emit(StopSlice, lease=lease.id, slice=slice_.id, node=slice_.node)


def finish(state: State, lease: Lease) -> None:
    """Close the books on a lease that has nothing left."""
    if lease.state is not LeaseState.DRAINING or lease.slices or lease.scheduler is not SchedulerState.NONE:
        return
    lease.state = LeaseState.ENDED
    lease.ended_at = state.now
    state.touch(lease)
    state.retire(lease)
    state.tell(lease, Notice.ENDED, f"{lease.request.name} has ended: {lease.why}.")


def on_kept(state: State, event: LeaseKept) -> None:
    """Its owner still needs an idle lease."""
    lease = find(state, event.lease)
    if lease and lease.idle_since:
        lease.idle_since, lease.idle_steps = state.now, 0
        watch_idle(state, lease)


def on_idle(state: State, event: LeaseIdle) -> None:
    """A lease does nothing."""
    lease = state.leases.get(event.lease)
    if lease and lease.state is LeaseState.ACTIVE and not lease.idle_since:
        lease.idle_since, lease.idle_steps = max(1, event.since), 0
        watch_idle(state, lease)


def on_busy(state: State, event: LeaseBusy) -> None:
    """An idle lease works again."""
    lease = state.leases.get(event.lease)
    if lease and lease.idle_since:
        lease.idle_since = lease.idle_steps = 0
        state.touch(lease)


def idle_due(state: State, lease: Lease) -> int:
    """When the next step of the idle rule is due; 0: never."""
    timeout = lease.request.idle_timeout or state.defaults.idle_timeout
    if not lease.idle_since or timeout < 0:
        return 0
    return lease.idle_since + timeout + lease.idle_steps * state.defaults.idle_warning_gap


def watch_idle(state: State, lease: Lease) -> None:
    """Look at an idle lease again when its next step is due."""
    due = idle_due(state, lease)
    if due:
        state.at(due, "lease", lease.id)
    state.touch(lease)


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
    lost = lease.scheduler is SchedulerState.UP
    if not lost or lease.failures >= MOST_FAILURES:
        lease.scheduler = SchedulerState.NONE if not lost else lease.scheduler
        fail(state, lease, event.why)
        return
    lease.scheduler, lease.address, lease.state = SchedulerState.STARTING, "", LeaseState.STARTING
    for slice_ in lease.live():
        state.set_slice(lease, slice_, SliceState.STARTING)
    ready = tuple(each for each in lease.live() if grants.created(each))
    state.emit(StartLease, lease=lease.id, request=lease.request, slices=ready)
    state.tell(
        lease,
        Notice.FAILED,
        f"The scheduler of {lease.request.name} was lost ({event.why}); it and its workers are started anew. "
        "Futures from before are lost: submit them again.",
    )


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
    if old and old.id in lease.leaving:
        grants.drain(state, lease, old)
        state.tell(
            lease,
            Notice.MIGRATED,
            f"{lease.request.name} now works on {state.device_name(slice_.device)} "
            f"instead of {state.device_name(old.device)}.",
        )
    activate(state, lease)


def activate(state: State, lease: Lease) -> None:
    """A lease whose scheduler answers and whose slices all run is active."""
    running = all(each.state is not SliceState.STARTING for each in lease.slices.values())
    if lease.state is LeaseState.STARTING and lease.scheduler is SchedulerState.UP and running:
        lease.state, lease.why = LeaseState.ACTIVE, ""
        lease.started_at = lease.started_at or state.now
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
        grants.want(state, lease, slice_, slice_.device)


def on_slice_drained(state: State, event: SliceDrained) -> None:
    """The lease's scheduler has let a worker go; its processes can end."""
    found = state.slice_of(event.slice)
    if not found or found[1].state is not SliceState.DRAINING:
        return
    lease, slice_ = found
    stop(state, lease, slice_)
    if event.forced or event.lost:
        cut = _cut_off(event.forced) if event.forced else ""
        lost = f"lost for good: {', '.join(event.lost)}" if event.lost else ""
        says = f"{lease.request.name}: {'; '.join(filter(None, (cut, lost)))}."
        data = json.dumps({"forced": event.forced, "lost": event.lost})
        state.tell(lease, Notice.MIGRATED, says, data)


def _cut_off(keys: tuple[str, ...]) -> str:
    """Name the tasks that the deadline has cut off; of very many, the first."""
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    named = ", ".join(keys[:MOST_NAMED]) + more
    return f"{len(keys)} running tasks were cut off at the deadline and run again elsewhere: {named}"


def free(state: State, lease: Lease, slice_: Slice) -> None:
    """A slice is over: its part is free, or becomes somebody's replacement."""
    unasked = slice_.state in (SliceState.STARTING, SliceState.RUNNING)
    if unasked and lease.state in HOLDING:
        grants.want(state, lease, slice_, "")
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
        finish(state, lease)


def on_instance_created(state: State, event: InstanceCreated) -> None:
    """A MIG instance exists: its worker can start."""
    found = state.slice_of(event.slice)
    instance = found[1].instance if found else None
    if not found or not instance or instance.uuid:
        return
    lease, slice_ = found
    instance = dataclasses.replace(instance, uuid=event.uuid)
    lease.slices[slice_.id] = fresh = dataclasses.replace(slice_, instance=instance)
    state.touch(lease)
    grants.add_slice(state, lease, fresh)


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
    grants.want(state, lease, slice_, slice_.device)
    free(state, lease, slice_)


# ----------------------------------------------------------------------------------------------------- time


def due(state: State, ident: str) -> None:
    """Something of a lease may be due: its end, the warning before, a step of the idle rule, a deadline."""
    lease = state.leases.get(ident)
    if lease is None or lease.state not in (LeaseState.STARTING, LeaseState.ACTIVE):
        return
    if state.now >= lease.ends_at:
        end(state, lease, "its time limit was reached")
        return
    if not lease.warned and state.now >= grants.expiry_warning(lease):
        lease.warned = True
        left = -(-(lease.ends_at - state.now) // 60_000)
        state.tell(lease, Notice.EXPIRING, f"{lease.request.name} ends in {left} min; extend it to keep it.")
        state.at(lease.ends_at, "lease", lease.id)
        state.touch(lease)
    for slice_id, leaving in list(lease.leaving.items()):
        if state.now >= leaving.deadline and slice_id in lease.slices:
            grants.drain(state, lease, lease.slices[slice_id])
    _idle_step(state, lease)


def _idle_step(state: State, lease: Lease) -> None:
    when = idle_due(state, lease)
    if not when or state.now < when:
        return
    lease.idle_steps += 1
    name, steps, warnings = lease.request.name, lease.idle_steps, state.defaults.idle_warnings
    minutes = (state.now - lease.idle_since) // 60_000
    if steps <= warnings:
        told = (
            f"{name} has done nothing for {minutes} min (warning {steps} of {warnings}); keep it, or lose it."
        )
        state.tell(lease, Notice.IDLE, told)
    elif steps == warnings + 1:
        state.tell(lease, Notice.IDLE, f"{name} has done nothing for {minutes} min: others may take it now.")
    else:
        end(state, lease, f"idle for {minutes} min")
        return
    watch_idle(state, lease)


def lost(state: State, lease: Lease, slice_: Slice, why: str) -> None:
    """A slice's node or device is gone, and with it the last that could be heard of its processes."""
    asked = slice_.state in (SliceState.DRAINING, SliceState.STOPPING)
    if not asked and lease.state in HOLDING:
        grants.want(state, lease, slice_, slice_.device)
        state.tell(lease, Notice.MIGRATING, f"{lease.request.name} lost {gpus(slice_.milli)}: {why}.")
    state.vacate(lease, slice_)
    state.touch(lease)
    finish(state, lease)
