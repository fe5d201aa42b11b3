"""Where: which parts of which devices a request gets, or why none.

Rule 1: feasible, then ranked, then chosen. What is not feasible has a `Refusal` that says why (`whynot`).
Rule 2: all slices that are asked for, or none.
Rule 3: fewest nodes (those that the lease has come first), then fewest islands, then the best by `ranking`.
        The same cluster and request give the same answer.
Rule 4: slices of one lease go to different devices, unless `same_device` is asked for; MIG instances are
        devices of their own.
Rule 5: nothing here changes the cluster; the pool takes what it grants.

Not its business: who is next (`shares`), and whether somebody should give something back (`pool`).
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import instances, islands, mig, ranking
from jupyter_gpupool.core.model import WHOLE, Reason, Refusal, Request, Slice
from jupyter_gpupool.core.never import asked, feasible_ever
from jupyter_gpupool.core.parts import Part
from jupyter_gpupool.core.wants import Room, Want, room, want_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from jupyter_gpupool.core.cluster import Cluster

__all__ = ["NoPlacement", "Placement", "feasible_ever", "may_fit", "place"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for every slice that was asked for."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """No place now; `whynot` gives the long answer, a refusal for each candidate."""

    refusals: tuple[Refusal, ...]


def place(
    request: Request,
    cluster: Cluster,
    *,
    count: int = 0,
    allow: Iterable[str] = (),
    have: Sequence[Slice] = (),
    want: Want | None = None,
) -> Placement | NoPlacement:
    """Find a place for `count` slices of a request (0: as many as it asks for at least).

    Args:
        request: What is wanted.
        cluster: Where; it is the same afterwards.
        count: Slices to place now.
        allow: Holders whose held parts may be used as if they were free.
        have: Slices that the lease keeps: the new ones keep to `same_node` and `nvlink` with them, and shares
            go to other devices.
        want: What one slice of the request needs, where that is known already.
    """
    if not any(node.devices for node in cluster.nodes.values()):
        return NoPlacement(
            (Refusal(reason=Reason.NO_NODES, sentence="No node with GPUs has joined the pool yet."),)
        )
    search = _Search(request, cluster, count or request.count, tuple(have), want or want_of(request))
    held = [each.key for holder in allow for each in cluster.held_for(holder)]
    if not held:
        return search.run()
    with cluster.trying():
        for key in held:
            cluster.release(key)
        return search.run()


def may_fit(request: Request, want: Want, cluster: Cluster, count: int) -> bool:
    """A quick look at whether there could be room for `count` slices of a request; False: there is none."""
    if want.isolated and not want.mig:
        return True  # by need: what has no room for the smallest profile may have it for another
    found = ranking.space(cluster, want)
    return count <= (found.most if request.same_node or request.nvlink else found.total)


@dataclass(slots=True)
class _Search:
    """One search for a place."""

    request: Request
    cluster: Cluster
    count: int
    have: tuple[Slice, ...]
    #: Wherever it has some already.
    bare: Want

    def run(self) -> Placement | NoPlacement:
        have = [] if self.bare.stack else [each.device for each in self.have]
        want = want_of(self.request, have) if have else self.bare
        # A look at whole devices takes as long as a ranking of them.
        hopeful = want.whole or may_fit(self.request, self.bare, self.cluster, self.count)
        for nth in self._sizes(want) if hopeful else ():
            for doubtful in (False, True) if self.cluster.doubts else (True,):
                rows = self._rows(dataclasses.replace(want, nth=nth) if nth else want, doubtful)
                if rows is not None:
                    return Placement(tuple(rows))
        sentence = f"No room for {asked(self.request, self.count)} on what is free now."
        return NoPlacement((Refusal(reason=Reason.NO_ROOM, sentence=sentence),))

    def _sizes(self, want: Want) -> Iterator[int]:
        """The n-th smallest MIG profile that suits, for a request by need; else just one try."""
        if not want.isolated or want.mig:
            return iter((0,))
        suiting = (
            len(mig.suiting(geometry, "", want.vram, want.milli))
            for geometry in self.cluster.geometries[1:]
            if geometry
        )
        return iter(range(max(suiting, default=0)))

    def _rows(self, want: Want, doubtful: bool) -> list[Part] | None:  # noqa: FBT001 (two tries of one kind)
        """Parts for all slices: on one node if any has room, else on the fewest; None: there is no room."""
        together = self.request.same_node or self.request.nvlink
        if self.request.spread and not together:
            return self._spread(want, doubtful=doubtful)
        parts: list[Part] = []
        used: set[int] = set()
        while len(parts) < self.count:
            left = self.count - len(parts)
            row, number = self._best_row(want, left, used, doubtful=doubtful)
            if row < 0 or (together and number < left):
                return None
            used.add(row)
            parts += self._fill(want, row, number, doubtful=doubtful)
        return parts

    # ---------------------------------------------------------------------------------------- which node

    def _spread(self, want: Want, *, doubtful: bool) -> list[Part] | None:
        """Parts on as many nodes as there are with room, the emptiest first."""
        rooms = ranking.ranking(self.cluster, want, 1, doubtful=doubtful).room
        emptiest = -self.cluster.free.sum(axis=1)
        nodes = [(0, int(emptiest[row]), self.cluster.names[row], int(row)) for row in np.flatnonzero(rooms)]
        heapq.heapify(nodes)
        numbers: dict[int, int] = {}
        for _ in range(self.count):
            if not nodes:
                return None
            taken, empty, name, row = heapq.heappop(nodes)
            numbers[row] = taken + 1
            if taken + 1 < rooms[row]:
                heapq.heappush(nodes, (taken + 1, empty, name, row))
        return [
            part
            for row, number in numbers.items()
            for part in self._fill(want, row, number, doubtful=doubtful)
        ]

    def _best_row(self, want: Want, left: int, used: set[int], *, doubtful: bool) -> tuple[int, int]:
        """The best node for what is left, and how many slices of it go there; (-1, 0): none has room."""
        ranked = ranking.ranking(self.cluster, want, left, doubtful=doubtful)
        keys = self._restricted(want, ranked, left, used, doubtful=doubtful)
        row = int(keys.argmin())
        if keys[row] != ranking.NONE:
            return row, left
        if self.request.same_node or self.request.nvlink or left == 1:
            return -1, 0
        # None has room for all: the most that any has, and of those the best.
        open_ = np.where(self._allowed(used), ranked.room, 0)
        if open_.sum() < left:
            return -1, 0
        most = int(min(open_.max(), left))
        ranked = ranking.ranking(self.cluster, want, most, doubtful=doubtful)
        keys = self._restricted(want, ranked, most, used, doubtful=doubtful)
        return int(keys.argmin()), most

    def _allowed(self, used: set[int]) -> np.ndarray:
        """Nodes that the lease may use (more of)."""
        allowed = np.ones(len(self.cluster.free), dtype=bool)
        if self.have and (self.request.same_node or self.request.nvlink):
            allowed[:] = False
            allowed[self._rows_of_lease()] = True
        allowed[list(used)] = False
        return allowed

    def _rows_of_lease(self) -> list[int]:
        row_of = self.cluster.row_of
        return sorted({row_of[each.node] for each in self.have if each.node in row_of})

    def _restricted(
        self, want: Want, ranked: ranking.Ranking, number: int, used: set[int], *, doubtful: bool
    ) -> np.ndarray:
        """The keys of the ranking, better where the lease is already and where one island holds all."""
        keys = ranked.keys(self.cluster)
        if used or self.have:
            keys = np.where(self._allowed(used), keys, ranking.NONE)
        if self.have:
            near = np.zeros(len(keys), dtype=bool)
            near[self._rows_of_lease()] = True
            keys = _first(keys, near)
        if want.whole and (number > 1 or (self.request.nvlink and self.have)):
            keys = self._by_islands(want, keys, number, doubtful=doubtful)
        return keys

    def _by_islands(self, want: Want, keys: np.ndarray, number: int, *, doubtful: bool) -> np.ndarray:
        """Nodes with one island that holds all come first; with `nvlink` no others do."""
        if not self.request.nvlink and not self.cluster.islands:
            return keys
        rows = np.flatnonzero(keys != ranking.NONE)
        usable = self._usable(want, rows, doubtful=doubtful)
        if self.request.nvlink:
            usable &= self.cluster.linked[rows] > 0
        island = self.cluster.island[rows]
        rooms = [(usable & (island == each)).sum(axis=1) for each in range(int(island.max(initial=0)) + 1)]
        holds = np.zeros(len(keys), dtype=bool)
        if rooms:
            holds[rows] = np.max(rooms, axis=0) >= number
        return np.where(holds, keys, ranking.NONE) if self.request.nvlink else _first(keys, holds)

    def _usable(self, want: Want, rows: np.ndarray, *, doubtful: bool) -> np.ndarray:
        found = room(self.cluster, want)
        usable = ranking.usable_devices(self.cluster, want, found, rows, doubtful=doubtful)
        if self.request.nvlink and self.have:
            usable &= self._islands_of_lease()[rows]
        return usable

    def _islands_of_lease(self) -> np.ndarray:
        """Devices in an island that the lease is in."""
        inside = np.zeros(self.cluster.free.shape, dtype=bool)
        for each in self.have:
            if self.cluster.device(each.device):
                row, column = self.cluster.place_of(each.device)
                inside[row] |= self.cluster.island[row] == self.cluster.island[row, column]
        return inside

    # ------------------------------------------------------------------------------------- which devices

    def _fill(self, want: Want, row: int, number: int, *, doubtful: bool) -> list[Part]:
        """Parts for so many slices on a node that has room for them."""
        found = room(self.cluster, want)
        if want.host_only:
            return [self._part(want, found, row, -1)] * number
        usable = self._usable(want, np.array([row]), doubtful=doubtful)[0]
        if want.whole:
            return [self._part(want, found, row, column) for column in self._columns(row, usable, number)]
        if want.instance or number > 1:
            return self._one_by_one(want, found, row, number, usable)
        column = int(ranking.ranking(self.cluster, want, 1, doubtful=doubtful).column[row])
        return [self._part(want, found, row, self._least_broken(row, usable, column))]

    def _columns(self, row: int, usable: np.ndarray, number: int) -> list[int]:
        """Whole devices: in one island if any holds them, and there as few broken blocks as possible."""
        topology = self.cluster.topologies[self.cluster.names[row]]
        free = frozenset(usable.nonzero()[0].tolist())
        by_island: dict[int, set[int]] = {}
        for column in sorted(free):
            if not self.request.nvlink or topology.linked[column] or number == 1:
                by_island.setdefault(topology.islands[column], set()).add(column)
        holding = [(len(each), island) for island, each in by_island.items() if len(each) >= number]
        if holding:
            free = frozenset(by_island[min(holding)[1]])
        return islands.choose(topology.blocks, free, number)

    def _least_broken(self, row: int, usable: np.ndarray, column: int) -> int:
        """Of the devices in the same state the one that breaks no block that another would not."""
        topology = self.cluster.topologies[self.cluster.names[row]]
        free = self.cluster.free[row]
        if free[column] != WHOLE:
            return column
        same = np.flatnonzero(usable & (free == WHOLE))
        return islands.choose(topology.blocks, frozenset(int(each) for each in same), 1)[0]

    def _one_by_one(self, want: Want, found: Room, row: int, number: int, usable: np.ndarray) -> list[Part]:
        """Shares or instances, each where it costs least after those before it."""
        parts: list[Part] = []
        left = usable.copy()
        with self.cluster.trying():
            for each in range(number):
                column = self._next_column(want, found, row, left)
                parts.append(self._part(want, found, row, column))
                left[column] = want.stack
                if each + 1 < number:
                    self.cluster.take(f"?{each}", "?", parts[-1])
        return parts

    def _next_column(self, want: Want, found: Room, row: int, left: np.ndarray) -> int:
        at = np.array([row])
        if want.instance:
            costs = instances.cost(self.cluster, found, at)[0]
            fits = left & (instances.rooms(self.cluster, found, at)[0] > 0)
        else:
            costs = ranking.gap_cost(self.cluster, at, found.charge[at])[0]
            fits = left & (self.cluster.free[row] >= found.charge[row])
        return int(np.where(fits, costs, ranking.NONE).argmin())

    def _part(self, want: Want, found: Room, row: int, column: int) -> Part:
        node = self.cluster.nodes[self.cluster.names[row]]
        cpus, memory = int(found.cpus[row]), int(found.memory[row])
        if column < 0:
            return Part(
                node=node.name,
                device="",
                milli=0,
                vram=0,
                cpus=cpus,
                memory=memory,
                generation=node.generation,
            )
        device = self.cluster.devices_of(row)[column]
        milli = int(found.charge[row, column])
        instance = instances.best(self.cluster, found, row, column) if want.instance else None
        return Part(
            node=node.name,
            device=device.uuid,
            milli=milli,
            vram=instance.memory if instance else want.vram or device.memory * milli // WHOLE,
            instance=instance,
            cpus=cpus,
            memory=memory,
            generation=node.generation,
        )


def _first(keys: np.ndarray, preferred: np.ndarray) -> np.ndarray:
    """The same keys, with these rows before all others."""
    return np.where(preferred | (keys == ranking.NONE), keys, keys + (1 << 60))
