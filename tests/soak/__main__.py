"""`python -m tests.soak --minutes 10 --seed 1`: a pool whose GPUs fail; the last line is the result as JSON.

Three leases compute without a pause on an embedded pool of 8 simulated GPUs, while the kinds of `faults` come
at random times, two GPUs out at most. After each the pool's journal is replayed into a pool that must be
valid. The seed decides which faults come and where. Exit status 1 where an answer was wrong or missing, work
stood still, the pool was not valid, or anything was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jupyter_gpupool import Pool, embedded
from jupyter_gpupool.controller.backup import backup
from jupyter_gpupool.controller.store import Store
from jupyter_gpupool.core.pool import Pool as Machine
from jupyter_gpupool.driver.simulated.processes import uses
from tests.soak.faults import KINDS, Kind
from tests.soak.load import Load

NODES = {"node-1": 4, "node-2": 4}
#: The leases: name -> GPUs.
LEASES = {"two": 2, "one": 1, "also-one": 1}
#: GPUs that are out at the same time at most; a drained node counts for all of its own.
OUT = 2
#: Part of the faults that meet a GPU with work on it.
USED = 0.7
#: Seconds between two faults, and for which one lasts, at most.
PAUSE, LASTS = 2.0, 6.0
#: Seconds within which all leases must have all their GPUs, and all GPUs be free at the end.
WHOLE, FREE = 90.0, 60.0
#: GPUs of one pool fail again and again here: they do not stay out for that, and it is not one common cause.
LIMITS = {"strikes": 0, "breaker_least": 1000, "repeats": 10_000, "repeats_programs": 10_000}


class Soak:
    """One run.

    Args:
        folder: The pool's own; `$GPUPOOL_DIR` names it.
        seed: What decides.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.happened: Counter[str] = Counter()
        #: What is broken now, and when it is to be made good.
        self.broken: list[tuple[float, Kind, str]] = []
        self.findings: list[str] = []
        self.checks = 0

    def run(self, seconds: float) -> dict[str, Any]:
        """Start the pool, let its GPUs fail for so long, and return what was found."""
        controller = self.folder / "controller"
        controller.mkdir(mode=0o700, parents=True)
        (controller / "thresholds.json").write_text(json.dumps(LIMITS))
        embedded.start(nodes=NODES)
        try:
            with Pool(start=False) as self.pool:
                self.machine = embedded.machine()
                leases = [
                    self.pool.request(gpus=gpus, name=name, time_limit="12h", timeout=WHOLE)
                    for name, gpus in LEASES.items()
                ]
                self.loads = [Load(each) for each in leases]
                self._work(seconds)
                self._give_back()
        finally:
            embedded.stop()
        return self._result()

    # ------------------------------------------------------------------------------------------- the faults

    def _work(self, seconds: float) -> None:
        for load in self.loads:
            load.start()
        try:
            self._attack(time.monotonic() + seconds)
        finally:
            for load in self.loads:
                load.end()
                self.findings += load.wrong

    def _attack(self, end: float) -> None:
        while time.monotonic() < end:
            self._repair(time.monotonic())
            self._break()
            self._check()
            time.sleep(self.random.uniform(0.2, PAUSE))
        self._repair(float("inf"))
        self._until(self._is_whole, WHOLE, "a lease has not all its GPUs, though all are whole")
        before = [load.rounds for load in self.loads]
        goes_on = lambda: all(load.rounds > then for load, then in zip(self.loads, before, strict=True))  # noqa: E731
        self._until(goes_on, WHOLE, "work stands still, though all GPUs are whole")

    def _break(self) -> None:
        """Let one more thing go wrong, if there is room for the work to go to."""
        kind, device = self.random.choice(KINDS), self._somewhere()
        lasts = self.random.uniform(1.0, LASTS)
        out = {each for _, what, each in self.broken if what.out}
        node = kind.name == "its node is drained"
        if device in {each for *_, each in self.broken} or (kind.out and len(out) >= (1 if node else OUT)):
            return
        if any(what.name == "its node is drained" for _, what, _ in self.broken) and kind.out:
            return
        print(f"{time.strftime('%X')} {self.pool_name(device)}: {kind.name}", file=sys.stderr)
        kind.do(self, device)
        self.happened[kind.name] += 1
        if kind.undo is not None:
            self.broken.append((time.monotonic() + lasts, kind, device))

    def _somewhere(self) -> str:
        """Choose a GPU, more often than not one that computes."""
        used = sorted(one.device for each in self.pool.leases() for one in each.slices)
        return self.random.choice(used if used and self.random.random() < USED else self.machine.devices())

    def _repair(self, until: float) -> None:
        """Make good what has lasted long enough."""
        due = [each for each in self.broken if each[0] <= until]
        self.broken = [each for each in self.broken if each[0] > until]
        for _, kind, device in due:
            if kind.undo is not None:
                kind.undo(self, device)
        if until == float("inf"):
            self.machine.heal()

    def node_of(self, device: str) -> str:
        """The node that a device is in."""
        return str(self.machine.describe(device)["node"])

    def pool_name(self, device: str) -> str:
        """What people call a device."""
        return f"{self.node_of(device)}/gpu{self.machine.describe(device)['index']}"

    # ------------------------------------------------------------------------------------------- what holds

    def _check(self) -> None:
        """Replay a copy of the journal: the pool that it tells of is valid."""
        copy = self.folder / "copy.sqlite"
        backup(self.folder / "controller" / "journal.sqlite", copy)
        with contextlib.closing(Store(copy)) as store:
            state, _ = store.restore()
            pool = Machine() if state is None else Machine.restore(state)
            for _, event in store.replay():
                pool.handle(event)
        for path in self.folder.glob("copy.sqlite*"):
            path.unlink()
        self.checks += 1
        try:
            pool.validate()
        except AssertionError as error:
            self.findings.append(f"the pool is not valid: {error}")

    def _is_whole(self) -> bool:
        running = {
            each.name: [one.state for one in each.slices].count("running") for each in self.pool.leases()
        }
        return running == LEASES

    def _until(self, so: Any, seconds: float, otherwise: str) -> None:
        end = time.monotonic() + seconds
        while not so():
            if time.monotonic() > end:
                self.findings.append(otherwise)
                return
            time.sleep(0.2)

    def _give_back(self) -> None:
        """Give everything back: no process is on a GPU, and every GPU is free."""
        for lease in self.pool.leases():
            lease.release(wait=FREE)
        free = sum(NODES.values())
        self._until(lambda: self.pool.status().gpus_free == free, FREE, "a GPU is not free again")
        self._until(lambda: not uses(self.machine.state), FREE, "a process is still on a GPU")
        marks = [each for each in self.folder.glob("node-*/leases/leases.json") if _entries(each)]
        if marks:
            self.findings.append(f"lease processes are left on {[each.parts[-3] for each in marks]}")

    def _result(self) -> dict[str, Any]:
        return {
            "faults": sum(self.happened.values()),
            "faults_by_kind": dict(self.happened),
            "rounds": sum(load.rounds for load in self.loads),
            "answers": sum(load.answers for load in self.loads),
            "checks": self.checks,
            "findings": self.findings,
        }


def _entries(table: Path) -> list[Any]:
    found = json.loads(table.read_text())["entries"]
    return list(found)


def main() -> None:
    """Run it and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        os.environ["GPUPOOL_DIR"] = str(Path(folder) / "pool")
        for name in ("GPUPOOL_URL", "GPUPOOL_TOKEN", "GPUPOOL_CA"):
            os.environ.pop(name, None)
        result = Soak(Path(folder) / "pool", options.seed).run(60 * options.minutes)
    print(json.dumps({"minutes": options.minutes, "seed": options.seed, **result}))
    sys.exit(bool(result["findings"]))


if __name__ == "__main__":
    main()
