"""The pool against a naive world (`naive`), whose people, agents, devices and administrators do as they like.

- no part of a device is used by two processes of different slices at once; the books add up;
- nobody is granted more than a hard limit; gangs are granted whole;
- who is less served comes first, and the first never waits while there is room;
- reclaims lower the potential, never go round in a circle, and take from no lease twice in a min run time;
- whoever waits is told why; the ledger counts every millisecond once;
- a pool restored from its snapshot, or made anew from its events, is equal and goes on alike;
- when everything has been given back and obeyed, nothing is left.
"""

from __future__ import annotations

import collections
import os

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jupyter_gpupool.core.ledger import Reclaim, Victim
from jupyter_gpupool.core.model import (
    HOUR,
    MINUTE,
    WHOLE,
    LeaseBusy,
    LeaseIdle,
    LeaseKept,
    NodeLost,
    NodeSilent,
    SliceFreed,
    Tick,
    Uncordoned,
    Verdict,
)
from tests import naive

#: How many runs of 100 steps; any other number than this one draws them by chance.
RUNS = 240
EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", RUNS))
#: What the suite promises to try.
LEAST = {"steps": 20_000, "grants": 120, "reclaims": 50}
NODES = st.sampled_from(naive.NODES)
DEVICES = st.sampled_from(naive.DEVICES)
PLACES = st.sampled_from((*naive.NODES, "head"))
#: What all runs have tried together.
tried: collections.Counter[str] = collections.Counter()


class Machine(RuleBasedStateMachine):
    """See the module's text; each rule is one verb of the world."""

    def __init__(self):
        super().__init__()
        tried["steps"] -= 1  # the first check comes before the first step
        self.world = naive.Naive(note=note if EXAMPLES != RUNS else None)

    def any_of(self, data, what):
        return data.draw(st.sampled_from(what))

    # -------------------------------------------------------------------------------------------- people

    @initialize(who=st.none() | st.sampled_from(naive.USERS), count=st.integers(1, 4), more=st.booleans())
    def a_full_pool(self, who, count, more):
        """Often one user has it all, for so long that others can take back: few runs get there by chance."""
        if who is None:
            return
        for _ in range(len(naive.DEVICES) // count):
            self.world.ask(who, count=count, max_count=2 * count if more else 0, time_limit=24 * HOUR)
        self.world.obey_all(20)
        self.world.wait(naive.DEFAULTS.min_run)

    @rule(
        who=st.sampled_from(naive.USERS),
        count=st.integers(1, 6),
        more=st.sampled_from((0, 0, 3, 4)),
        milli=st.sampled_from((WHOLE, WHOLE, WHOLE, 500, 250)),
        model=st.sampled_from(("", "", "", "H100", "A100")),
        interactive=st.booleans(),
        hours=st.sampled_from((0, 1, 3, 24)),
        together=st.booleans(),
        priority=st.integers(0, 2),
    )
    def ask(self, who, count, more, milli, model, interactive, hours, together, priority):  # noqa: PLR0917 - Hypothesis names them
        what = {"count": count, "max_count": count + more if more else 0, "milli": milli, "model": model}
        what |= {"interactive": interactive, "time_limit": hours * HOUR, "priority": priority}
        self.world.ask(who, same_node=together and count <= naive.GPUS, **what)

    @rule(count=st.integers(1, 4), more=st.sampled_from((0, 3)), hours=st.sampled_from((1, 24)))
    def everybody_asks(self, count, more, hours):
        """Whatever the order of the steps, there are times at which more is wanted than there is."""
        for who in naive.USERS:
            self.world.ask(who, count=count, max_count=count + more if more else 0, time_limit=hours * HOUR)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def release(self, data):
        self.world.release(self.any_of(data, self.world.alive()))

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), by=st.sampled_from((MINUTE, HOUR)))
    def extend(self, data, by):
        self.world.extend(self.any_of(data, self.world.alive()), by)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), count=st.integers(0, 8))
    def scale(self, data, count):
        self.world.scale(self.any_of(data, self.world.alive()), count)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def rekey(self, data):
        self.world.rekey(self.any_of(data, self.world.alive()))

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), kind=st.sampled_from((LeaseIdle, LeaseBusy, LeaseKept)))
    def rest(self, data, kind):
        self.world.rest(self.any_of(data, self.world.alive()), kind)

    # -------------------------------------------------------------------------------------------- agents

    @rule(where=PLACES, times=st.integers(1, 12))
    def some_obey(self, where, times):
        self.world.obey(where, times)

    @rule(times=st.integers(1, 40))
    def all_obey(self, times):
        self.world.obey_all(times)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def a_worker_dies(self, data):
        self.world.worker_dies(self.any_of(data, sorted(self.world.running)))

    @precondition(lambda self: self.world.schedulers)
    @rule(data=st.data())
    def a_scheduler_dies(self, data):
        self.world.scheduler_dies(self.any_of(data, sorted(self.world.schedulers)))

    @rule(name=NODES, kind=st.sampled_from((NodeSilent, NodeLost)))
    def a_node_goes(self, name, kind):
        self.world.leave(name, kind)

    @rule(name=NODES)
    def a_node_is_back(self, name):
        self.world.join(name)

    @rule(name=NODES, devices=st.sampled_from((naive.GPUS, naive.GPUS, 2)))
    def a_node_has_rebooted(self, name, devices):
        self.world.join(name, rebooted=True, devices=devices)

    # --------------------------------------------------------------------------- devices, administrators

    @rule(device=DEVICES, verdict=st.sampled_from(tuple(Verdict)))
    def judge(self, device, verdict):
        self.world.judge(device, verdict)

    @rule(device=DEVICES, who=st.sampled_from(("", "PID 1")))
    def outside(self, device, who):
        self.world.outside(device, who)

    @rule(what=NODES | DEVICES, drain=st.booleans(), retire=st.booleans())
    def cordon(self, what, drain, retire):
        self.world.cordon(what, drain=drain or retire, retire=retire)

    @rule(what=NODES | DEVICES)
    def uncordon(self, what):
        self.world.uncordon(what)

    @rule(projects=st.sampled_from((*naive.TREES, naive.TOO_MUCH)))
    def reconfigure(self, projects):
        self.world.configure(projects)

    # -------------------------------------------------------------------------------------------- time

    @rule(minutes=st.sampled_from((0, 1, 2, 5, 10, 30)))
    def time_passes(self, minutes):
        self.world.wait(minutes * MINUTE)

    @rule()
    def restart(self):
        self.world.restart()

    @invariant()
    def all_holds(self):
        tried["steps"] += 1
        self.world.check()

    def teardown(self):
        tried.update({what: self.world.counts[what] for what in ("grants", "reclaims")})
        self.world.whoever_waits_is_told_why(all_=True)
        self.world.replay()
        self.world.all_is_given_back()


