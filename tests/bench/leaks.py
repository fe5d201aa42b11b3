"""What is left after many leases: requested, computed on, released, `--cycles` times, on one pool.

Processes, file descriptors, threads, shared memory, temporary files, the controller's memory after the last
cycle, beside those after the first few: what the pool keeps for good has been made by then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

#: Cycles before the first look, and seconds for the last processes to leave before each look.
FIRST, CALM = 10, 3.0


def processes(folder: Path) -> list[psutil.Process]:
    """All processes of the pool: its folder is in their command line or in their environment."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            said = [*each.cmdline(), *each.environ().values()]
            if each.pid != os.getpid() and any(str(folder) in word for word in said):
                found.append(each)
    return found


def controller(found: list[psutil.Process]) -> psutil.Process:
    """The controller among the pool's processes."""
    return next(each for each in found if "jupyter_gpupool.controller" in each.cmdline())


def look(folder: Path, scratch: Path) -> dict[str, int]:
    """Count what there is now."""
    found = processes(folder)
    counted = {"processes": len(found), "fds": 0, "threads": 0}
    for each in found:
        with suppress(psutil.Error):
            counted["fds"] += each.num_fds()
            counted["threads"] += each.num_threads()
    counted["shm"] = sum(1 for _ in Path("/dev/shm").iterdir())
    counted["files"] = sum(len(files) for _, _, files in os.walk(scratch))
    counted["rss"] = controller(found).memory_info().rss
    return counted


def settled(folder: Path, scratch: Path) -> dict[str, int]:
    """Count when two counts in a row are alike."""
    time.sleep(CALM)
    before = look(folder, scratch)
    for _ in range(20):
        time.sleep(1)
        now = look(folder, scratch)
        if {**now, "rss": 0} == {**before, "rss": 0}:
            return now
        before = now
    return before


def cycle(pool: Any) -> None:
    """One lease from its request to its end."""
    lease = pool.request(gpus=1, timeout=120)
    assert lease.client().submit(sum, [20, 22]).result(timeout=120) == 42
    lease.release(wait=60)


def measure(folder: Path, scratch: Path, cycles: int) -> dict[str, Any]:
    """Run the cycles and return what has grown."""
    from jupyter_gpupool import Pool, embedded

    embedded.start(nodes={"node-1": 2})
    try:
        with Pool(start=False) as pool:
            for _ in range(FIRST):
                cycle(pool)
            before = settled(folder, scratch)
            for number in range(cycles):
                cycle(pool)
                if number % 100 == 99:
                    print(f"{number + 1} cycles: {look(folder, scratch)}", file=sys.stderr, flush=True)
            after = settled(folder, scratch)
    finally:
        embedded.stop()
    grown = {name: after[name] - before[name] for name in ("processes", "fds", "threads", "shm", "files")}
    growth = 100 * (after["rss"] - before["rss"]) / before["rss"]
    return {"cycles": cycles, "rss_growth_percent": round(growth, 2), **grown, "before": before}


def main() -> None:
    """Run the bench; the last line is its result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.leaks")
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="20 cycles")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        folder, scratch = Path(name) / "pool", Path(name) / "tmp"
        scratch.mkdir()
        os.environ.update(GPUPOOL_DIR=str(folder), TMPDIR=str(scratch))
        tempfile.tempdir = None
        print(json.dumps(measure(folder, scratch, 20 if options.quick else options.cycles)))


if __name__ == "__main__":
    main()
