"""Running a trace of requests through the pool in virtual time: how long would they have waited?

Rule 1: the very same `core.pool` as in production decides; only time and the agents are played.
Rule 2: agents obey at once. A worker that is drained works on until the deadline. Work that is suspended is
        kept, and going on again costs `RESTART`.
Rule 3: the pool sees a time limit, never the duration: the duration rounded up to the next of `LIMITS`.

Not its business: what a trace file looks like (`read`) is kept apart from how it is played (`play`).
"""

from __future__ import annotations

import contextlib
import csv
import gc
import gzip
import heapq
import math
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

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
    Project,
    RefuseRequest,
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
from jupyter_gpupool.core.quotas import effective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from jupyter_gpupool.core.model import Instruction, PoolEvent

#: What a request asks for as its time limit: the first of these that its duration fits in, in milliseconds.
LIMITS = (HOUR, 4 * HOUR, DAY, 7 * DAY, 60 * DAY)
#: What going on after a suspension costs, in milliseconds: its last minute is computed again.
RESTART = MINUTE
#: Later than anything happens.
_NEVER = sys.maxsize
#: How many objects are made before their youngest are looked through.
_GARBAGE = 1_000_000
POLICIES = ("ours", "fifo", "quota-only")


@dataclass(slots=True)
class Job:
    """A request of a trace, and what became of it. Times in milliseconds from the trace's beginning."""

    id: str
    project: str
    user: str
    arrival: int
    duration: int
    #: Slices, and thousandths of a GPU of each.
    gpus: int
    milli: int = WHOLE
    #: Work that is left; since when it runs (-1: it does not); how often its run was stopped.
    left: int = 0
    running: int = -1
    epoch: int = 0
    started: int = -1
    finished: int = -1
    suspended: int = 0
    #: It never started, or was ended before its work was done.
    refused: bool = False
    #: From when to when it has run.
    runs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Thousandths of GPUs in all."""
        return self.gpus * self.milli


@dataclass(slots=True)
class Played:
    """What a replay found."""

    jobs: list[Job]
    policy: str
    gpus: int
    pool: Pool
    #: Thousandths of GPUs times milliseconds of work that was computed again.
    lost: int = 0
    #: How many pool events there were.
    events: int = 0


class TraceError(ValueError):
    """A trace cannot be read; the sentence says where, and what is wanted."""


def read(path: Path) -> list[Job]:
    """Read a trace: CSV with `timestamp` (ISO, or seconds), `duration` (s), `gpus`; maybe `project`, `user`.

    `num_gpus` and `cluster` are taken for `gpus` and `project`, as in published traces; `.gz` is unpacked.
    `gpus` is a whole number, or less than one for a share of a GPU.

    Raises:
        TraceError: There is no such file, it is no such table, or a row of it is none of this.
    """
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            rows = csv.DictReader(file)
            _columns(path, rows.fieldnames or [])
            jobs = [_job(path, number, row) for number, row in enumerate(rows, start=2)]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or "it is no CSV table"
        raise TraceError(f"{path} cannot be read: {why}.") from error
    if not jobs:
        raise TraceError(f"{path} has no requests: a row each, with {', '.join(COLUMNS)}.")
    jobs.sort(key=lambda each: (each.arrival, each.id))
    begin = jobs[0].arrival
    for job in jobs:
        job.arrival -= begin
    return jobs


#: The columns of a trace that must be there, with the names that are understood.
COLUMNS = {"timestamp": ("timestamp",), "duration": ("duration",), "gpus": ("gpus", "num_gpus")}


def _columns(path: Path, names: Sequence[str]) -> None:
    for wanted, known in COLUMNS.items():
        if not any(name in names for name in known):
            raise TraceError(
                f"{path} has no column {wanted}: a trace has {', '.join(COLUMNS)} and maybe project, user."
            )


def _job(path: Path, number: int, row: dict[str, str]) -> Job:
    try:
        project = row.get("project") or row.get("cluster") or "default"
        count, milli = _gpus(row.get("gpus") or row["num_gpus"])
        duration = _positive(row["duration"])
        return Job(
            id=f"r{number:06d}",
            project=project,
            user=row.get("user") or project,
            arrival=round(_seconds(row["timestamp"]) * SECOND),
            duration=max(1, round(duration * SECOND)),
            gpus=count,
            milli=milli,
        )
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError(
            f"Line {number} of {path} is no request: it needs a time (ISO, or seconds), a duration in seconds"
            " above 0, and a number of GPUs."
        ) from error


def _seconds(text: str) -> float:
    try:
        return _finite(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _positive(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise ValueError(text)
    return value


def _gpus(text: str) -> tuple[int, int]:
    """How many slices, and thousandths of a GPU of each."""
    value = _positive(text)
    if value < 1:
        return 1, max(1, round(value * WHOLE))
    if value != int(value):
        raise ValueError(text)
    return int(value), WHOLE


def equal(jobs: Iterable[Job], gpus: int) -> tuple[Project, ...]:
    """Equal quotas of whole GPUs for all projects of a trace."""
    names = sorted({job.project for job in jobs})
    quota = gpus // len(names) * WHOLE
    return tuple(Project(name=name, quota=((ANY, quota),)) for name in names)


def nodes(gpus: int, width: int = 8) -> list[Node]:
    """Nodes of `width` GPUs each, the last one with what remains."""
    found = []
    for at in range(0, gpus, width):
        name = f"node-{at // width + 1:04d}"
        count = min(width, gpus - at)
        devices = tuple(
            Device(uuid=f"GPU-{at + index:06d}", node=name, index=index, model="GPU", memory=80 * GB)
            for index in range(count)
        )
        found.append(Node(name=name, devices=devices, cpus=16_000 * count, memory=128 * GB * count))
    return found


def configuration(
    policy: str, projects: tuple[Project, ...], defaults: Defaults
) -> tuple[tuple[Project, ...], Defaults]:
    """What makes the pool follow a policy: `ours`, `fifo` (nobody passes), `quota-only` (nobody borrows).

    Everybody may use every project, for as long as the trace has them run.
    """
    projects = tuple(replace(each, members=(ANY,), default_time=0, max_time=0) for each in projects)
    if policy == "fifo":
        return (Project(name="all"),), replace(defaults, passing=False)
    if policy == "quota-only":
        sure = effective(projects)
        kept = [replace(each, limit=tuple(sure[each.name].items()) or ((ANY, 0),)) for each in projects]
        return tuple(kept), replace(defaults, passing=False)
    return projects, defaults


@contextlib.contextmanager
def _looking_seldom() -> Iterator[None]:
    """Look for cycles seldom: hardly anything that a replay makes is in one, and looking took a tenth."""
    before = gc.get_threshold()
    gc.set_threshold(_GARBAGE, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Player:
    """Plays the trace and the agents against a pool."""

    def __init__(
        self,
        jobs: Sequence[Job],
        gpus: int,
        policy: str,
        projects: tuple[Project, ...],
        *,
        defaults: Defaults | None = None,
        look: Callable[[PoolEvent | Instruction, int], None] | None = None,
    ) -> None:
        self.jobs = {job.id: replace(job, left=job.duration, runs=[]) for job in jobs}
        self.policy = policy
        self.pool = Pool()
        self.played = Played(list(self.jobs.values()), policy, gpus, self.pool)
        self.look = look
        self.now = 0
        #: (when, number, what, id, epoch)
        self.due: list[tuple[int, int, str, str, int]] = []
        self.number = 0
        longest = max(LIMITS)
        defaults = replace(defaults or Defaults(), max_time=longest, time_limit=DAY, idle_timeout=-1)
        projects, defaults = configuration(policy, projects, defaults)
        self.send(ConfigChanged(now=0, projects=projects, defaults=defaults))
        for node in nodes(gpus):
            self.send(NodeJoined(now=0, node=node))

    def send(self, event: PoolEvent) -> None:
        """Let the pool handle an event, and the agents obey what follows."""
        waiting = [event]
        while waiting:
            event = waiting.pop()
            self.played.events += 1
            if self.look:
                self.look(event, self.now)
            for order in self.pool.handle(event):
                if self.look:
                    self.look(order, self.now)
                obey = _OBEY.get(type(order))
                if obey:
                    waiting += reversed(obey(self, order))

    def at(self, when: int, what: str, ident: str, epoch: int = 0) -> None:
        """Remember what happens when."""
        self.number += 1
        heapq.heappush(self.due, (when, self.number, what, ident, epoch))

    def play(self) -> Played:
        """Play to the end of the last job."""
        with _looking_seldom():
            return self._play()

    def _play(self) -> Played:
        arrivals = sorted(self.jobs.values(), key=lambda job: (job.arrival, job.id))
        at = 0
        while at < len(arrivals) or self.due:
            job = arrivals[at] if at < len(arrivals) else None
            due = self.due[0][0] if self.due else _NEVER
            tick = self.pool.next_time()
            arrival = job.arrival if job else _NEVER
            self.now = max(self.now, min(due, arrival, _NEVER if tick is None else tick))
            if due <= self.now:
                _, _, what, ident, epoch = heapq.heappop(self.due)
                _HAPPEN[what](self, ident, epoch)
            elif job and job.arrival <= self.now:
                at += 1
                self.send(RequestSubmitted(now=self.now, request=self.request(job)))
            else:
                self.send(Tick(now=self.now))
        return self.played

    def request(self, job: Job) -> Request:
        """What a job asks for."""
        limit = next((each for each in LIMITS if job.duration <= each), max(LIMITS))
        project = "all" if self.policy == "fifo" else job.project
        user = "all" if self.policy == "fifo" else job.user
        return Request(
            id=job.id,
            user=user,
            project=project,
            name=job.id,
            count=job.gpus,
            milli=job.milli,
            time_limit=limit,
            arrived=self.now,
        )

    def start(self, ident: str) -> None:
        """A job's lease has become active."""
        job = self.jobs[ident]
        if job.running < 0 and self.pool.leases[ident].state is LeaseState.ACTIVE:
            job.running = self.now
            job.started = self.now if job.started < 0 else job.started
            self.at(self.now + job.left, "finish", ident, job.epoch)

    def finish(self, job: Job) -> None:
        """A job's work is done."""
        job.runs.append((job.running, self.now))
        job.finished, job.running = self.now, -1

    def stop(self, ident: str) -> None:
        """A job's work is interrupted; going on will cost something."""
        job = self.jobs[ident]
        if job.running < 0:
            return
        job.left -= self.now - job.running
        again = min(RESTART, job.duration - job.left)
        job.left += again
        self.played.lost += again * job.size
        job.runs.append((job.running, self.now))
        job.running = -1
        job.suspended += 1
        job.epoch += 1


