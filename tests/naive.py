"""A naive world around a pool: agents that are slow, lose orders, reboot and come back; and what must hold.

Rule 1: whatever people, agents, devices and administrators do is a verb here, tried by a state machine and by
        the storm alike.
Rule 2: `check` knows nothing of how the pool decides; it counts again what is seen from outside.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, explain, give, grants, placement, turns
from jupyter_gpupool.core.model import (
    ANY,
    GB,
    HOUR,
    MINUTE,
    WHOLE,
    AddSlice,
    ConfigChanged,
    Cordoned,
    Defaults,
    DrainSlice,
    EndLease,
    LeaseExtended,
    LeaseFailed,
    LeaseFreed,
    LeaseIdle,
    LeaseRekeyed,
    LeaseReleased,
    LeaseScaled,
    LeaseStarted,
    NodeJoined,
    OutsideUse,
    Project,
    RequestSubmitted,
    SliceDrained,
    SliceFailed,
    SliceFreed,
    SliceStarted,
    StartLease,
    StopSlice,
    Tick,
    Uncordoned,
    UserShare,
    VerdictChanged,
)
from jupyter_gpupool.core.pool import Pool
from tests.pool_helpers import node, request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.core.ledger import Reclaim
    from jupyter_gpupool.core.model import Instruction, PoolEvent, Slice
    from jupyter_gpupool.core.state import Lease

GPUS = 4
NODES = ("n1", "n2", "n3")
#: Two nodes of one model, one of another.
MODELS = {"n1": "H100", "n2": "H100", "n3": "A100"}
DEVICES = tuple(f"GPU-{name}-{index}" for name in NODES for index in range(GPUS))
USERS = (("lab", "ann"), ("lab", "ben"), ("deep", "cat"), ("deep", "dan"), ("open", "eve"))


def gpus(count: int, model: str = ANY) -> tuple[tuple[str, int], ...]:
    return ((model, count * WHOLE),)


#: Trees that an administrator changes between; each adds up.
TREES = (
    (
        Project(name="lab", quota=gpus(4), users=(UserShare(name="ben", weight=2),)),
        Project(name="deep", parent="lab", quota=gpus(2), limit=gpus(6)),
        Project(name="open", quota=gpus(2), weight=2),
    ),
    (
        Project(name="lab", quota=gpus(2), tier=1, users=(UserShare(name="ann", limit=gpus(4)),)),
        Project(name="deep", parent="lab", limit=gpus(6), weight=3),
        Project(name="open", quota=gpus(6)),
    ),
    (
        Project(name="lab", quota=gpus(2, "A100") + gpus(2, "H100")),
        Project(name="deep", parent="lab", quota=gpus(1, "A100")),
        Project(name="open", quota=gpus(2, "A100"), limit=gpus(3, "A100") + gpus(9)),
    ),
)
#: One that does not: it is to be refused.
TOO_MUCH = (Project(name="lab", quota=gpus(9)), Project(name="open", quota=gpus(9)))
DEFAULTS = Defaults(
    min_run=10 * MINUTE, grace=2 * MINUTE, time_limit=HOUR, idle_timeout=20 * MINUTE, half_life=6 * HOUR
)
#: A lease in one of these wants nothing any more, unless it gives back for a while only.
OVER = ("draining", "ended")
#: Events after which demands, quotas and devices are as before.
STILL = (Tick, LeaseStarted, SliceStarted, SliceDrained, SliceFreed, LeaseFreed)


class Naive:
    """A world of three nodes, and all that is seen of the pool from there."""

    def __init__(self, *, keep: bool = True, note: object = None) -> None:
        """Join the nodes of a pool; `keep`: keep all events, so that they can be replayed at the end."""
        self.pool = Pool()
        self.now = 1_000_000
        self.keep = keep
        self.note = note
        self.events: list[PoolEvent] = []
        self.told: list[Instruction] = []
        self.number = 0
        #: What really runs: slice -> (node, device, thousandths); and schedulers.
        self.running: dict[str, tuple[str, str, int]] = {}
        self.schedulers: set[str] = set()
        #: What was started with which keys: slice -> how often its lease's had been made anew.
        self.keys: dict[str, int] = {}
        #: Orders on their way, by node; "head" starts and ends schedulers and drains.
        self.orders: dict[str, list[tuple[str, object]]] = {name: [] for name in (*NODES, "head")}
        self.up: set[str] = set()
        #: Reclaims since the last check, and when a lease was last taken from.
        self.reclaims: list[Reclaim] = []
        self.taken: dict[str, list[int]] = {}
        #: Since demands, quotas and devices are as they are: claimant -> those whom it was given by.
        self.still: dict[str, set[str]] = {}
        self.wanting: set[str] = set()
        self.waits: set[str] = set()
        self.over: dict[tuple[str, str, str], int] = {}
        self.used = 0
        #: The pool's version, and the time, when somebody was last told why they wait.
        self.asked = (-1, 0)
        self.counts = {
            "events": 0,
            "grants": 0,
            "reclaims": 0,
            "loops": 0,
            "potential_rises": 0,
            "losses": 0,
        }
        #: The last reclaim that went round in a circle, and what was given before.
        self.circle = ""
        self.configure(TREES[0])
        for name in NODES:
            self.join(name)

    # ------------------------------------------------------------------------------------ events, orders

    def send(self, kind: type[PoolEvent], **fields: object) -> list[Instruction]:
        event = kind(now=self.now, **fields)
        if self.note:
            self.note(f"{event}")
        before, waits = self.pool.ledger.count, self.waits
        out = self.pool.handle(event)
        self.counts["events"] += 1
        if self.keep:
            self.events.append(event)
            self.told += out
        if self.differs(event):
            self.still = {}
        fresh = self.pool.ledger.count - before
        for each in self.pool.ledger.reclaims[len(self.pool.ledger.reclaims) - fresh :]:
            self.look_at(each)
        self.waits = {*self.pool._state.waiting, *self.pool._state.claims}
        self.gangs_are_granted_whole(waits)
        for order in out:
            self.deliver(order)
        return out

    def differs(self, event: PoolEvent) -> bool:
        """Whether demands, quotas or devices are others after an event.

        They are when somebody's lease has ended, or begun to, and when something came free that nobody was
        asked to give: whoever is granted that may be above their share by it, and be asked for it by right.
        """
        before, self.wanting = (
            self.wanting,
            {ident for ident, each in self.pool.leases.items() if each.state not in OVER or each.suspending},
        )
        if not isinstance(event, STILL) or self.wanting != before:
            return True
        given = set().union(*self.still.values())
        return isinstance(event, SliceFreed) and event.slice.rpartition("/")[0] not in given

    def deliver(self, order: Instruction) -> None:
        """Put an order on its way; one to a node that is away is lost."""
        match order:
            case StartLease():
                self.orders["head"].append(("scheduler", order.lease))
                for each in order.slices:
                    self.start(each)
            case AddSlice():
                if self.pool.leases[order.lease].address:  # else it is started with the scheduler
                    self.start(order.slice)
            case DrainSlice():
                self.orders["head"].append(("drain", order.slice))
            case StopSlice():
                self.to_node(order.node, ("stop", order.slice))
            case EndLease():
                self.orders["head"].append(("end", order.lease))

    def start(self, part: Slice) -> None:
        self.keys[part.id] = self.pool.leases[part.lease].keys
        self.to_node(part.node, ("start", part))

    def to_node(self, name: str, order: tuple[str, object]) -> None:
        if name in self.up:
            self.orders[name].append(order)

    def obey(self, where: str, times: int = 1) -> None:
        """Carry out the oldest orders that are on their way to a node."""
        for _ in range(min(times, len(self.orders[where]))):
            self._obey(*self.orders[where].pop(0))

    def _obey(self, what: str, about: object) -> None:
        match what:
            case "scheduler":
                self.schedulers.add(about)
                self.send(LeaseStarted, lease=about, address="tls://x")
                lease = self.pool.leases.get(about)
                for each in list(lease.slices.values()) if lease and lease.address else ():
                    if each.state == "starting" and grants.created(each):
                        self.start(each)
            case "end":
                self.schedulers.discard(about)
                self.send(LeaseFreed, lease=about)
            case "drain":
                self.send(SliceDrained, slice=about)
            case "start":
                self.running[about.id] = (about.node, about.device, about.milli)
                self.nobody_shares(about.device)
                self.send(SliceStarted, slice=about.id)
            case "stop":
                self.running.pop(about, None)
                self.send(SliceFreed, slice=about)

    def obey_all(self, times: int = 1) -> None:
        for _ in range(times):
            for where in self.orders:
                self.obey(where)

    # -------------------------------------------------------------------------------------------- people

    def alive(self) -> list[str]:
        """All requests and leases that their owners can still do something with."""
        return list(self.pool._state.names.values())

    def ask(self, who: tuple[str, str], **what: object) -> None:
        project, user = who
        self.number += 1
        asked = request(f"r{self.number}", user, project=project, min_count=1, **what)
        self.send(RequestSubmitted, request=asked)

    def release(self, lease: str) -> None:
        self.send(LeaseReleased, lease=lease)

    def extend(self, lease: str, by: int) -> None:
        self.send(LeaseExtended, lease=lease, by=by)

    def scale(self, lease: str, count: int) -> None:
        self.send(LeaseScaled, lease=lease, count=count)

    def rekey(self, lease: str) -> None:
        self.send(LeaseRekeyed, lease=lease, why="a test")

    def rest(self, lease: str, kind: type[PoolEvent]) -> None:
        self.send(kind, lease=lease, **({"since": self.now} if kind is LeaseIdle else {}))

    # --------------------------------------------------------------------------- agents, devices, quotas

    def join(self, name: str, *, rebooted: bool = False, devices: int = GPUS) -> None:
        """A node is there, or back: with what still runs, or rebooted and perhaps without some devices."""
        if rebooted:
            self.running = {each: what for each, what in self.running.items() if what[0] != name}
        adopted = tuple(sorted(each for each, (where, *_) in self.running.items() if where == name))
        self.up.add(name)
        self.orders[name] = []
        memory = 80 * GB if MODELS[name] == "H100" else 40 * GB
        self.send(NodeJoined, node=node(name, devices, model=MODELS[name], memory=memory), adopted=adopted)

    def leave(self, name: str, kind: type[PoolEvent]) -> None:
        self.up.discard(name)
        self.orders[name] = []
        self.send(kind, node=name)

    def worker_dies(self, ident: str) -> None:
        if self.running[ident][0] in self.up:
            self.send(SliceFailed, slice=ident, why="died")

    def scheduler_dies(self, lease: str) -> None:
        self.schedulers.discard(lease)
        self.send(LeaseFailed, lease=lease, why="killed")

    def judge(self, device: str, verdict: str) -> None:
        self.send(VerdictChanged, device=device, verdict=verdict, sentence="a test")

    def outside(self, device: str, who: str) -> None:
        self.send(OutsideUse, device=device, who=who)

    def cordon(self, target: str, *, drain: bool, retire: bool = False) -> None:
        self.send(Cordoned, target=target, why="a test", drain=drain, retire=retire)

    def uncordon(self, target: str) -> None:
        self.send(Uncordoned, target=target)

    def configure(self, projects: tuple[Project, ...]) -> None:
        before = self.pool.projects
        self.send(ConfigChanged, projects=projects, defaults=DEFAULTS)
        if projects is TOO_MUCH and any(self.pool._state.capacity.values()):
            assert self.pool.projects == before
        self.over = self.beyond_limits()

    def restart(self) -> None:
        """The controller dies and comes back."""
        data = json.loads(self.pool.text())
        assert data == self.pool.snapshot(), "the text of a snapshot says the same"
        self.pool = Pool.restore(data)
        assert self.pool.orders() is not None

    # ---------------------------------------------------------------------------------------------- time

    def wait(self, milliseconds: int) -> None:
        """Let time pass, with a tick at every time that the pool has asked for."""
        until = self.now + milliseconds
        while (when := self.pool.next_time()) is not None and when <= until:
            self._go_on(max(self.now, when))
            self.send(Tick)
        self._go_on(until)
        if self.keep and self.number % 4 == 0:  # a look at everything takes long
            self.an_idle_tick_changes_nothing()

    def an_idle_tick_changes_nothing(self) -> None:
        before, version = self.pool.snapshot(), self.pool.version
        if not self.send(Tick) and self.pool.version == version:
            assert self.pool.snapshot() == before, "a tick from which nothing followed has changed something"

    def _go_on(self, now: int) -> None:
        for ident in self.alive():
            lease = self.pool.leases[ident]
            self.used += (now - self.now) * sum(lease.charges[each].milli for each in lease.meters)
        self.now = now

    # ----------------------------------------------------------------------------------- what must hold

    def nobody_shares(self, device: str) -> None:
        used = sum(milli for _, where, milli in self.running.values() if where == device)
        assert used <= WHOLE, f"{device} is used {used} thousandths: {self.running}"

    def gangs_are_granted_whole(self, waited: Iterable[str]) -> None:
        for ident in waited:
            lease = self.pool.leases.get(ident)
            if lease and ident not in self.waits and not lease.ended_at and lease.state != "draining":
                self.counts["grants"] += 1
                seats = [*lease.seats()]
                assert len(seats) == lease.sure, f"{ident} got {seats} of {lease.sure}"

    def look_at(self, reclaim: Reclaim) -> None:
        """Reclaims lower the potential, spare whoever gave lately, and never go round in a circle."""
        self.reclaims.append(reclaim)
        surplus = not any(each.whole for each in reclaim.victims)
        self.counts["reclaims"] += 1
        drops = reclaim.after < reclaim.before or (surplus and reclaim.after == reclaim.before)
        self.counts["potential_rises"] += not drops
        if any(self._leads(each.lease, reclaim.lease) for each in reclaim.victims):
            self.counts["loops"] += 1
            self.circle = f"{reclaim} after {self.still}"
        self.still.setdefault(reclaim.lease, set()).update(each.lease for each in reclaim.victims)
        for each in reclaim.victims:
            times = [*self.taken.get(each.lease, ()), reclaim.now]
            self.taken[each.lease] = [when for when in times if reclaim.now - when < DEFAULTS.min_run]
            self.counts["losses"] = max(self.counts["losses"], len(self.taken[each.lease]))

    def _leads(self, start: str, goal: str) -> bool:
        """Whether `start` was given, directly or by others, what `goal` gave."""
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            if here == goal:
                return True
            todo += [each for each in self.still.get(here, ()) if each not in seen]
            seen |= self.still.get(here, set())
        return False

    def check(self) -> None:
        """Assert all that must hold between two events."""
        self.pool.validate()
        for reclaim in self.reclaims:
            assert reclaim.served <= reclaim.share, reclaim
        self.reclaims = []
        assert self.counts["potential_rises"] == 0
        assert self.counts["loops"] == 0, self.circle
        assert self.counts["losses"] <= 1
        over = self.beyond_limits()
        for key, amount in over.items():
            assert amount <= self.over.get(key, 0), f"{key} is {amount} above its limit"
        self.over = over
        self.nothing_works_with_old_keys()
        self.less_served_come_first()
        self.the_first_never_waits_while_there_is_room()
        self.whoever_waits_is_told_why()
        self.the_ledger_adds_up()

    def beyond_limits(self) -> dict[tuple[str, str, str], int]:
        """By how much which limits are passed, as they may be only after they were lowered."""
        above = {each.name: each.parent for each in self.pool.projects}
        held: dict[tuple[str, str, str], int] = {}
        for lease in self.pool.leases.values():
            for model, milli in _held(lease):
                for key in (ANY, model):
                    project = lease.request.project
                    where = [(project, lease.request.user)]
                    while project:
                        where.append((project, ""))
                        project = above.get(project, "")
                    for each in where:
                        held[*each, key] = held.get((*each, key), 0) + milli
        found = {}
        for project in self.pool.projects:
            limits = [("", project.limit), *((each.name, each.limit) for each in project.users)]
            for user, limit in limits:
                for key, most in limit:
                    beyond = held.get((project.name, user, key), 0) - most
                    if beyond > 0:
                        found[project.name, user, key] = beyond
        return found

    def nothing_works_with_old_keys(self) -> None:
        """Whatever a lease computes on was started with the keys that it has now."""
        for lease in self.pool.leases.values():
            if lease.keys:
                for each in lease.slices.values():
                    works = each.state in ("running", "draining")
                    assert not works or self.keys.get(each.id, lease.keys) == lease.keys, each

    def less_served_come_first(self) -> None:
        """If A is less served than its sibling B, everything below A stands before everything below B."""
        state = self.pool._state
        place = {each.id: at for at, each in enumerate(explain.order(state))}
        weight = state.tree.decay.at(state.now + state.defaults.charged_ahead)
        for tenant in state.tree.everybody():
            ranked = []
            for child in tenant.children.values():
                lines = [leaf.line for leaf in _leaves(child) if leaf.line]
                below = [place[each] for line in lines for _, each in line.all()]
                if below:
                    used = (child.usage + child.rate * weight) // child.weight
                    ranked.append((child.served[ANY] >= child.share[ANY], used, min(below), max(below)))
            ranked.sort()
            for one, other in itertools.pairwise(ranked):
                assert one[3] < other[2], f"below {tenant.title()}: {ranked}"

    def the_first_never_waits_while_there_is_room(self) -> None:
        state = self.pool._state
        for leaf, heads in turns.turns(state):
            for _, ident, _ in heads:
                lease = state.leases[ident]
                if not give.at_limit(state, leaf, lease):
                    asked = bounds.narrowed(state, lease.request, lease.milli)
                    found = placement.place(asked, state.cluster, count=lease.sure)
                    assert isinstance(found, placement.NoPlacement), f"{ident} could start on {found}"
                    return

    def whoever_waits_is_told_why(self, *, all_: bool = False) -> None:
        """One of those that wait, unless nothing has changed since somebody was told; or all."""
        waiting = sorted(self.pool._state.waiting)
        asked, self.asked = self.asked, (self.pool.version, self.now)
        if asked == self.asked and not all_:
            return
        for ident in waiting if all_ else waiting[self.number % max(1, len(waiting)) :][:1]:
            told = self.pool.explain(ident, self.now)
            assert told.reasons, ident
            assert told.place >= 1

    def the_ledger_adds_up(self) -> None:
        accounts = self.pool._state.ledger.accounts.values()
        meters = sum(
            (self.now - since) * lease.charges[ident].milli
            for lease in self.pool.leases.values()
            for ident, since in lease.meters.items()
        )
        assert sum(each.used for each in accounts) + meters == self.used

    def replay(self) -> None:
        """The same events tell the same, and lead to an equal pool."""
        again = Pool()
        told = [order for event in self.events for order in again.handle(event)]
        assert told == self.told, "the same events told something else"
        mine, other = self.pool.snapshot(), again.snapshot()
        assert {key: mine[key] for key in mine if mine[key] != other[key]} == {
            key: other[key] for key in mine if mine[key] != other[key]
        }

    def all_is_given_back(self) -> None:
        """When everything has been released and obeyed, nothing is left."""
        for name in NODES:
            self.join(name)
        for _ in range(3):
            for ident in self.alive():
                self.release(ident)
            while any(self.orders.values()):
                self.obey_all()
        assert not [ident for ident, each in self.pool.leases.items() if not each.ended_at]
        assert not self.running, self.running
        self.pool.validate()
        state = self.pool._state
        for device in DEVICES:
            assert state.cluster.bars_of(device) or state.cluster.free_of(device) == WHOLE, device
        assert state.tree.root.served[ANY] == 0


def _held(lease: Lease) -> Iterable[tuple[str, int]]:
    """What a lease has, by model: a replacement is charged in the place of what it replaces."""
    return [(each.model, each.milli) for each in lease.charges.values()]


def _leaves(tenant: object) -> list[object]:
    if tenant.user:
        return [tenant]
    return [leaf for child in tenant.children.values() for leaf in _leaves(child)]
