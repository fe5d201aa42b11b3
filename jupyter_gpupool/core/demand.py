"""What is usually asked for, learned from the requests themselves.

Rule 1: recent requests count; before there are any, a prior does.
Rule 2: what placement uses changes rarely and at fixed counts of requests, so that what was worked out from
        it stays good for long, and the same requests always lead to the same places.

Not its business: what follows for placement (`fragmentation`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import MIB, WHOLE

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Request

#: After so many requests all counts are halved: the older half of what is known counts half as much.
WINDOW = 2048
#: What is learned is put to use after 8, 16, 32… requests, and then after every so many.
EVERY = 1024


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What of a request matters to others who look for room."""

    #: Slices that are wanted together.
    count: int
    milli: int
    vram: int
    #: Of one slice: host CPUs in thousandths of a core, and MiB of host memory (0: its part of the node).
    cpus: int
    memory: int
    models: tuple[str, ...] = ()
    min_vram: int = 0
    #: MIG profile by name, or "?" for one by need.
    mig: str = ""


#: Before anything is known: single GPUs mostly, the usual gangs, halves and quarters.
PRIOR: tuple[tuple[Shape, int], ...] = (
    (Shape(1, WHOLE, 0, 0, 0), 8),
    (Shape(2, WHOLE, 0, 0, 0), 2),
    (Shape(4, WHOLE, 0, 0, 0), 2),
    (Shape(8, WHOLE, 0, 0, 0), 2),
    (Shape(1, WHOLE // 2, 0, 0, 0), 3),
    (Shape(1, WHOLE // 4, 0, 0, 0), 3),
)


def shape_of(request: Request) -> Shape:
    """Say what of a request matters to others."""
    whole = request.milli >= WHOLE
    return Shape(
        count=request.count if whole else 1,
        milli=request.milli,
        vram=0 if whole else request.vram,
        cpus=request.cpus,
        memory=-(-request.memory // MIB),
        models=tuple(sorted(filter(None, request.model.split("|")))),
        min_vram=request.min_vram,
        mig=request.mig or ("?" if request.isolated else ""),
    )


class Demand:
    """Counts of recent requests by shape, and the copy of them that placement goes by."""

    def __init__(self) -> None:
        """Begin with the prior."""
        self._counts: dict[Shape, int] = {}
        self._seen = 0
        self._next = 8
        #: What placement goes by: shapes and how often they were asked for, sorted.
        self.usual: tuple[tuple[Shape, int], ...] = tuple(sorted(PRIOR))
        #: Counts up whenever `usual` changes.
        self.generation = 0

    def observe(self, request: Request) -> None:
        """Take note of a request; call it once for each that is submitted."""
        shape = shape_of(request)
        self._counts[shape] = self._counts.get(shape, 0) + 1
        self._seen += 1
        if self._seen >= self._next:
            self._next = self._seen + min(self._seen, EVERY)
            self._renew()

    def _renew(self) -> None:
        if sum(self._counts.values()) > WINDOW:
            self._counts = {shape: count // 2 for shape, count in self._counts.items() if count > 1}
        counts = dict(PRIOR)
        for shape, count in self._counts.items():
            counts[shape] = counts.get(shape, 0) + count
        usual = tuple(sorted(counts.items()))
        if usual != self.usual:
            self.usual = usual
            self.generation += 1

    def snapshot(self) -> dict[str, Any]:
        """Everything that is known, as JSON-able data."""
        return {
            "seen": self._seen,
            "next": self._next,
            "counts": [_row(*each) for each in sorted(self._counts.items())],
            "usual": [_row(*each) for each in self.usual],
        }

    @classmethod
    def restore(cls, data: dict[str, Any]) -> Demand:
        """Read back what `snapshot` wrote.

        Raises:
            KeyError: Something is missing.
        """
        demand = cls()
        demand._seen, demand._next = data["seen"], data["next"]
        demand._counts = dict(_read(each) for each in data["counts"])
        demand.usual = tuple(_read(each) for each in data["usual"])
        return demand


def _row(shape: Shape, count: int) -> list[Any]:
    return [
        shape.count,
        shape.milli,
        shape.vram,
        shape.cpus,
        shape.memory,
        list(shape.models),
        shape.min_vram,
        shape.mig,
        count,
    ]


def _read(row: list[Any]) -> tuple[Shape, int]:
    count, milli, vram, cpus, memory, models, min_vram, mig, times = row
    return Shape(count, milli, vram, cpus, memory, tuple(models), min_vram, mig), times
