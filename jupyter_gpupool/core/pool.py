"""The machine: pool events in, instructions out.

Rule 1: `handle(event)` is the only way that anything changes. `now` rides on the event; nothing here reads a
        clock, draws a random number or does I/O.
Rule 2: the same events give an equal pool and the same instructions.
Rule 3: what is due by an event's time happens before the event.
Rule 4: a `Tick` from which nothing follows changes nothing (`version` stays as it is).
Rule 5: nothing raises for what comes from outside: a wrong wish gets a `RefuseRequest`, a stale report
        nothing.

Not its business: the rules themselves. A lease's life is `lives`, nodes and devices are `nodes`, what is
given is `grants`, who is next is `shares`, where is `placement`.
"""

from __future__ import annotations

import heapq
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core import (
    claims,
    consolidate,
    elastic,
    extend,
    figures,
    idle,
    lives,
    model,
    quotas,
    records,
    rekey,
    settle,
    submit,
)
from jupyter_gpupool.core import explain as why
from jupyter_gpupool.core import nodes as hosts
from jupyter_gpupool.core.model import Instruction, PoolEvent, RefuseRequest, Request
from jupyter_gpupool.core.state import DeviceRecord, Lease, NodeRecord
from jupyter_gpupool.core.strokes import State
from jupyter_gpupool.core.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jupyter_gpupool.core.ledger import Ledger
    from jupyter_gpupool.core.model import ConfigChanged, Project

__all__ = ["Lease", "Pool"]


def on_config(state: State, event: ConfigChanged) -> None:
    """The tree of projects or the defaults change; quotas that do not add up are refused."""
    there = state.capacity if any(state.capacity.values()) else {}
    # Who changes other numbers is not told of quotas that a lost node has made too many.
    refusals = quotas.check(event.projects, there) if event.projects != state.projects else ()
    if refusals:
        state.emit(RefuseRequest, lease="", refusals=refusals)
        return
    records.reconfigure(state, event.projects, event.defaults)
    state.stir()
    state.version += 1


def on_tick(state: State, event: model.Tick) -> None:
    """Time has passed; what is due has happened already."""


#: One handler for each pool event.
HANDLERS: dict[type[PoolEvent], Callable[[State, Any], None]] = {
    model.ConfigChanged: on_config,
    model.NodeJoined: hosts.on_joined,
    model.NodeSilent: hosts.on_silent,
    model.NodeLost: hosts.on_lost,
    model.RequestSubmitted: submit.on_submitted,
    model.RequestWithdrawn: lives.on_withdrawn,
    model.LeaseReleased: lives.on_released,
    model.LeaseExtended: extend.on_extended,
    model.LeaseScaled: elastic.on_scaled,
    model.LeaseKept: idle.on_kept,
    model.LeaseRekeyed: rekey.on_rekeyed,
    model.LeaseIdle: idle.on_idle,
    model.LeaseBusy: idle.on_busy,
    model.LeaseHolds: lives.on_holds,
    model.LeaseStarted: lives.on_lease_started,
    model.LeaseFailed: lives.on_lease_failed,
    model.LeaseFreed: lives.on_lease_freed,
    model.SliceStarted: lives.on_slice_started,
    model.SliceFailed: lives.on_slice_failed,
    model.SliceDrained: lives.on_slice_drained,
    model.SliceFreed: hosts.on_slice_freed,
    model.ConsolidationAsked: consolidate.on_asked,
    model.InstanceCreated: lives.on_instance_created,
    model.InstanceFailed: lives.on_instance_failed,
    model.VerdictChanged: hosts.on_verdict,
    model.OutsideUse: hosts.on_outside_use,
    model.Cordoned: hosts.on_cordoned,
    model.Uncordoned: hosts.on_uncordoned,
    model.Tick: on_tick,
}

#: What is looked at when its time has come.
TIMERS: dict[str, Callable[[State, str], None]] = {
    "lease": lives.due,
    "node": hosts.due,
    "claim": claims.due,
    "wake": settle.wake,
}


