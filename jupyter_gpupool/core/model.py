"""The nouns of the pool: what there is, what can happen to it, and what is then to be done.

Rule 1: everything here is frozen, compares by value and can be written as JSON (`encode`, `decode`).
Rule 2: amounts are integers: GPU shares in thousandths of a GPU ("milli"), memory in bytes, time in
        milliseconds. Floating-point amounts that never quite fit are a known way to hang a scheduler.
Rule 3: a *pool event* says what has happened, an *instruction* what is to be done. Both carry their cause.
Rule 4: a no has a name from the closed list `Reason`, a sentence, and what to do next.
Rule 5: identifiers come from the caller. Nothing here reads a clock or draws a random number.

Not its business: who is next (`shares`), where (`placement`, `mig`), whether a device is fit (`health`),
and the state of the pool (`pool`).
"""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

if TYPE_CHECKING:
    from collections.abc import Callable

#: One whole GPU, in thousandths.
WHOLE = 1000
#: Seconds, minutes, hours and days in milliseconds, the unit of every time here.
SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
#: Memory units in bytes. "GB" in a request means 10**9 bytes, "GiB" 2**30, as everywhere in Dask.
GB = 10**9
GIB = 2**30
MIB = 2**20
#: The key of `Amounts` that stands for all models together.
ANY = "*"
#: Thousandths of a GPU by model; the key `ANY` bounds all models together. Sorted by key: it compares.
Amounts = tuple[tuple[str, int], ...]


class Verdict(StrEnum):
    """What the health rules say of a device, from best to worst."""

    FINE = "fine"
    WATCH = "watch"
    RESTART_WORKER = "restart_worker"
    RETIRE_SOON = "retire_soon"
    EVACUATE = "evacuate"
    GONE = "gone"


#: The topic of Dask's events under which a lease's scheduler tells its clients that the lease has ended.
FAREWELL = "gpupool-lease"


class LeaseState(StrEnum):
    """Where a request or the lease that it became stands."""

    PENDING = "pending"
    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"
    SUSPENDED = "suspended"
    ENDED = "ended"


class SliceState(StrEnum):
    """What a slice of a lease is doing. It occupies its part of the device in every one of these states."""

    STARTING = "starting"  # its worker is being started
    RUNNING = "running"  # its worker takes tasks
    DRAINING = "draining"  # its worker finishes what it has, or is being ended
    STOPPING = "stopping"  # the lease is done with it; the agent has yet to see all its processes gone


class DrainMode(StrEnum):
    """How a slice is taken out of its lease."""

    FINISH = "finish"  # running tasks end, data moves first, up to the deadline
    SUSPEND = "suspend"  # running tasks end, up to the deadline; no worker stays that data could move to
    NOW = "now"  # the device does not work any more: out at once, what is lost is computed again


class Layer(StrEnum):
    """What keeps a slice within its part of a device."""

    MIG = "mig"  # the hardware
    RMM = "rmm"  # the most that the pool of RAPIDS' memory manager grows to
    TORCH = "torch"  # PyTorch's allocator: on RMM, or by its own fraction
    CUPY = "cupy"  # CuPy's allocator: on RMM, or by its own limit
    MPS = "mps"  # NVIDIA's Multi-Process Service
    GUARD = "guard"  # the node looks at what the processes have, and ends what has too much


class LayerState(StrEnum):
    """How a layer stands in a slice."""

    ON = "on"
    READY = "ready"  # it is set when its library is imported
    FAILED = "failed"  # it could not be set


