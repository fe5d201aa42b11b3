"""A node under test: real `Leases` on a simulated machine, and a judge that knows the machine's state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path

from distributed import Client
from distributed.security import Security

from jupyter_gpupool.core.model import GB, WHOLE, Slice, encode
from jupyter_gpupool.driver import simulated
from jupyter_gpupool.lease.settings import security
from jupyter_gpupool.node import guard
from jupyter_gpupool.node.leases import Leases

#: Seconds that anything may take before a test fails.
LONGEST = 90


def credentials() -> dict[str, str]:
    keys = Security.temporary()
    return {"ca": keys.tls_ca_file, "cert": keys.tls_client_cert, "key": keys.tls_client_key}


def judge(machine: simulated.Machine, device: str, *, busy: bool = False) -> dict[str, object]:
    """What a node's health rules would say of a device, as far as these tests need it."""
    lost = machine.describe(device)["lost"]
    sentence = f"GPU {device[:12]} has fallen off the bus." if lost else ""
    verdict = "gone" if lost else "fine"
    said = {"order": "verdict", "device": device, "verdict": verdict, "sentence": sentence}
    return {**said, "final": True, "busy": busy}


class Node:
    """`Leases` in a loop of its own thread, with what it reports in a queue."""

    def __init__(self, folder: Path, *, name: str = "node-1", judges: bool = True, **options: object) -> None:
        self.folder, self.name, self.judges = folder, name, judges
        if not (folder / "machines").exists():
            simulated.create(folder / "machines")
        self.machine = simulated.Machine(folder / "machines")
        self.devices = self.machine.devices(name)
        self.reports: list[dict] = []
        #: Devices that are at work, as the driver says.
        self.busy: set[str] = set()
        self._queue: queue.Queue[dict] = queue.Queue()
        self._untaken: list[dict] = []
        self._options = options
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self.leases: Leases

    # --------------------------------------------------------------------------------------------------- life

    def start(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self.run(self._start())

    async def _start(self):
        # Every test has its own forkserver's folder, so that one test's leftovers are not another's.
        self.leases = Leases(
            self.folder / self.name,
            self._report,
            device_pids=self._device_pids,
            simulated_environ=simulated.environment(self.folder / "machines", self.name),
            **{"grace_s": 1.0, **self._options},
        )
        adopted = await self.leases.adopt()
        await self.leases.start()
        await self.leases.warm()
        return adopted

    def stop(self, *, keep: bool = False) -> None:
        self.run(self.leases.close(keep=keep))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONGEST)

    def _report(self, report: dict) -> None:
        self.reports.append(report)
        self._queue.put(report)
        if report["report"] == "suspect" and self.judges:
            device = report["device"]
            verdict = judge(self.machine, device, busy=device in self.busy)
            self._loop.create_task(self.leases.obey(verdict))

    async def _device_pids(self, device: str) -> set[int]:
        from jupyter_gpupool.driver.simulated.processes import uses

        return {use.pid for use in uses(self.machine.state) if use.on == device}

    # ------------------------------------------------------------------------------------------------- orders

    def obey(self, name: str, **order: object) -> None:
        self.run(self.leases.obey({"order": name, **order}))

    def wait(self, kind: str, **fields: object) -> dict:
        """Wait for a report of this kind that nobody has waited for yet; one of a failure ends the test."""
        deadline = time.monotonic() + LONGEST
        while True:
            for report in list(self._untaken):
                if report["report"] == kind and fields.items() <= report.items():
                    self._untaken.remove(report)
                    return report
                mine = fields.items() <= report.items() and report["report"] == kind.replace(
                    "started", "failed"
                )
                assert not mine, (
                    report,
                    [each["text"][-2000:] for each in self.leases.logs(report["lease"])],
                )
            self._untaken.append(self._queue.get(timeout=max(0.01, deadline - time.monotonic())))

    def wait_failed(self, kind: str, **fields: object) -> dict:
        """Wait for the report of a failure, which is what the test is about."""
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._untaken.append(self._queue.get(timeout=0.05))
            for report in list(self._untaken):
                if report["report"] == kind and fields.items() <= report.items():
                    self._untaken.remove(report)
                    return report
        raise AssertionError(f"no {kind} of {fields}")

    def heard(self, kind: str) -> list[dict]:
        return [report for report in self.reports if report["report"] == kind]


