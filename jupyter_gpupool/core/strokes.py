"""The few strokes that change records and indexes together.

Rule 1: a slice occupies its part of a device from the grant until its processes are seen gone.
Rule 2: a charge is held against its user and projects from the grant until its slice is freed; the
        replacement of a failing slice takes over the charge of the one that it replaces.
Rule 3: what is being taken back, or ended, counts no longer for the share of its user, and is metered no
        longer.
Rule 4: every index is a function of the records: made anew from a snapshot, it is the same.

Not its business: what follows from an event (`pool`, `lives`, `nodes`), and who is next (`give`,
`reclaim`).
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.cluster import Cluster, Part, part_of
from jupyter_gpupool.core.ledger import Ledger
from jupyter_gpupool.core.line import Waiting
from jupyter_gpupool.core.model import (
    ANY,
    GB,
    WHOLE,
    Defaults,
    Instruction,
    LeaseState,
    Notice,
    Notify,
    Project,
    Request,
    Slice,
    SliceState,
)
from jupyter_gpupool.core.shares import Decay
from jupyter_gpupool.core.state import (
    HOLDING,
    KEEP_ENDED,
    WAITING,
    Charge,
    DeviceRecord,
    KeptOut,
    Lease,
    NodeRecord,
    NodeState,
)
from jupyter_gpupool.core.times import Times
from jupyter_gpupool.core.tree import CPUS, MEMORY, Tenant, Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jupyter_gpupool.core.line import Kind
    from jupyter_gpupool.core.reserve import Reservation
    from jupyter_gpupool.core.turns import Ranks

#: Kinds of timers whose id is a lease's, and so many are let be before those of leases that are over go.
OF_LEASES, KEEP_TIMERS = ("lease", "claim"), 64


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
        #: UUID -> why it is cordoned, of devices that were taken out of their nodes: they come back so.
        self.absent: dict[str, KeptOut] = {}
        #: All leases, the last `KEEP_ENDED` ended ones included.
        self.leases: dict[str, Lease] = {}
        self.ended: dict[str, None] = {}
        self.ledger = Ledger()
        #: When who is next is to be looked at again although nothing happens; 0: not before something does.
        self.wake_at = 0
        #: Ids of leases with replacements wanted, longest wanted first.
        self.needy: dict[str, None] = {}
        # Indexes.
        self.cluster = Cluster()
        self.tree = Tree(self.projects, Decay(self.defaults.half_life))
        self.waiting = Waiting()
        #: Ids of requests that others give back for, and of leases with surplus slices or room for some.
        self.claims: dict[str, None] = {}
        self.elastic: dict[str, None] = {}
        #: Of the requests that others give back for, those that await nothing more.
        self.ready: dict[str, None] = {}
        #: User -> ids of the leases that hold something.
        self.holding: dict[Tenant, dict[str, None]] = {}
        #: (when by its time limit, id) of everything that holds something, soonest first.
        self.ends: list[tuple[int, str]] = []
        self.end_of: dict[str, int] = {}
        #: Grows with each change of `ends`; and what is worked out about reservations while nothing changes.
        self.ends_mark = 0
        self._reserved_at: tuple[object, int] = ((), 0)
        self._reserved: dict[object, Reservation | None] = {}
        self._freed_by_ends: dict[Kind, tuple[list[int], Iterator[int]]] = {}
        #: How tenants stand, as last worked out.
        self.ranks: Ranks | None = None
        #: By user: from when on each lease has run long enough to be taken from; when each ends by its limit.
        self.takeable_from = Times()
        self.ends_of = Times()
        #: (user, name) -> id of the live lease of that name.
        self.names: dict[tuple[str, str], str] = {}
        #: Node -> ids of the slices on it.
        self.on_node: dict[str, dict[str, None]] = {}
        #: Slice id -> id of the request that awaits its part.
        self.awaited: dict[str, str] = {}
        #: Devices that count: UUID -> model.
        self.counted: dict[str, str] = {}
        self.capacity: dict[str, int] = {ANY: 0}
        #: (when, kind, id): what is to be looked at when; stale entries are dropped as they come up.
        self.timers: list[tuple[int, str, str]] = []
        #: How many there were when those of leases that were over had been dropped.
        self._timers_kept = 0
        #: Grows whenever something has become free.
        self.freed = 0
        #: Something has become free, or wanted, since who is next was last looked at.
        self.stirred = False
        self.out: list[Instruction] = []

    # ---------------------------------------------------------------------------------------- telling

    def emit(self, kind: type[Instruction], **fields: Any) -> None:
        """Order something; the cause is that of the event at hand."""
        self.out.append(kind(cause=self.cause, **fields))

    def tell(self, lease: Lease, notice: Notice, sentence: str, data: str = "{}") -> None:
        """Tell the lease's owner one sentence."""
        user = lease.request.user
        self.emit(Notify, user=user, notice=notice, lease=lease.id, sentence=sentence, data=data)

    def touch(self, lease: Lease) -> None:
        """Say that the lease has changed."""
        lease.version += 1
        self.version += 1
        if lease.wanted > lease.sure or lease.id in self.elastic:
            self._place(self.elastic, lease, there=stretches(lease))

    def stir(self) -> None:
        """Say that something has become free: all that was hopeless may be tried again."""
        self.freed += 1
        self.stirred = True

    def at(self, when: int, kind: str, ident: str) -> None:
        """Look at something of that kind and id at a time."""
        heapq.heappush(self.timers, (when, kind, ident))

    def leaf(self, request: Request) -> Tenant:
        """The user in the tree."""
        return self.tree.user(request.project, request.user)

    def free_at(self, lease: Lease) -> int:
        """From when on a lease can be taken from: it has run long enough since grant and last loss."""
        return max(lease.granted_at, lease.taken_at) + self.defaults.min_run

    def slice_of(self, ident: str) -> tuple[Lease, Slice] | None:
        """The slice of that id with its lease, None if there is none."""
        lease = self.leases.get(ident.rpartition("/")[0])
        slice_ = lease.slices.get(ident) if lease else None
        return (lease, slice_) if lease and slice_ else None

    # ---------------------------------------------------------------------------------- parts, charges

    def occupy(self, lease: Lease, slice_: Slice) -> None:
        """Give a part of a device to a lease."""
        self.cluster.occupy(slice_)
        lease.slices[slice_.id] = slice_
        self.on_node.setdefault(slice_.node, {})[slice_.id] = None

    def vacate(self, lease: Lease, slice_: Slice) -> None:
        """Take the part of a slice back, its processes being gone; it is free, or held for who awaits it."""
        ident = slice_.id
        if self.cluster.taken(ident):
            self.cluster.release(ident)
        self.stop_meter(lease, ident)
        del lease.slices[ident]
        self.on_node[slice_.node].pop(ident, None)
        lease.leaving.pop(ident, None)
        old = slice_.replaces
        if old in lease.slices and old not in lease.charges and ident in lease.charges:
            # The replacement goes first: what it was to replace is charged again until it is gone too.
            lease.charges[old] = lease.charges.pop(ident)
            if ident in lease.unserved:
                lease.unserved[old] = lease.unserved.pop(ident)
        if old in lease.slices:
            _inherit(lease, ident, old)
        if not lease.slices:
            self._place_end(lease)
        if ident not in lease.needs:
            self.discharge(lease, ident)
            self.wish(lease)
        claimant = self.leases.get(self.awaited.pop(ident, ""))
        if claimant and claimant.claim:
            claimant.claim.awaited.pop(ident, None)
            self.complete(claimant)
            self.hold(claimant, ident, part_of(slice_))
        self.stir()

    def complete(self, lease: Lease) -> None:
        """Note whether all that a claim awaits has been freed."""
        self._place(self.ready, lease, there=lease.claim is not None and not lease.claim.awaited)

    def hold(self, lease: Lease, key: str, part: Part) -> None:
        """Hold a free part for a claimant, as long as its claim stands."""
        if lease.claim and not self.barred(part.node, part.device):
            self.cluster.hold(f"{lease.id}!{key}", lease.id, part)
            lease.claim.held[f"{lease.id}!{key}"] = part

    def unhold(self, keys: Iterable[str]) -> None:
        """Forget what was held for claimants on devices that are gone."""
        for key in keys:
            lease = self.leases.get(key.partition("!")[0])
            if lease and lease.claim:
                lease.claim.held.pop(key, None)

    def barred(self, node: str, device: str) -> bool:
        """Whether a device takes no new work, or is gone."""
        if not device:
            return self.nodes[node].state is not NodeState.UP
        return device not in self.devices or bool(self.cluster.bars_of(device))

    def charge(self, lease: Lease, slice_: Slice) -> None:
        """Charge a slice to its user, in the place of the one that it replaces if there is one."""
        if slice_.replaces:
            self.discharge(lease, slice_.replaces)
        lease.charges[slice_.id] = charge = self.price(slice_)
        leaf = self.leaf(lease.request)
        self.tree.hold(leaf, limits(charge), 1)
        if slice_.id not in lease.extra:
            self.tree.serve(leaf, charge.model, charge.milli)
        lease.meters[slice_.id] = self.now
        self.tree.meter(leaf, charge.rate, self.now)

    def price(self, part: Part | Slice) -> Charge:
        """What a part is charged."""
        record = self.devices.get(part.device)
        model = record.device.model if record else ""
        node = self.nodes[part.node].node
        share = part.cpus * WHOLE * len(node.devices) // node.cpus if node.cpus else 0
        weight = dict(self.defaults.model_weights).get(model) or max(
            1, (record.device.memory if record else 0) // GB
        )
        kind = part.instance.profile if part.instance else "whole" if part.milli >= WHOLE else "share"
        return Charge(
            model=model,
            kind=kind,
            milli=part.milli,
            cpus=part.cpus,
            memory=part.memory,
            rate=max(part.milli, share) * weight,
        )

    def discharge(self, lease: Lease, ident: str) -> None:
        """Take a slice's charge off its user."""
        self.unserve(lease, ident)
        charge = lease.charges.pop(ident, None)
        lease.unserved.pop(ident, None)
        if charge:
            self.tree.hold(self.leaf(lease.request), limits(charge), -1)

    def unserve(self, lease: Lease, ident: str) -> None:
        """Count a slice no longer for its user's share, and stop its meter: it is on its way back."""
        charge = lease.charges.get(ident)
        if charge and ident not in lease.unserved:
            lease.unserved[ident] = ""
            if ident in lease.extra:
                del lease.extra[ident]
            else:
                self.tree.serve(self.leaf(lease.request), charge.model, -charge.milli)
        self.stop_meter(lease, ident)

    def stop_meter(self, lease: Lease, ident: str) -> None:
        """Write down what a slice has used."""
        since = lease.meters.pop(ident, None)
        charge = lease.charges.get(ident)
        if since is None or charge is None:
            return
        self.tree.meter(self.leaf(lease.request), -charge.rate, self.now)
        request = lease.request
        account = self.ledger.account(request.user, request.project, charge.model, charge.kind)
        account.used += charge.milli * (self.now - since)
        account.kept += charge.milli * (self.tree.decay.at(self.now) - self.tree.decay.at(since))
        self.ledger.person(request.user).add(charge.milli, since, self.now)
        self._count_idle(lease, charge, since)

    def count_idle(self, lease: Lease) -> None:
        """Write down what a lease has had while it did nothing; its meters run on."""
        for ident, since in lease.meters.items():
            self._count_idle(lease, lease.charges[ident], since)

    def _count_idle(self, lease: Lease, charge: Charge, since: int) -> None:
        request, begin = lease.request, max(since, lease.idle_since)
        if lease.idle_since and begin < self.now:
            account = self.ledger.account(request.user, request.project, charge.model, charge.kind)
            account.idle += charge.milli * (self.now - begin)
            self.ledger.person(request.user).add(charge.milli, begin, self.now, idle=True)

    def set_slice(self, lease: Lease, slice_: Slice, state: SliceState) -> Slice:
        """Put a slice into another state."""
        fresh = lease.slices[slice_.id] = with_state(slice_, state)
        self.touch(lease)
        return fresh

    # ------------------------------------------------------------------------------- what a lease wants

    def place(self, lease: Lease) -> None:
        """Put a lease where its state says that it belongs: among what waits, what holds, or neither."""
        leaf = self.leaf(lease.request)
        self.waiting.remove(lease.id)
        if lease.state in WAITING and not lease.claim:
            first = self.waiting.add(lease, leaf, self.defaults)
            # Who stands behind another of their own that is alike can only start after that.
            self.stirred = self.stirred or first
        if lease.claim or lease.id in self.claims:
            self._place(self.claims, lease, there=bool(lease.claim))
            self.complete(lease)
        if lease.wanted > lease.sure or lease.extra or lease.id in self.elastic:
            self._place(self.elastic, lease, there=stretches(lease))
        self._place_held(lease, leaf)
        self._place_end(lease)
        self.wish(lease)
        self.stirred = self.stirred or bool(self.tree.stale)
        self.tree.review(leaf)

    @staticmethod
    def _place(index: dict[str, None], lease: Lease, *, there: bool) -> None:
        if there:
            index[lease.id] = None
        else:
            index.pop(lease.id, None)

    def _place_held(self, lease: Lease, leaf: Tenant) -> None:
        if lease.state in HOLDING:
            self.holding.setdefault(leaf, {})[lease.id] = None
            self.takeable_from.put(leaf, lease.id, self.free_at(lease))
            self.ends_of.put(leaf, lease.id, lease.ends_at)
        elif lease.id in self.takeable_from:
            del self.holding[leaf][lease.id]
            self.takeable_from.drop(lease.id)
            self.ends_of.drop(lease.id)

    def _place_end(self, lease: Lease) -> None:
        known = self.end_of.get(lease.id)
        end = lease.ends_at if lease.slices and not lease.suspending else None
        if known == end:
            return
        self.ends_mark += 1
        if known is not None:
            del self.end_of[lease.id]
            del self.ends[bisect.bisect_left(self.ends, (known, lease.id))]
        if end is not None:
            self.end_of[lease.id] = end
            bisect.insort(self.ends, (end, lease.id))

    def reserved(self) -> dict[object, Reservation | None]:
        """What `reserve` has worked out since anything last changed."""
        at = (self.cluster.moment, self.ends_mark)
        if self._reserved_at != at:
            self._reserved_at, self._reserved, self._freed_by_ends = at, {}, {}
        return self._reserved

    def freed_by_ends(self) -> dict[Kind, tuple[list[int], Iterator[int]]]:
        """What `reserve` has summed up since anything changed: what comes free by each end, and the rest."""
        self.reserved()
        return self._freed_by_ends

    def wish(self, lease: Lease) -> None:
        """Count what a lease wants for its user's demand."""
        before, after = self.tree.asked.get(lease.id, ()), self.wants(lease)
        if before != after:
            self.tree.ask(self.leaf(lease.request), lease.id, after)

    @staticmethod
    def wants(lease: Lease) -> tuple[tuple[str, int], ...]:
        """What a lease wants for sure, by key: what it waits for, or what it is served."""
        if lease.state in WAITING or lease.suspending:
            milli = lease.milli
        elif lease.state in HOLDING:
            served = (ident for ident in lease.charges if ident not in lease.extra)
            milli = sum(lease.charges[ident].milli for ident in served if ident not in lease.unserved)
        else:
            return ()
        model = lease.request.model
        named = ((model, milli),) if model and "|" not in model else ()
        return ((ANY, milli), *named)

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
        if len(self.timers) > 2 * self._timers_kept + KEEP_TIMERS:
            self._drop_timers()

    def _drop_timers(self) -> None:
        """Drop what would be looked at of leases that are over; some would come up in weeks only."""
        over = [ident in self.ended or ident not in self.leases for _, _, ident in self.timers]
        kept = zip(self.timers, over, strict=True)
        self.timers[:] = [each for each, is_over in kept if each[1] not in OF_LEASES or not is_over]
        heapq.heapify(self.timers)
        self._timers_kept = len(self.timers)

    def count_device(self, record: DeviceRecord, *, there: bool) -> None:
        """Count a device for what there is to share out, or no longer."""
        uuid, model = record.device.uuid, record.device.model
        if there == (uuid in self.counted):
            return
        if there:
            self.counted[uuid] = model
        else:
            model = self.counted.pop(uuid)
        for key in (ANY, model):
            self.capacity[key] = self.capacity.get(key, 0) + (WHOLE if there else -WHOLE)
        self.tree.capacity(self.capacity)
        self.stirred = True

    # -------------------------------------------------------------------------------------------- names

    def model_of(self, uuid: str) -> str:
        """The model of a device, "" where there is none."""
        record = self.devices.get(uuid)
        return record.device.model if record else ""

    def device_name(self, uuid: str) -> str:
        """Name a device for people: "node-1/gpu3"."""
        record = self.devices.get(uuid)
        return f"{record.device.node}/gpu{record.device.index}" if record else uuid or "no GPU"

    def device_names(self, slices: Iterable[Slice]) -> str:
        """The devices of some slices, for people."""
        names = list(dict.fromkeys(self.device_name(each.device) for each in slices))
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more


def _inherit(lease: Lease, gone: str, old: str) -> None:
    """Let what is to replace a slice that is gone replace what that one was to replace."""
    for each in [each for each in lease.slices.values() if each.replaces == gone]:
        lease.slices[each.id] = dataclasses.replace(each, replaces=old)
    if gone in lease.needs:
        lease.needs = {old if ident == gone else ident: avoid for ident, avoid in lease.needs.items()}


def grows(lease: Lease) -> bool:
    """A running lease wants more slices than it has."""
    more = lease.wanted > lease.sure and lease.state is LeaseState.ACTIVE
    return more and len({*lease.needs, *(each.id for each in lease.live())}) < lease.wanted


def stretches(lease: Lease) -> bool:
    """It holds something, and has surplus or wants some."""
    return lease.state in HOLDING and bool(lease.extra or grows(lease))


def limits(charge: Charge) -> tuple[tuple[str, int], ...]:
    """What a charge counts against hard limits."""
    return (
        (ANY, charge.milli),
        (charge.model, charge.milli),
        (CPUS, charge.cpus),
        (MEMORY, charge.memory),
    )


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
