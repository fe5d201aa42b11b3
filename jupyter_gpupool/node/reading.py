"""The reader's process: it calls NVML so that nobody else has to, and writes what it hears as JSON lines.

Rule 1: a call may hang. So each device is read by a thread of its own, events are awaited by another, and
        orders are taken by a third: what hangs holds up nothing else.
Rule 2: a device whose call hangs gets no reading; whoever waits for one notices. It is not said to be dead.
Rule 3: it ends when its standard input does, so that none is left behind when the agent dies.

Lines on standard output: {"kind": "devices" | "readings" | "event" | "trouble" | "unavailable", …}. Orders on
standard input: {"order": "poll", "id": n, "only": [UUID, …]} (none: all), {"order": "know", "devices": […]}
and {"order": "quit"}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Device, Reading, decode, encode
from jupyter_gpupool.driver import simulated
from jupyter_gpupool.driver.nvml import Driver, DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Seconds that a poll waits for its slowest device before it tells what it has; the others' readings follow.
POLL_DEADLINE = 1.0
#: Seconds within which devices are read one after the other, and that each gets before the next one begins.
#: The driver has one lock for all of them, so that at the same time they would only wait for each other.
IN_TURN, A_TURN = 0.3, 0.1
#: Seconds of one wait for NVML events: it bounds how long an end takes and how soon a new device is listened
#: to.
EVENT_WAIT = 1.0
#: Seconds between polls that events give cause to; they can come in hundreds.
EVENT_POLL_GAP = 0.5
#: Seconds before a failed wait for events is tried anew.
EVENT_RETRY = 2.0
#: Seconds that calls in flight get to end before the process does: ending an NVML client in a call can hurt
#: its GPU.
LAST_CALLS = 3.0
#: Error of a device that the driver does not list any more.
GONE = "GPU_NOT_FOUND"
#: The look at which devices there are, among the calls in flight.
PRESENCE = "presence"


def now_ms() -> int:
    """The reader's clock, in milliseconds."""
    return time.time_ns() // 1_000_000


