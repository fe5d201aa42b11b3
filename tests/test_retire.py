"""What is retired leaves the pool for good: its work ends first, and only a person lets it in again."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jupyter_gpupool.core import nodes
from jupyter_gpupool.core.model import (
    HOUR,
    Cordoned,
    DrainSlice,
    NodeJoined,
    NodeLost,
    NodeSilent,
    Uncordoned,
    Verdict,
)
from jupyter_gpupool.core.pool import Pool
from tests.pool_helpers import World, node

ONE, OTHER = "GPU-node-1-0", "GPU-node-1-1"


@pytest.fixture
def world():
    """One node of two GPUs."""
    return World(node("node-1", 2))


def retire(world, target, **more):
    return world.send(Cordoned, target=target, why="retired: sold", drain=True, retire=True, **more)


def without(device):
    """The node as it is while a device is taken out of it."""
    whole = node("node-1", 2)
    return dataclasses.replace(whole, devices=tuple(each for each in whole.devices if each.uuid != device))


def test_what_runs_on_it_ends_first_and_nothing_new_goes_there(world):
    world.ask("a", time_limit=100 * HOUR)
    world.ignore = {DrainSlice}
    retire(world, ONE)
    drains = [each for each in world.told if isinstance(each, DrainSlice)]
    assert [each.deadline - world.now for each in drains] == [nodes.RETIREMENT]
    assert world.devices("a") == [ONE, OTHER]
    world.ask("b")
    assert world.state("b") == "pending"


def test_a_deadline_that_is_said_counts_and_a_drain_is_more_urgent(world):
    world.ask("a", count=2)
    retire(world, ONE, deadline=HOUR)
    assert world.pool.leases["a"].leaving["a/0"].deadline == world.now + HOUR
    world.send(Cordoned, target=ONE, why="now", drain=True, deadline=60_000)
    assert world.pool.leases["a"].leaving["a/0"].deadline == world.now + 60_000
    assert world.pool.devices[ONE].retired, "it still is to leave for good"


def test_with_nowhere_to_go_the_work_stays_until_there_is_a_place(world):
    world.ask("a", time_limit=100 * HOUR)
    world.ask("b", time_limit=100 * HOUR)
    retire(world, ONE)
    world.wait(10 * world.pool.defaults.drain_deadline)
    assert world.devices("a") == [ONE]
    world.release("b")
    assert world.devices("a") == [OTHER]


@pytest.mark.parametrize(
    "cure",
    [
        pytest.param(lambda world: world.verdict(ONE, Verdict.FINE), id="it is judged fine"),
        pytest.param(
            lambda world: (
                world.verdict(ONE, Verdict.GONE),
                world.verdict(ONE, Verdict.FINE, probation=True),
            ),
            id="it was lost, and is back after a reset",
        ),
        pytest.param(
            lambda world: world.send(NodeJoined, node=node("node-1", 2)), id="its node was started anew"
        ),
        pytest.param(
            lambda world: (
                world.send(NodeLost, node="node-1"),
                world.send(NodeJoined, node=node("node-1", 2)),
            ),
            id="its node was lost",
        ),
        pytest.param(
            lambda world: (
                world.send(NodeJoined, node=without(ONE)),
                world.send(NodeJoined, node=node("node-1", 2)),
            ),
            id="it was taken out of its node and put in again",
        ),
        pytest.param(
            lambda world: (
                world.send(NodeJoined, node=without(ONE)),
                world.send(NodeJoined, node=node("node-1", 2)),
                world.send(NodeJoined, node=without(ONE)),
                world.send(NodeJoined, node=node("node-1", 2)),
            ),
            id="twice",
        ),
        pytest.param(
            lambda world: setattr(world, "pool", Pool.restore(json.loads(json.dumps(world.pool.snapshot())))),
            id="the controller was started anew",
        ),
        pytest.param(lambda world: world.wait(8 * 24 * HOUR), id="a week has passed"),
        pytest.param(
            lambda world: world.send(Cordoned, target=ONE, why="by mistake"), id="it was cordoned besides"
        ),
        pytest.param(lambda world: world.send(Uncordoned, target="node-1"), id="its node was uncordoned"),
    ],
)
def test_it_is_not_back_although(world, cure):
    retire(world, ONE)
    cure(world)
    assert (world.pool.devices[ONE].retired, bool(world.pool.devices[ONE].cordoned)) == (True, True)
    world.ask("a", count=2)
    assert world.state("a") == "pending"
    world.send(Uncordoned, target=ONE)
    assert not world.pool.devices[ONE].retired
    assert world.state("a") == "active"


def test_its_controller_may_start_while_it_is_out_of_its_node(world):
    retire(world, ONE)
    world.send(NodeJoined, node=without(ONE))
    world.pool = Pool.restore(json.loads(json.dumps(world.pool.snapshot())))
    world.send(NodeJoined, node=node("node-1", 2))
    assert world.pool.devices[ONE].retired


def test_it_does_not_come_back_by_another_node(world):
    retire(world, ONE)
    world.send(NodeJoined, node=without(ONE))
    moved = dataclasses.replace(node("node-1", 2).devices[0], node="node-2")
    world.send(NodeJoined, node=dataclasses.replace(node("node-2", 0), devices=(moved,)))
    assert (world.pool.devices[ONE].device.node, world.pool.devices[ONE].retired) == ("node-2", True)


def test_another_gpu_in_its_slot_takes_work(world):
    retire(world, ONE)
    new = dataclasses.replace(node("node-1", 2).devices[0], uuid="GPU-new")
    world.send(NodeJoined, node=dataclasses.replace(without(ONE), devices=(new, *without(ONE).devices)))
    world.ask("a", count=2)
    assert world.state("a") == "active"


def test_a_retired_node_is_out_with_whatever_gpus_it_brings(world):
    retire(world, "node-1")
    new = tuple(dataclasses.replace(each, uuid=f"{each.uuid}-new") for each in node("node-1", 2).devices)
    world.send(NodeSilent, node="node-1")
    world.send(NodeJoined, node=dataclasses.replace(node("node-1", 2), devices=new))
    world.ask("a")
    assert world.state("a") == "pending"
    world.send(Uncordoned, target="node-1")
    assert (world.pool.nodes["node-1"].retired, world.state("a")) == (False, "active")


def test_a_cordon_too_is_kept_while_the_device_is_out_of_its_node(world):
    world.send(Cordoned, target=ONE, why="new fan")
    world.send(NodeJoined, node=without(ONE))
    world.send(NodeJoined, node=node("node-1", 2))
    assert (world.pool.devices[ONE].cordoned, world.pool.devices[ONE].retired) == ("new fan", False)
    world.send(Uncordoned, target=ONE)
    world.send(NodeJoined, node=without(ONE))
    world.send(NodeJoined, node=node("node-1", 2))
    assert world.pool.devices[ONE].cordoned == ""


def test_the_snapshot_of_a_pool_that_knew_nothing_of_it_is_read(world):
    old = world.pool.snapshot()
    del old["absent"]
    for each in (*old["devices"].values(), *old["nodes"].values()):
        del each["retired"]
    restored = Pool.restore({**old, "form": 2})
    assert restored.snapshot() == world.pool.snapshot()
