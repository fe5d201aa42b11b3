"""The agent's side of NVML: it starts the reader's process, hears it, and sees that it does not fall silent.

Rule 1: the agent never calls NVML; a hanging call, a crash or a stall in it stays in the reader's process.
Rule 2: silence is a finding ("readings stopped 40 s ago"), not a dead GPU.
Rule 3: a reader that hangs is replaced gently: asked to end, then SIGTERM. To end an NVML client by SIGKILL
        can freeze its GPU, so that comes last, and only when the agent itself ends.

`python -m jupyter_gpupool.node.reader` is the process itself (`node.reading`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Device, NvmlEvent, Reading, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

logger = logging.getLogger(__name__)

#: Seconds that the first look at the devices may take; a real driver without persistence needs some.
START_LIMIT = 60.0
#: Seconds after which an ordered poll that was not answered counts as answered with nothing.
POLL_LIMIT = 5.0
#: Seconds between being asked to end, SIGTERM, and (only when the agent ends) SIGKILL.
GENTLE, FIRM = 5.0, 5.0
#: Seconds before a reader that died is started anew: at first, and at most.
RETRY, RETRY_MOST = 0.2, 30.0
#: Seconds between replacements at most; they grow towards it while one does not help.
REPLACE_MOST = 600.0
#: Replaced readers that still hang; with so many no other is started.
MOST_LEFT = 2
#: Bytes of one line of the reader's: a node of 16 GPUs with hundreds of processes fits.
LINE_LIMIT = 4 * 2**20


class ReaderError(Exception):
    """NVML cannot be used on this node; its text is one sentence that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is the matter with the readings, or, with `seconds` 0 and no `name`, that they are back."""

    #: UUID, or "": all devices of the node.
    device: str
    #: Since when there is no reading.
    seconds: float
    #: For people.
    sentence: str
    #: NVML's name of the driver's error, where it gave one.
    name: str = ""


def _ignore(_: Any) -> None:
    """Nobody listens."""


class Reader:
    """The reader of one node.

    Args:
        environ: The environment of its process.
        node: The node's name, for the devices' descriptions.
        interval_s: Seconds between polls.
        known: Devices that were here before; a reading tells what became of them.
        silence_s: Seconds without a reading that are a finding; 0: two intervals and ten seconds.
        on_devices: Called with all devices when one has come or has changed (not for those that `start`
            returns).
        on_readings: Called with a list of readings.
        on_event: Called with each NVML event.
        on_silence: Called with a `Finding`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        node: str = "",
        known: tuple[Device, ...] = (),
        interval_s: float = 15.0,
        silence_s: float = 0.0,
        on_devices: Callable[[tuple[Device, ...]], Any] = _ignore,
        on_readings: Callable[[list[Reading]], Any] = _ignore,
        on_event: Callable[[NvmlEvent], Any] = _ignore,
        on_silence: Callable[[Finding], Any] = _ignore,
    ) -> None:
        self.environ = dict(environ)
        self.node = node
        self.interval_s = interval_s
        self.silence_s = silence_s or 2 * interval_s + 10
        self.devices = known
        self._on_devices, self._on_readings = on_devices, on_readings
        self._on_event, self._on_silence = on_event, on_silence
        self._process: asyncio.subprocess.Process | None = None
        self._first: asyncio.Future[tuple[Device, ...]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: set[asyncio.subprocess.Process] = set()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[list[Reading]]] = {}
        #: device -> when its last reading came (monotonic seconds), and devices of which silence was told.
        self._heard: dict[str, float] = {}
        self._silent: dict[str, float] = {}
        self._delay = RETRY
        #: When the next replacement may be, and how long the one after that has to wait.
        self._may_replace, self._patience = 0.0, self.silence_s
        self._closing = False
        self._launching = asyncio.Lock()

    async def start(self) -> tuple[Device, ...]:
        """Start the reader's process and return the node's devices.

        Raises:
            ReaderError: There is no driver, or it does not answer.
        """
        self._first = asyncio.get_running_loop().create_future()
        await self._launch()
        try:
            self._keep(await asyncio.wait_for(asyncio.shield(self._first), START_LIMIT))
        except TimeoutError:
            await self.close()
            raise ReaderError(
                f"NVML did not answer within {START_LIMIT:.0f} s: look at `nvidia-smi` and the kernel log"
            ) from None
        except ReaderError:
            await self.close()
            raise
        self._spawn(self._watch())
        return self.devices

    def poll(self, only: Iterable[str] = ()) -> asyncio.Future[list[Reading]]:
        """Ask for readings now; the future has those that came within a second, and may be left alone.

        It is empty where the reader does not answer within five seconds.

        Args:
            only: UUIDs of the devices that are to be read; all of them unless said.
        """
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        future: asyncio.Future[list[Reading]] = loop.create_future()
        self._asked[number] = future
        self._order({"order": "poll", "id": number, "only": list(only)})
        timer = loop.call_later(POLL_LIMIT, self._answer, [number], [])
        future.add_done_callback(lambda _: self._forget(number, timer))
        return future

    def _forget(self, number: int, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._asked.pop(number, None)

    def _answer(self, numbers: list[int], readings: list[Reading]) -> None:
        for number in numbers:
            future = self._asked.get(number)
            if future is not None and not future.done():
                future.set_result(readings)

    def age(self, device: str) -> float:
        """Seconds since the last reading of a device; infinite where there was none."""
        return time.monotonic() - self._heard.get(device, float("-inf"))

    async def close(self) -> None:
        """End the reader, gently and then firmly; nothing of it is left afterwards."""
        self._closing = True
        async with self._launching:  # what is being started now is ended too
            pass
        processes = [*self._left, *([self._process] if self._process else [])]
        self._process = None
        await asyncio.gather(*(_end(each, kill=True) for each in processes))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in list(self._asked.values()):
            future.cancel()
        self._left.clear()

    # -------------------------------------------------------------------------------------------- its process

    async def _launch(self) -> None:
        async with self._launching:
            if not self._closing:
                await self._start_process()

    async def _start_process(self) -> None:
        command = [sys.executable, "-m", "jupyter_gpupool.node.reader"]
        command += ["--node", self.node, "--interval", str(self.interval_s)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=self.environ, limit=LINE_LIMIT, start_new_session=True
        )
        self._spawn(self._hear(self._process))
        if self.devices:
            self._order({"order": "know", "devices": [encode(each) for each in self.devices]})

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _order(self, order: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.is_closing():
            return  # it is being replaced; the next one polls at its start
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _hear(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                self._take(json.loads(line))
            except Exception:
                # One bad line, or an error of a listener's, must not make the node deaf.
                logger.exception("A message of the reader's was not understood: %.200r", line)
        status = await process.wait()
        self._left.discard(process)
        if process is self._process and not self._closing:
            self._spawn(self._again(process, status))

    async def _again(self, process: asyncio.subprocess.Process, status: int) -> None:
        """Start a reader that died anew, later each time until one has told readings."""
        if self._first is not None and not self._first.done():
            self._first.set_exception(
                ReaderError(f"the reader's process ended at its start ({_how(status)})")
            )
            return
        sentence = (
            f"the reader's process ended ({_how(status)}) and is started anew; XIDs in between are missed"
        )
        self._tell(Finding(device="", seconds=0.0, sentence=sentence, name="READER_ENDED"))
        while not self._closing and self._process is process:
            await asyncio.sleep(self._delay)
            self._delay = min(2 * self._delay, RETRY_MOST)
            with contextlib.suppress(OSError):
                await self._launch()

    async def _replace(self) -> None:
        """Start another reader and let the one that hangs end when it can."""
        old, now = self._process, time.monotonic()
        if old is None or self._closing or len(self._left) >= MOST_LEFT or now < self._may_replace:
            return
        self._may_replace = now + self._patience
        self._patience = min(2 * self._patience, max(REPLACE_MOST, self.silence_s))
        self._left.add(old)
        await self._launch()
        self._spawn(_end(old, kill=False))

    # ---------------------------------------------------------------------------------------- what it is told

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "devices":
            self._take_devices(tuple(decode(Device, each) for each in message["devices"]))
        elif kind == "readings":
            self._take_readings(message["answers"], [decode(Reading, each) for each in message["readings"]])
        elif kind == "event":
            self._on_event(decode(NvmlEvent, message["event"]))
        elif kind == "trouble":
            self._take_trouble(message)
        elif kind == "unavailable":
            self._take_unavailable(message)

    def _take_unavailable(self, message: dict[str, Any]) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(ReaderError(message["sentence"]))
        else:
            self._tell(Finding(device="", seconds=0.0, sentence=message["sentence"], name=message["name"]))

    def _take_devices(self, devices: tuple[Device, ...]) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(devices)
            return
        before = self.devices
        self._keep(devices)
        if self.devices != before:
            self._on_devices(self.devices)

    def _keep(self, devices: tuple[Device, ...]) -> None:
        """Remember devices; a reader sees only what works now, and what was known before stays known."""
        self.devices = tuple(({each.uuid: each for each in self.devices + devices}).values())
        for device in self.devices:
            self._heard.setdefault(device.uuid, time.monotonic())

    def _take_readings(self, answers: list[int], readings: list[Reading]) -> None:
        now = time.monotonic()
        self._delay = RETRY
        for reading in readings:
            self._heard[reading.device] = now
            if self._silent.pop(reading.device, None) is not None:
                self._tell(Finding(device=reading.device, seconds=0.0, sentence="readings are back"))
        self._on_readings(readings)
        self._answer(answers, readings)

    def _take_trouble(self, message: dict[str, Any]) -> None:
        device = message["device"]
        finding = Finding(
            device=device,
            seconds=self.age(device) if device in self._heard else 0.0,
            sentence=message["sentence"],
            name=message["name"],
        )
        self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        self._on_silence(finding)

    # ------------------------------------------------------------------------------------------- the watchdog

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.silence_s / 4))
            now = time.monotonic()
            late = {uuid: now - at for uuid, at in self._heard.items() if now - at >= self.silence_s}
            if not late:
                self._may_replace, self._patience = 0.0, self.silence_s
            new = [uuid for uuid in late if now - self._silent.get(uuid, float("-inf")) >= self.silence_s]
            if not new:
                continue
            self._silent |= dict.fromkeys(new, now)
            self._tell_silence(late, new)
            await self._replace()

    def _tell_silence(self, late: dict[str, float], new: list[str]) -> None:
        youngest = min(time.monotonic() - at for at in self._heard.values())
        if youngest >= self.silence_s / 2:
            # Nothing at all is heard; that the devices' last readings came one after the other means nothing.
            seconds = max(late.values())
            self._silent |= dict.fromkeys(self._heard, time.monotonic())
            self._tell(Finding(device="", seconds=seconds, sentence=f"readings stopped {seconds:.0f} s ago"))
            return
        for uuid in new:
            sentence = f"readings of this device stopped {late[uuid]:.0f} s ago"
            self._tell(Finding(device=uuid, seconds=late[uuid], sentence=sentence))


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


async def _end(process: asyncio.subprocess.Process, *, kill: bool) -> None:
    """Ask a reader to end, and then tell it to."""
    with contextlib.suppress(ConnectionError, RuntimeError):
        if process.stdin is not None:
            process.stdin.write(b'{"order": "quit"}\n')
            process.stdin.close()
    for limit, number in ((GENTLE, signal.SIGTERM), (FIRM, signal.SIGKILL if kill else None)):
        if await _ended(process, limit) or number is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
    await process.wait()


async def _ended(process: asyncio.subprocess.Process, limit: float) -> bool:
    try:
        await asyncio.wait_for(process.wait(), limit)
    except TimeoutError:
        return False
    return True


if __name__ == "__main__":
    from jupyter_gpupool.node.reading import main

    main()
