"""What a huge graph in one lease costs the others: the controller's answers, and another lease's tasks.

The controller is asked and the other lease is given a small task, in turns, at a steady rate: first alone,
then while a third program has a graph of `--tasks` tasks in a lease of its own. The graph is that of an array
of so many chunks and their sum: few bytes are sent, and its scheduler makes the tasks, sets them in order
and runs them. Dask takes about 2 ms of processor time a task, so `--at-most` ends the measurement before the
graph is done; how many tasks the scheduler had, and had done by then, is said. All of it shares the
machine's cores.
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
#: What the neighbour runs: tasks that do next to nothing, so that the scheduler has all the work.
GRAPH = """
import json, select, sys
import dask.array
from jupyter_gpupool import Pool

def tasks(dask_scheduler):
    states = [group.states for group in dask_scheduler.task_groups.values()]
    known = sum(sum(each.values()) for each in states)
    ahead = "waiting", "queued", "no-worker", "processing"
    waits = sum(each[name] for each in states for name in ahead)
    return {"known": known, "done": known - waits}

count = int(sys.argv[1])
with Pool(start=False) as pool, pool.request(gpus=1, timeout=120) as lease:
    client = lease.client()
    print("ready", flush=True)
    sys.stdin.readline()
    future = client.compute(dask.array.ones(count, chunks=1, dtype=int).sum(split_every=1000))
    while not future.done() and not select.select([sys.stdin], [], [], 0.5)[0]:
        pass
    found = client.run_on_scheduler(tasks)
    if future.done():
        assert future.result() == count
        found["done"] = found["known"]
    print(json.dumps(found), flush=True)
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


def measure(tasks: int, at_most: float) -> dict[str, Any]:
    """Time both without the neighbour and with it, for so many seconds at most."""
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
            while neighbour.poll() is None and time.monotonic() - begun < at_most:
                beside.ask()
            took = time.monotonic() - begun
            said, _ = neighbour.communicate(b"enough\n", timeout=300)
    finally:
        embedded.stop()
    return {
        "answer_p99_ratio": round(p99(beside.answers) / p99(alone.answers), 3),
        "other_lease_p99_ratio": round(p99(beside.tasks) / p99(alone.tasks), 3),
        "tasks": tasks,
        **json.loads(said.splitlines()[-1]),
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
    parser.add_argument("--at-most", type=float, default=3600.0, help="seconds beside the graph")
    parser.add_argument("--quick", action="store_true", help="100,000 tasks, for 25 s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        os.environ["GPUPOOL_DIR"] = str(Path(name) / "pool")
        many, at_most = (100_000, 25.0) if options.quick else (options.tasks, options.at_most)
        print(json.dumps(measure(many, at_most)))


if __name__ == "__main__":
    main()
