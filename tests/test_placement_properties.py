"""Any sequence of requests, ends, bars, holds, tries, failures: nothing overlaps, nothing is missed."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.cluster import Cluster
from jupyter_gpupool.core.demand import Demand
from jupyter_gpupool.core.model import GB, GIB, WHOLE, Instance, Reason, Request
from jupyter_gpupool.core.placement import Placement, place
from jupyter_gpupool.core.whynot import why_not
from tests.placing import node, request

PAIRS = {0: [(1, 4)], 1: [(0, 4)], 2: [(3, 4)], 3: [(2, 4)]}
THERE = (Instance(profile="1g.6gb", start=0, size=1, uuid="MIG-there", memory=5 * GIB),)
NODES = (
    node("a", 4, "A30-24GB", links=PAIRS, numa=(0, 0, 1, 1)),
    node("b", 2, "T4-16GB"),
    node("m", 2, "A30-24GB", mig=True),
    node("f", 1, "A30-24GB", mig=True, managed=False, instances=THERE),
)
DEVICES = [device.uuid for each in NODES for device in each.devices]

REQUESTS = st.one_of(
    st.fixed_dictionaries(
        {"count": st.integers(1, 4)},
        optional={
            "same_node": st.booleans(),
            "nvlink": st.booleans(),
            "spread": st.booleans(),
            "model": st.sampled_from(["A30-24GB", "T4-16GB", "A30-24GB|T4-16GB"]),
            "cpus": st.sampled_from([100, 8000, 20_000]),
        },
    ),
    st.fixed_dictionaries(
        {"milli": st.sampled_from([1, 190, 250, 333, 500, 810, 999]), "count": st.integers(1, 3)},
        optional={
            "same_device": st.booleans(),
            "same_node": st.booleans(),
            "exclude": st.sampled_from([("a",), ("GPU-b-0",)]),
            "memory": st.sampled_from([GB, 150 * GB]),
        },
    ),
    st.fixed_dictionaries(
        {"vram": st.sampled_from([GB, 7 * GIB, 8 * GIB, 17 * GIB]), "count": st.integers(1, 2)},
        optional={"milli": st.sampled_from([0, 400]), "min_vram": st.sampled_from([20 * GB])},
    ),
    st.fixed_dictionaries(
        {"mig": st.sampled_from(["1g.6gb", "1g.6gb+me", "2g.12gb", "4g.24gb"]), "count": st.integers(1, 3)},
        optional={"same_node": st.booleans(), "node": st.sampled_from(["m", "f"])},
    ),
    st.fixed_dictionaries({"isolated": st.just(True), "vram": st.sampled_from([GB, 9 * GB])}),
)


class Naive:
    """The same ledger as lists, and a search that tries everything."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.free = {
            uuid: WHOLE - sum(each.part.milli for each in cluster.taken_of(uuid)) for uuid in DEVICES
        }
        self.masks = {
            uuid: sum(mig.bits(each.part.instance) for each in cluster.taken_of(uuid)) for uuid in DEVICES
        }
        self.engines = {
            uuid: sum(
                "+" in each.part.instance.profile for each in cluster.taken_of(uuid) if each.part.instance
            )
            for uuid in DEVICES
        }
        self.cpus = {name: int(cluster.cpus[row]) for name, row in cluster.row_of.items()}
        self.memory = {name: int(cluster.memory[row]) for name, row in cluster.row_of.items()}

    def fits(self, wanted: Request, left: int, used: tuple[str, ...] = ()) -> bool:
        """Is there any way to place so many more slices?"""
        if left == 0:
            return True
        for each in NODES:
            for device in each.devices:
                if not self._may(wanted, device, used):
                    continue
                for milli, bits, engine in self._ways(wanted, device):
                    cpus = wanted.cpus or each.cpus // len(each.devices) * milli // WHOLE
                    memory = wanted.memory or each.memory // len(each.devices) * milli // WHOLE
                    if self.cpus[each.name] < cpus or self.memory[each.name] < memory:
                        continue
                    self._add(device, (milli, engine, cpus, memory), bits)
                    found = self.fits(wanted, left - 1, (*used, device.uuid))
                    self._add(device, (-milli, -engine, -cpus, -memory), bits)
                    if found:
                        return True
        return False

    def _add(self, device, amounts, bits):
        milli, engine, cpus, memory = amounts
        self.free[device.uuid] -= milli
        self.masks[device.uuid] ^= bits
        self.engines[device.uuid] += engine
        self.cpus[device.node] -= cpus
        self.memory[device.node] -= memory

    def _may(self, wanted, device, used):
        instance = bool(wanted.mig) or wanted.isolated
        if device.uuid in used and not (wanted.same_device or instance):
            return False
        if used and wanted.same_node and device.node != used[0].split("-")[1]:
            return False
        if used and wanted.nvlink and device.uuid not in island(used[0]):
            return False
        if wanted.nvlink and wanted.count > 1 and len(island(device.uuid)) == 1:
            return False
        return (
            device.mig == instance
            and not self.cluster.bars_of(device.uuid)
            and (not wanted.model or device.model in wanted.model.split("|"))
            and device.memory >= max(wanted.vram, wanted.min_vram)
            and (not wanted.node or device.node == wanted.node)
            and not {device.node, device.uuid} & set(wanted.exclude)
        )

    def _ways(self, wanted, device):
        if not device.mig:
            milli = max(wanted.milli, -(-wanted.vram * WHOLE // device.memory))
            return [(milli, 0, 0)] if milli <= self.free[device.uuid] else []
        kinds = mig.geometry_of(device)
        ways = []
        for each in mig.suiting(kinds, wanted.mig, wanted.vram, 0):
            starts = each.starts if device.mig_managed else [0] if each.name == "1g.6gb" else []
            for start in starts:
                bits = mig.span(start, each.size)
                engine = "+" in each.name
                if not self.masks[device.uuid] & bits and not (engine and self.engines[device.uuid]):
                    ways.append((kinds.milli(each), bits, int(engine)))
        return ways


def island(uuid: str) -> set[str]:
    """The devices that NVLink connects to one, itself included."""
    device = next(each for known in NODES for each in known.devices if each.uuid == uuid)
    return {uuid, *(peer for peer, _ in device.links)}


def again(cluster: Cluster, takings: dict) -> Cluster:
    """The same cluster built anew, in another order."""
    fresh = Cluster(width=2)
    for each in reversed(NODES):
        fresh.add_node(each)
    for key, taken in sorted(takings.items(), reverse=True):
        fresh.take(key, taken.holder, taken.part, held=taken.held)
    for uuid in DEVICES:
        for reason, why in cluster.bars_of(uuid).items():
            fresh.bar(uuid, reason, why)
    fresh.demand = Demand.restore(cluster.demand.snapshot())
    return fresh


class Placing(RuleBasedStateMachine):
    """Everything that the pool does to a cluster, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        for each in NODES:
            self.cluster.add_node(each)
        self.keys: list[str] = []
        self.number = 0

    def takings(self):
        """What is taken, by key."""
        return {key: self.cluster.taken(key) for key in self.keys}

    @rule(what=REQUESTS, held=st.booleans())
    def ask(self, what, held):
        """A request gets a place exactly if there is one, and the same one in a cluster built anew."""
        wanted = request(**what)
        self.cluster.demand.observe(wanted)
        found = place(wanted, self.cluster)
        assert isinstance(found, Placement) == Naive(self.cluster).fits(wanted, wanted.count)
        assert place(wanted, again(self.cluster, self.takings())) == found
        if isinstance(found, Placement):
            assert len(found.parts) == wanted.count
            for part in found.parts:
                self.number += 1
                self.keys.append(f"k{self.number:04}")
                self.cluster.take(self.keys[-1], "somebody", part, held=held)
        else:
            assert why_not(wanted, self.cluster)[0].sentence

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def end(self, data):
        """What ends, or could not be created by the driver, is free again."""
        key = data.draw(st.sampled_from(self.keys))
        self.keys.remove(key)
        self.cluster.release(key)

    @rule(uuid=st.sampled_from(DEVICES), up=st.booleans())
    def bar(self, uuid, up):
        """A device goes out of service or comes back."""
        (self.cluster.unbar if up else self.cluster.bar)(uuid, Reason.DEVICE_OUT)

    @rule(what=REQUESTS)
    def attempt(self, what):
        """A try in which everything is freed and taken anew leaves no trace."""
        before = self.cluster.grids.copy(), self.cluster.lines.copy(), self.takings()
        with self.cluster.trying():
            for key in self.keys:
                self.cluster.release(key)
            found = place(request(**what), self.cluster, allow=["somebody"])
            for number, part in enumerate(found.parts if isinstance(found, Placement) else ()):
                self.cluster.take(f"try {number}", "try", part)
            self.cluster.validate()
        assert (before[0] == self.cluster.grids).all()
        assert (before[1] == self.cluster.lines).all()
        assert before[2] == self.takings()

    @rule(which=st.sampled_from(NODES))
    def join_again(self, which):
        """A node that joins again keeps what is taken of it."""
        assert self.cluster.update_node(which) == ()

    @invariant()
    def nothing_overlaps(self):
        """Shares never sum above a device, whole and shared never meet, MIG instances never overlap."""
        self.cluster.validate()


Placing.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
test_nothing_overlaps_and_nothing_is_missed = Placing.TestCase


@given(st.lists(REQUESTS, max_size=20))
@settings(max_examples=30, deadline=None)
def test_what_was_learned_survives_being_written_and_read(asked):
    demand = Demand()
    for each in asked:
        demand.observe(request(**each))
    known = Demand.restore(demand.snapshot())
    assert known.usual == demand.usual
    demand.observe(request())
    known.observe(request())
    assert known.snapshot() == demand.snapshot()


def test_a_failed_creation_is_taken_back_and_the_next_try_is_the_same():
    cluster = Cluster()
    for each in NODES:
        cluster.add_node(each)
    wanted = request(mig="2g.12gb")
    first = place(wanted, cluster)
    assert isinstance(first, Placement)
    cluster.take("x", "x", first.parts[0])
    cluster.release("x")
    assert place(wanted, cluster) == first
    elsewhere = place(dataclasses.replace(wanted, exclude=(first.parts[0].device,)), cluster)
    assert isinstance(elsewhere, Placement)
    assert elsewhere.parts[0].device != first.parts[0].device