def _start_lease(player: Player, order: StartLease) -> list[PoolEvent]:
    found: list[PoolEvent] = [SliceStarted(now=player.now, slice=each.id) for each in order.slices]
    player.at(player.now, "start", order.lease)
    return [LeaseStarted(now=player.now, lease=order.lease), *found]


def _add_slice(player: Player, order: AddSlice) -> list[PoolEvent]:
    player.at(player.now, "start", order.lease)
    return [SliceStarted(now=player.now, slice=order.slice.id)]


def _drain(player: Player, order: DrainSlice) -> list[PoolEvent]:
    player.at(order.deadline, "drained", order.slice)
    return []


def _stop(player: Player, order: StopSlice) -> list[PoolEvent]:
    return [SliceFreed(now=player.now, slice=order.slice)]


def _end(player: Player, order: EndLease) -> list[PoolEvent]:
    job = player.jobs[order.lease]
    if job.finished < 0 and 0 <= job.running <= player.now - job.left:
        # Its work and its time limit end in the same moment.
        player.finish(job)
    elif job.finished < 0:
        player.stop(order.lease)
        job.refused = True
    return [LeaseFreed(now=player.now, lease=order.lease)]


def _refuse(player: Player, order: RefuseRequest) -> list[PoolEvent]:
    job = player.jobs.get(order.lease)
    if job and job.started < 0:
        job.refused = True
    return []