class Reason(StrEnum):
    """Why not: the closed list of refusals (first part: never) and of reasons to wait (second: not now)."""

    BAD_REQUEST = "bad_request"
    UNKNOWN_PROJECT = "unknown_project"
    NOT_A_MEMBER = "not_a_member"
    UNKNOWN_MODEL = "unknown_model"
    UNKNOWN_PROFILE = "unknown_profile"
    UNKNOWN_NODE = "unknown_node"
    UNKNOWN_LEASE = "unknown_lease"
    NAME_TAKEN = "name_taken"
    TOO_MANY_GPUS = "too_many_gpus"  # more than the pool will ever have
    TOO_MUCH_MEMORY = "too_much_memory"  # more than any device has
    TOO_MUCH_HOST = "too_much_host"  # more CPUs or host memory than any node has
    CONTRADICTION = "contradiction"  # constraints that no device meets together
    OVER_LIMIT = "over_limit"  # the hard limit of the user or project can never allow it
    TIME_LIMIT = "time_limit"
    QUOTA_SUM = "quota_sum"  # quotas that sum above their parent or the pool
    NOT_YOURS = "not_yours"
    ONE_USER_ONLY = "one_user_only"  # the agents cannot switch users and `trust_users` is not set
    DELAYS_RESERVATION = "delays_reservation"  # an extension that would delay who waits
    LEASE_OVER = "lease_over"  # it has ended or is ending
    STORE_FAILED = "store_failed"  # the journal cannot be written

    AT_LIMIT = "at_limit"  # the user or a project of theirs is at its hard limit now
    BEHIND = "behind"  # others are before it in the order and need what is free
    NO_ROOM = "no_room"  # no placement on what is free
    RESERVED = "reserved"  # what is free is kept for a reservation
    RECLAIMING = "reclaiming"  # its parts are being given back by others
    NO_NODES = "no_nodes"  # no node has joined yet

    DEVICE_BUSY = "device_busy"
    DEVICE_HELD = "device_held"
    DEVICE_OUT = "device_out"  # its verdict does not allow work
    DEVICE_CORDONED = "device_cordoned"
    DEVICE_OUTSIDE_USE = "device_outside_use"  # a process from outside the pool computes on it
    DEVICE_SHARED = "device_shared"  # it is in shares; a whole GPU was asked for
    DEVICE_WHOLE = "device_whole"  # it is leased whole; a share was asked for
    WRONG_MODEL = "wrong_model"
    TOO_LITTLE_MEMORY = "too_little_memory"
    NO_CPUS = "no_cpus"
    NO_HOST_MEMORY = "no_host_memory"
    NO_MIG = "no_mig"
    NO_MIG_ROOM = "no_mig_room"
    NOT_SAME_NODE = "not_same_node"
    NOT_LINKED = "not_linked"
    EXCLUDED = "excluded"
    NODE_SILENT = "node_silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A no, with its name, a sentence for a person, and what to do next."""

    reason: Reason
    #: One sentence with the numbers, for the person who asked.
    sentence: str
    #: What to do, or the nearest thing that would work; empty where nothing helps.
    advice: str = ""
    #: The field of the request that caused it, so that a form can show the sentence beside it.
    field: str = ""
    #: The candidate that was left out (device or node), where the refusal is about one.
    subject: str = ""


