"""What was learned of the demand, in the form that fits this cluster: looked up, kept, counted up.

Rule 1: what follows from the demand holds until the demand changes; what follows from a node, until it does.
Rule 2: while little is known, each model counts as sought after a little for its own sake: who could go
        anywhere takes the common ones first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import fragmentation, mig
from jupyter_gpupool.core.model import MIB, WHOLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.core.cluster import Cluster

#: Whole devices asked for of each model before anything is known, all models together.
MODELS_PRIOR = 20
#: Of so many states it is remembered what follows from them.
MOST_STATES = 16384


class Learned:
    """The demand as this cluster sees it."""

    def __init__(self, cluster: Cluster) -> None:
        """Look at the demand as it is now."""
        self.generation = cluster.demand.generation
        self._usual: dict[int, fragmentation.Usual] = {}
        self._demand = cluster.demand.usual
        self._widest = max(1, int(cluster.devices.max()))
        #: Devices of different memory differ in what the usual shares take of them.
        self._by_size = any(shape.vram for shape, _ in self._demand)
        #: Sets of models (by number) that requests would take, and thousandths asked for; {}: just one model.
        self.models = _models(cluster)

    def _of_size(self, vram: int) -> fragmentation.Usual:
        found = self._usual.get(vram)
        if found is None:
            found = self._usual[vram] = fragmentation.usual(self._demand, vram, self._widest)
        return found

    def _sizes(self, cluster: Cluster, rows: np.ndarray) -> np.ndarray:
        sizes: np.ndarray = cluster.vram[rows].max(axis=1)
        return sizes if self._by_size else np.minimum(sizes, 0)

    def waste(
        self, cluster: Cluster, rows: np.ndarray, free: np.ndarray, cpus: np.ndarray, memory: np.ndarray
    ) -> np.ndarray:
        """The waste of these rows, had they so much free; nodes with devices of one size go together."""
        sizes = self._sizes(cluster, rows)
        found = np.zeros(len(rows), dtype=np.int64)
        for size in np.unique(sizes):
            at = sizes == size
            usual = self._of_size(int(size))
            found[at] = fragmentation.waste(usual, free[at], cpus[at], memory[at] // MIB)
        return found

    def worths(self, cluster: Cluster, rows: np.ndarray) -> np.ndarray:
        """For each row the worth of gaps by their hundredths."""
        sizes = self._sizes(cluster, rows)
        tables = np.zeros((len(rows), fragmentation.STEPS + 1), dtype=np.int64)
        for size in np.unique(sizes):
            tables[sizes == size] = self._of_size(int(size)).worth
        return tables

    def profiles(self, geometry: mig.Geometry) -> np.ndarray:
        """How often each plain MIG profile is asked for, of 1024; each now and then."""
        counts = {each.name: 0 for each in mig.plain(geometry)}
        for shape, times in self._demand:
            if shape.mig in counts:
                counts[shape.mig] += times
        total = max(1, sum(counts.values()))
        return np.array([8 + count * 1024 // total for count in counts.values()], dtype=np.int64)


def learned(cluster: Cluster) -> Learned:
    """The demand as this cluster sees it, up to date."""
    found = cluster.memo.get("learned")
    if not isinstance(found, Learned) or found.generation != cluster.demand.generation:
        found = cluster.memo["learned"] = Learned(cluster)
    return found


def _models(cluster: Cluster) -> dict[frozenset[int], int]:
    memory = {}
    for name in cluster.models:
        number = cluster.model_number(name)
        memory[number] = int(cluster.vram[cluster.model == number].max(initial=0))
    here = [number for number, size in memory.items() if size]
    if len(here) < 2:
        return {}
    found = {frozenset((number,)): MODELS_PRIOR * WHOLE // len(here) for number in here}
    for shape, times in cluster.demand.usual:
        names = {cluster.model_number(name) for name in shape.models} if shape.models else set(here)
        models = frozenset(each for each in here if each in names and memory[each] >= shape.min_vram)
        if models and not shape.mig:
            found[models] = found.get(models, 0) + shape.count * max(shape.milli, 1) * times
    return found


class Table:
    """Columns of numbers by row of a cluster that follow from the row's state alone, kept by state."""

    def __init__(self, columns: int, rows: int) -> None:
        """Begin with zeros."""
        self.rows: np.ndarray = np.zeros((columns, rows), dtype=np.int64)
        self._known: dict[int, np.ndarray] = {}

    def forget(self) -> None:
        """What follows from a state is another now."""
        self._known.clear()

    def update(
        self, cluster: Cluster, rows: list[int], work_out: Callable[[Cluster, np.ndarray], None]
    ) -> None:
        """Bring rows up to date; `work_out` fills in those of states that are not known yet."""
        states, known = cluster.states(), self._known
        if len(known) > MOST_STATES:
            known.clear()
        fresh = {states[row]: row for row in rows if states[row] not in known}
        if fresh:
            work_out(cluster, np.array(list(fresh.values()), dtype=np.int64))
            known.update((state, self.rows[:, row].copy()) for state, row in fresh.items())
        for row in rows:
            self.rows[:, row] = known[states[row]]


class Kept:
    """What is worked out for each row, anew when the row or the demand has changed."""

    def __init__(self, rows: int) -> None:
        """Nothing is worked out yet."""
        self._mark, self._generation = (-1, 0), -1
        #: By row, and by number of its state: the waste as it is, and the free thousandths.
        self._table = Table(2, rows)
        self.waste, self._idle = self._table.rows
        #: Free thousandths by number of model; a node counts for the model of its first device.
        self.free: dict[int, int] = {}

    def refresh(self, cluster: Cluster) -> None:
        """Work out what has changed."""
        self._mark, rows = cluster.changes_since(self._mark)
        if rows is None or self._generation != cluster.demand.generation:
            self._generation = cluster.demand.generation
            self.free = dict.fromkeys(np.unique(cluster.model[:, 0]).tolist(), 0)
            self.free.pop(0, None)
            self._idle[:] = 0
            self._table.forget()
            rows = list(cluster.row_of.values())
        if rows:
            before = self._idle[rows]
            self._table.update(cluster, rows, self._work_out)
            self._count(cluster, rows, self._idle[rows] - before)

    def _work_out(self, cluster: Cluster, rows: np.ndarray) -> None:
        free = open_devices(cluster, rows)
        self.waste[rows] = learned(cluster).waste(
            cluster, rows, free, cluster.cpus[rows], cluster.memory[rows]
        )
        self._idle[rows] = free.sum(axis=1)

    def _count(self, cluster: Cluster, rows: list[int], more: np.ndarray) -> None:
        for model, amount in zip(cluster.model[rows, 0].tolist(), more.tolist(), strict=True):
            if model:
                self.free[model] += amount


def kept(cluster: Cluster) -> Kept:
    """What is kept by row, up to date."""
    found = cluster.memo.get("kept")
    if not isinstance(found, Kept):
        found = cluster.memo["kept"] = Kept(len(cluster.free))
    found.refresh(cluster)
    return found


def open_devices(cluster: Cluster, rows: np.ndarray) -> np.ndarray:
    """Free thousandths of devices that take whole work and shares."""
    given = (cluster.barred[rows] == 0) & (cluster.geometry[rows] == 0)
    return np.where(given, cluster.free[rows], 0)
