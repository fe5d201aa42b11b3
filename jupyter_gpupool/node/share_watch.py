"""What shares really take of their devices, from the driver's lists of processes: judged, and nothing done.

Rule 1: a slice has what all its processes have together: its worker, its shell, and all that these have
        started, in whatever container.
Rule 2: one step a look. A slice above its share is warned, then paused, then its largest process is ended;
        one that is back within its share begins anew. So a moment of it ends nobody.
Rule 3: whole GPUs and MIG instances are not judged: they have no neighbour, or the hardware keeps them apart.
Rule 4: a process of a lease on a device of which that lease has nothing is astray when two looks in a row
        find it there.

Not its business: telling, pausing and ending (`share_guard`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import MIB, WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jupyter_gpupool.core.model import Reading, Slice

#: Bytes above a share that are nobody's fault: the driver rounds, and loads code when it is first called.
SLACK = 64 * MIB


class Step(IntEnum):
    """How far a slice above its share has been answered."""

    WITHIN = 0
    WARNED = 1
    PAUSED = 2
    ENDED = 3


@dataclass(frozen=True, slots=True)
class Over:
    """A slice at another step than before."""

    slice: Slice
    step: Step
    #: Bytes that its processes have.
    used: int
    #: Of these the one that has most.
    pid: int


@dataclass(frozen=True, slots=True)
class Stray:
    """A process of a lease on a device of which the lease has nothing."""

    pid: int
    lease: str
    device: str


@dataclass(slots=True)
class _Known:
    step: Step = Step.WITHIN
    #: The reading at which that was found, in milliseconds of the reader's clock.
    at: int = 0


@dataclass(slots=True)
class ShareWatch:
    """Remembers how far each slice is, from look to look.

    Args:
        owner: Says whose a process is: a slice's id, a lease's id (its scheduler), or "".
        gap_ms: Milliseconds between two steps at least; an NVML event brings readings in between.
    """

    owner: Callable[[int], str]
    gap_ms: int
    #: Slices of which a process has been seen: only for these does the watch hold.
    seen: set[str] = field(default_factory=set)
    #: Strays that one look has found.
    doubted: set[Stray] = field(default_factory=set)
    #: What the last look found of slices that have just one process there, in bytes.
    alone: dict[str, int] = field(default_factory=dict)
    _known: dict[str, _Known] = field(default_factory=dict)

    def look(self, readings: Iterable[Reading], slices: Iterable[Slice]) -> Iterator[Over | Stray]:
        """Judge readings; give what is to be done.

        Args:
            readings: Of all devices of the node, or of some.
            slices: All that are here.
        """
        here = {each.id: each for each in slices}
        self.seen &= here.keys()
        self.alone = {}
        self._known = {ident: known for ident, known in self._known.items() if ident in here}
        for reading in readings:
            found = self._by_slice(reading)
            self.alone |= {whose: each[0][0] for whose, each in found.items() if len(each) == 1}
            yield from self._strays(reading.device, found, here)
            yield from self._above(reading, found, here)

    def _by_slice(self, reading: Reading) -> dict[str, list[tuple[int, int]]]:
        """The processes of leases on a device, as (bytes, PID), by whose they are."""
        found: dict[str, list[tuple[int, int]]] = {}
        for pid, size in reading.processes:
            if whose := self.owner(pid):
                found.setdefault(whose, []).append((size, pid))
        return found

    def _strays(
        self, device: str, found: dict[str, list[tuple[int, int]]], here: dict[str, Slice]
    ) -> Iterator[Stray]:
        own = {each.lease for each in here.values() if each.device == device}
        astray = {
            Stray(pid, lease, device)
            for whose, processes in found.items()
            if (lease := _lease_of(whose, here)) not in own
            for _, pid in processes
        }
        before = {each for each in self.doubted if each.device == device}
        self.doubted = (self.doubted - before) | (astray - before)
        yield from sorted(astray & before, key=lambda each: each.pid)

    def _above(
        self, reading: Reading, found: dict[str, list[tuple[int, int]]], here: dict[str, Slice]
    ) -> Iterator[Over]:
        for part in here.values():
            if part.device != reading.device or not is_share(part):
                continue
            processes = found.get(part.id, [])
            self.seen |= {part.id} if processes else set()
            used = sum(size for size, _ in processes)
            step = self._step(part, used, reading.now)
            if step is not None:
                yield Over(part, step, used, max(processes, default=(0, 0))[1])

    def _step(self, part: Slice, used: int, now: int) -> Step | None:
        """The slice's next step, if it takes one."""
        known = self._known.setdefault(part.id, _Known())
        if used <= part.vram + SLACK:
            back = known.step is Step.PAUSED
            known.step = Step.WITHIN
            return Step.WITHIN if back else None
        if known.step and now - known.at < self.gap_ms:
            return None
        step = Step(known.step + 1)
        # With its largest process gone the slice begins anew.
        known.step, known.at = Step(step % Step.ENDED), now
        return step


def is_share(part: Slice) -> bool:
    """Whether a slice is a share of a device that others may have shares of."""
    return part.instance is None and 0 < part.milli < WHOLE and bool(part.vram)


def _lease_of(whose: str, here: dict[str, Slice]) -> str:
    return here[whose].lease if whose in here else whose.rpartition("/")[0] or whose
