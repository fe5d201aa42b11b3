"""Leases that do nothing: two warnings, then others may take them, then they end.

Rule 1: idle is what the lease's scheduler and the reader say together: no task, no call, no utilisation.
        That a browser is closed is nothing.
Rule 2: `warnings` times a warning, then it is preemptible, then it ends; a gap lies between the steps, also
        where nobody could look for a while.
Rule 3: any work resets it; *keep* begins the time-out anew.

Not its business: what counts as idle (`lease`, `controller`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core import lives
from jupyter_gpupool.core.model import LeaseState, Notice

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import LeaseBusy, LeaseIdle, LeaseKept
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State


def on_kept(state: State, event: LeaseKept) -> None:
    """Its owner still needs an idle lease."""
    lease = lives.find(state, event.lease)
    if lease and lease.idle_since:
        state.count_idle(lease)
        lease.idle_since, lease.idle_steps = state.now, 0
        watch(state, lease)


def on_idle(state: State, event: LeaseIdle) -> None:
    """A lease does nothing."""
    lease = state.leases.get(event.lease)
    if lease and lease.state is LeaseState.ACTIVE and not lease.idle_since:
        lease.idle_since, lease.idle_steps = max(1, event.since), 0
        watch(state, lease)


def on_busy(state: State, event: LeaseBusy) -> None:
    """An idle lease works again."""
    lease = state.leases.get(event.lease)
    if lease and lease.idle_since:
        state.count_idle(lease)
        lease.idle_since = lease.idle_steps = 0
        state.touch(lease)


def due(state: State, lease: Lease) -> int:
    """When the next step of the idle rule is due; 0: never."""
    timeout = lease.request.idle_timeout or state.defaults.idle_timeout
    if not lease.idle_since or timeout < 0:
        return 0
    gap = state.defaults.idle_warning_gap
    earliest = lease.idle_told + gap if lease.idle_steps else 0
    return max(lease.idle_since + timeout + lease.idle_steps * gap, earliest)


def watch(state: State, lease: Lease) -> None:
    """Look at an idle lease again when its next step is due."""
    when = due(state, lease)
    if when:
        state.at(when, "lease", lease.id)
    state.touch(lease)


def step(state: State, lease: Lease) -> None:
    """Take the next step of the rule, if it is due."""
    when = due(state, lease)
    if not when or state.now < when:
        return
    lease.idle_steps += 1
    lease.idle_told = state.now
    name, steps, warnings = lease.request.name, lease.idle_steps, state.defaults.idle_warnings
    minutes = (state.now - lease.idle_since) // 60_000
    if steps <= warnings:
        told = (
            f"{name} has done nothing for {minutes} min (warning {steps} of {warnings}); keep it, or lose it."
        )
        state.tell(lease, Notice.IDLE, told)
    elif steps == warnings + 1:
        state.tell(lease, Notice.IDLE, f"{name} has done nothing for {minutes} min: others may take it now.")
        state.stirred = True
    else:
        lives.end(state, lease, f"idle for {minutes} min")
        return
    watch(state, lease)