# -------------------------------------------------------------------------------------------- what there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A MIG instance: memory slices `[start, start + size)` of its parent device."""

    profile: str  # "1g.10gb"
    start: int
    size: int  # in memory slices
    #: Empty until it has been created.
    uuid: str = ""
    #: bytes
    memory: int = 0
    #: The pool makes it for a slice and destroys it afterwards; else it was there before and stays.
    made: bool = False
    #: The driver's number of it, by which NVML events name it; -1: it is not known.
    gpu_instance: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """A kind of MIG instance, as the driver describes it."""

    name: str  # "1g.10gb"
    #: Memory slices, and in which of them it may start.
    size: int
    starts: tuple[int, ...]
    #: Compute slices.
    compute: int
    #: bytes
    memory: int
    #: How many there can be on a device; 0: as many as have room.
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as its node reports it: what does not change while it is there."""

    #: The driver's UUID ("GPU-…"), the key everywhere; indexes change over reboots.
    uuid: str
    node: str
    #: The driver's index at the last start; for people only.
    index: int
    #: "H100-80GB": the product's short name, see `driver.nvml.short_model`.
    model: str
    #: bytes
    memory: int
    pci: str = ""
    #: NUMA node, or -1 where unknown.
    numa: int = -1
    #: (uuid of a peer, number of NVLinks to it), sorted.
    links: tuple[tuple[str, int], ...] = ()
    #: It is in MIG mode.
    mig: bool = False
    #: The agent may create and destroy instances on it.
    mig_managed: bool = False
    #: The MIG instances that exist on it and are offered as they are.
    instances: tuple[Instance, ...] = ()
    #: What the driver says that it can be cut into; empty: as its model's are (`core.mig`).
    profiles: tuple[MigProfile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with GPUs, as its agent reports it when it joins."""

    name: str
    devices: tuple[Device, ...]
    #: Host CPUs in thousandths of a core, and host memory in bytes, that leases may use.
    cpus: int
    memory: int
    #: The host name or address that other machines reach it by.
    address: str = "127.0.0.1"
    #: True where the devices are simulated; every face says so.
    simulated: bool = False
    #: True where the agent can start processes as other OS users.
    switches_users: bool = False
    #: Grows by one each time the node is declared lost, so that old processes can be told from new ones.
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShare:
    """What a project says of one of its users: a leaf of the tree."""

    name: str
    quota: Amounts = ()
    limit: Amounts = ()
    weight: int = 1
    tier: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A node of the tree of projects; users are its leaves."""

    #: Unique in the pool; no "/" in it.
    name: str
    #: The name of the project above, or "" at the top.
    parent: str = ""
    #: Guaranteed, in milli-GPU by model. Empty: nothing is guaranteed.
    quota: Amounts = ()
    #: Hard limit, in milli-GPU by model. Empty: no limit.
    limit: Amounts = ()
    #: Its part of the surplus among its siblings of the same tier.
    weight: int = 1
    #: Who comes first in the surplus: higher tiers before lower ones.
    tier: int = 0
    #: Users with numbers of their own; others of the project have weight 1, no quota and no limit.
    users: tuple[UserShare, ...] = ()
    #: Who may use it; `ANY` among them: everybody.
    members: tuple[str, ...] = (ANY,)
    #: Time limit of its leases unless asked otherwise, and the longest that may be asked for (0: the pool's).
    default_time: int = 0
    max_time: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a person asks for: `count` slices, whole GPUs unless `milli`, `vram` or `mig` says else."""

    id: str
    user: str
    project: str
    #: A name among the user's leases, for people.
    name: str
    #: Slices for sure, all at once (a gang); `max_count` above it makes the lease elastic.
    count: int = 1
    max_count: int = 0  # 0: the same as count
    #: What the lease can shrink to when a slice fails and there is no replacement.
    min_count: int = 0  # 0: the same as count
    #: Of one slice: thousandths of a GPU (1000: whole), bytes of its memory (0: the part that `milli` is).
    milli: int = WHOLE
    vram: int = 0
    #: A MIG profile by name, or "" ; with `isolated`, any profile that has `vram` bytes.
    mig: str = ""
    isolated: bool = False
    #: Host CPUs (thousandths of a core) and host memory (bytes) of one slice (0: its part of the node).
    cpus: int = 0
    memory: int = 0
    #: Constraints.
    model: str = ""
    min_vram: int = 0
    same_node: bool = False
    nvlink: bool = False
    node: str = ""
    exclude: tuple[str, ...] = ()  # node names or device UUIDs
    spread: bool = False  # prefer many nodes to few
    same_device: bool = False  # shares of one lease may sit on one device
    #: milliseconds; 0: the project's default.
    time_limit: int = 0
    #: Idle time-out in milliseconds; 0: the pool's default, below 0: never.
    idle_timeout: int = 0
    interactive: bool = False
    preemptible: bool = False
    #: Among the requests of the same user only; higher first.
    priority: int = 0
    #: What the pool only hands to the node: environment, pre_import, dask-cuda's options… (JSON text).
    options: str = "{}"
    #: When it arrived, by the controller's clock.
    arrived: int = 0
    #: The user's groups, as an identity provider told them; projects have them as members with "@" before.
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a lease has of one device: the whole of it, a share of it, or a MIG instance."""

    id: str
    lease: str
    device: str
    node: str
    #: What is occupied and charged of the device, and the bytes of its memory.
    milli: int
    vram: int
    #: Where it is a MIG instance.
    instance: Instance | None = None
    #: Host CPUs (thousandths of a core) and memory (bytes) of its worker.
    cpus: int = 0
    memory: int = 0
    state: SliceState = SliceState.STARTING
    #: The slice that it replaces while that one drains; it is charged in its place.
    replaces: str = ""
    #: Epoch of the node it was granted on.
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one poll of the driver says of one device. `None`: not supported, which is never bad."""

    device: str
    #: milliseconds of the reader's clock
    now: int
    #: The driver's name of the error that every call on this device returns ("GPU_IS_LOST"), or "".
    error: str = ""
    utilisation: int | None = None  # percent
    memory_used: int | None = None  # bytes
    temperature: int | None = None  # degrees Celsius
    power: int | None = None  # milliwatts
    recovery_action: int | None = None  # NVML field 230
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    ecc_uncorrected: int | None = None  # volatile count since the driver was loaded
    slowdown: int | None = None  # bits of the clocks' event reasons
    pcie_width: int | None = None
    nvlinks: tuple[bool, ...] | None = None  # state by link
    nvlink_errors: int | None = None  # replays and recoveries so far
    #: (PID, bytes) of the compute processes on it.
    processes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlEvent:
    """What the driver announced between two polls."""

    device: str
    now: int
    #: "xid", "ecc_double", "recovery_action", "unavailable", "mig_config"…
    kind: str
    #: The XID, where it is one.
    xid: int = 0
    #: GPU instance and compute instance, or -1: the whole device.
    gpu_instance: int = -1
    compute_instance: int = -1


