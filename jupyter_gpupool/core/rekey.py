"""A lease goes on with new keys: whoever has the old ones reaches nothing of it any more.

Rule 1: Dask cannot forget a key, so the scheduler and all workers end, are seen gone, and start anew.
Rule 2: new keys are made when the scheduler starts (`Lease.keys` says how often); nothing that has old ones
        is there by then, save on nodes that are away, where it finds nobody to work for.
Rule 3: its place is kept: each slice is first in line for what becomes free, as one that was lost.

Not its business: who may know the keys (`controller`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core import grants, lives, replace
from jupyter_gpupool.core.model import EndLease, LeaseState, Notice
from jupyter_gpupool.core.state import HOLDING, WORKING, Lease, SchedulerState

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import LeaseRekeyed
    from jupyter_gpupool.core.strokes import State


def on_rekeyed(state: State, event: LeaseRekeyed) -> None:
    """Others know its keys who shall not reach it any more."""
    lease = lives.find(state, event.lease)
    if lease is None:
        return
    lease.keys += 1
    state.touch(lease)
    if lease.scheduler in (SchedulerState.STARTING, SchedulerState.UP):
        why = f"it starts anew on new keys: {event.why}".removesuffix(": ")
        _end_all(state, lease, why)
        lost = "What it computed and held is lost: connect and submit again."
        state.tell(lease, Notice.RESTARTED, f"{lease.request.name}: {why}. {lost}")
    elif lease.scheduler is SchedulerState.NONE:
        # Its scheduler was lost while it gave back: what still drains knows the old keys and serves nobody.
        for slice_ in [each for each in lease.slices.values() if grants.created(each)]:
            lives.stop(state, lease, slice_)


def _end_all(state: State, lease: Lease, why: str) -> None:
    """End its scheduler and workers; where it holds devices, replacements of the workers are wanted."""
    lease.scheduler, lease.address = SchedulerState.ENDING, ""
    lease.holds, lease.holds_count, lease.holds_size = (), 0, 0
    state.emit(EndLease, lease=lease.id, why=why)
    if lease.idle_since:
        state.count_idle(lease)
        lease.idle_since = lease.idle_steps = 0
    if lease.state in HOLDING:
        lease.state, lease.why = LeaseState.STARTING, why
    there = [each for each in lease.slices.values() if grants.created(each)]
    working = [each for each in there if each.state in WORKING]
    for slice_ in there:
        lives.stop(state, lease, slice_)
    for slice_ in working if lease.state in HOLDING else ():
        replace.want(state, lease, slice_, "")
    state.place(lease)
