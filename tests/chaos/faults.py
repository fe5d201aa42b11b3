"""What can go wrong, one row a kind: each function does the damage, lets it last, and makes it good again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from jupyter_gpupool.driver import simulated
from tests.chaos.record import Wish
from tests.chaos.world import SILENCE, World
from tests.pool_processes import wait_for

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    import psutil

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


def kill_controller(world: World, rng: random.Random) -> bool:
    world.kill("controller")
    time.sleep(rng.choice((0, 0.2, 2)))
    world.start_controller()
    return True


def kill_controller_twice(world: World, rng: random.Random) -> bool:
    """The second time while it starts."""
    world.kill("controller")
    world._run("controller", "jupyter_gpupool.controller", [])
    time.sleep(rng.uniform(0.2, 2))
    return kill_controller(world, rng)


def end_controller(world: World, rng: random.Random) -> bool:
    world.kill("controller", signal.SIGTERM)
    world.start_controller()
    return True


def stop_controller(world: World, rng: random.Random) -> bool:
    _send(world.pid("controller"), signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 5))
    return _send(world.pid("controller"), signal.SIGCONT)


def full_disk(world: World, rng: random.Random) -> bool:
    if not world.disk:
        return False
    with world.full_disk():
        time.sleep(rng.uniform(0.5, 4))
    return True


def full_disk_and_kill(world: World, rng: random.Random) -> bool:
    """It dies while its disk is full, and starts when there is room again."""
    if not world.disk:
        return False
    with world.full_disk():
        time.sleep(rng.uniform(0.2, 2))
        world.kill("controller")
    world.start_controller()
    return True


def files_cannot_grow(world: World, rng: random.Random) -> bool:
    with world.file_limit():
        time.sleep(rng.uniform(0.5, 4))
    return True


# ------------------------------------------------------------------------------------------------ the agents


def _node(world: World, rng: random.Random) -> str:
    return rng.choice(list(world.nodes))


def kill_agent(world: World, rng: random.Random) -> bool:
    name = _node(world, rng)
    world.kill(name)
    time.sleep(rng.choice((0, 0.2, 2)))
    world.start_agent(name)
    return True


def stop_agent(world: World, rng: random.Random) -> bool:
    name = _node(world, rng)
    _send(world.pid(name), signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 6))
    return _send(world.pid(name), signal.SIGCONT)


def second_agent(world: World, rng: random.Random) -> bool:
    """Somebody starts an agent from a copy of a node's folder: it must not be heard beside the first."""
    name = _node(world, rng)
    twin = f"{name}-twin"
    folder = world.folder / twin
    folder.mkdir(mode=0o700, exist_ok=True)
    shutil.copy(world.folder / name / "agent.json", folder)
    environ = simulated.environment(world.simulated, name)
    world._run(twin, "jupyter_gpupool.node", ["--name", name], environ)
    time.sleep(rng.uniform(2, 4))
    world.kill(twin)
    return True


def kill_reader(world: World, rng: random.Random) -> bool:
    found = world.children(_node(world, rng), "node.reader")
    return bool([each for each in found if _send(each, signal.SIGKILL)])


def kill_launcher(world: World, rng: random.Random) -> bool:
    found = world.children(_node(world, rng), "lease_launcher")
    return bool(found) and _send(found[0], signal.SIGKILL)


def lose_node(world: World, rng: random.Random) -> bool:
    """A node is cut off until it is given up; then it is back, with all that it ran."""
    proxy = world.proxies[_node(world, rng)]
    proxy.cut(refuse=True)
    time.sleep(SILENCE + 3)
    proxy.heal()
    return True


def crash_node(world: World, rng: random.Random) -> bool:
    """A node goes down with all its processes, and is up again."""
    name = _node(world, rng)
    run = {each.pid for each in world.children(name, "")}
    marks = world.node_processes(name)
    world.kill(name)
    for pid in run | marks:
        _send(pid, signal.SIGKILL)
    time.sleep(rng.uniform(0, 3))
    world.start_agent(name)
    return True


