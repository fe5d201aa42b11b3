"""What the pool knows, as plain records.

Rule 1: `core.pool` and its neighbours are the only writers; everybody else reads.
Rule 2: what can be worked out again from the records is an index; a snapshot holds records only.

Not its business: how the records and indexes change together (`strokes`), and what follows from an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from jupyter_gpupool.core.cluster import Part  # noqa: TC001 - `decode` reads the hints
from jupyter_gpupool.core.model import (
    WHOLE,
    Device,
    DrainMode,
    LeaseState,
    Node,
    Request,
    Slice,
    SliceState,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    #: It is cordoned for good.
    retired: bool = False
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
    #: It is cordoned for good.
    retired: bool = False
    #: Who computes on it from outside the pool; empty: nobody.
    outside: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOut:
    """What an administrator has said of a device that its node does not have at present."""

    why: str
    retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What a slice counts against quotas and limits, and how fast its usage runs."""

    model: str
    #: "whole", "share", or the MIG profile.
    kind: str
    milli: int
    cpus: int
    memory: int
    #: Thousandths of a GPU, or of the host's CPUs if that is more, times the weight of the model.
    rate: int


@dataclass(slots=True, kw_only=True)
class Leaving:
    """A slice that is to be taken out of its lease, once its replacement runs or the time is up."""

    mode: DrainMode
    #: When it goes, replacement or not.
    deadline: int
    why: str
    #: Number of the reclaim that takes it; 0: it goes for another reason.
    reclaim: int = 0


@dataclass(slots=True, kw_only=True)
class Claim:
    """Parts that others are giving back for a waiting request."""

    since: int
    #: When it is given up: the grace of those who give back, and the time that freed parts are held.
    until: int
    #: Where the request will go, if all goes well.
    parts: tuple[Part, ...]
    #: Slices that are still to be freed for it.
    awaited: dict[str, str] = field(default_factory=dict)
    #: What is held for it now, by the cluster's keys.
    held: dict[str, Part] = field(default_factory=dict)
    #: What it is served and charged in advance.
    charges: tuple[Charge, ...] = ()


@dataclass(slots=True, kw_only=True)
class Lease:
    """A request, and the lease that it became."""

    request: Request
    state: LeaseState = LeaseState.PENDING
    #: Slices for sure, and the most that it wants; more than `sure` are surplus.
    sure: int = 1
    wanted: int = 1
    #: Thousandths of a GPU of one slice, as far as is known before it has a place.
    estimate: int = WHOLE
    #: Occupied parts by slice id, in the order of their numbers.
    slices: dict[str, Slice] = field(default_factory=dict)
    #: What each slice is charged; the charge of one that is gone stays while its replacement is wanted.
    charges: dict[str, Charge] = field(default_factory=dict)
    #: Slice id -> since when its usage has been running.
    meters: dict[str, int] = field(default_factory=dict)
    #: Surplus slices, in the order of their grants.
    extra: dict[str, str] = field(default_factory=dict)
    #: Charged slices that count no more for its user's share: they are being taken back or ended.
    unserved: dict[str, str] = field(default_factory=dict)
    #: Slice id -> device to avoid: a replacement is wanted, and nothing was free for it yet.
    needs: dict[str, str] = field(default_factory=dict)
    #: Slices that are to go.
    leaving: dict[str, Leaving] = field(default_factory=dict)
    #: While others give back for it.
    claim: Claim | None = None
    scheduler: SchedulerState = SchedulerState.NONE
    address: str = ""
    #: How often its keys have been made anew; while it holds devices, its scheduler ends for that only.
    keys: int = 0
    #: Milliseconds of the pool's clock; 0: not yet. A resumed lease was granted when it was resumed.
    granted_at: int = 0
    started_at: int = 0
    ends_at: int = 0
    ended_at: int = 0
    #: When something was last taken from it, and how long it had run before its last suspension, or its end.
    taken_at: int = 0
    ran: int = 0
    #: It is draining to be suspended, not to end.
    suspending: bool = False
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
    #: When the last of these steps was taken.
    idle_told: int = 0
    #: What it would lose for good with its workers: the largest, how many, and the bytes of all.
    holds: tuple[tuple[str, int], ...] = ()
    holds_count: int = 0
    holds_size: int = 0
    #: Grows with each change, so that a reader can wait for the next one.
    version: int = 0

    @property
    def id(self) -> str:
        """The lease's id, which is its request's."""
        return self.request.id

    @property
    def left(self) -> int:
        """How long it may still run from its next grant, in milliseconds."""
        return max(1, self.request.time_limit - self.ran)

    @property
    def milli(self) -> int:
        """Thousandths of GPUs that it asks for, for sure."""
        return self.sure * self.estimate

    def live(self) -> list[Slice]:
        """Slices that work or are being started, and are not on their way out."""
        return [
            each for each in self.slices.values() if each.state in WORKING and each.id not in self.leaving
        ]

    def seats(self) -> Iterator[str]:
        """Ids of the slices that it has for sure, those whose replacement is wanted included."""
        yield from (each.id for each in self.live() if each.id not in self.extra)
        yield from self.needs


#: States in which a slice has, or gets, a worker that takes tasks.
WORKING = (SliceState.STARTING, SliceState.RUNNING)
#: States in which a lease has, or may get, slices.
HOLDING = (LeaseState.STARTING, LeaseState.ACTIVE)
#: States in which it waits for a grant.
WAITING = (LeaseState.PENDING, LeaseState.SUSPENDED)


def gpus(milli: int) -> str:
    """Thousandths as a count of GPUs, for people."""
    return f"{milli / WHOLE:g} GPU{'' if milli == WHOLE else 's'}"
