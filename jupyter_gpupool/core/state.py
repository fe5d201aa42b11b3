"""What the pool knows, as plain records, and the few strokes that keep its indexes together.

Rule 1: `core.pool` and its neighbours are the only writers; everybody else reads.
Rule 2: what can be worked out again from the records is an index; a snapshot holds records only.
Rule 3: a slice occupies its part of a device from the grant until its processes are seen gone.
Rule 4: a charge is held against its user and projects from the grant until its slice is freed; the
        replacement of a failing slice takes over the charge of the one that it replaces.

Not its business: what follows from an event (`pool`, `lives`, `nodes`), who is next (`shares`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.cluster import Cluster
from jupyter_gpupool.core.model import (
    WHOLE,
    Defaults,
    Device,
    DrainMode,
    Instruction,
    LeaseState,
    Node,
    Notice,
    Notify,
    Project,
    Request,
    Slice,
    SliceState,
    Verdict,
)
from jupyter_gpupool.core.shares import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable

#: How many ended leases are remembered, so that their owners can still read why they ended.
KEEP_ENDED = 1000


class NodeState(StrEnum):
    """What the pool hears of a node."""

    UP = "up"
    SILENT = "silent"  # its leases run on; nothing new goes there
    LOST = "lost"  # its slices are given up; it may come back


class SchedulerState(StrEnum):
    """How far a lease's own scheduler is."""

    NONE = "none"
    STARTING = "starting"
    UP = "up"
    ENDING = "ending"


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """A node and what is known of its agent."""

    node: Node
    state: NodeState = NodeState.UP
    #: Why an administrator keeps new work off it; empty: they do not.
    cordoned: str = ""
    #: When it is declared lost; 0: it is not silent.
    lost_at: int = 0
    #: Slices given up when it was lost, whose processes may still run there.
    ghosts: dict[str, Slice] = field(default_factory=dict)
    #: Slices that it reports and nobody knows: nothing goes there until they are gone.
    strangers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class DeviceRecord:
    """A device and what is known of its fitness."""

    device: Device
    verdict: Verdict = Verdict.FINE
    sentence: str = ""
    evidence: str = "{}"
    probation: bool = False
    #: Why an administrator keeps new work off it; empty: they do not.
    cordoned: str = ""
    #: Who computes on it from outside the pool; empty: nobody.
    outside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a slice counts against quotas and limits."""

    model: str
    milli: int
    cpus: int
    memory: int


@dataclass(slots=True, kw_only=True)
class Leaving:
    """A slice that is to be taken out of its lease, once its replacement runs or the time is up."""

    mode: DrainMode
    #: When it goes, replacement or not.
    deadline: int
    why: str


@dataclass(slots=True, kw_only=True)
class Lease:
    """A request, and the lease that it became."""

    request: Request
    state: LeaseState = LeaseState.PENDING
    #: Occupied parts by slice id, in the order of their numbers.
    slices: dict[str, Slice] = field(default_factory=dict)
    #: What each slice is charged; the charge of one that is gone stays while its replacement is wanted.
    charges: dict[str, Charge] = field(default_factory=dict)
    #: Slice id -> device to avoid: a replacement is wanted, and nothing was free for it yet.
    needs: dict[str, str] = field(default_factory=dict)
    #: Slices that are to go.
    leaving: dict[str, Leaving] = field(default_factory=dict)
    scheduler: SchedulerState = SchedulerState.NONE
    address: str = ""
    #: Milliseconds of the pool's clock; 0: not yet.
    granted_at: int = 0
    started_at: int = 0
    ends_at: int = 0
    ended_at: int = 0
    #: Why it is in its state, for its owner.
    why: str = ""
    #: Slices had so far; the next one gets this number.
    number: int = 0
    #: Failed starts in a row.
    failures: int = 0
    #: The warning before the end of its time has been given.
    warned: bool = False
    #: Since when it does nothing; 0: it works. And how many steps of the idle rule have been taken.
    idle_since: int = 0
    idle_steps: int = 0
    #: Grows with each change, so that a reader can wait for the next one.
    version: int = 0

    @property
    def id(self) -> str:
        """The lease's id, which is its request's."""
        return self.request.id

    def live(self) -> list[Slice]:
        """Slices that work or are being started, and are not on their way out."""
        good = (SliceState.STARTING, SliceState.RUNNING)
        return [each for each in self.slices.values() if each.state in good and each.id not in self.leaving]


#: States in which a lease has, or may get, slices.
HOLDING = (LeaseState.STARTING, LeaseState.ACTIVE)


def with_state(slice_: Slice, state: SliceState) -> Slice:
    """Copy a slice with another state; `dataclasses.replace` costs three times as much."""
    return Slice(
        id=slice_.id,
        lease=slice_.lease,
        device=slice_.device,
        node=slice_.node,
        milli=slice_.milli,
        vram=slice_.vram,
        instance=slice_.instance,
        cpus=slice_.cpus,
        memory=slice_.memory,
        state=state,
        replaces=slice_.replaces,
        generation=slice_.generation,
    )


class State:
    """Everything that the pool knows. See the module's rules."""

    def __init__(self) -> None:
        """Start with no node, no lease and one open project."""
        self.now = 0
        self.cause = ""
        #: Grows with each event that has changed something.
        self.version = 0
        self.defaults = Defaults()
        self.projects: tuple[Project, ...] = (Project(name="default"),)
        self.nodes: dict[str, NodeRecord] = {}
        self.devices: dict[str, DeviceRecord] = {}
        #: All leases, the last `KEEP_ENDED` ended ones included.
        self.leases: dict[str, Lease] = {}
        self.ended: dict[str, None] = {}
        # Indexes.
        self.cluster = Cluster()
        self.tree = Tree(self.projects)
        #: Ids of pending and suspended leases.
        self.waiting: dict[str, None] = {}
        #: Ids of leases with replacements wanted, longest wanted first.
        self.needy: dict[str, None] = {}
        #: (user, name) -> id of the live lease of that name.
        self.names: dict[tuple[str, str], str] = {}
        #: Node -> ids of the slices on it.
        self.on_node: dict[str, dict[str, None]] = {}
        #: (when, kind, id): what is to be looked at when; stale entries are dropped as they come up.
        self.timers: list[tuple[int, str, str]] = []
        #: Something has become free, or wanted, since who is next was last looked at.
        self.stirred = False
        self.out: list[Instruction] = []

    # ------------------------------------------------------------------------------------------ strokes

    def emit(self, kind: type[Instruction], **fields: Any) -> None:
        """Order something; the cause is that of the event at hand."""
        self.out.append(kind(cause=self.cause, **fields))

    def tell(self, lease: Lease, notice: Notice, sentence: str, data: str = "{}") -> None:
        """Tell the lease's owner one sentence."""
        self.emit(
            Notify, user=lease.request.user, notice=notice, lease=lease.id, sentence=sentence, data=data
        )

    def touch(self, lease: Lease) -> None:
        """Say that the lease has changed."""
        lease.version += 1
        self.version += 1

    def at(self, when: int, kind: str, ident: str) -> None:
        """Look at something of that kind and id at a time."""
        heapq.heappush(self.timers, (when, kind, ident))

    def slice_of(self, ident: str) -> tuple[Lease, Slice] | None:
        """The slice of that id with its lease, None if there is none."""
        lease = self.leases.get(ident.rpartition("/")[0])
        slice_ = lease.slices.get(ident) if lease else None
        return (lease, slice_) if lease and slice_ else None

    def occupy(self, lease: Lease, slice_: Slice) -> None:
        """Give a part of a device to a lease."""
        self.cluster.occupy(slice_)
        lease.slices[slice_.id] = slice_
        self.on_node.setdefault(slice_.node, {})[slice_.id] = None

    def vacate(self, lease: Lease, slice_: Slice) -> None:
        """Take the part of a slice back: its processes are gone."""
        if self.cluster.taken(slice_.id):
            self.cluster.release(slice_.id)
        del lease.slices[slice_.id]
        self.on_node[slice_.node].pop(slice_.id, None)
        lease.leaving.pop(slice_.id, None)
        if slice_.id not in lease.needs:
            self.discharge(lease, slice_.id)
        self.stirred = True

    def charge(self, lease: Lease, slice_: Slice) -> None:
        """Charge a slice to its user, in the place of the one that it replaces if there is one."""
        record = self.devices.get(slice_.device)
        charge = Charge(
            model=record.device.model if record else "",
            milli=slice_.milli,
            cpus=slice_.cpus,
            memory=slice_.memory,
        )
        if slice_.replaces:
            self.discharge(lease, slice_.replaces)
        lease.charges[slice_.id] = charge
        self.tree.user(lease.request.project, lease.request.user).charge(charge, 1)

    def discharge(self, lease: Lease, ident: str) -> None:
        """Take a slice's charge off its user."""
        charge = lease.charges.pop(ident, None)
        if charge:
            self.tree.user(lease.request.project, lease.request.user).charge(charge, -1)

    def set_slice(self, lease: Lease, slice_: Slice, state: SliceState) -> Slice:
        """Put a slice into another state."""
        fresh = lease.slices[slice_.id] = with_state(slice_, state)
        self.touch(lease)
        return fresh

    def unname(self, lease: Lease) -> None:
        """Let its owner use the name again: a lease that is ending must not be in the way of the next one."""
        self.names.pop((lease.request.user, lease.request.name), None)

    def retire(self, lease: Lease) -> None:
        """Remember an ended lease for a while, and forget the oldest."""
        self.ended[lease.id] = None
        while len(self.ended) > KEEP_ENDED:
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            del self.leases[oldest]

    # -------------------------------------------------------------------------------------------- names

    def device_name(self, uuid: str) -> str:
        """Name a device for people: "node-1/gpu3"."""
        record = self.devices.get(uuid)
        return f"{record.device.node}/gpu{record.device.index}" if record else uuid or "no GPU"

    def device_names(self, slices: Iterable[Slice]) -> str:
        """The devices of some slices, for people."""
        return ", ".join(dict.fromkeys(self.device_name(each.device) for each in slices))


def gpus(milli: int) -> str:
    """Thousandths as a count of GPUs, for people."""
    return f"{milli / WHOLE:g} GPU{'' if milli == WHOLE else 's'}"
