"""What can go wrong, one row a kind: each function does the damage, lets it last, and makes it good again.

Several kinds are at work at once, but nothing is hit by two of them: what a kind needs for itself is in its
row, and its function gets the name of the node or device that it has got.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from jupyter_gpupool.driver import simulated
from tests.chaos.record import Wish
from tests.chaos.world import NODES, SILENCE, World
from tests.pool_processes import wait_for

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    import psutil

    #: Does the damage; whether there was anything to hit.
    Act = Callable[[World, random.Random, str], bool]

#: The XIDs that are tried, and whether the GPU is then out of service.
XIDS = {79: True, 95: True, 31: False, 94: False}


def _send(process: psutil.Process | int, number: int) -> bool:
    """Send a signal; whether there was somebody to get it."""
    pid = process if isinstance(process, int) else process.pid
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


# ------------------------------------------------------------------------------------------- the controller


def kill_controller(world: World, rng: random.Random, name: str) -> bool:
    world.kill("controller")
    time.sleep(rng.choice((0, 0.2, 2)))
    world.start_controller()
    return True


def kill_controller_twice(world: World, rng: random.Random, name: str) -> bool:
    """The second time while it starts."""
    world.kill("controller")
    world._run("controller", "jupyter_gpupool.controller", [])
    time.sleep(rng.uniform(0.2, 2))
    return kill_controller(world, rng, name)


def end_controller(world: World, rng: random.Random, name: str) -> bool:
    world.kill("controller", signal.SIGTERM)
    world.start_controller()
    return True


def stop_controller(world: World, rng: random.Random, name: str) -> bool:
    _send(world.pid("controller"), signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 5))
    return _send(world.pid("controller"), signal.SIGCONT)


def full_disk(world: World, rng: random.Random, name: str) -> bool:
    if not world.disk:
        return False
    with world.full_disk():
        time.sleep(rng.uniform(0.5, 4))
    return True


def full_disk_and_kill(world: World, rng: random.Random, name: str) -> bool:
    """It dies while its disk is full, and starts when there is room again."""
    if not world.disk:
        return False
    with world.full_disk():
        time.sleep(rng.uniform(0.2, 2))
        world.kill("controller")
    world.start_controller()
    return True


def files_cannot_grow(world: World, rng: random.Random, name: str) -> bool:
    with world.file_limit():
        time.sleep(rng.uniform(0.5, 4))
    return True


# ------------------------------------------------------------------------------------------------ the agents


def kill_agent(world: World, rng: random.Random, name: str) -> bool:
    world.kill(name)
    time.sleep(rng.choice((0, 0.2, 2)))
    world.start_agent(name)
    return True


def stop_agent(world: World, rng: random.Random, name: str) -> bool:
    _send(world.pid(name), signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 6))
    return _send(world.pid(name), signal.SIGCONT)


def second_agent(world: World, rng: random.Random, name: str) -> bool:
    """Somebody starts an agent from a copy of a node's folder: it must not be heard beside the first."""
    twin = f"{name}-twin"
    folder = world.folder / twin
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(world.folder / name / "agent.json", folder)
    environ = simulated.environment(world.simulated, name)
    world._run(twin, "jupyter_gpupool.node", ["--name", name], environ)
    time.sleep(rng.uniform(2, 4))
    world.kill(twin)
    return True


def kill_reader(world: World, rng: random.Random, name: str) -> bool:
    found = world.children(name, "node.reader")
    return bool([each for each in found if _send(each, signal.SIGKILL)])


def kill_launcher(world: World, rng: random.Random, name: str) -> bool:
    found = world.children(name, "lease_launcher")
    return bool(found) and _send(found[0], signal.SIGKILL)


def lose_node(world: World, rng: random.Random, name: str) -> bool:
    """A node is cut off until it is given up; then it is back, with all that it ran."""
    proxy = world.proxies[name]
    proxy.cut(refuse=True)
    time.sleep(SILENCE + 3)
    proxy.heal()
    return True


def crash_node(world: World, rng: random.Random, name: str) -> bool:
    """A node goes down with all its processes, and is up again."""
    run = {each.pid for each in world.children(name, "")}
    marks = world.node_processes(name)
    world.kill(name)
    for pid in run | marks:
        _send(pid, signal.SIGKILL)
    time.sleep(rng.uniform(0, 3))
    world.start_agent(name)
    return True


# --------------------------------------------------------------------------------------- leases' processes


def _of_lease(what: str, number: int, again: int = 0) -> Act:
    def act(world: World, rng: random.Random, name: str) -> bool:
        found = [each for each, kind, _ in world.lease_processes() if kind == what]
        if not found:
            return False
        chosen = rng.choice(found)
        hit = _send(chosen, number)
        if again:
            time.sleep(rng.uniform(0.5, 8))
            _send(chosen, again)
        return hit

    return act


def gpu_fails(world: World, rng: random.Random, name: str) -> bool:
    world.machine.fail(name, rng.choice(list(XIDS)))
    time.sleep(rng.uniform(0.5, 4))
    _make_good(world, name)
    return True


