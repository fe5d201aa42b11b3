"""Keeps shares within what they are: looks while there are any, warns, pauses, ends, and says so.

Rule 1: while a share is here the driver is asked every `LOOK` seconds about its device; otherwise, and of the
        other devices, ordinary readings do.
Rule 2: only the slice that takes too much is touched. Its largest process is asked to end before it is
        killed, since killing a process that talks to the driver can freeze the GPU; the Nanny starts a worker
        anew.
Rule 3: each step is reported with its numbers; the pool tells the owner.

Not its business: whether a slice is above its share (`share_watch`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Slice, decode
from jupyter_gpupool.node import guard
from jupyter_gpupool.node.share_watch import Over, ShareWatch, Step, Stray, is_share

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from jupyter_gpupool.core.model import Reading
    from jupyter_gpupool.node.leases import Leases

logger = logging.getLogger(__name__)

#: Seconds between two looks while there are shares.
LOOK = 2.0
#: Part of that time that must lie between two steps.
_APART = 0.75


class ShareGuard:
    """The guard of one node.

    Args:
        leases: What the agent has of leases.
        poll: Asks the reader for readings of devices, which come by `on_readings`.
        report: Called with each report.
        look_s: Seconds between two looks.
    """

    def __init__(
        self,
        leases: Leases,
        poll: Callable[[Iterable[str]], Awaitable[list[Reading]]],
        report: Callable[[dict[str, Any]], None],
        look_s: float = LOOK,
    ) -> None:
        self._leases, self._poll, self._report = leases, poll, report
        self._look_s = look_s
        self._watch = ShareWatch(leases.owner, gap_ms=int(look_s * _APART * 1000))
        self._ending: dict[int, asyncio.Task[None]] = {}

    async def keep(self) -> None:
        """Look for as long as the agent runs."""
        while True:
            await asyncio.sleep(self._look_s)
            watched = {each.device for each in self._slices() if is_share(each)}
            watched |= {each.device for each in self._watch.doubted}
            if watched:
                await self._poll(sorted(watched))

    def on_readings(self, readings: Iterable[Reading]) -> None:
        """Judge readings, and answer what takes too much."""
        slices, seen = self._slices(), set(self._watch.seen)
        for found in self._watch.look(readings, slices):
            if isinstance(found, Over):
                self._answer(found)
            else:
                self._end_stray(found)
        for ident in sorted(self._watch.seen - seen):
            self._leases.guarded(ident)
        for part in slices:
            if part.id in self._watch.alone and part.instance is None:
                self._leases.shares.see(part, self._watch.alone[part.id])

    def _slices(self) -> list[Slice]:
        return [decode(Slice, each) for each in self._leases.parts()]

    def _answer(self, over: Over) -> None:
        part, step = over.slice, over.step
        logger.warning("%s has %d of %d bytes: %s", part.id, over.used, part.vram, step.name.lower())
        self._leases.hold(part.id, hold=step is not Step.WITHIN and step is not Step.WARNED)
        if step is Step.ENDED:
            self._end(over.pid)
        said = {"slice": part.id, "lease": part.lease, "step": step.name.lower(), "used": over.used}
        self._report({"report": "over_share", **said, "share": part.vram, "pid": over.pid})

    def _end_stray(self, stray: Stray) -> None:
        logger.warning("process %d of lease %s is on %s", stray.pid, stray.lease, stray.device)
        if self._end(stray.pid):
            said = {"lease": stray.lease, "device": stray.device, "pid": stray.pid}
            self._report({"report": "stray", **said})

    def _end(self, pid: int) -> bool:
        """End a process in the background; False where that is under way."""
        if pid in self._ending:
            return False
        self._ending[pid] = asyncio.create_task(self._ended(pid, guard.end_one(pid, self._leases.grace_s)))
        return True

    async def _ended(self, pid: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            self._ending.pop(pid, None)