# ---------------------------------------------------------------------------------------------- pool events


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """Something that has happened, at `now` (milliseconds of the pool's clock), and by whom or what."""

    now: int
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The one table of defaults; docs/defaults.md gives each its reason. All times in milliseconds."""

    half_life: int = 7 * DAY
    #: Between the notice of a reclaim and the deadline.
    grace: int = 2 * MINUTE
    #: No lease is taken from twice within it, nor before it has run that long.
    min_run: int = 10 * MINUTE
    time_limit: int = 24 * HOUR
    max_time: int = 7 * DAY
    idle_timeout: int = 2 * HOUR
    idle_warnings: int = 2
    #: Between the warnings, and between the last one and the lease becoming preemptible.
    idle_warning_gap: int = 15 * MINUTE
    #: What runs is charged so far ahead from its grant on, so that a burst of grants gains nothing.
    charged_ahead: int = 10 * MINUTE
    #: How fast usage runs on a model, for one GPU; a model that is not named: its memory in GB.
    model_weights: Amounts = ()
    #: How many blocked heads of the queue get a reservation.
    reservations: int = 4
    #: Others may pass a blocked head; otherwise the queue is strict: who cannot start holds up all behind.
    passing: bool = True
    #: After so long without a word a node is declared lost.
    node_silence: int = 60 * SECOND
    #: How long a drain for health or maintenance may take.
    drain_deadline: int = 10 * MINUTE
    #: How long freed parts are held for their claimant.
    hold: int = 60 * SECOND
    #: Bound of what ageing may add among one user's own requests, in steps of `priority`.
    ageing_step: int = HOUR
    ageing_most: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChanged(PoolEvent):
    """The tree of projects or the defaults are these from now on."""

    projects: tuple[Project, ...]
    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(PoolEvent):
    """A node's agent has joined, or is back with what it has now."""

    node: Node
    #: Ids of the slices whose processes the agent has found alive and adopted.
    adopted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent(PoolEvent):
    """The agent's connection is gone; its leases run on, nothing new is placed there."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(PoolEvent):
    """The node stayed away too long, or was removed: all its slices are gone."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSubmitted(PoolEvent):
    """A person asks for a lease."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWithdrawn(PoolEvent):
    """A pending request is taken back."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleased(PoolEvent):
    """A lease's owner, or an administrator, gives it back."""

    lease: str
    why: str = "released by its owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExtended(PoolEvent):
    """The owner asks for more time."""

    lease: str
    #: milliseconds on top of the present limit
    by: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseScaled(PoolEvent):
    """The owner of an elastic lease wants this many slices at most from now on."""

    lease: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKept(PoolEvent):
    """The owner says that an idle lease is still needed."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRekeyed(PoolEvent):
    """Somebody may know a lease's keys who shall not reach it any more: it starts anew on others."""

    lease: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBusy(PoolEvent):
    """An idle lease works again."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseIdle(PoolEvent):
    """Neither tasks, nor calls, nor utilisation since `since`."""

    lease: str
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolds(PoolEvent):
    """What a lease would lose for good if it were suspended now: scattered data and actors."""

    lease: str
    #: The largest of them, with their bytes; how many there are, and the bytes of all.
    parts: tuple[tuple[str, int], ...] = ()
    count: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStarted(PoolEvent):
    """The lease's scheduler answers at `address`."""

    lease: str
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFailed(PoolEvent):
    """The lease's scheduler did not start, or was lost."""

    lease: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStarted(PoolEvent):
    """The slice's worker has registered with the lease's scheduler."""

    slice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFailed(PoolEvent):
    """The slice's worker could not be started, or has died for good."""

    slice: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDrained(PoolEvent):
    """The lease's scheduler has let the slice's worker go."""

    slice: str
    #: Keys of running tasks that the deadline cut off.
    forced: tuple[str, ...] = ()
    #: Names of what was lost for good (scattered data, actors).
    lost: tuple[str, ...] = ()
    #: How long the work took that is to be done again, in milliseconds, as far as the scheduler knows.
    work: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFreed(PoolEvent):
    """The agent has seen all processes of the slice gone, and the driver lists none."""

    slice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFreed(PoolEvent):
    """The lease's scheduler process is gone as well."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictChanged(PoolEvent):
    """The health rules judge a device anew."""

    device: str
    verdict: Verdict
    #: The rule's sentence, for people, and the evidence (JSON text).
    sentence: str = ""
    evidence: str = "{}"
    #: The device may take work again, but is watched more closely.
    probation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideUse(PoolEvent):
    """Processes from outside the pool compute on a device; empty: none any more."""

    device: str
    #: "PID 4711, user ben" for people.
    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordoned(PoolEvent):
    """An administrator keeps new work off a device or node; with `drain`, moves the present work away too."""

    target: str
    why: str
    drain: bool = False
    #: milliseconds for the drain; 0: the default
    deadline: int = 0
    #: It leaves the pool for good: what runs there has long to end, and only a person lets it in again.
    retire: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncordoned(PoolEvent):
    """A device or node takes work again."""

    target: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationAsked(PoolEvent):
    """An administrator wants small slices to move together so that whole GPUs come free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCreated(PoolEvent):
    """A MIG instance that the pool asked for exists, verified by listing."""

    slice: str
    uuid: str
    gpu_instance: int = -1
    #: What it is and on which device: its slice may be gone by now.
    device: str = ""
    instance: Instance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFailed(PoolEvent):
    """A MIG instance could not be created; nothing of it is left."""

    slice: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(PoolEvent):
    """Time has passed. One from which nothing follows changes nothing and is not journaled."""


