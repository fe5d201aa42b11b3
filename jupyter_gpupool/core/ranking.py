"""Which of the places that are feasible is best: the ranking, kept up to date row by row.

Rule 1: first what the worth of gaps says (shares; `fragmentation`), coarsely; then the gradient of
        fragmentation, in steps, and the pressure on the model; then the fullest node; then the first by name.
        The steps are coarse on purpose: they leave ties for the fullest node to decide, without which the
        gradient alone does worse than plain best fit.
Rule 2: a MIG instance that exists is better than one to be made, and else the place that costs others least.
Rule 3: what was worked out for a node holds until the node changes.
Rule 4: most of what is tried in a full pool fits nowhere; `space` finds that out without ranking anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import fragmentation, instances
from jupyter_gpupool.core.learned import Table, kept, learned, open_devices
from jupyter_gpupool.core.model import WHOLE
from jupyter_gpupool.core.wants import MANY, Room, Want, by_host, room

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.core.cluster import Cluster

#: Worth is compared in tenths of a device, waste in steps of 12 thousandths of one (times its own unit).
WORTH_STEP = 100
WASTE_STEP = 12 * 4 * fragmentation.WEIGHT
#: Of one such step as many as a whole device counts on a model under full pressure.
PRESSURE_STEPS = 30
MOST_PRESSURE = 5 * WHOLE
#: Parts of a step: pressure is finer than waste.
FINE = 64
#: How good a place is, as one number: its worth from this bit on, its steps from this one, then how full.
_WORTH, _STEPS = 35, 11
#: No place.
NONE = np.iinfo(np.int64).max
#: Rankings that are kept.
KEPT = 512


class Ranking:
    """For one kind of slice, and how many together on a node: how good each node is."""

    def __init__(self, cluster: Cluster, want: Want, count: int, *, doubtful: bool) -> None:
        """Prepare for `count` slices together on a node; `doubtful`: devices under watch may be used."""
        self._want, self._count, self._doubtful = want, count, doubtful
        self._mark, self._generation = (-1, 0), -1
        self._table = Table(4, len(cluster.free))
        #: How many slices each node has room for, and the best device of each node for one slice; then how
        #: good it is, and of that how full.
        self.room, self.column, self._good, self._fullness = self._table.rows

    def refresh(self, cluster: Cluster) -> None:
        """Work out again what has changed."""
        self._mark, rows = cluster.changes_since(self._mark)
        if rows is None or self._generation != cluster.demand.generation:
            self._generation = cluster.demand.generation
            self._table.forget()
            rows = list(cluster.row_of.values())
        _bring_up(cluster, self._want, self._table, rows, self._work_out)

    def keys(self, cluster: Cluster) -> np.ndarray:
        """For each node a number: the smallest is the best; `NONE` where there is no room."""
        if self._want.instance:
            self._rank_instances(cluster)
        good, pressure = self._good, _pressure(cluster, self._want, self._count)
        if pressure is not None:
            good = good + (pressure << _STEPS)
        return np.where(self.room >= self._count, good * len(good) + cluster.order(), NONE)

    def _rank_instances(self, cluster: Cluster) -> None:
        """Anew each time: what an instance costs others depends on all devices."""
        rows = np.flatnonzero(self.room >= self._count)
        found = room(cluster, self._want)
        usable = usable_devices(cluster, self._want, found, rows, doubtful=self._doubtful)
        cost = np.where(usable, instances.cost(cluster, found, rows), MANY << 16)
        self.column[rows] = cost.argmin(axis=1)
        # Ranks stand for the costs, which may be any size.
        rank = np.unique(cost.min(axis=1), return_inverse=True)[1]
        self._good[rows] = (rank * FINE << _STEPS) + self._fullness[rows]

    def _work_out(self, cluster: Cluster, rows: np.ndarray) -> None:
        want, found = self._want, room(cluster, self._want)
        usable = usable_devices(cluster, want, found, rows, doubtful=self._doubtful)
        self.room[rows] = capacity(cluster, want, found, rows, usable)
        enough = self.room[rows] >= self._count
        rows, usable = rows[enough], usable[enough]
        if not len(rows):
            return
        cpus = cluster.cpus[rows] - self._count * found.cpus[rows]
        idle = cluster.free[rows].sum(axis=1)
        most = max(1, int((cluster.cpus_part * cluster.devices).max())), WHOLE * cluster.width
        self._fullness[rows] = np.clip(cpus * 800 // most[0] + idle * 800 // most[1], 0, (1 << _STEPS) - 1)
        if not want.instance:
            self._rank(cluster, found, rows, usable)

    def _rank(self, cluster: Cluster, found: Room, rows: np.ndarray, usable: np.ndarray) -> None:
        want, count = self._want, self._count
        free = open_devices(cluster, rows)
        charge = found.charge[rows]
        cpus = cluster.cpus[rows] - count * found.cpus[rows]
        memory = cluster.memory[rows] - count * found.memory[rows]
        before = kept(cluster).waste[rows]
        if want.host_only:
            tries = _plain(free)
        elif want.whole:
            tries = _plain(np.where(usable & (usable.cumsum(axis=1) <= count), 0, free))
        elif count == 1:
            tries = _with_share(cluster, rows, free, usable, charge)
        else:
            tries = _with_shares(cluster, rows, free, usable, charge, count=count if want.stack else -count)
        which, column = tries.row, tries.column
        after = learned(cluster).waste(cluster, rows[which], tries.free, cpus[which], memory[which])
        added = after - before[which]
        if len(which) > len(rows):
            best = _best_of(which, added, tries.free)
            added, column = added[best], column[best]
        self.column[rows] = column
        steps = (added + WASTE_STEP // 2) // WASTE_STEP * FINE
        self._good[rows] = ((tries.worth << _WORTH) + (steps << _STEPS)) + self._fullness[rows]


def _by_state(want: Want) -> bool:
    """What a node has room for follows from its state alone: the request names no node, and no instance."""
    return not (want.node or want.exclude or want.instance)


def _bring_up(
    cluster: Cluster,
    want: Want,
    table: Table,
    rows: list[int],
    work_out: Callable[[Cluster, np.ndarray], None],
) -> None:
    """Work out anew the rows of a table that have changed."""
    if rows and _by_state(want):
        table.update(cluster, rows, work_out)
    elif rows:
        work_out(cluster, np.array(rows, dtype=np.int64))


def ranking(cluster: Cluster, want: Want, count: int, *, doubtful: bool) -> Ranking:
    """The ranking of a kind of slice, up to date."""
    known = cluster.memo.setdefault("rankings", {})
    assert isinstance(known, dict)
    key = (want, count, doubtful)
    found = known.get(key)
    if found is None:
        if len(known) >= KEPT:
            known.pop(next(iter(known)))
        found = known[key] = Ranking(cluster, want, count, doubtful=doubtful)
    assert isinstance(found, Ranking)
    found.refresh(cluster)
    return found


class Space:
    """For one kind of slice: how many each node has room for, devices under watch included."""

    def __init__(self, cluster: Cluster, want: Want) -> None:
        """Prepare for slices of a kind."""
        self._want = want
        self._mark = (-1, 0)
        self._table = Table(1, len(cluster.free))
        self._room = self._table.rows[0]
        #: All nodes together, and the most of any one.
        self.total = self.most = 0

    def refresh(self, cluster: Cluster) -> None:
        """Work out again what has changed."""
        self._mark, changed = cluster.changes_since(self._mark)
        rows = list(cluster.row_of.values()) if changed is None else changed
        if rows:
            _bring_up(cluster, self._want, self._table, rows, self._work_out)
            self.total, self.most = int(self._room.sum()), int(self._room.max())

    def _work_out(self, cluster: Cluster, rows: np.ndarray) -> None:
        found = room(cluster, self._want)
        usable = usable_devices(cluster, self._want, found, rows, doubtful=True)
        self._room[rows] = capacity(cluster, self._want, found, rows, usable)


def space(cluster: Cluster, want: Want) -> Space:
    """How much room there is for a kind of slice, up to date."""
    known = cluster.memo.setdefault("spaces", {})
    assert isinstance(known, dict)
    found = known.get(want)
    if found is None:
        if len(known) >= KEPT:
            known.pop(next(iter(known)))
        found = known[want] = Space(cluster, want)
    assert isinstance(found, Space)
    found.refresh(cluster)
    return found


# ------------------------------------------------------------------------------------------ what is free


def usable_devices(
    cluster: Cluster, want: Want, found: Room, rows: np.ndarray, *, doubtful: bool
) -> np.ndarray:
    """Devices of these rows that have room for a slice now."""
    usable: np.ndarray = found.fits[rows] & (cluster.barred[rows] == 0)
    if not doubtful:
        usable &= cluster.doubtful[rows] == 0
    if want.host_only:
        return usable
    if want.instance:
        usable &= instances.rooms(cluster, found, rows) > 0
    else:
        usable &= cluster.free[rows] >= found.charge[rows]
    return usable


def capacity(cluster: Cluster, want: Want, found: Room, rows: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """How many slices each of these rows has room for: devices, host CPUs and host memory."""
    if want.host_only:
        counts = np.full(len(rows), MANY) * (cluster.devices[rows] > 0)
    elif want.instance:
        counts = (instances.rooms(cluster, found, rows) * usable).sum(axis=1)
    elif want.stack:
        counts = (cluster.free[rows] // np.maximum(found.charge[rows], 1) * usable).sum(axis=1)
    else:
        counts = usable.sum(axis=1)
    return by_host(counts, (cluster.cpus[rows], found.cpus[rows]), (cluster.memory[rows], found.memory[rows]))


# ------------------------------------------------------------------------------ whole devices and shares


@dataclass(frozen=True, slots=True)
class _Tries:
    """What would be left: one or more tries for each row."""

    #: By row: what the worth of gaps goes down by.
    worth: np.ndarray
    #: By try: the free thousandths after it, of which row it is (by place), and the device that it takes.
    free: np.ndarray
    row: np.ndarray
    column: np.ndarray


def _plain(free: np.ndarray) -> _Tries:
    """One try a row, by which no gap on a device is touched."""
    nothing = np.zeros(len(free), dtype=np.int64)
    return _Tries(nothing, free, np.arange(len(free)), nothing)


def _lost_worth(cluster: Cluster, rows: np.ndarray, free: np.ndarray, charge: np.ndarray) -> np.ndarray:
    """What the worth of each device's gap goes down by, in steps."""
    tables, step = learned(cluster).worths(cluster, rows), fragmentation.STEP
    each = np.arange(len(rows))[:, None]
    lost = tables[each, free // step] - tables[each, np.maximum(free - charge, 0) // step]
    found: np.ndarray = (lost + WORTH_STEP // 2) // WORTH_STEP
    return found


def gap_cost(cluster: Cluster, rows: np.ndarray, charge: np.ndarray) -> np.ndarray:
    """What a share costs on each device of these rows: least worth lost, then the smallest gap."""
    free = open_devices(cluster, rows)
    cost: np.ndarray = _lost_worth(cluster, rows, free, charge) * 2048 + free
    return cost


def _with_share(
    cluster: Cluster, rows: np.ndarray, free: np.ndarray, usable: np.ndarray, charge: np.ndarray
) -> _Tries:
    """Tries for one share: the devices of a row by which least worth is lost, each state once."""
    lost = np.where(usable, _lost_worth(cluster, rows, free, charge), MANY)
    worth = lost.min(axis=1)
    among = usable & (lost == worth[:, None])
    for column in range(1, free.shape[1]):
        same = among[:, :column] & (free[:, :column] == free[:, column, None])
        among[:, column] &= ~same.any(axis=1)
    row, chosen = np.nonzero(among)
    after = free[row]
    after[np.arange(len(row)), chosen] -= charge[row, chosen]
    return _Tries(worth, after, row, chosen)


def _with_shares(
    cluster: Cluster,
    rows: np.ndarray,
    free: np.ndarray,
    usable: np.ndarray,
    charge: np.ndarray,
    *,
    count: int,
) -> _Tries:
    """Several shares of one lease, one after the other where least worth is lost; below 0: each elsewhere."""
    after, left, each = free.copy(), usable.copy(), np.arange(len(rows))
    worth = np.zeros(len(rows), dtype=np.int64)
    first = np.zeros(len(rows), dtype=np.int64)
    for number in range(abs(count)):
        lost = np.where(left, _lost_worth(cluster, rows, after, charge), MANY)
        column = (lost * 2048 + after).argmin(axis=1)
        worth += lost[each, column]
        after[each, column] -= charge[each, column]
        left[each, column] = count > 0
        left &= after >= charge
        first = column if number == 0 else first
    return _Tries(worth, after, each, first)


def _best_of(which: np.ndarray, added: np.ndarray, after: np.ndarray) -> np.ndarray:
    """For each row the candidate with the least added waste, then with the smallest gap left."""
    step = (added + WASTE_STEP // 2) // WASTE_STEP
    smallest = np.where(after > 0, after, WHOLE).min(axis=1)
    order = np.lexsort((smallest, step, which))
    ordered = which[order]
    found: np.ndarray = order[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    return found


# ---------------------------------------------------------------------------------------------- pressure


def _pressure(cluster: Cluster, want: Want, count: int) -> np.ndarray | None:
    """Steps (of `FINE` parts) that a node costs because others can go nowhere else; None: none does."""
    wanted = learned(cluster).models
    if not wanted or want.host_only or want.instance:
        return None
    free = kept(cluster).free
    found = fragmentation.pressure(wanted, free)
    levels = np.zeros(len(cluster.models) + 1, dtype=np.int64)
    for model, level in found.items():
        levels[model] = min(level, MOST_PRESSURE)
    milli = count * max(want.milli, 1)
    steps: np.ndarray = levels[cluster.model[:, 0]] * (milli * PRESSURE_STEPS * FINE) // (WHOLE * WHOLE)
    return steps
