"""What a huge graph in one lease costs the others: the controller's answers, and another lease's tasks.

The controller is asked and the other lease is given a small task, in turns, at a steady rate: first alone,
then while a third program builds and runs a graph of `--tasks` tasks in a lease of its own. All of it shares
the machine's cores, the client that builds the graph too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Seconds of the measurement without the neighbour, and between two questions.
ALONE, PAUSE = 20.0, 0.05
#: What the neighbour runs: tasks that do nothing, added up by a tree, so that the scheduler has all the work.
GRAPH = """
import sys
import dask
from jupyter_gpupool import Pool

def nothing(*_):
    return 0

count = int(sys.argv[1])
with Pool(start=False) as pool, pool.request(gpus=1, timeout=120) as lease:
    client = lease.client()
    print("ready", flush=True)
    sys.stdin.readline()
    graph = {f"leaf-{n}": (nothing, n) for n in range(count)}
    graph["sum"] = (len, [f"leaf-{n}" for n in range(count)])
    client.get(graph, "sum")
"""


class Clocked:
    """Times of what is asked, in seconds."""

    def __init__(self, pool: Any, lease: Any) -> None:
        self.pool, self.client = pool, lease.client()
        self.answers: list[float] = []
        self.tasks: list[float] = []

    def ask(self) -> None:
        """Ask both once."""
        begun = time.perf_counter()
        self.pool.status()
        asked = time.perf_counter()
        assert self.client.submit(sum, [20, 22], pure=False).result(timeout=120) == 42
        self.answers.append(asked - begun)
        self.tasks.append(time.perf_counter() - asked)
        time.sleep(PAUSE)


def p99(times: list[float]) -> float:
    """The time that 99 of 100 do not exceed."""
    return sorted(times)[int(0.99 * (len(times) - 1))]


def measure(tasks: int) -> dict[str, Any]:
    """Time both without the neighbour and with it."""
    from jupyter_gpupool import Pool, embedded

    embedded.start(nodes={"node-1": 2})
    try:
        with Pool(start=False) as pool, pool.request(gpus=1, timeout=120) as lease:
            neighbour = subprocess.Popen(
                [sys.executable, "-c", GRAPH, str(tasks)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            neighbour.stdout.readline()
            alone, beside = Clocked(pool, lease), Clocked(pool, lease)
            end = time.monotonic() + ALONE
            while time.monotonic() < end:
                alone.ask()
            neighbour.stdin.write(b"go\n")
            neighbour.stdin.flush()
            begun = time.monotonic()
            while neighbour.poll() is None:
                beside.ask()
            took = time.monotonic() - begun
    finally:
        embedded.stop()
    return {
        "answer_p99_ratio": round(p99(beside.answers) / p99(alone.answers), 3),
        "other_lease_p99_ratio": round(p99(beside.tasks) / p99(alone.tasks), 3),
        "tasks": tasks,
        "failed": neighbour.returncode,
        "seconds": round(took, 1),
        "asked": [len(alone.answers), len(beside.answers)],
        "answer_p99_ms": [round(1000 * p99(each.answers), 1) for each in (alone, beside)],
        "other_lease_p99_ms": [round(1000 * p99(each.tasks), 1) for each in (alone, beside)],
    }


def main() -> None:
    """Run the bench; the last line is its result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.neighbour")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="50,000 tasks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        os.environ["GPUPOOL_DIR"] = str(Path(name) / "pool")
        print(json.dumps(measure(50_000 if options.quick else options.tasks)))


if __name__ == "__main__":
    main()