# --------------------------------------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Something to be done, and the cause it follows from."""

    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRequest(Instruction):
    """The request, or a change to a lease, is refused; nothing has changed."""

    lease: str
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLease(Instruction):
    """Start the lease's scheduler and the workers of these slices."""

    lease: str
    request: Request
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSlice(Instruction):
    """Start a worker of a running lease on this slice."""

    lease: str
    slice: Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSlice(Instruction):
    """Take the slice's worker out of its lease; answer with `SliceDrained`."""

    lease: str
    slice: str
    mode: DrainMode
    #: By the pool's clock; 0 with `DrainMode.NOW`.
    deadline: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSlice(Instruction):
    """End the slice's processes; answer with `SliceFreed` when they are seen gone."""

    lease: str
    slice: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLease(Instruction):
    """End the lease's scheduler; answer with `LeaseFreed`. Its slices get their own `StopSlice`."""

    lease: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateInstance(Instruction):
    """Create a MIG instance at exactly this place; answer with `InstanceCreated` or `InstanceFailed`."""

    slice: str
    node: str
    device: str
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyInstance(Instruction):
    """Destroy a MIG instance of the pool's making."""

    slice: str
    node: str
    device: str
    instance: Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartWorker(Instruction):
    """Restart the slice's worker on the same device before it takes another task."""

    lease: str
    slice: str
    node: str
    why: str


