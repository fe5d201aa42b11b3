"""Bench `openb`: how full a cluster gets when real requests arrive until it is full.

The arrival experiment of FGD (Weng et al., USENIX ATC 2023) on Alibaba's openb trace: 1,213 nodes with
6,212 GPUs; pods are drawn with replacement until what has arrived is so many per cent of the GPUs; nobody
leaves. CPUs and memory of the nodes count too. Every pod goes through the product's own `core.placement`,
which learns what is usually asked for from the arrivals alone. Times are of the processor, not of the clock
on the wall: what else runs on the machine does not count.

    python -m tests.bench.openb --nodes NODES.csv.gz --pods PODS.csv.gz [--seeds 10] [--arrived 100,130]
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_gpupool.core.cluster import Cluster
from jupyter_gpupool.core.model import GIB, MIB, WHOLE, Device, Node, Request
from jupyter_gpupool.core.placement import Placement, place

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Memory of the trace's models; nothing in the trace depends on it.
GIBIBYTES = {"A10": 24, "G2": 24, "G3": 80, "P100": 16, "T4": 16, "V100M16": 16, "V100M32": 32}
QUICK_SEEDS = 2


def rows_of(file: str) -> list[dict[str, str]]:
    """Rows of a CSV file, compressed or not."""
    path = Path(file)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as lines:
        return list(csv.DictReader(lines))


def node_of(row: dict[str, str]) -> Node:
    """A node of the trace as an agent would report it."""
    name, model = row["sn"], row["model"]
    devices = tuple(
        Device(
            uuid=f"GPU-{name}-{index}",
            node=name,
            index=index,
            model=model,
            memory=GIBIBYTES.get(model, 16) * GIB,
        )
        for index in range(int(row["gpu"]))
    )
    return Node(name=name, devices=devices, cpus=int(row["cpu_milli"]), memory=int(row["memory_mib"]) * MIB)


def request_of(row: dict[str, str]) -> Request:
    """A pod of the trace as a request; one without GPUs takes host CPUs and memory only."""
    count = int(row["num_gpu"])
    slices = max(1, count)
    return Request(
        id=row["name"],
        user="trace",
        project="trace",
        name=row["name"],
        count=slices,
        milli=int(row["gpu_milli"]) if count else 0,
        cpus=max(1, -(-int(row["cpu_milli"]) // slices)),
        memory=max(1, -(-int(row["memory_mib"]) * MIB // slices)),
        model=row.get("gpu_spec") or "",
        same_node=True,
    )


def arrivals(requests: list[Request], seed: int, demand: int) -> Iterator[Request]:
    """Requests drawn with replacement until they ask for so many thousandths of GPUs together."""
    chance = random.Random(seed)
    arrived = 0
    while arrived < demand:
        request = chance.choice(requests)
        arrived += request.count * request.milli
        yield request


def fill(
    nodes: list[Node], requests: list[Request], seed: int, marks: list[int]
) -> tuple[dict[int, float], list[float]]:
    """Let requests arrive up to the last mark (per cent): allocated per cent at each, seconds of each."""
    cluster = Cluster()
    for node in nodes:
        cluster.add_node(node)
    total = sum(len(node.devices) for node in nodes) * WHOLE
    arrived = allocated = taken = 0
    reached: dict[int, float] = {}
    seconds = []
    for request in arrivals(requests, seed, -(-total * max(marks) // 100)):
        arrived += request.count * request.milli
        start = time.thread_time()
        cluster.demand.observe(request)
        found = place(request, cluster)
        seconds.append(time.thread_time() - start)
        for part in found.parts if isinstance(found, Placement) else ():
            cluster.take(str(taken), request.id, part)
            allocated += part.milli
            taken += 1
        for mark in marks:
            if arrived * 100 >= mark * total and mark not in reached:
                reached[mark] = 100 * allocated / total
    cluster.validate()
    return reached, seconds


def main() -> None:
    """Run the bench; the last line on stdout is its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", required=True, help="nodes of the trace, .csv or .csv.gz")
    parser.add_argument("--pods", required=True, help="pods of the trace, .csv or .csv.gz")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--arrived", default="100,130", help="arrived demand in per cent of the GPUs")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} seeds")
    options = parser.parse_args()
    nodes = [node_of(row) for row in rows_of(options.nodes)]
    requests = [request_of(row) for row in rows_of(options.pods)]
    marks = [int(mark) for mark in options.arrived.split(",")]
    runs, seconds = [], []
    for seed in range(min(options.seeds, QUICK_SEEDS) if options.quick else options.seeds):
        reached, took = fill(nodes, requests, seed, marks)
        runs.append(reached)
        seconds += took
        print(f"seed {seed}: {', '.join(f'{reached[mark]:.2f} % at {mark} %' for mark in marks)}", flush=True)
    seconds.sort()
    result = {
        "allocated_percent": {str(mark): spread([run[mark] for run in runs]) for mark in marks},
        "place_p50_ms": round(1000 * seconds[len(seconds) // 2], 4),
        "place_p99_ms": round(1000 * seconds[len(seconds) * 99 // 100], 4),
    }
    print(json.dumps(result))


def spread(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 3), "std": round(deviation, 3)}


if __name__ == "__main__":
    main()
