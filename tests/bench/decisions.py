"""Bench `decisions`: how long one decision takes in a pool of ten thousand GPUs with fifty thousand waiting.

1,250 nodes of 8 GPUs, 50 projects with equal quotas, 10 users each. The pool is full, and as many requests
as asked for wait. Then pool events come one after the other: mostly a lease is given back and a new request
comes, now and then a node is lost and is back. Each is timed with all that the pool decides because of it.
Then, with one project holding far more than its share, members of the others ask for gangs of 64 GPUs, for
which others must give back. Times are of the processor, not of the clock on the wall: what else runs on the
machine does not count.

    python -m tests.bench.decisions [--gpus 10000] [--pending 50000]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jupyter_gpupool.core import placement
from jupyter_gpupool.core.model import (
    ANY,
    DAY,
    GB,
    HOUR,
    MINUTE,
    SECOND,
    WHOLE,
    AddSlice,
    ConfigChanged,
    Defaults,
    Device,
    DrainSlice,
    EndLease,
    LeaseFreed,
    LeaseReleased,
    LeaseStarted,
    LeaseState,
    Node,
    NodeJoined,
    NodeLost,
    Project,
    Request,
    RequestSubmitted,
    SliceDrained,
    SliceFreed,
    SliceStarted,
    StartLease,
    StopSlice,
    Tick,
)
from jupyter_gpupool.core.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_gpupool.core.model import Instruction, PoolEvent

PROJECTS = 50
USERS = 10
WIDTH = 8
#: How many GPUs are asked for, and how often of a hundred; the rest are whole nodes.
COUNTS = (*(1,) * 70, *(2,) * 12, *(4,) * 10, *(8,) * 6, 16, 32)
LIMITS = (HOUR, 4 * HOUR, DAY)
#: A full run: so many pool events are timed, and so many reclaims.
EVENTS, RECLAIMS, PLACES = 12_000, 100, 1_000
QUICK = 10
GANG = 64
#: Every so many events a node is lost, and comes back.
LOSS_EVERY = 100


def milliseconds(seconds: list[float], percent: int) -> float:
    """The time that so many of a hundred do not pass."""
    ranked = sorted(seconds)
    return round(1000 * ranked[min(len(ranked) - 1, len(ranked) * percent // 100)], 3) if ranked else 0.0


def node_of(number: int) -> Node:
    """A node as an agent would report it."""
    name = f"node-{number:05d}"
    devices = tuple(
        Device(uuid=f"GPU-{number:05d}-{index}", node=name, index=index, model="H100-80GB", memory=80 * GB)
        for index in range(WIDTH)
    )
    return Node(name=name, devices=devices, cpus=16_000 * WIDTH, memory=128 * GB * WIDTH)


@dataclass(slots=True)
class Town:
    """A pool, its people and its agents, which obey at once."""

    gpus: int
    chance: random.Random = field(default_factory=lambda: random.Random(4711))
    pool: Pool = field(default_factory=Pool)
    now: int = SECOND
    number: int = 0
    #: Seconds that each timed pool event took, and with which instructions.
    seconds: list[float] = field(default_factory=list)
    grants: int = 0
    #: Leases that hold something, in no order, with the place of each.
    holding: list[str] = field(default_factory=list)
    place_of: dict[str, int] = field(default_factory=dict)
    #: (when, slice): drains that end at their deadline.
    drains: list[tuple[int, str]] = field(default_factory=list)
    gangs: list[float] = field(default_factory=list)

    def open(self) -> None:
        """Let all nodes join, and give every project the same quota."""
        quota = ((ANY, self.gpus // PROJECTS * WHOLE),)
        projects = tuple(Project(name=f"p{number:02d}", quota=quota) for number in range(PROJECTS))
        defaults = Defaults(idle_timeout=-1, node_silence=DAY)
        self.send(ConfigChanged(now=self.now, projects=projects, defaults=defaults))
        for number in range(self.gpus // WIDTH):
            self.send(NodeJoined(now=self.now, node=node_of(number)))

    def send(self, event: PoolEvent, *, timed: bool = False) -> float:
        """Let the pool handle an event and the agents obey; the seconds that the event itself took."""
        waiting, took = [event], -1.0
        while waiting:
            event = waiting.pop()
            begin = time.thread_time()
            orders = self.pool.handle(event)
            seconds = time.thread_time() - begin
            took = seconds if took < 0 else took
            if timed:
                self.seconds.append(seconds)
            for order in orders:
                obey = _OBEY.get(type(order))
                waiting += obey(self, order) if obey else ()
        return took

    def request(self, project: int | None = None, count: int = 0, limit: int = 0) -> Request:
        """Something that somebody asks for."""
        self.number += 1
        project = self.chance.randrange(PROJECTS) if project is None else project
        ident = f"r{self.number:07d}"
        user = f"u{project:02d}-{self.chance.randrange(USERS)}"
        return Request(
            id=ident,
            user=user,
            project=f"p{project:02d}",
            name=ident,
            count=count or self.chance.choice(COUNTS),
            time_limit=limit or self.chance.choice(LIMITS),
            arrived=self.now,
        )

    def submit(self, request: Request, *, timed: bool = False) -> float:
        """Somebody asks."""
        return self.send(RequestSubmitted(now=self.now, request=request), timed=timed)

    def release(self, *, timed: bool = False) -> None:
        """Somebody gives a lease back."""
        ident = self.chance.choice(self.holding)
        self.send(LeaseReleased(now=self.now, lease=ident), timed=timed)

    def lose_node(self, *, timed: bool = False) -> None:
        """A node is lost and comes back."""
        node = node_of(self.chance.randrange(self.gpus // WIDTH))
        self.send(NodeLost(now=self.now, node=node.name), timed=timed)
        self.now += MINUTE
        self.send(NodeJoined(now=self.now, node=node), timed=timed)

    def pass_time(self, milliseconds_: int, *, timed: bool = False) -> None:
        """Let time pass, with what is due meanwhile."""
        until = self.now + milliseconds_
        while True:
            tick, drain = self.pool.next_time(), self.drains[0][0] if self.drains else None
            due = min(each for each in (tick, drain, until) if each is not None)
            if due >= until:
                break
            self.now = max(self.now, due)
            if drain is not None and drain <= self.now:
                self.send(SliceDrained(now=self.now, slice=self.drains.pop(0)[1]), timed=timed)
            else:
                self.send(Tick(now=self.now), timed=timed)
        self.now = until

    def hold(self, lease: str) -> None:
        """A lease has something."""
        if lease not in self.place_of:
            self.place_of[lease] = len(self.holding)
            self.holding.append(lease)

    def let_go(self, lease: str) -> None:
        """A lease has nothing more."""
        at = self.place_of.pop(lease, None)
        if at is not None:
            last = self.holding.pop()
            if last != lease:
                self.holding[at] = last
                self.place_of[last] = at


def _start(town: Town, order: StartLease) -> list[PoolEvent]:
    town.grants += 1
    town.hold(order.lease)
    slices: list[PoolEvent] = [SliceStarted(now=town.now, slice=each.id) for each in order.slices]
    return [LeaseStarted(now=town.now, lease=order.lease), *slices]


def _add(town: Town, order: AddSlice) -> list[PoolEvent]:
    town.hold(order.lease)
    return [SliceStarted(now=town.now, slice=order.slice.id)]


def _drain(town: Town, order: DrainSlice) -> list[PoolEvent]:
    town.drains.append((order.deadline, order.slice))
    town.let_go(order.lease)
    return []


def _end(town: Town, order: EndLease) -> list[PoolEvent]:
    town.let_go(order.lease)
    return [LeaseFreed(now=town.now, lease=order.lease)]


def _stop(town: Town, order: StopSlice) -> list[PoolEvent]:
    return [SliceFreed(now=town.now, slice=order.slice)]


_OBEY: dict[type[Instruction], Callable[..., list[PoolEvent]]] = {
    StartLease: _start,
    AddSlice: _add,
    DrainSlice: _drain,
    EndLease: _end,
    StopSlice: _stop,
}


def fill(town: Town, pending: int) -> None:
    """Fill the pool, then let so many wait."""
    while len(town.pool.leases) - len(town.holding) < pending:
        town.submit(town.request())
        town.now += 10


def events(town: Town, count: int) -> None:
    """People ask and give back, and nodes are lost, until so many pool events were timed."""
    turn = 0
    while len(town.seconds) < count:
        turn += 1
        town.pass_time(SECOND, timed=True)
        town.submit(town.request(), timed=True)
        town.release(timed=True)
        if turn % LOSS_EVERY == 0:
            town.lose_node(timed=True)


def reclaims(town: Town, count: int) -> None:
    """Members of projects that have nothing ask for gangs, for which others must give back."""
    ours = tuple(replace(each, quota=()) for each in town.pool.projects)
    theirs = tuple(
        Project(name=f"q{turn:03d}", quota=((ANY, GANG * WHOLE),)) for turn in range(count * 5 // 4)
    )
    config = ConfigChanged(now=town.now, projects=(*ours, *theirs), defaults=town.pool.defaults)
    town.send(config)
    town.pass_time(HOUR // 2)  # what follows from the new quotas has been given back by then
    for project in theirs:
        if len(town.gangs) >= count:
            break
        request = replace(town.request(0, GANG, HOUR), project=project.name, user=f"u-{project.name}")
        before = town.pool.ledger.count
        seconds = town.submit(request)
        if town.pool.ledger.count > before:
            town.gangs.append(seconds)
        town.pass_time(5 * MINUTE)
        if town.pool.leases[request.id].state in (LeaseState.STARTING, LeaseState.ACTIVE):
            town.send(LeaseReleased(now=town.now, lease=request.id))
        town.pass_time(town.pool.defaults.min_run)


def places(town: Town, count: int) -> Iterator[float]:
    """Seconds of searching a place for something in the pool as it is, some of it free."""
    cluster = town.pool._state.cluster  # a search without a decision has no other door
    for _ in range(count):
        ident = town.chance.choice(town.holding)
        lease = town.pool.leases[ident]
        request = replace(town.request(), same_node=town.chance.random() < 0.5)
        with cluster.trying():
            for each in lease.slices:
                cluster.release(each)
            begin = time.thread_time()
            placement.place(request, cluster)
            yield time.thread_time() - begin


def main() -> None:
    """Run the bench; the last line on stdout is its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--pending", type=int, default=50_000)
    parser.add_argument("--quick", action="store_true", help=f"a tenth of all: 1/{QUICK}")
    options = parser.parse_args()
    part = QUICK if options.quick else 1
    town = Town(options.gpus // part)
    town.open()
    begin = time.monotonic()
    fill(town, options.pending // part)
    print(
        f"{len(town.holding)} leases, {len(town.pool.leases)} in all, {time.monotonic() - begin:.1f} s",
        flush=True,
    )
    granted = town.grants
    events(town, EVENTS // part)
    granted = town.grants - granted
    print(f"{len(town.seconds)} events, worst {1000 * max(town.seconds):.1f} ms", flush=True)
    found = sorted(places(town, PLACES // part))
    reclaims(town, RECLAIMS // part)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {
        "events": len(town.seconds),
        "grants": granted,
        "reclaims": len(town.gangs),
        "p50_ms": milliseconds(town.seconds, 50),
        "p99_ms": milliseconds(town.seconds, 99),
        "max_ms": milliseconds(town.seconds, 100),
        "reclaim_64_ms": milliseconds(town.gangs, 50),
        "reclaim_64_p99_ms": milliseconds(town.gangs, 99),
        "place_p99_ms": milliseconds(found, 99),
        "peak_rss_mb": round(rss / 1024, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