def drill(world: World, rng: random.Random, name: str) -> bool:
    """An administrator breaks a GPU for practice; the verdict holds until they undo it."""
    if world.ask("POST", f"/v1/health/{name}", {"action": "drill", "xid": 79}).status_code >= 400:
        return False
    with suppress(AssertionError):
        wait_for(lambda: world.settings()[f"drill {name}"], "it is out", 10)
        with world.record.lock:
            world.record.wishes[f"drill {name}"] = Wish(True)
            world.record.confirmed += 1
        kill_controller(world, rng, name)
        world.compare()
    with world.record.lock:
        world.record.wishes.pop(f"drill {name}", None)
    _make_good(world, name)
    return True


def _make_good(world: World, device: str) -> None:
    """Repair a GPU, and let an administrator say so."""
    world.machine.restore(device)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if world.ask("POST", f"/v1/health/{device}", {"action": "undrill"}).status_code < 400:
            return
        time.sleep(0.5)  # its agent is away


# ------------------------------------------------------------------------------------------------ the network


def delay(world: World, rng: random.Random, name: str) -> bool:
    proxy = world.proxies[name]
    proxy.delay = rng.uniform(0.1, 1.5)
    time.sleep(rng.uniform(1, 6))
    proxy.heal()
    return True


def _one_way(way: str) -> Act:
    def act(world: World, rng: random.Random, name: str) -> bool:
        proxy = world.proxies[name]
        proxy.stall(way)
        time.sleep(rng.uniform(1, 16))
        if rng.random() < 0.5:
            proxy.cut(refuse=False)  # what was held back is lost
        proxy.heal()
        return True

    return act


def cut(world: World, rng: random.Random, name: str) -> bool:
    proxy = world.proxies[name]
    proxy.cut(refuse=True)
    time.sleep(rng.uniform(0, 4))
    proxy.heal()
    return True


def repeat(world: World, rng: random.Random, name: str) -> bool:
    world.proxies[name].repeat()
    return True


def cut_and_kill_controller(world: World, rng: random.Random, name: str) -> bool:
    proxy = world.proxies[name]
    proxy.cut(refuse=True)
    kill_controller(world, rng, name)
    proxy.heal()
    return True


class Kind(NamedTuple):
    """How often a kind is chosen, what it needs for itself, and what does it."""

    weight: int
    needs: tuple[str, ...]
    act: Act


CONTROLLER, NODE, DEVICE = "controller", "node", "device"
#: What "a node" or "a device" can be; a kind that needs one gets one of these that nobody else has.
THINGS = {
    CONTROLLER: [CONTROLLER],
    NODE: list(NODES),
    DEVICE: [f"{name}/gpu{number}" for name, many in NODES.items() for number in range(many)],
}
KINDS: dict[str, Kind] = {
    "controller killed": Kind(6, (CONTROLLER,), kill_controller),
    "controller killed while it starts": Kind(2, (CONTROLLER,), kill_controller_twice),
    "controller ended": Kind(2, (CONTROLLER,), end_controller),
    "controller stopped": Kind(3, (CONTROLLER,), stop_controller),
    "disk full": Kind(3, (CONTROLLER,), full_disk),
    "disk full, controller killed": Kind(2, (CONTROLLER,), full_disk_and_kill),
    "files cannot grow": Kind(2, (CONTROLLER,), files_cannot_grow),
    "agent killed": Kind(5, (NODE,), kill_agent),
    "agent stopped": Kind(3, (NODE,), stop_agent),
    "second agent": Kind(1, (NODE,), second_agent),
    "reader killed": Kind(3, (NODE,), kill_reader),
    "launcher killed": Kind(2, (NODE,), kill_launcher),
    "node lost": Kind(1, (NODE,), lose_node),
    "node crashed": Kind(2, (NODE,), crash_node),
    "scheduler killed": Kind(2, (), _of_lease("scheduler", signal.SIGKILL)),
    "scheduler stopped": Kind(1, (), _of_lease("scheduler", signal.SIGSTOP, signal.SIGCONT)),
    "host killed": Kind(2, (), _of_lease("host", signal.SIGKILL)),
    "worker killed": Kind(4, (), _of_lease("worker", signal.SIGKILL)),
    "worker stopped": Kind(2, (), _of_lease("worker", signal.SIGSTOP, signal.SIGCONT)),
    "GPU fails": Kind(4, (DEVICE,), gpu_fails),
    "drill": Kind(2, (CONTROLLER, DEVICE), drill),
    "network slow": Kind(3, (NODE,), delay),
    "network one way, to the controller": Kind(2, (NODE,), _one_way("up")),
    "network one way, to the agent": Kind(2, (NODE,), _one_way("down")),
    "network cut": Kind(4, (NODE,), cut),
    "network repeats": Kind(3, (NODE,), repeat),
    "network cut, controller killed": Kind(2, (CONTROLLER, NODE), cut_and_kill_controller),
}
