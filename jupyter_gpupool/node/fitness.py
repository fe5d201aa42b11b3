"""The fitness of a node's devices: readings and NVML events go in, changed verdicts and findings come out.

The rules are `core.health`; here are the clock, the files that keep their memory and their thresholds over a
restart of the agent, and the tasks' suspicions, for each of which the driver is asked at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.health import CONDEMNED, Judge, Outcome, Thresholds
from jupyter_gpupool.core.model import NvmlEvent, Verdict
from jupyter_gpupool.node.guard import boot_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from pathlib import Path

    from jupyter_gpupool.core.model import Device, Reading, VerdictChanged

logger = logging.getLogger(__name__)

#: Seconds to wait for a reading that was asked for.
POLL = 3.0
#: Seconds that an NVML event may come later than the task's error that it explains.
LATER = 0.3
#: Seconds between two looks at the time, and between two saves.
TICK, SAVE = 5.0, 60.0


def now_ms() -> int:
    """Return the time by the reader's clock, in milliseconds."""
    return time.time_ns() // 1_000_000


class Fitness:
    """Judges the devices of one node.

    Args:
        path: Where what is remembered is kept.
        node: The node's name.
        report: Called with each changed verdict and each finding, as a report.
        poll: Asks the driver for readings now.
        users_on: Says whose work is on a device, or on the MIG instance of it that an NVML event names.
        interval_s: Seconds between two readings.
    """

    def __init__(
        self,
        path: Path,
        node: str,
        report: Callable[[dict[str, Any]], None],
        poll: Callable[[], Awaitable[Any]],
        users_on: Callable[[str, int], Iterable[str]],
        *,
        interval_s: float = 15.0,
    ) -> None:
        self._path = path
        self._report = report
        self._poll = poll
        self._users_on = users_on
        self._interval = interval_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._judge, self._remembers = _restore(path, node)
        self._judge.watches = False  # the reader's watchdog does, and replaces the reader
        self._thresholds = path.with_name("thresholds.json")
        self._limit(_read_thresholds(self._thresholds))

    async def keep(self) -> None:
        """Let time pass, and write down what is remembered, until cancelled."""
        saved = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            self._follow(self._judge.tick(now_ms()))
            if time.monotonic() - saved >= SAVE:
                saved = time.monotonic()
                self.save()

    # ------------------------------------------------------------------------------------------------ inputs

    def on_devices(self, devices: tuple[Device, ...]) -> None:
        """Take what the driver lists."""
        self._follow(self._judge.devices(devices, now_ms(), boot=boot_id()))

    def on_readings(self, readings: list[Reading]) -> None:
        """Take what a poll says, and what follows from it for other devices."""
        outcome = Outcome()
        for reading in readings:
            outcome += self._judge.reading(reading)
        self._follow(outcome + self._judge.tick(now_ms()))

    def on_event(self, event: NvmlEvent) -> None:
        """Take what the driver announces."""
        self._follow(self._judge.event(event, self._users_on(event.device, event.gpu_instance)))

    def drill(self, device: str, xid: int) -> None:
        """Take a fault that a person has made up; XID 0 takes it back."""
        if xid:
            self.on_event(NvmlEvent(device=device, now=now_ms(), kind="xid", xid=xid))
        else:
            self.forgive(device)

    def forgive(self, device: str) -> None:
        """A person says that a device is fit."""
        self._follow(self._judge.forgive(device, now_ms()))

    def blame(self, user: str) -> None:
        """A person's program fails on other nodes too: no device here is to suffer for it."""
        self._follow(self._judge.blame(user, now_ms()))

    def set_limits(self, data: dict[str, Any]) -> None:
        """Take the pool's thresholds, and keep them for a start without the controller.

        Args:
            data: As `core.thresholds.Thresholds.parse` reads them.

        Raises:
            ValueError: They are wrong; nothing has changed.
        """
        self._limit(Thresholds.parse(data))
        _write(self._thresholds, json.dumps(data))
        self._follow(self._judge.tick(now_ms()))

    @property
    def hung_s(self) -> float:
        """Seconds after which a worker that neither answers nor does anything hangs; 0: never."""
        return self._judge.limits.hung / 1000

    def _limit(self, limits: Thresholds) -> None:
        two_polls = int(2000 * self._interval) + 10_000
        self._judge.limits = replace(limits, silence=max(limits.silence, two_polls))

    async def suspect(self, device: str) -> dict[str, Any]:
        """Judge a device on which a task has failed: ask the driver, and return the verdict as an order."""
        await self.look()
        if self._judge.opinion(device, now_ms()).verdict not in CONDEMNED:
            await asyncio.sleep(LATER)
        now = now_ms()
        more = {"hardware": self._judge.failed_just_now(device, now), "busy": self._judge.is_busy(device)}
        return {**order_of(self._judge.opinion(device, now)), "final": True, **more}

    async def look(self) -> None:
        """Ask the driver now, and wait for its answer, but not for ever."""
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(self._poll()), POLL)

    def opinions(self) -> list[dict[str, Any]]:
        """Return the verdicts as they stand, as reports; no past restarts.

        An agent that remembers nothing has nothing to say for a device that looks fine today.
        """
        now = now_ms()
        known = [self._judge.opinion(device, now) for device in self._judge.histories]
        told = known if self._remembers else self._judge.opinions(now)
        return [report_of(each) for each in told if each.verdict is not Verdict.RESTART_WORKER]

    # ----------------------------------------------------------------------------------------- what follows

    def _follow(self, outcome: Outcome) -> None:
        for change in outcome.changes:
            logger.info("%s is %s: %s", change.device, change.verdict, change.sentence)
            self._report(report_of(change))
        for finding in outcome.findings:
            logger.warning("%s", finding.sentence)
            about, subject = finding.about.value, finding.subject
            self._report(
                {"report": "finding", "about": about, "subject": subject, "sentence": finding.sentence}
            )
        if outcome.changes or outcome.findings:
            self.save()
        if outcome.poll:
            task = asyncio.ensure_future(self._poll())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def save(self) -> None:
        """Write down what is remembered; without it, histories begin anew."""
        _write(self._path, json.dumps(self._judge.snapshot()))


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    try:
        part.touch(mode=0o600)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)


def _read_thresholds(path: Path) -> Thresholds:
    try:
        return Thresholds.parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("%s is not used (%s): the defaults are.", path, error)
    return Thresholds()


def report_of(change: VerdictChanged) -> dict[str, Any]:
    """Return a verdict as a report to the controller."""
    return {
        "report": "verdict",
        "device": change.device,
        "verdict": change.verdict.value,
        "sentence": change.sentence,
        "evidence": change.evidence,
        "probation": change.probation,
    }


def order_of(change: VerdictChanged) -> dict[str, Any]:
    """Return a verdict as the order that tells a lease's processes."""
    return {
        "order": "verdict",
        "device": change.device,
        "verdict": change.verdict.value,
        "sentence": change.sentence,
    }


def _restore(path: Path, node: str) -> tuple[Judge, bool]:
    """Read back what was remembered; return whether there was anything."""
    try:
        return Judge.restore(json.loads(path.read_text(encoding="utf-8"))), True
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is not used (%s): the devices' histories begin anew.", path, error)
    return Judge(node, boot=boot_id()), False