class Notice(StrEnum):
    """What a person is told about; each becomes a Jupyter event and a notification."""

    GRANTED = "granted"
    STARTED = "started"
    FAILED = "failed"
    MIGRATING = "migrating"
    MIGRATED = "migrated"
    SHRUNK = "shrunk"
    GROWN = "grown"
    RECLAIM = "reclaim"
    SUSPENDED = "suspended"
    RESUMED = "resumed"
    RESTARTED = "restarted"
    IDLE = "idle"
    EXPIRING = "expiring"
    ENDED = "ended"
    DEVICE = "device"
    OVERUSE = "overuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify(Instruction):
    """Tell a person (`user`; `ANY`: administrators) one sentence."""

    user: str
    notice: Notice
    lease: str
    sentence: str
    #: More, for machines (JSON text).
    data: str = "{}"


# ----------------------------------------------------------------------------------------------------- JSON

_T = TypeVar("_T")
#: Most of what is written, and written as it is.
_PLAIN = (str, int, bool, type(None))


def encode(value: Any) -> Any:
    """Write a value as JSON-able data; pool events and instructions carry their type as `"type"`.

    >>> encode(Tick(now=5))
    {'type': 'Tick', 'now': 5, 'cause': ''}
    """
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        data: dict[str, Any] = {}
        if isinstance(value, PoolEvent | Instruction):
            data["type"] = type(value).__name__
        for name in _field_types(type(value)):
            data[name] = encode(getattr(value, name))
        return data
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    return value


def decode(kind: type[_T], data: Any) -> _T:
    """Read back what `encode` wrote.

    >>> decode(PoolEvent, {"type": "Tick", "now": 5})
    Tick(now=5, cause='')

    Raises:
        ValueError: An unknown type, a missing field or a value outside a closed list.
    """
    try:
        return typing.cast("_T", _decode(kind, data))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def _decode(kind: Any, data: Any) -> Any:
    return _reader(kind)(data)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - a table of kinds in reading order
    """What reads a kind of value; found once, as whole pools are read so."""
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _reader(next(arm for arm in arms if arm is not type(None)))
        return lambda data: None if data is None else inner(data)
    if origin is tuple:
        return _tuple_reader(arms)
    if origin is dict:
        item = _reader(arms[1])
        return lambda data: {key: item(each) for key, each in data.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return functools.partial(_decode_dataclass, kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if kind in (int, str, bool):
        return functools.partial(_exactly, kind)
    return lambda data: data


def _exactly(kind: type, data: Any) -> Any:
    if type(data) is not kind:
        raise TypeError(f"{data!r} is not {kind.__name__}")
    return data


def _tuple_reader(arms: tuple[Any, ...]) -> Callable[[Any], Any]:
    readers = [_reader(arm) for arm in arms if arm is not Ellipsis]
    if len(arms) == 2 and arms[1] is Ellipsis:
        return lambda data: tuple([readers[0](item) for item in data])
    return lambda data: tuple(read(item) for read, item in zip(readers, data, strict=True))


def _decode_dataclass(kind: type, data: dict[str, Any]) -> Any:
    if issubclass(kind, PoolEvent | Instruction):
        kind = _tagged(PoolEvent if issubclass(kind, PoolEvent) else Instruction)[data["type"]]
    return kind(**{name: read(data[name]) for name, read in _field_readers(kind) if name in data})


@functools.cache
def _field_readers(kind: type) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((name, _reader(hint)) for name, hint in _field_types(kind).items())


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(typing.cast("Any", kind))}


@functools.cache
def _tagged(base: type) -> dict[str, type]:
    kinds: list[type] = base.__subclasses__()
    return {kind.__name__: kind for kind in kinds}
