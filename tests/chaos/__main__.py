"""`python -m tests.chaos --minutes 30 --seed 1`: a pool under attack; the last line is the result as JSON.

Several attackers are at it at once, and users who go on meanwhile. The seed decides which faults each of them
has in mind and what users wish; how they meet the processes and each other is the machine's. Exit status 1
where anything was lost, doubled or leaked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chaos.attack import Attacker, Turns
from tests.chaos.faults import THINGS
from tests.chaos.world import User, World, free_again

#: Seconds between two comparisons, and until everything must be free at the end.
LOOK, CALM = 8.0, 120.0


def run(
    folder: Path, seed: int, seconds: float, *, users: int = 4, attackers: int = 3, pause: float = 2.0
) -> dict[str, Any]:
    """Attack a pool for so long, and return what was found."""
    turns = Turns(THINGS)
    with World(folder).start() as world:
        people = [User(world, number, seed, pause) for number in range(users)]
        hands = [Attacker(world, turns, f"{seed}/attacker {number}") for number in range(attackers)]
        for each in people:
            each.start()
        _attack(world, hands, seconds)
        world.over.set()
        for each in (*hands, *people):
            each.join(200)
            if each.error:
                raise each.error
        _calm(world)
    record, happened = world.record, sum((each.happened for each in hands), Counter[str]())
    return {
        "faults": happened.total(),
        "faults_by_kind": dict(sorted(happened.items())),
        "confirmed": record.confirmed,
        **{kind: record.count(kind) for kind in ("lost", "doubled", "leaked")},
        "seed": seed,
        "minutes": round(seconds / 60, 2),
        "findings": sorted(record.findings.values()),
        "given_up": dict(record.given_up),
        "disk": world.disk,
    }


def _attack(world: World, attackers: list[Attacker], seconds: float) -> None:
    """Let them attack for so long, and compare meanwhile, also while things are broken."""
    end = time.monotonic() + seconds
    for each in attackers:
        each.start()
    while time.monotonic() < end and not world.over.wait(min(LOOK, max(0.1, end - time.monotonic()))):
        world.compare()


def _calm(world: World) -> None:
    """Give everything back, and see that it is all free."""
    for device in ("node-2/gpu0", "node-3/gpu0"):
        world.ask("POST", f"/v1/health/{device}", {"action": "uncordon"})
    world.record.wishes = {name: wish for name, wish in world.record.wishes.items() if name == "quota"}
    for asked in world.record.asked.values():
        if asked.id and not asked.released:
            asked.releasing = True
            world.ask("DELETE", f"/v1/leases/{asked.id}")
            asked.released = True
    end = time.monotonic() + CALM
    while time.monotonic() < end and not free_again(world):
        time.sleep(0.5)
    world.compare()
    if not free_again(world):
        world.record.find("leaked", "at the end", json.dumps(left(world)))


def left(world: World) -> dict[str, Any]:
    """What is still taken: for people who look for the reason."""
    leases = [each for each in world.everything() if each["state"] != "ended"]
    devices = world.ask("GET", "/v1/devices").json()["devices"]
    return {
        "pool": world.ask("GET", "/v1/pool").json(),
        "leases": [(each["name"], each["state"], each["why"], each["slices"]) for each in leases],
        "devices": [(each["name"], each["verdict"], each["cordoned"], each.get("state")) for each in devices],
        "processes": world.tables(),
    }


def main() -> None:
    """Read the command line and attack."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder that is left, with all logs")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        found = run(options.keep, options.seed, 60 * options.minutes)
    else:
        with tempfile.TemporaryDirectory(prefix="gp-") as folder:
            found = run(Path(folder), options.seed, 60 * options.minutes)
    print(json.dumps(found))
    sys.exit(any(found[kind] for kind in ("lost", "doubled", "leaked")))


if __name__ == "__main__":
    main()
