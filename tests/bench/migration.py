"""Work that moves off GPUs, many times over: what is lost, what runs twice, and how long it takes.

    python -m tests.bench.migration --count 100 --kind drain
    python -m tests.bench.migration --count 100 --kind gone

An embedded pool of 8 simulated GPUs is started in a folder of its own, and a lease of 3 computes on it
without a pause: Dask data frames with a P2P shuffle in each round, and single tasks. Meanwhile, at random
moments, one of its GPUs is drained for maintenance (`drain`) or falls off the bus (`gone`), `--count` times.
Every fifth time the GPU runs a task that is longer than the deadline of the drain. Each start of a task is
written to a file by the worker that runs it, so a start is counted though its worker is gone a moment later;
every answer is compared with plain pandas.

`--observe` switches migration off (the threshold `observe`): then the bench ends with tasks that are lost and
answers that are missing.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

#: GPUs of the lease that computes.
GPUS = 3
#: Seconds that work gets to leave a GPU, and where a task is in the way that is longer.
DEADLINE_S, SHORT_S, LONG_TASK_S = 30.0, 2.0, 6.0
#: Every so many-th time there is such a task.
LONG_EVERY = 5
#: Seconds that anything may take, and the move of the work off one GPU beyond its deadline.
WAIT_S, MOVE_S = 90.0, 45.0
#: Rows and parts of a data frame, single tasks in a round, and different data.
ROWS, PARTS, SINGLE, SEEDS = 2000, 8, 16, 4
#: Bytes of a result, and results, of the worker that holds 1 GB.
PIECE, PIECES = 64 * 2**20, 16


def main() -> None:
    """Run the bench and print its result as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="of migrations")
    parser.add_argument("--kind", choices=["drain", "gone"], default="drain")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="6 migrations")
    parser.add_argument("--observe", action="store_true", help="with migration switched off")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        os.environ["GPUPOOL_DIR"] = folder
        for name in ("GPUPOOL_URL", "GPUPOOL_TOKEN", "GPUPOOL_CA"):
            os.environ.pop(name, None)
        configure(Path(folder), observe=options.observe)
        from jupyter_gpupool import embedded

        try:
            result = measured(6 if options.quick else options.count, options.kind, options.seed)
        finally:
            embedded.stop()
    print(json.dumps(result))


def configure(folder: Path, *, observe: bool) -> None:
    """Let GPUs fail again and again: neither do they stay out, nor does the circuit breaker stop the pool."""
    controller = folder / "controller"
    controller.mkdir(mode=0o700)
    limits = {"strikes": 0, "breaker_least": 1000, "observe": int(observe)}
    (controller / "thresholds.json").write_text(json.dumps(limits))