Machine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=100,
    deadline=None,
    derandomize=EXAMPLES == RUNS,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.mark.timeout(1200)  # a minute on an idle core
class TestMachine(Machine.TestCase):
    def runTest(self):  # noqa: N802 - unittest's name
        super().runTest()
        print(dict(tried))
        assert EXAMPLES < RUNS or all(tried[what] >= least for what, least in LEAST.items())


# -------------------------------------------------------------------------------- what the naive world sees


def taken(claimant: str, victim: str) -> Reclaim:
    gave = Victim(lease=victim, user="", project="", slices=1, milli=WHOLE, whole=True, ran=0)
    amounts = {"milli": WHOLE, "served": WHOLE, "share": WHOLE, "before": (2, 2), "after": (1, 1)}
    return Reclaim(now=0, lease=claimant, user="", project="", victims=(gave,), **amounts)


def test_who_is_over_wants_nothing_any_more_though_their_processes_have_yet_to_end():
    world = naive.Naive()
    world.ask(("lab", "ann"), time_limit=HOUR)
    world.obey_all(20)
    world.look_at(taken("a", "b"))
    world.wait(HOUR)
    assert world.pool.leases["r1"].state == "draining"
    world.look_at(taken("b", "a"))
    assert world.counts["loops"] == 0


@pytest.mark.parametrize(
    ("between", "circles"),
    [
        pytest.param([], 1, id="at once"),
        pytest.param([(Tick, {})], 1, id="time alone gives nobody a right"),
        pytest.param([(SliceFreed, {"slice": "b/0"})], 1, id="what was asked for comes free"),
        pytest.param([(SliceFreed, {"slice": "c/0"})], 0, id="something else comes free"),
        pytest.param([(Uncordoned, {"target": "n1"})], 0, id="devices come back"),
    ],
)
def test_two_that_take_from_each_other_go_round_in_a_circle_unless_something_has_changed(between, circles):
    world = naive.Naive()
    world.look_at(taken("a", "b"))
    for kind, fields in between:
        world.send(kind, **fields)
    world.look_at(taken("b", "a"))
    assert world.counts["loops"] == circles