# --------------------------------------------------------------------------------------- leases' processes


def _of_lease(what: str, number: int, again: int = 0) -> Callable[[World, random.Random], bool]:
    def act(world: World, rng: random.Random) -> bool:
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


def gpu_fails(world: World, rng: random.Random) -> bool:
    device = rng.choice(world.machine.devices())
    xid = rng.choice(list(XIDS))
    world.machine.fail(device, xid)
    time.sleep(rng.uniform(0.5, 4))
    _make_good(world, device)
    return True


def drill(world: World, rng: random.Random) -> bool:
    """An administrator breaks a GPU for practice; the verdict holds until they undo it."""
    name = rng.choice(["node-1/gpu2", "node-2/gpu2"])
    if world.ask("POST", f"/v1/health/{name}", {"action": "drill", "xid": 79}).status_code >= 400:
        return False
    with suppress(AssertionError):
        wait_for(lambda: world.settings()[f"drill {name}"], "it is out", 10)
        with world.record.lock:
            world.record.wishes[f"drill {name}"] = Wish(True)
            world.record.confirmed += 1
        kill_controller(world, rng)
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


def delay(world: World, rng: random.Random) -> bool:
    proxy = world.proxies[_node(world, rng)]
    proxy.delay = rng.uniform(0.1, 1.5)
    time.sleep(rng.uniform(1, 6))
    proxy.heal()
    return True


def _one_way(way: str) -> Callable[[World, random.Random], bool]:
    def act(world: World, rng: random.Random) -> bool:
        proxy = world.proxies[_node(world, rng)]
        proxy.stall(way)
        time.sleep(rng.uniform(1, 16))
        if rng.random() < 0.5:
            proxy.cut(refuse=False)  # what was held back is lost
        proxy.heal()
        return True

    return act


def cut(world: World, rng: random.Random) -> bool:
    proxy = world.proxies[_node(world, rng)]
    proxy.cut(refuse=True)
    time.sleep(rng.uniform(0, 4))
    proxy.heal()
    return True


def repeat(world: World, rng: random.Random) -> bool:
    world.proxies[_node(world, rng)].repeat()
    return True


def cut_and_kill_controller(world: World, rng: random.Random) -> bool:
    proxy = world.proxies[_node(world, rng)]
    proxy.cut(refuse=True)
    kill_controller(world, rng)
    proxy.heal()
    return True


#: Kind -> how often it is chosen, and what does it.
KINDS: dict[str, tuple[int, Callable[[World, random.Random], bool]]] = {
    "controller killed": (6, kill_controller),
    "controller killed while it starts": (2, kill_controller_twice),
    "controller ended": (2, end_controller),
    "controller stopped": (3, stop_controller),
    "disk full": (3, full_disk),
    "disk full, controller killed": (2, full_disk_and_kill),
    "files cannot grow": (2, files_cannot_grow),
    "agent killed": (5, kill_agent),
    "agent stopped": (3, stop_agent),
    "second agent": (1, second_agent),
    "reader killed": (3, kill_reader),
    "launcher killed": (2, kill_launcher),
    "node lost": (1, lose_node),
    "node crashed": (2, crash_node),
    "scheduler killed": (2, _of_lease("scheduler", signal.SIGKILL)),
    "scheduler stopped": (1, _of_lease("scheduler", signal.SIGSTOP, signal.SIGCONT)),
    "host killed": (2, _of_lease("host", signal.SIGKILL)),
    "worker killed": (4, _of_lease("worker", signal.SIGKILL)),
    "worker stopped": (2, _of_lease("worker", signal.SIGSTOP, signal.SIGCONT)),
    "GPU fails": (4, gpu_fails),
    "drill": (2, drill),
    "network slow": (3, delay),
    "network one way, to the controller": (2, _one_way("up")),
    "network one way, to the agent": (2, _one_way("down")),
    "network cut": (4, cut),
    "network repeats": (3, repeat),
    "network cut, controller killed": (2, cut_and_kill_controller),
}