class Output:
    """JSON lines on standard output, whole also when threads write at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, kind: str, **message: Any) -> None:
        """Write one line."""
        line = json.dumps({"kind": kind, **message}, separators=(",", ":")) + "\n"
        with self._lock:
            data = line.encode()
            while data:
                data = data[os.write(1, data) :]


class Poller:
    """Reads devices on request, each in its own thread, one after the other as long as none hangs."""

    def __init__(self, driver: Driver, node: str, output: Output) -> None:
        self.driver = driver
        self.node = node
        self.output = output
        self.devices: dict[str, Device] = {}
        self._round = ThreadPoolExecutor(1, "round")
        self._reads: dict[str, ThreadPoolExecutor] = {}
        self._flying: dict[str, Future[Any]] = {}
        #: What the next round answers: a number, or None for nobody's, and the devices (none named: all).
        self._asked: list[tuple[int | None, tuple[str, ...]]] = []
        self._lock = threading.Lock()
        self._running = False

    def look(self) -> None:
        """Find out which devices there are, and tell when one is new or has changed.

        Raises:
            DriverError: The driver does not answer.
        """
        found = {device.uuid: device for device in self.driver.devices(self.node)}
        if any(self.devices.get(uuid) != device for uuid, device in found.items()) or not self.devices:
            self.devices.update(found)
            self.output.write("devices", devices=[encode(each) for each in self.devices.values()])

    def know(self, devices: list[Device]) -> None:
        """Learn of devices that were here before this process: lost ones get a reading that says so."""
        for device in devices:
            self.driver.know(device.uuid, device.pci)
            self.devices.setdefault(device.uuid, device)

    def start(self, number: int | None = None, only: Sequence[str] = ()) -> None:
        """Begin a poll unless one is under way; `number` is told with the readings that answer it.

        With `only` these devices are read and nothing else: who looks at two of eight pays for two.
        """
        with self._lock:
            if number is not None or not self._running:
                self._asked.append((number, tuple(only)))
            if self._running:
                return
            self._running = True
        self._round.submit(self._poll)

    def _poll(self) -> None:
        try:
            while True:
                with self._lock:
                    asked, self._asked = self._asked, []
                self._one_round(asked)
                with self._lock:
                    if (
                        not self._asked
                    ):  # asked for while this one was under way: it may have looked too early
                        self._running = False
                        return
        except BaseException:
            with self._lock:
                self._running = False
            raise

    def _one_round(self, asked: list[tuple[int | None, tuple[str, ...]]]) -> None:
        named = {uuid for _, only in asked for uuid in only}
        whole = not all(only for _, only in asked)
        turns_end = time.monotonic() + IN_TURN
        for uuid in [each for each in self.devices if whole or each in named]:
            self._begin(uuid, self._read, turns_end)
        if whole:
            self._begin(PRESENCE, self._absent, turns_end)
        flying = {name: future for name, future in self._flying.items() if whole or name in named}
        wait(flying.values(), POLL_DEADLINE)
        found = {uuid: self._take(uuid, future) for uuid, future in flying.items()}
        for uuid in found.pop(PRESENCE, None) or ():
            reading = found.get(uuid)
            if not isinstance(reading, Reading) or not reading.error:
                found[uuid] = Reading(device=uuid, now=now_ms(), error=GONE)
        readings = [encode(each) for each in found.values() if each is not None]
        answers = [number for number, _ in asked if number is not None]
        self.output.write("readings", answers=answers, readings=readings)

    def _absent(self, _: str) -> list[str]:
        """Devices that were there and that the driver does not list any more; new ones are told."""
        try:
            self.look()
            present = self.driver.present()
        except DriverError as error:
            self._trouble(error)
            return []
        return [uuid for uuid in list(self.devices) if uuid not in present]

    def _begin(self, name: str, call: Callable[[str], Any], turns_end: float) -> None:
        """Begin a call, and let it end before the next one begins; one that hangs is not waited for long."""
        if name in self._flying:
            return  # it hangs; one call at a time is enough to find out when it is back
        threads = self._reads.setdefault(name, ThreadPoolExecutor(1, name))
        self._flying[name] = threads.submit(call, name)
        wait((self._flying[name],), max(0.0, min(A_TURN, turns_end - time.monotonic())))

    def _take(self, name: str, future: Future[Any]) -> Any:
        if not future.done():
            future.add_done_callback(lambda done: self._late(name, done))
            return None
        self._flying.pop(name, None)
        return future.result()

    def _late(self, name: str, future: Future[Any]) -> None:
        """Tell the reading of a call that hung and is back."""
        if self._flying.get(name) is not future:
            return
        del self._flying[name]
        if isinstance(future.result(), Reading):
            self.output.write("readings", answers=[], readings=[encode(future.result())])

    def _read(self, uuid: str) -> Reading | None:
        try:
            return self.driver.read(uuid, now_ms())
        except DriverError as error:
            self._trouble(error, uuid)
            return None

    def _trouble(self, error: DriverError, uuid: str = "") -> None:
        self.output.write("trouble", device=uuid, name=error.name, sentence=str(error))

    def idle(self) -> bool:
        """No call is in flight."""
        return not self._running and not self._flying


def listen(driver: Driver, output: Output, stop: threading.Event, poller: Poller) -> None:
    """Tell NVML events as they come, and poll at once, for they are best understood beside readings."""
    troubled, polled = False, 0.0
    while not stop.is_set():
        try:
            events = driver.wait_events(EVENT_WAIT)
            troubled = False
        except DriverError as error:
            if not troubled:
                output.write("trouble", device="", name=error.name, sentence=str(error))
            troubled = True
            stop.wait(EVENT_RETRY)
            continue
        for event in events:
            output.write("event", event=encode(event))
        if events and time.monotonic() - polled >= EVENT_POLL_GAP:
            polled = time.monotonic()
            poller.start()


def orders(interval_s: float, poller: Poller) -> None:
    """Take orders, and poll at each interval, until standard input ends."""
    pending = b""
    due = time.monotonic() + interval_s
    while True:
        ready, _, _ = select.select([0], [], [], max(0.0, due - time.monotonic()))
        if not ready:
            poller.start()
            due = max(due + interval_s, time.monotonic())
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        if not all(_obey(line, poller) for line in lines):
            return


def _obey(line: bytes, poller: Poller) -> bool:
    """Carry out one order; False at the end."""
    try:
        order = json.loads(line)
    except ValueError:
        return True
    if order.get("order") == "poll":
        poller.start(order.get("id"), order.get("only", ()))
    elif order.get("order") == "know":
        poller.know([decode(Device, each) for each in order["devices"]])
    return bool(order.get("order") != "quit")


def main() -> None:
    """Run the reader's process until its standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.node.reader")
    parser.add_argument("--node", default="")
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between polls")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    simulated.install()
    output, driver, stop = Output(), Driver(), threading.Event()
    poller = Poller(driver, arguments.node, output)
    try:
        driver.open()
        poller.look()
    except DriverError as error:
        output.write("unavailable", name=error.name, sentence=str(error))
        sys.exit(1)
    poller.start()
    threading.Thread(target=listen, args=(driver, output, stop, poller), daemon=True, name="events").start()
    with contextlib.suppress(BrokenPipeError):
        orders(arguments.interval, poller)
    stop.set()
    _end(poller)


def _end(poller: Poller) -> None:
    until = time.monotonic() + LAST_CALLS
    while not poller.idle() and time.monotonic() < until:
        time.sleep(0.02)
    # Threads may still be in a call that hangs: do not wait for them.
    os._exit(0)