_OBEY: dict[type[Instruction], Callable[..., list[PoolEvent]]] = {
    StartLease: _start_lease,
    AddSlice: _add_slice,
    DrainSlice: _drain,
    StopSlice: _stop,
    EndLease: _end,
    RefuseRequest: _refuse,
}


def _started(player: Player, ident: str, _epoch: int) -> None:
    player.start(ident)


def _finished(player: Player, ident: str, epoch: int) -> None:
    job = player.jobs[ident]
    if job.epoch == epoch and job.finished < 0:
        player.finish(job)
        player.send(LeaseReleased(now=player.now, lease=ident))


def _drained(player: Player, ident: str, _epoch: int) -> None:
    lease = ident.rpartition("/")[0]
    if player.jobs[lease].finished < 0:
        player.stop(lease)
        player.send(SliceDrained(now=player.now, slice=ident))


_HAPPEN: dict[str, Callable[[Player, str, int], None]] = {
    "start": _started,
    "finish": _finished,
    "drained": _drained,
}


def play(
    jobs: Sequence[Job],
    gpus: int,
    policy: str = "ours",
    projects: tuple[Project, ...] = (),
    *,
    defaults: Defaults | None = None,
    look: Callable[[PoolEvent | Instruction, int], None] | None = None,
) -> Played:
    """Replay a trace.

    Args:
        jobs: The requests.
        gpus: How many GPUs the pool has.
        policy: One of `POLICIES`.
        projects: The tree; empty: equal quotas for all projects of the trace.
        defaults: What applies to all requests, but for time limits and idleness.
        look: Called with each pool event and each instruction that follows, in their order, and the time.
    """
    tree = projects or equal(jobs, gpus)
    return Player(jobs, gpus, policy, tree, defaults=defaults, look=look).play()
