"""How long one lease takes from its orders to its first result, and what an idle one costs.

The node's part of `first_result`: no controller, no HTTP. `python -m tests.bench.lease_start [--leases 20]
[--quick]`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from tests.leasing import Lease, Node, credentials


def add_one(x):
    return x + 1


def start(node: Node, name: str) -> tuple[float, float]:
    """Answer with the seconds to the first result, and those from its end until all is free."""
    keys = credentials()  # the controller makes them ahead too
    began = time.perf_counter()
    lease = Lease(node, name, keys=keys)
    with lease.client() as client:
        client.submit(add_one, 1).result(timeout=30)
        first = time.perf_counter() - began
    ended = time.perf_counter()
    lease.end()
    return first, time.perf_counter() - ended


def idle_percent(node: Node, seconds: float) -> float:
    """Answer with the part of one core that a lease without a client uses."""

    def used() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in lease.processes())

    lease = Lease(node, "idle")
    time.sleep(2)
    before = used()
    time.sleep(seconds)
    percent = 100 * (used() - before) / seconds
    lease.end()
    return percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leases", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="five leases")
    options = parser.parse_args()
    count = 5 if options.quick else options.leases
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        began = time.perf_counter()
        node.start()
        warm = time.perf_counter() - began
        try:
            times = [start(node, f"lease{number}") for number in range(count)]
            idle = idle_percent(node, 10 if options.quick else 30)
        finally:
            node.stop()
    firsts, ends = sorted(first for first, _ in times), sorted(end for _, end in times)
    figures = {
        "leases": count,
        "warm_s": warm,
        "p50_s": statistics.median(firsts),
        "p95_s": firsts[int(0.95 * (count - 1))],
        "free_p50_s": statistics.median(ends),
        "idle_percent": idle,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
