"""The state of all devices as columns, so that a whole pool is searched in one stroke.

Rule 1: a row is a node, a column a device of it in the order of the driver's indexes. Rows come and go; what
        decides must not depend on their order (`order` ranks nodes by name).
Rule 2: readers keep what they have worked out and ask which rows have changed since (`changes_since`).

Not its business: what may be written here (`cluster`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core.model import WHOLE

if TYPE_CHECKING:
    from jupyter_gpupool.core.mig import Geometry

_GRIDS = (
    "free",
    "shares",
    "barred",
    "vram",
    "model",
    "mask",
    "fixed",
    "geometry",
    "island",
    "linked",
    "doubtful",
)
_LINES = ("cpus", "memory", "cpus_part", "memory_part", "devices")
#: Of the log of changes as much is kept.
_LOG = 16384
#: Of distinct states of rows as many are remembered.
_STATES = 16384


class Columns:
    """Arrays of integers with a row for each node, and a log of the rows that have changed."""

    #: All of what follows: by kind, row and column; and by kind and row.
    grids: np.ndarray
    lines: np.ndarray
    #: Thousandths of each device that are not taken.
    free: np.ndarray
    #: How many shares of each device are taken.
    shares: np.ndarray
    #: Bits of `cluster.BARS`; a device with any takes no new work.
    barred: np.ndarray
    #: Bytes of memory; 0: no device there.
    vram: np.ndarray
    #: Number of the model's name, from 1; 0: no device there.
    model: np.ndarray
    #: Memory slices that are taken, as bits; and those in which no instance can be made: one is offered there
    #: as it is, or they are not ours to cut.
    mask: np.ndarray
    fixed: np.ndarray
    #: Number of the MIG geometry, from 1; 0: not in MIG mode; -1: in MIG mode, of no known kind.
    geometry: np.ndarray
    #: Number of its island within the node, and whether NVLink connects it to another device.
    island: np.ndarray
    linked: np.ndarray
    #: Its verdict asks for a closer watch: used only where nothing else fits.
    doubtful: np.ndarray
    #: Of each node: free host CPUs (thousandths of a core) and host memory (bytes).
    cpus: np.ndarray
    memory: np.ndarray
    #: The host part that goes with a whole device of the node, unless asked otherwise.
    cpus_part: np.ndarray
    memory_part: np.ndarray
    #: How many devices the node has.
    devices: np.ndarray

    def __init__(self, width: int = 8) -> None:
        """Start empty, with room for `width` devices a node."""
        #: Row -> name of the node, "" where the row is unused; and back.
        self.names: list[str] = []
        self.row_of: dict[str, int] = {}
        #: Counts up whenever a node comes or goes.
        self.epoch = 0
        #: What readers have worked out; emptied whenever a node comes or goes.
        self.memo: dict[object, object] = {}
        self._models: list[str] = []
        self._geometries: list[Geometry | None] = [None]
        self._unused: list[int] = []
        self._order: np.ndarray | None = None
        self._log: list[int] = []
        self._log_base = 0
        #: How many devices are wholly free, bars or not; how many are doubtful; whether there are islands.
        self.wholes = self.doubts = 0
        self.islands = False
        #: The same moment, the same state of all nodes; after a try it is again as it was before.
        self.moment = (0, 0)
        #: The same pair, the same bars: how often a node came or went, and how often any bar was changed.
        self.bars = (0, 0)
        self._states_mark = (-1, 0)
        self._state_numbers: dict[bytes, int] = {}
        self._next_state = 0
        #: Row -> number of its state.
        self._states: dict[int, int] = {}
        self._grow(0, width)

    @property
    def width(self) -> int:
        """How many devices a row has room for."""
        return int(self.free.shape[1])

    @property
    def models(self) -> tuple[str, ...]:
        """Names of models; the number of a model is its place here, from 1."""
        return tuple(self._models)

    def model_number(self, name: str) -> int:
        """Number of a model's name, 0 where no device has it or had it."""
        return self._models.index(name) + 1 if name in self._models else 0

    @property
    def geometries(self) -> tuple[Geometry | None, ...]:
        """MIG geometries by their number."""
        return tuple(self._geometries)

    def order(self) -> np.ndarray:
        """Place of each row's node among all by name: the last tie-break everywhere."""
        if self._order is None:
            ranked = sorted(range(len(self.names)), key=lambda row: (self.names[row] == "", self.names[row]))
            self._order = np.full(len(self.free), len(self.free), dtype=np.int64)
            self._order[ranked] = np.arange(len(ranked))
        return self._order

    def mark(self) -> tuple[int, int]:
        """The present moment: another one after any change."""
        return self.epoch, self._log_base + len(self._log)

    def changes_since(self, mark: tuple[int, int]) -> tuple[tuple[int, int], list[int] | None]:
        """Rows changed since `mark`, each once, and the mark for next time; None: too long ago, take all.

        Begin with the mark `(-1, 0)`.
        """
        now = self.mark()
        if mark[0] != self.epoch or mark[1] < self._log_base:
            return now, None
        return now, list(dict.fromkeys(self._log[mark[1] - self._log_base :]))

    def states(self) -> dict[int, int]:
        """By row a number for its state: the same number, the same state, at any time."""
        mark, changed = self.changes_since(self._states_mark)
        self._states_mark = mark
        if len(self._state_numbers) > _STATES:
            self._state_numbers.clear()
        for row in self.row_of.values() if changed is None else changed:
            key = self.grids[:, row].tobytes() + self.lines[:, row].tobytes()
            number = self._state_numbers.get(key)
            if number is None:
                self._next_state += 1
                number = self._state_numbers[key] = self._next_state
            self._states[row] = number
        return self._states

    def _changed(self, row: int) -> None:
        if len(self._log) >= _LOG:
            del self._log[: _LOG // 2]
            self._log_base += _LOG // 2
        self._log.append(row)
        self.moment = self.mark()

    def _grow(self, rows: int, width: int) -> None:
        """Make the arrays (anew), with what was in them."""
        grids: np.ndarray = np.zeros((len(_GRIDS), rows, width), dtype=np.int64)
        lines: np.ndarray = np.zeros((len(_LINES), rows), dtype=np.int64)
        if self.names:
            grids[:, : self.grids.shape[1], : self.grids.shape[2]] = self.grids
            lines[:, : self.lines.shape[1]] = self.lines
        self.grids, self.lines = grids, lines
        for number, name in enumerate(_GRIDS):
            setattr(self, name, grids[number])
        for number, name in enumerate(_LINES):
            setattr(self, name, lines[number])

    def _new_row(self, name: str, devices: int) -> int:
        if devices > self.width:
            self._grow(len(self.free), devices)
        if self._unused:
            row = self._unused.pop()
        else:
            row = len(self.names)
            self.names.append("")
            if row == len(self.free):
                self._grow(max(8, 2 * row), self.width)
        self.names[row] = name
        self.row_of[name] = row
        return row

    def _clear_row(self, name: str) -> None:
        row = self.row_of.pop(name)
        for each in (*_GRIDS, *_LINES):
            getattr(self, each)[row] = 0
        self.names[row] = ""
        self._unused.append(row)

    def _rows_changed(self) -> None:
        self.epoch += 1
        self.wholes = int(np.count_nonzero(self.free >= WHOLE))
        self.doubts = int(np.count_nonzero(self.doubtful))
        self.islands = bool(self.island.any())
        self.bars = (self.epoch, 0)
        self.moment = self.mark()
        self._order = None
        self.memo.clear()

    def _number(self, model: str) -> int:
        if model not in self._models:
            self._models.append(model)
        return self._models.index(model) + 1

    def _geometry_number(self, geometry: Geometry | None) -> int:
        if geometry not in self._geometries:
            self._geometries.append(geometry)
        return self._geometries.index(geometry)