class Pool:
    """All GPUs of a team, who has them and who waits."""

    def __init__(self) -> None:
        """Start with no node, no lease, and one project `default` that is open to everybody."""
        self._state = State()

    def handle(self, event: PoolEvent) -> list[Instruction]:
        """Take in what has happened and say what is to be done.

        A clock that goes back is taken to stand still.
        """
        state, before = self._state, (self._state.now, self._state.version)
        state.now = max(state.now, event.now)
        state.cause = event.cause or f"{type(event).__name__} at {event.now}"
        state.out = []
        self._ring()
        HANDLERS[type(event)](state, event)
        settle.settle(state)
        if state.version == before[1]:
            state.now = before[0]
        out, state.out = state.out, []
        return out

    def _ring(self) -> None:
        """Let happen what is due, in its order."""
        timers, state = self._state.timers, self._state
        while timers and timers[0][0] <= state.now:
            _, kind, ident = heapq.heappop(timers)
            TIMERS[kind](state, ident)
            settle.settle(state)

    # --------------------------------------------------------------------------------------------- looking

    @property
    def version(self) -> int:
        """Grows with every event that has changed something: those are the ones to journal."""
        return self._state.version

    @property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """The nodes by name, lost ones included."""
        return MappingProxyType(self._state.nodes)

    @property
    def devices(self) -> Mapping[str, DeviceRecord]:
        """The devices by UUID."""
        return MappingProxyType(self._state.devices)

    @property
    def leases(self) -> Mapping[str, Lease]:
        """Requests and leases by id, the latest ended ones included."""
        return MappingProxyType(self._state.leases)

    @property
    def projects(self) -> tuple[Project, ...]:
        """The tree of projects as configured."""
        return self._state.projects

    @property
    def defaults(self) -> model.Defaults:
        """The defaults as configured."""
        return self._state.defaults

    @property
    def ledger(self) -> Ledger:
        """What was used, and what reclaims took."""
        return self._state.ledger

    def device_name(self, uuid: str) -> str:
        """Name a device for people: "node-1/gpu3"."""
        return self._state.device_name(uuid)

    def next_time(self) -> int | None:
        """When a `Tick` may have something to do; None: not before something else happens."""
        return self._state.timers[0][0] if self._state.timers else None

    def orders(self, node: str = "") -> list[Instruction]:
        """What is outstanding now, for all nodes or one of them: for a controller that has just started."""
        return records.orders(self._state, node)

    def explain(self, lease: str, now: int) -> why.Explanation:
        """Say why a lease is where it is: its reasons, its place in the queue and its expected start.

        Raises:
            KeyError: There is no such lease.
        """
        return why.explain(self._state, self._state.leases[lease], now)

    def order(self, most: int) -> list[str]:
        """The ids of what waits, the next one first, those for whom others give back before all."""
        return why.places(self._state, most)

    def queue(self, now: int) -> list[tuple[str, int]]:
        """All that waits, the next one first: its id and when it should start (0: not known)."""
        del now
        return why.queue(self._state)

    def usage(self, now: int) -> dict[str, Any]:
        """What everybody is served, deserves and has used, and what reclaims have taken; JSON-able."""
        return figures.figures(self._state, now)

    def consolidation(self) -> consolidate.Plan:
        """What a consolidation would move now, and which devices come free by it; nothing changes."""
        return consolidate.plan(self._state)

    def history(self, user: str, now: int) -> list[list[int]]:
        """What a person used by hours of the pool's clock: hour, used, of that while idle."""
        return figures.history(self._state, user, now)

    def would(self, request: Request, now: int) -> why.Explanation:
        """Say whether a request would start now, else when and why not; nothing changes."""
        return why.would(self._state, request, now)

    # ---------------------------------------------------------------------------------- checking, keeping

    def validate(self) -> None:
        """Count again from the bottom; raises AssertionError where the books do not add up."""
        validate(self._state)

    def snapshot(self) -> dict[str, Any]:
        """Write everything as JSON-able data."""
        return records.snapshot(self._state)

    def text(self) -> str:
        """Write everything as the JSON of `snapshot`, in less memory."""
        return records.text(self._state)

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Pool:
        """Read back what `snapshot` wrote.

        Raises:
            ValueError: It is not a snapshot of a pool.
        """
        pool = cls()
        pool._state = records.restore(data)
        return pool

    def __eq__(self, other: object) -> bool:
        """Pools are equal when they know the same."""
        return isinstance(other, Pool) and self.snapshot() == other.snapshot()

    __hash__ = None  # type: ignore[assignment]  # it changes
