"""More time for a lease: granted unless it would delay somebody who waits.

Rule 1: an extension that would delay a reservation is refused, with the time that can be had.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jupyter_gpupool.core import elastic, grants, lives
from jupyter_gpupool.core.model import HOUR, MINUTE, Reason
from jupyter_gpupool.core.state import HOLDING

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import LeaseExtended
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State


def max_time(state: State, project: str) -> int:
    """The longest time limit of a project's leases, in milliseconds."""
    known = state.tree.projects.get(project)
    return (known.max_time if known else 0) or state.defaults.max_time


def on_extended(state: State, event: LeaseExtended) -> None:
    """Its owner asks for more time."""
    lease = lives.find(state, event.lease)
    if not lease:
        return
    limit = lease.request.time_limit + event.by
    most = max_time(state, lease.request.project)
    if event.by <= 0 or limit > most:
        have = max(0, most - lease.request.time_limit)
        told = f"{limit / HOUR:g} hours in all are more than the {most / HOUR:g} that are allowed."
        lives.refuse(state, lease.id, Reason.TIME_LIMIT, told, f"Ask for at most {_more(have)}.")
        return
    delayed = _delayed(state, lease, event.by)
    if delayed:
        name, have = delayed
        advice = (
            f"Ask for at most {have // MINUTE} more minutes." if have >= MINUTE else "Release it in time."
        )
        told = f"{_more(event.by)} would delay {name}, which waits for these GPUs."
        lives.refuse(state, lease.id, Reason.DELAYS_RESERVATION, told, advice)
        return
    lease.request = dataclasses.replace(lease.request, time_limit=limit)
    if lease.state in HOLDING:
        lease.ends_at += event.by
        lease.warned = False
        state.at(grants.expiry_warning(lease), "lease", lease.id)
    state.place(lease)
    state.touch(lease)


def _more(time: int) -> str:
    return f"{time / HOUR:g} more hour{'s' * (time != HOUR)}"


def _delayed(state: State, lease: Lease, by: int) -> tuple[str, int] | None:
    """Whose start would be later, and the time that can be had without."""
    if lease.state not in HOLDING:
        return None
    before = {each.lease.id: each for each in elastic.heads(state).resolve()}
    end = lease.ends_at
    lease.ends_at = end + by
    state.place(lease)
    after = {each.lease.id: each.start for each in elastic.heads(state).resolve()}
    lease.ends_at = end
    state.place(lease)
    late = [each for ident, each in before.items() if after.get(ident, each.start + 1) > each.start]
    if not late:
        return None
    first = min(late, key=lambda each: (each.start, each.lease.id))
    return first.lease.request.name, max(0, first.start - end)