class Lease:
    """A lease on a node under test, with a scheduler and as many workers as are added."""

    def __init__(
        self,
        node: Node,
        name: str,
        workers: int = 1,
        user: str = "me",
        keys: dict[str, str] | None = None,
        **options: object,
    ) -> None:
        self.node, self.id, self.user, self.options = node, name, user, options
        self.keys = keys or credentials()
        self.secret = "secret-of-" + name
        self.parts: list[Slice] = []
        node.obey(
            "start_scheduler",
            lease=name,
            user=self.user,
            credentials=self.keys,
            secret=self.secret,
            options=options,
        )
        self.address = ""
        for _ in range(workers):  # as the controller does: they wait for their scheduler
            self.add(wait=False)
        started = node.wait("scheduler_started", lease=name)
        self.address, self.dashboard = started["address"], started["dashboard"]
        for part in self.parts:
            self.start(part)
        for part in self.parts:
            node.wait("slice_started", slice=part.id)

    def add(self, device: int | None = None, *, wait: bool = True, **fields: object) -> Slice:
        """Start a worker on the next device."""
        index = len(self.parts)
        part = Slice(
            id=f"{self.id}/{index}",
            lease=self.id,
            device=self.node.devices[index if device is None else device],
            node=self.node.name,
            **{"milli": WHOLE, "vram": 80 * GB, "memory": 2 * GB, **fields},
        )
        self.parts.append(part)
        self.start(part)
        if wait:
            self.node.wait("slice_started", slice=part.id)
        return part

    def start(self, part: Slice) -> None:
        """Order a part's worker, for the scheduler as far as it is known."""
        self.node.obey(
            "start_worker",
            lease=self.id,
            slice=encode(part),
            user=self.user,
            address=self.address,
            credentials=self.keys,
            options=self.options,
        )

    def client(self) -> Client:
        return Client(self.address, security=security(self.keys), timeout=20)

    def drain(self, index: int, mode: str, deadline_in: int = 0) -> dict:
        part = self.parts[index].id
        self.node.obey("drain", lease=self.id, slice=part, mode=mode, deadline_in=deadline_in, why="a test")
        return self.node.wait("slice_drained", slice=part)

    def end(self) -> None:
        self.node.obey("end_lease", lease=self.id)
        for part in self.parts:
            self.node.obey("stop_slice", lease=self.id, slice=part.id)
        waiting = {self.id, *(part.id for part in self.parts)}
        deadline = time.monotonic() + LONGEST
        while waiting & set(self.node.leases._table.entries) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not waiting & set(self.node.leases._table.entries)

    def processes(self) -> set[int]:
        """The PIDs of everything of the lease."""
        marks = [self.node.leases._table.mark(key) for key in (self.id, *(part.id for part in self.parts))]
        return {pid for pid, _ in guard.find(marks, (), guard.look())}


@contextlib.contextmanager
def running(node: Node, name: str, **options: object):
    """A lease that is ended after the test, with all its processes."""
    lease = Lease(node, name, **options)
    try:
        yield lease
    finally:
        lease.end()
        assert not lease.processes()


def main() -> None:
    """Stand for an agent that is to be killed: obeys lines on stdin, reports on stdout."""
    node = Node(Path(sys.argv[1]))
    adopted = node.start()
    print(json.dumps({"report": "adopted", "slices": adopted[0], "leases": adopted[1]}), flush=True)

    def tell() -> None:
        while True:
            print(json.dumps(node._queue.get()), flush=True)

    threading.Thread(target=tell, daemon=True).start()
    for line in sys.stdin:
        node.run(node.leases.obey(json.loads(line)))
    with contextlib.suppress(Exception):
        node.stop(keep=True)
    os._exit(0)


if __name__ == "__main__":
    main()
