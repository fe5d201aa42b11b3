"""The whole machine against a naive world: agents that are slow, lose orders, reboot and come back.

Whatever people, agents, devices and administrators do, in any order:

- no part of a device is used by two processes of different slices at once;
- nobody holds more than a hard limit; gangs are granted whole;
- reclaims lower the potential, and take from no lease twice in a min run time;
- whoever waits is told why, and the first in the queue never waits while there is room for it;
- a pool restored from its snapshot, or from its events, is equal and goes on alike;
- when everything has been given back and obeyed, nothing is left.
"""

from __future__ import annotations

import json
import os

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jupyter_gpupool.core import explain, give, placement
from jupyter_gpupool.core.model import (
    ANY,
    HOUR,
    MINUTE,
    WHOLE,
    AddSlice,
    ConfigChanged,
    Cordoned,
    Defaults,
    DrainSlice,
    EndLease,
    LeaseBusy,
    LeaseExtended,
    LeaseFailed,
    LeaseFreed,
    LeaseIdle,
    LeaseKept,
    LeaseReleased,
    LeaseScaled,
    LeaseStarted,
    NodeJoined,
    NodeLost,
    NodeSilent,
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
    Verdict,
    VerdictChanged,
)
from jupyter_gpupool.core.pool import Pool
from tests.pool_helpers import node, request

NODES = ("n1", "n2", "n3")
GPUS = 4
DEVICES = tuple(f"GPU-{name}-{index}" for name in NODES for index in range(GPUS))
USERS = (("lab", "ann"), ("lab", "ben"), ("deep", "cat"), ("deep", "dan"), ("open", "eve"))
PROJECTS = (
    Project(name="lab", quota=((ANY, 4 * WHOLE),), users=(UserShare(name="ben", weight=2),)),
    Project(name="deep", parent="lab", quota=((ANY, 2 * WHOLE),), limit=((ANY, 6 * WHOLE),)),
    Project(name="open", quota=((ANY, 2 * WHOLE),), weight=2),
)
OTHERS = (
    Project(name="lab", quota=((ANY, 2 * WHOLE),), tier=1),
    Project(name="deep", parent="lab", limit=((ANY, 6 * WHOLE),), weight=3),
    Project(name="open", quota=((ANY, 6 * WHOLE),)),
)
DEFAULTS = Defaults(min_run=10 * MINUTE, grace=2 * MINUTE, time_limit=HOUR, idle_timeout=20 * MINUTE)