def measured(count: int, kind: str, seed: int) -> dict[str, Any]:
    """Migrate `count` times under load, and for `drain` also a worker that holds 1 GB."""
    from jupyter_gpupool import Pool, embedded

    embedded.start(nodes={"node-1": 4, "node-2": 4})
    trace = Trace(Path(os.environ["GPUPOOL_DIR"]) / "starts")
    with Pool(start=False) as pool:
        lease = pool.request(gpus=GPUS, name="load", time_limit="12h", timeout=WAIT_S)
        client = lease.client()
        client.register_plugin(starts_to(str(trace.path)))
        load = Load(client)
        mover = Mover(pool, lease, client, trace, kind=kind, seed=seed)
        load.start()
        try:
            for nth in range(count):
                rounds = load.rounds
                mover.migrate(nth)
                # GPUs that fail faster than a shuffle can begin anew would show nothing but that.
                mover.until(lambda: load.rounds > rounds, "the load makes no progress")  # noqa: B023 - used at once
        except MigrationError as error:
            print(f"given up: {error}", file=sys.stderr)
        finally:
            load.end()
        mover.long_answers()
        forced = cut_off(pool)
        client.close()
        lease.release(wait=30)
        big = [drain_1gb(pool) for _ in range(max(2, count // 10))] if kind == "drain" else []
    return result_of(mover, load, trace, forced, big)


def result_of(mover: Mover, load: Load, trace: Trace, forced: set[str], big: list[float]) -> dict[str, Any]:
    """Put together what was seen."""
    trace_lines = trace.look()
    starts = collections.Counter(key for _, _, key in trace_lines)
    twice = [key for key, times in starts.items() if times > 1 and key not in forced]
    for key in twice if mover.kind == "drain" else ():
        ran = [f"{when - mover.began:.2f} s on {worker}" for when, worker, each in trace_lines if each == key]
        print(f"ran more than once: {key}: {', '.join(ran)}", file=sys.stderr)
    first = sorted(mover.first_task)
    return {
        "count": mover.done,
        "kind": mover.kind,
        "tasks": len(starts),
        "shuffles": load.shuffles,
        "tasks_lost": load.lost + mover.lost,
        "tasks_run_twice": len(twice),
        "tasks_forced": len(forced),
        "answers_wrong": load.wrong + mover.wrong,
        "killed_worker": load.killed + mover.killed,
        "first_task_p50_s": percentile(first, 0.5),
        "first_task_p95_s": percentile(first, 0.95),
        "drain_1gb_p95_s": percentile(sorted(big), 0.95),
        "rounds": load.rounds,
        "long_tasks": mover.long_tasks,
    }


def percentile(ordered: list[float], share: float) -> float | None:
    """Return a percentile of sorted figures; None of none."""
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


# ------------------------------------------------------------------------------------------ who ran what


def starts_to(path: str) -> Any:
    """Return a worker plugin that writes each start of a task to a file, with its time and worker."""
    import distributed

    class Starts(distributed.WorkerPlugin):
        name = "starts"

        def setup(self, worker: Any) -> None:
            import os

            self.worker = worker
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND)

        def teardown(self, worker: Any) -> None:
            del worker
            import os

            os.close(self.file)

        def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
            import json
            import os
            import time

            if finish in ("executing", "rescheduled") and start != finish:
                line = json.dumps([time.time(), str(self.worker.name), str(key), finish]) + "\n"
                os.write(self.file, line.encode())

    return Starts()


class Trace:
    """What the workers have written of the starts of tasks.

    Left out are those of a shuffle's outputs on a worker that has not got them: Dask starts each of them
    anywhere, and it does nothing but name the right worker.
    """

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path = path
        self._read = 0
        #: Time, worker and key of each start.
        self.starts: list[tuple[float, str, str]] = []

    def look(self) -> list[tuple[float, str, str]]:
        """Read on, and return all starts so far."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            when, worker, key, what = json.loads(line)
            if what == "executing":
                self.starts.append((when, worker, key))
            elif "p2pshuffle" in key:
                started = next(each for each in reversed(self.starts) if each[1:] == (worker, key))
                self.starts.remove(started)
        return self.starts


def cut_off(pool: Any) -> set[str]:
    """Return the keys that the deadlines cut off, as the owner was told."""
    keys: set[str] = set()
    after = 0
    while True:
        page = pool.call("GET", f"/v1/notices?after={after}")
        if not page["notices"]:
            return keys
        for each in page["notices"]:
            data = each["data"] if isinstance(each["data"], dict) else json.loads(each["data"] or "{}")
            keys.update(data.get("forced", ()))
        after = page["next"]


# ---------------------------------------------------------------------------------------------- the load


def frame(seed: int, part: int) -> Any:
    """One part of a data frame, always the same."""
    import numpy as np
    import pandas as pd

    draws = np.random.default_rng([seed, part])
    return pd.DataFrame({"key": draws.integers(0, 97, ROWS), "value": draws.integers(0, 1000, ROWS)})


def median_by_key(part: Any) -> Any:
    """Each key's count and median; exact only where all its rows are together."""
    return part.groupby("key").value.agg(["size", "median"])


def source(part: int, seed: int, round_: int) -> Any:
    """A part as a task; `round_` makes its key another one."""
    del round_
    time.sleep(0.03)
    return frame(seed, part)


def triangle(number: int, round_: int) -> int:
    """A single task."""
    del round_
    time.sleep(0.03)
    return number * (number + 1) // 2


class Load(threading.Thread):
    """Computes round after round until it is ended, and counts what went wrong."""

    def __init__(self, client: Any) -> None:
        super().__init__(daemon=True)
        import pandas as pd

        self.client = client
        self.rounds = self.shuffles = self.lost = self.wrong = self.killed = 0
        self.ending = threading.Event()
        whole = [pd.concat([frame(seed, part) for part in range(PARTS)]) for seed in range(SEEDS)]
        self.expected = [median_by_key(each).sort_index() for each in whole]

    def run(self) -> None:
        while not self.ending.is_set():
            self.one_round()
            self.rounds += 1

    def end(self) -> None:
        """Let the present round end."""
        self.ending.set()
        self.join(WAIT_S)
        if self.is_alive():
            print("the load hangs", file=sys.stderr)
            self.lost += 1

    def one_round(self) -> None:
        table, singles = self.submit(self.rounds % SEEDS)
        answer = self.answer(table)
        if answer is not None:
            self.shuffles += 1
            equal = answer.sort_index().equals(self.expected[self.rounds % SEEDS])
            self.wrong += not equal
        for number, future in enumerate(singles):
            value = self.answer(future)
            self.wrong += value is not None and value != number * (number + 1) // 2

    def submit(self, seed: int) -> tuple[Any, list[Any]]:
        """Submit a round: a shuffle with what follows from it, and single tasks."""
        import dask
        import dask.dataframe as dd
        import pandas as pd

        meta = pd.DataFrame({"key": [0], "value": [0]}).iloc[:0]
        with dask.config.set({"dataframe.shuffle.method": "p2p", "dataframe.convert-string": False}):
            data = dd.from_map(
                source, range(PARTS), seed=seed, round_=self.rounds, meta=meta, enforce_metadata=False
            )
            whole = data.shuffle("key", npartitions=PARTS)
            table = self.client.compute(whole.map_partitions(median_by_key, meta=median_by_key(meta)))
        singles = self.client.map(triangle, range(SINGLE), round_=self.rounds, pure=True)
        return table, singles

    def answer(self, future: Any) -> Any:
        """Return a result; None, counted, where there is none."""
        from distributed import KilledWorker

        try:
            return future.result(timeout=WAIT_S)
        except KilledWorker as error:
            self.killed += 1
            print(f"killed: {error}", file=sys.stderr)
        except Exception as error:  # noqa: BLE001 - counted and shown
            print(f"lost: {future.key}: {type(error).__name__}: {error}"[:500], file=sys.stderr)
        self.lost += 1
        return None


# -------------------------------------------------------------------------------------------- the faults


class MigrationError(Exception):
    """Work has not moved in time."""


def long_task(seconds: float, nth: int) -> int:
    """Be longer than the deadline."""
    time.sleep(seconds)
    return nth


class Mover:
    """Takes one GPU of the lease after the other out, and back."""

    def __init__(self, pool: Any, lease: Any, client: Any, trace: Trace, *, kind: str, seed: int) -> None:
        self.pool, self.lease, self.client, self.trace, self.kind = pool, lease, client, trace, kind
        self.random = random.Random(seed)
        self.first_task: list[float] = []
        self.long: list[tuple[int, Any]] = []
        self.done = self.lost = self.wrong = self.killed = self.long_tasks = 0
        self.began = time.time()

    def migrate(self, nth: int) -> None:
        """Take out the GPU of one slice, wait until the work has moved, and give the GPU back."""
        time.sleep(self.random.uniform(0.0, 1.0))
        old = self.random.choice([each for each in self.lease.refresh().slices if each.state == "running"])
        known = {each.id for each in self.lease.slices}
        late = nth % LONG_EVERY == LONG_EVERY - 1
        if late:
            self.occupy(old, nth)
        began = time.time()
        self.take_out(old.device, SHORT_S if late else DEADLINE_S)
        new = self.replacement(old, known)
        self.first_task.append(self.first_start(new) - began)
        self.give_back(old.device)
        self.done += 1
        said = f"{nth}: at {began - self.began:.2f} s {old.id} ({old.device_name}) left for {new}"
        print(f"{said}, which worked after {self.first_task[-1]:.2f} s", file=sys.stderr)

    def occupy(self, slice_: Any, nth: int) -> None:
        """Let a task begin there that is longer than the deadline.

        The results of those before are fetched first: kept for the whole bench they would be lost with each
        GPU, and the load would do little but compute them again.
        """
        self.long_answers()
        key = f"long-{nth}"
        future = self.client.submit(
            long_task, LONG_TASK_S, nth, key=key, workers=[slice_.id], allow_other_workers=True, priority=10
        )
        self.long.append((nth, future))
        self.long_tasks += 1
        self.until(lambda: any(each[2] == key for each in self.trace.look()), f"{key} has not begun")

    def take_out(self, device: str, deadline: float) -> None:
        if self.kind == "gone":
            self.pool.drill(device, xid=79)
        else:
            said = {"action": "drain", "why": "driver upgrade", "deadline": deadline}
            self.pool.call("POST", f"/v1/health/{device}", said)

    def give_back(self, device: str) -> None:
        if self.kind == "gone":
            self.pool.undrill(device)
        else:
            self.pool.call("POST", f"/v1/health/{device}", {"action": "undrain"})
        self.until(lambda: self.pool.status().gpus_free == 8 - GPUS, f"{device} is not free again")

    def replacement(self, old: Any, known: set[str]) -> str:
        """Wait until the old slice is gone and another one runs; return its id."""

        def moved() -> str:
            slices = {each.id: each.state for each in self.lease.refresh().slices}
            new = [name for name, state in slices.items() if name not in known and state == "running"]
            return new[0] if new and old.id not in slices else ""

        return self.until(moved, f"{old.device_name} has no replacement, or is not left")

    def first_start(self, name: str) -> float:
        """Wait until a slice's worker has begun a task; return when."""

        def begun() -> float:
            return min((when for when, worker, _ in self.trace.look() if worker == name), default=0.0)

        return self.until(begun, f"{name} runs no task")

    def until(self, so: Any, otherwise: str) -> Any:
        """Wait for something and return it."""
        end = time.monotonic() + MOVE_S
        while not (found := so()):
            if time.monotonic() > end:
                raise MigrationError(otherwise)
            time.sleep(0.1)
        return found

    def long_answers(self) -> None:
        """Look at the answers of the long tasks, which were cut off and ran again."""
        from distributed import KilledWorker

        while self.long:
            nth, future = self.long.pop()
            try:
                self.wrong += future.result(timeout=WAIT_S) != nth
            except KilledWorker:
                self.killed += 1
                self.lost += 1
            except Exception as error:  # noqa: BLE001 - counted and shown
                print(f"lost: {future.key}: {error}"[:500], file=sys.stderr)
                self.lost += 1


def drain_1gb(pool: Any) -> float:
    """Return the seconds until a worker that held 1 GB has left with its data moved."""
    import numpy as np
    from distributed import wait

    with pool.request(gpus=2, name="1gb", time_limit="1h", timeout=WAIT_S) as lease:
        client = lease.client()
        old = lease.slices[0]
        pieces = client.map(
            lambda nth: np.full(PIECE // 8, nth), range(PIECES), workers=[old.id], allow_other_workers=True
        )
        wait(pieces, timeout=WAIT_S)
        workers = client.scheduler_info()["workers"]
        address = next((each for each, info in workers.items() if info["name"] == old.id), "")
        assert address, [each["text"][-3000:] for each in lease.logs()]  # nobody has asked it to leave yet
        began = time.monotonic()
        pool.call("POST", f"/v1/health/{old.device}", {"action": "drain", "why": "driver upgrade"})
        while address in client.scheduler_info()["workers"] and time.monotonic() - began < WAIT_S:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        assert [int(each[0]) for each in client.gather(client.map(lambda each: each[:1], pieces))] == [
            *range(PIECES)
        ]
        client.close()
        pool.call("POST", f"/v1/health/{old.device}", {"action": "undrain"})
    lease.release(wait=30)
    print(f"1 GB: {seconds:.2f} s", file=sys.stderr)
    return seconds


if __name__ == "__main__":
    main()
