"""Whatever is asked for, given back and broken: no part of a device is in two hands, nor there twice.

The agents here have a driver whose calls to create and destroy MIG instances fail as they are told, and that
has its own view of what is there; the pool never sees that view.
"""

from __future__ import annotations

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import (
    GB,
    WHOLE,
    CreateInstance,
    DestroyInstance,
    InstanceCreated,
    InstanceFailed,
    NodeJoined,
    NodeLost,
    encode,
)
from tests.placing import node
from tests.pool_helpers import World

NODES = (node("m", 2, "A30-24GB", mig=True), node("s", 2))
WISHES = st.one_of(
    st.fixed_dictionaries({"mig": st.sampled_from(["1g.6gb", "2g.12gb", "4g.24gb"]), "milli": st.just(0)}),
    st.fixed_dictionaries({"vram": st.just(9 * GB), "isolated": st.just(True), "milli": st.just(0)}),
    st.fixed_dictionaries({"milli": st.sampled_from([WHOLE, 700, 500, 300, 1]), "count": st.integers(1, 2)}),
    st.fixed_dictionaries({"vram": st.sampled_from([GB, 30 * GB, 70 * GB]), "milli": st.just(0)}),
)


class Agents(World):
    """A world whose driver fails when it is told to."""

    def __init__(self, *nodes):
        #: Device -> start -> UUID and bits of what the hardware has.
        self.there = {device.uuid: {} for each in nodes for device in each.devices}
        #: Orders to create and to destroy that have not been carried out yet, and how many are to fail.
        self.waiting, self.fails, self.made = [], 0, 0
        super().__init__(*nodes)

    def obey(self, order):
        if isinstance(order, CreateInstance | DestroyInstance):
            self.waiting.append(order)
        else:
            super().obey(order)

    def carry_out(self):
        """Carry out the oldest order, in the order in which an agent takes them."""
        order = self.waiting.pop(0)
        wanted = order.instance
        here = self.there[order.device]
        broken, self.fails = self.fails > 0, max(0, self.fails - 1)
        if isinstance(order, DestroyInstance):
            if not broken and here.get(wanted.start, ("",))[0] == wanted.uuid:
                del here[wanted.start]
            return
        taken = sum(bits for _, bits in here.values())
        if broken or taken & mig.bits(wanted):
            self.send(InstanceFailed, slice=order.slice, why="the driver says no")
            return
        self.made += 1
        uuid = f"MIG-{self.made}"
        here[wanted.start] = (uuid, mig.bits(wanted))
        self.send(InstanceCreated, slice=order.slice, uuid=uuid, device=order.device, instance=wanted)

    def sweep(self):
        """Destroy what belongs to no slice, as the agent does once nothing is under way."""
        used = {part.instance.uuid for part in self.parts() if part.instance}
        for here in self.there.values():
            for start in [start for start, (uuid, _) in here.items() if uuid not in used]:
                del here[start]

    def parts(self):
        return [part for lease in self.pool.leases.values() for part in lease.slices.values()]


class Slices(RuleBasedStateMachine):
    """Requests, releases, broken drivers and lost nodes in any order."""

    @initialize()
    def begin(self):
        self.world = Agents(*NODES)
        self.asked = 0

    @rule(what=WISHES, user=st.sampled_from(["ann", "ben"]))
    def ask(self, what, user):
        self.asked += 1
        self.world.ask(f"l{self.asked}", user, **what)

    def live(self):
        over = ("ended", "draining")
        return [each for each in self.world.pool.leases.values() if str(each.state) not in over]

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def release(self, data):
        self.world.release(data.draw(st.sampled_from([each.id for each in self.live()])))

    @rule(times=st.integers(1, 3))
    def break_the_driver(self, times):
        self.world.fails = times

    @precondition(lambda self: self.world.waiting)
    @rule(times=st.integers(1, 4))
    def carry_out(self, times):
        for _ in range(min(times, len(self.world.waiting))):
            self.world.carry_out()

    @precondition(lambda self: not self.world.waiting)
    @rule()
    def sweep(self):
        self.world.sweep()

    @rule()
    def lose_and_find_the_node_with_shares(self):
        self.world.send(NodeLost, node="s")
        self.world.send(NodeJoined, node=NODES[1])

    @invariant()
    def no_part_is_in_two_hands(self):
        """Shares never sum above a device, whole and shared never meet, MIG instances never overlap."""
        for uuid in self.world.there:
            parts = [each for each in self.world.parts() if each.device == uuid]
            note(f"{uuid}: {[encode(each) for each in parts]}")
            assert sum(each.milli for each in parts) <= WHOLE
            assert len(parts) == 1 or all(each.milli < WHOLE for each in parts)
            taken = [mig.bits(each.instance) for each in parts if each.instance]
            assert sum(taken).bit_count() == sum(each.bit_count() for each in taken)

    @invariant()
    def the_hardware_has_what_a_running_slice_stands_on(self):
        """Nothing overlaps in the hardware either, and no worker runs on an instance that is not there."""
        for here in self.world.there.values():
            spans = [bits for _, bits in here.values()]
            assert sum(spans).bit_count() == sum(each.bit_count() for each in spans)
        for part in self.world.parts():
            if part.instance and part.instance.uuid and str(part.state) in ("starting", "running"):
                there = self.world.there[part.device].get(part.instance.start)
                assert there == (part.instance.uuid, mig.bits(part.instance)), encode(part)


Slices.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_part_is_in_two_hands_whatever_fails = Slices.TestCase