class Machine(RuleBasedStateMachine):
    """See the module's text."""

    def __init__(self):
        super().__init__()
        self.pool = Pool()
        self.now = 1_000_000
        self.events = []
        self.told = []
        self.number = 0
        #: What really runs: slice -> (node, device, thousandths); and schedulers.
        self.running = {}
        self.schedulers = set()
        #: Orders on their way, by node; "head" starts and ends schedulers and drains.
        self.orders = {name: [] for name in (*NODES, "head")}
        self.up = set()
        self.reclaims = []
        self.limits = {}

    @initialize()
    def start(self):
        self.configure(PROJECTS)
        for name in NODES:
            self.join(name)

    def configure(self, projects):
        self.send(ConfigChanged, projects=projects, defaults=DEFAULTS)
        self.limits = {each.name: dict(each.limit).get(ANY) for each in projects if each.limit}

    def join(self, name):
        adopted = tuple(sorted(each for each, (where, *_) in self.running.items() if where == name))
        self.up.add(name)
        self.orders[name] = []
        self.send(NodeJoined, node=node(name, GPUS), adopted=adopted)

    def send(self, kind, **fields):
        event = kind(now=self.now, **fields)
        if os.environ.get("NOTES", "1") == "1":
            note(f"{event}")
        before = len(self.pool.ledger.reclaims)
        out = self.pool.handle(event)
        self.events.append(event)
        self.told += out
        for order in out:
            self.deliver(order)
        self.reclaims += self.pool.ledger.reclaims[before:]
        return out

    def deliver(self, order):
        """Put an order on its way; one to a node that is away is lost."""
        match order:
            case StartLease():
                assert len(order.slices) in (0, order.request.count) or order.lease in self.granted_before()
                self.orders["head"].append(("scheduler", order.lease))
                for each in order.slices:
                    self.to_node(each.node, ("start", each))
            case AddSlice():
                self.to_node(order.slice.node, ("start", order.slice))
            case DrainSlice():
                self.orders["head"].append(("drain", order.slice))
            case StopSlice():
                self.to_node(order.node, ("stop", order.slice))
            case EndLease():
                self.orders["head"].append(("end", order.lease))

    def granted_before(self):
        return {each.lease for each in self.told[:-1] if isinstance(each, StartLease)} | {
            each.lease for each in self.told if isinstance(each, AddSlice)
        }

    def to_node(self, name, order):
        if name in self.up:
            self.orders[name].append(order)

    def obey(self, where):
        """Carry out the oldest order that is on its way to a node."""
        if not self.orders[where]:
            return
        match self.orders[where].pop(0):
            case ("scheduler", lease):
                self.schedulers.add(lease)
                self.send(LeaseStarted, lease=lease, address="tls://x")
            case ("end", lease):
                self.schedulers.discard(lease)
                self.send(LeaseFreed, lease=lease)
            case ("drain", ident):
                self.send(SliceDrained, slice=ident)
            case ("start", slice_):
                self.running[slice_.id] = (slice_.node, slice_.device, slice_.milli)
                self.nobody_shares(slice_.device)
                self.send(SliceStarted, slice=slice_.id)
            case ("stop", ident):
                self.running.pop(ident, None)
                self.send(SliceFreed, slice=ident)

    def nobody_shares(self, device):
        used = sum(milli for _, where, milli in self.running.values() if where == device)
        assert used <= WHOLE, f"{device} is used {used} thousandths: {self.running}"

    def alive(self):
        return sorted(ident for ident, each in self.pool.leases.items() if not each.ended_at)

    def pick(self, data, what):
        return data.draw(st.sampled_from(what))

    # ------------------------------------------------------------------------------------------ people

    @rule(
        who=st.sampled_from(USERS),
        count=st.integers(1, 6),
        more=st.integers(0, 4),
        milli=st.sampled_from((WHOLE, WHOLE, WHOLE, 500, 250)),
        interactive=st.booleans(),
        hours=st.sampled_from((0, 1, 3)),
        together=st.booleans(),
        priority=st.integers(0, 2),
    )
    def ask(self, who, count, more, milli, interactive, hours, together, priority):  # noqa: PLR0917 - Hypothesis names them
        project, user = who
        self.number += 1
        what = {"count": count, "max_count": count + more if more > 2 else 0, "milli": milli}
        what |= {"interactive": interactive, "time_limit": hours * HOUR, "priority": priority}
        what |= {"same_node": together and count <= GPUS, "project": project, "min_count": 1}
        self.send(RequestSubmitted, request=request(f"r{self.number}", user, **what))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def release(self, data):
        self.send(LeaseReleased, lease=self.pick(data, self.alive()))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), by=st.sampled_from((MINUTE, HOUR)))
    def extend(self, data, by):
        self.send(LeaseExtended, lease=self.pick(data, self.alive()), by=by)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), count=st.integers(0, 8))
    def scale(self, data, count):
        self.send(LeaseScaled, lease=self.pick(data, self.alive()), count=count)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), kind=st.sampled_from((LeaseIdle, LeaseBusy, LeaseKept)))
    def rest(self, data, kind):
        more = {"since": self.now} if kind is LeaseIdle else {}
        self.send(kind, lease=self.pick(data, self.alive()), **more)

    # ------------------------------------------------------------------------------------------ agents

    @rule(where=st.sampled_from((*NODES, "head")), times=st.integers(1, 12))
    def agents_obey(self, where, times):
        for _ in range(times):
            self.obey(where)

    @rule(times=st.integers(1, 40))
    def all_agents_obey(self, times):
        for _ in range(times):
            for where in (*NODES, "head"):
                self.obey(where)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_worker_dies(self, data):
        ident = self.pick(data, sorted(self.running))
        name = self.running[ident][0]
        if name in self.up:
            self.send(SliceFailed, slice=ident, why="died")

    @precondition(lambda self: self.schedulers)
    @rule(data=st.data())
    def a_scheduler_dies(self, data):
        lease = self.pick(data, sorted(self.schedulers))
        self.schedulers.discard(lease)
        self.send(LeaseFailed, lease=lease, why="killed")

    @rule(name=st.sampled_from(NODES), kind=st.sampled_from((NodeSilent, NodeLost)))
    def a_node_goes(self, name, kind):
        self.up.discard(name)
        self.orders[name] = []
        self.send(kind, node=name)

    @rule(name=st.sampled_from(NODES), rebooted=st.booleans())
    def a_node_is_back(self, name, rebooted):
        if rebooted:
            self.running = {each: what for each, what in self.running.items() if what[0] != name}
        self.join(name)

    # --------------------------------------------------------------------------- devices, administrators

    @rule(device=st.sampled_from(DEVICES), verdict=st.sampled_from(tuple(Verdict)))
    def judge(self, device, verdict):
        self.send(VerdictChanged, device=device, verdict=verdict, sentence="a test")

    @rule(device=st.sampled_from(DEVICES), who=st.sampled_from(("", "PID 1")))
    def outside(self, device, who):
        self.send(OutsideUse, device=device, who=who)

    @rule(what=st.sampled_from(NODES + DEVICES), drain=st.booleans())
    def cordon(self, what, drain):
        self.send(Cordoned, target=what, why="a test", drain=drain)

    @rule(what=st.sampled_from(NODES + DEVICES))
    def uncordon(self, what):
        self.send(Uncordoned, target=what)

    @rule(projects=st.sampled_from((PROJECTS, OTHERS)))
    def reconfigure(self, projects):
        before = self.pool.projects
        self.configure(projects)
        if self.pool.projects == before:
            self.limits = {each.name: dict(each.limit).get(ANY) for each in before if each.limit}

    # -------------------------------------------------------------------------------------------- time

    @rule(minutes=st.sampled_from((0, 1, 2, 5, 10, 30)))
    def time_passes(self, minutes):
        until = self.now + minutes * MINUTE
        while (when := self.pool.next_time()) is not None and when <= until:
            self.now = max(self.now, when)
            version, out = self.pool.version, self.send(Tick)
            assert out or self.pool.version >= version
        self.now = until
        before = self.pool.snapshot()
        if not self.send(Tick) and self.pool.version == before["version"]:
            assert self.pool.snapshot() == before, "a tick from which nothing followed has changed something"

    @rule()
    def restart(self):
        self.pool = Pool.restore(json.loads(json.dumps(self.pool.snapshot())))
        assert self.pool.orders() is not None

    # -------------------------------------------------------------------------------------- invariants

    @invariant()
    def the_books_add_up(self):
        self.pool.validate()

    @invariant()
    def limits_hold(self):
        held = {}
        for lease in self.pool.leases.values():
            replaced = {each.replaces for each in lease.slices.values()}
            mine = [each for each in lease.slices.values() if each.id not in replaced]
            held.setdefault(lease.request.project, 0)
            held[lease.request.project] += sum(
                each.milli for each in mine if not (each.replaces and each.id not in lease.charges)
            )
        for project, most in self.limits.items():
            assert held.get(project, 0) <= most, f"{project} holds {held[project]} of {most}"

    @invariant()
    def reclaims_lower_the_potential_and_spare_whoever_gave_lately(self):
        last = {}
        for reclaim in self.reclaims:
            surplus = sum(each.milli for each in reclaim.victims if not each.whole)
            assert reclaim.after < reclaim.before or (reclaim.after == reclaim.before and surplus)
            assert reclaim.served <= reclaim.share
            for victim in reclaim.victims:
                assert reclaim.now - last.get(victim.lease, -DEFAULTS.min_run) >= DEFAULTS.min_run
                last[victim.lease] = reclaim.now

    @invariant()
    def the_first_in_the_queue_never_waits_while_there_is_room(self):
        state = self.pool._state
        for lease in explain.order(state):
            if give.at_limit(state, state.leaf(lease.request), lease):
                continue
            found = placement.place(lease.request, state.cluster, count=lease.sure)
            assert isinstance(found, placement.NoPlacement), f"{lease.id} could start on {found}"
            return

    @invariant()
    def whoever_waits_is_told_why(self):
        for ident in self.pool._state.waiting:
            told = self.pool.explain(ident, self.now)
            assert told.reasons
            assert told.place >= 1

    def teardown(self):
        again = Pool()
        told = [order for event in self.events for order in again.handle(event)]
        assert told == self.told, "the same events told something else"
        mine, other = self.pool.snapshot(), again.snapshot()
        assert {key: mine[key] for key in mine if mine[key] != other[key]} == {
            key: other[key] for key in mine if mine[key] != other[key]
        }
        self.all_is_given_back()

    def all_is_given_back(self):
        for name in NODES:
            if name not in self.up:
                self.join(name)
        for _ in range(3):
            for ident in self.alive():
                self.send(LeaseReleased, lease=ident)
            while any(self.orders.values()):
                for where in self.orders:
                    self.obey(where)
        assert not self.alive()
        assert not self.running
        self.pool.validate()
        free = [self.pool._state.cluster.free_of(device) for device in DEVICES]
        out = [bool(self.pool._state.cluster.bars_of(device)) for device in DEVICES]
        assert all(barred or milli == WHOLE for milli, barred in zip(free, out, strict=True))
        assert self.pool._state.tree.root.served[ANY] == 0


#: 200 times 100 = 20,000 steps; more by $MACHINE_EXAMPLES.
Machine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MACHINE_EXAMPLES", "200")),
    stateful_step_count=100,
    deadline=None,
    derandomize="MACHINE_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestMachine = Machine.TestCase
