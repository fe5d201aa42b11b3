"""Bench `storm`: does taking back come to an end, whatever happens?

An endless stream of what people, agents, devices and administrators can do, in any order and as unkind as
chance makes it, through the product's own `core.pool` in virtual time. Now and then there is a lull, in which
only time passes and agents obey: then reclaims must come to an end. `tests.naive` looks on from outside.

    python -m tests.bench.storm [--steps 1000000] [--seed 1] [--quick]

Keys: `steps`; `reclaims`, at least 1,000 in a full run; `loops`: reclaims by which somebody, directly or by
others, gets back what was taken for its victim, while demands, quotas and devices were as they are;
`potential_rises`: reclaims after which the sum of squared over-shares had not dropped (or, where only surplus
was taken, had risen); `max_losses_in_min_run`: the most reclaims from one lease within a min run time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import (
    HOUR,
    MINUTE,
    WHOLE,
    LeaseBusy,
    LeaseIdle,
    LeaseKept,
    NodeLost,
    NodeSilent,
    Verdict,
)
from tests import naive

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.naive import Naive

QUICK_STEPS = 8_000
#: After so many steps all books are counted again, and all that waits is asked why.
LOOK = 500
#: More than that are never alive at once: people give up on a long queue.
MOST = 30
#: A lull: so many times so long.
LULL = (12, 10 * MINUTE)


def ask(world: Naive, rng: random.Random) -> None:
    """Somebody asks: alone or as a gang, for whole GPUs or shares, of any model or one, elastic or not."""
    if len(world.alive()) >= MOST:
        return
    count, more = rng.randint(1, 6), rng.choice((0, 0, 3, 4))
    world.ask(
        rng.choice(naive.USERS),
        count=count,
        max_count=count + more if more else 0,
        milli=rng.choice((WHOLE, WHOLE, WHOLE, 500, 250)),
        model=rng.choice(("", "", "", "H100", "A100")),
        interactive=rng.random() < 0.3,
        time_limit=rng.choice((0, 1, 3, 24)) * HOUR,
        priority=rng.randint(0, 2),
        same_node=count <= naive.GPUS and rng.random() < 0.3,
    )


def lull(world: Naive, _: random.Random) -> None:
    """Nobody wants anything new: time passes, and agents obey."""
    times, long = LULL
    for _ in range(times):
        world.wait(long)
        world.obey_all(20)


def of_leases(verb: Callable[[Naive, random.Random, str], None]) -> Callable[[Naive, random.Random], None]:
    """Do something with one of the leases, if there is one."""

    def do(world: Naive, rng: random.Random) -> None:
        alive = world.alive()
        if alive:
            verb(world, rng, rng.choice(alive))

    return do


def die(world: Naive, rng: random.Random) -> None:
    """A worker or a scheduler dies."""
    if world.running and rng.random() < 0.7:
        world.worker_dies(rng.choice(sorted(world.running)))
    elif world.schedulers:
        world.scheduler_dies(rng.choice(sorted(world.schedulers)))


def come_back(world: Naive, rng: random.Random) -> None:
    """A node is back: its agent has started anew, or it has rebooted, and may lack some devices."""
    if rng.random() < 0.5:
        world.join(rng.choice(naive.NODES))
    else:
        devices = rng.choice((naive.GPUS, naive.GPUS, naive.GPUS, 2, 1))
        world.join(rng.choice(naive.NODES), rebooted=True, devices=devices)


FINE = (Verdict.FINE,) * 12
PLACES = (*naive.NODES, "head")
RESTS = (LeaseIdle, LeaseBusy, LeaseKept)
TARGETS = (*naive.NODES, *naive.DEVICES)
#: What happens, and how often of a hundred times.
VERBS: tuple[tuple[float, Callable[[Naive, random.Random], None]], ...] = (
    (25, ask),
    (9, of_leases(lambda world, _, lease: world.release(lease))),
    (2, of_leases(lambda world, rng, lease: world.extend(lease, rng.choice((MINUTE, HOUR))))),
    (4, of_leases(lambda world, rng, lease: world.scale(lease, rng.randint(0, 8)))),
    (
        3,
        of_leases(lambda world, rng, lease: world.rest(lease, rng.choice((LeaseIdle, LeaseBusy, LeaseKept)))),
    ),
    (10, lambda world, rng: world.obey(rng.choice(PLACES), rng.randint(1, 12))),
    (14, lambda world, rng: world.obey_all(rng.randint(1, 20))),
    (2, die),
    (2, lambda world, rng: world.leave(rng.choice(naive.NODES), rng.choice((NodeSilent, NodeLost)))),
    (4, come_back),
    (4, lambda world, rng: world.judge(rng.choice(naive.DEVICES), rng.choice((*Verdict, *FINE)))),
    (1, lambda world, rng: world.outside(rng.choice(naive.DEVICES), rng.choice(("", "", "", "PID 1")))),
    (1, lambda world, rng: world.cordon(rng.choice(TARGETS), drain=rng.random() < 0.5)),
    (4, lambda world, rng: world.uncordon(rng.choice(TARGETS))),
    (1, lambda world, rng: world.configure(rng.choice((*naive.TREES, naive.TOO_MUCH)))),
    (0.3, lambda world, _: world.restart()),
    (0.2, lull),
    (16, lambda world, rng: world.wait(rng.choice((0, 1, 2, 5, 10, 30)) * MINUTE)),
)
_WEIGHTS = [weight for weight, _ in VERBS]
_DEEDS = [deed for _, deed in VERBS]


def step(world: Naive, rng: random.Random) -> None:
    """Let one thing happen."""
    rng.choices(_DEEDS, _WEIGHTS)[0](world, rng)


def storm(steps: int, seed: int) -> dict[str, float]:
    """Let so many things happen."""
    began = time.process_time()
    world, rng = naive.Naive(keep=False), random.Random(seed)
    number = 0
    try:
        for number in range(1, steps + 1):
            step(world, rng)
            if number % LOOK == 0:
                world.check()
        world.all_is_given_back()
    except Exception as error:
        error.add_note(f"at step {number} of seed {seed}")
        raise
    return {
        "steps": steps,
        "events": world.counts["events"],
        "grants": world.counts["grants"],
        "reclaims": world.counts["reclaims"],
        "loops": world.counts["loops"],
        "potential_rises": world.counts["potential_rises"],
        "max_losses_in_min_run": world.counts["losses"],
        "cpu_s": round(time.process_time() - began, 1),
    }


def main() -> None:
    """Run the bench, and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    args = parser.parse_args()
    print(json.dumps(storm(QUICK_STEPS if args.quick else args.steps, args.seed)))


if __name__ == "__main__":
    main()
