"""Bench `mig`: how many MIG instances find a place, by the product's placement and by two simple rules.

Fixed streams of requests for instances of an A100-40GB and of their ends, each stream with a mix of profiles
and a load of its own, none of which the product is told beforehand. A request that finds no place is lost.
First fit takes the first device with a legal place and there the lowest; lowest start takes the lowest place
on any device.

    python -m tests.bench.mig [--gpus 100] [--streams 10] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.cluster import Cluster
from jupyter_gpupool.core.model import GIB, Device, Node, Request
from jupyter_gpupool.core.placement import Placement, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.core.model import MigProfile

#: Requests of a stream for each GPU.
REQUESTS = 60
QUICK_STREAMS = 3
MODEL, MEMORY = "A100-40GB", 40 * GIB
T = TypeVar("T")
#: An instance's memory slices as bits, by device.
Held = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a stream."""

    profile: MigProfile
    #: How many requests later it ends, if it found a place.
    ends: int


def stream(seed: int, gpus: int) -> list[Asked]:
    """The requests of one stream: a mix of profiles, and ends such that about 95 to 125 % would be in use."""
    chance = random.Random(seed)
    geometry = mig.built_in(MODEL, MEMORY)
    assert geometry is not None
    profiles = [each for each in geometry.profiles if "+" not in each.name]
    mix = [chance.random() ** 2 / each.size for each in profiles]
    size = sum(each.size * part for each, part in zip(profiles, mix, strict=True)) / sum(mix)
    load = chance.uniform(0.95, 1.25)
    mean = load * gpus * geometry.slots / size
    return [
        Asked(chance.choices(profiles, mix)[0], max(1, round(chance.expovariate(1 / mean))))
        for _ in range(gpus * REQUESTS)
    ]


def run(requests: list[Asked], take: Callable[[Asked], T | None], end: Callable[[T], object]) -> int:
    """Let a stream go by; returns how many of its requests found a place."""
    ending: dict[int, list[T]] = {}
    placed = 0
    for now, asked in enumerate(requests):
        for held in ending.pop(now, ()):
            end(held)
        found = take(asked)
        if found is not None:
            placed += 1
            ending.setdefault(now + asked.ends, []).append(found)
    return placed


def simple(requests: list[Asked], gpus: int, *, first: bool) -> int:
    """First fit, or lowest start."""
    masks = [0] * gpus

    def take(asked: Asked) -> Held | None:
        size = asked.profile.size
        free = (
            (start, device)
            for device, mask in enumerate(masks)
            for start in asked.profile.starts
            if not mask & mig.span(start, size)
        )
        found = next(free, None) if first else min(free, default=None)
        if found is None:
            return None
        start, device = found
        masks[device] |= mig.span(start, size)
        return device, mig.span(start, size)

    def end(held: Held) -> None:
        masks[held[0]] &= ~held[1]

    return run(requests, take, end)


def ours(requests: list[Asked], gpus: int) -> int:
    """The product's placement."""
    cluster = Cluster()
    for number in range(-(-gpus // 8)):
        cluster.add_node(node_of(number, min(8, gpus - 8 * number)))
    taken = iter(range(len(requests)))

    def take(asked: Asked) -> str | None:
        request = Request(id="r", user="u", project="p", name="n", mig=asked.profile.name)
        cluster.demand.observe(request)
        found = place(request, cluster)
        if not isinstance(found, Placement):
            return None
        key = str(next(taken))
        cluster.take(key, key, found.parts[0])
        return key

    placed = run(requests, take, cluster.release)
    cluster.validate()
    return placed


def node_of(number: int, devices: int) -> Node:
    """A node with so many devices in MIG mode that the pool may cut."""
    name = f"node-{number:03}"
    return Node(
        name=name,
        cpus=128_000,
        memory=1024 * GIB,
        devices=tuple(
            Device(
                uuid=f"GPU-{name}-{index}",
                node=name,
                index=index,
                model=MODEL,
                memory=MEMORY,
                mig=True,
                mig_managed=True,
            )
            for index in range(devices)
        ),
    )


def main() -> None:
    """Run the bench; the last line on stdout is its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=100)
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STREAMS} streams")
    options = parser.parse_args()
    results = []
    for seed in range(QUICK_STREAMS if options.quick else options.streams):
        requests = stream(seed, options.gpus)
        results.append(
            {
                "seed": seed,
                "requests": len(requests),
                "ours": ours(requests, options.gpus),
                "first_fit": simple(requests, options.gpus, first=True),
                "lowest_start": simple(requests, options.gpus, first=False),
            }
        )
        print(results[-1], flush=True)
    print(json.dumps({"streams": results}))


if __name__ == "__main__":
    main()
