"""What a replay has shown: waits, utilisation, and how fairly the pool was shared.

Rule 1: a wait is finish - arrival - run time, so that suspensions count.
Rule 2: rho (finish-time fairness, Mahajan et al., NSDI 2020) sets the time from arrival to finish against
        what it would have been had the request's project GPUs of its own: all, by the number of projects;
        first come, first served, and nobody passes. Requests wider than that are left out.
Rule 3: a request was treated unfairly when it took longer than 1.05 times that, plus the min run time and the
        grace of a reclaim, which even a request within its share may have to wait.
Rule 4: utilisation is work done, without what was computed again, up to the last arrival: what is left then
        runs in a pool that nobody else wants.
Rule 5: shares are looked at `LOOKS` times between the first and the last arrival. A project's part is what it
        was served of what it deserved, nothing more; Jain's index (Jain, Chiu and Hawe, 1984) is of these
        parts, the share error what is missing of all that was deserved.

Not its business: how the requests came to run (`replay`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY, SECOND, WHOLE, Defaults
from jupyter_gpupool.core.shares import Decay
from jupyter_gpupool.core.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jupyter_gpupool.core.model import Project
    from jupyter_gpupool.replay import Job, Played

#: How often shares are looked at.
LOOKS = 2000
#: A request is late when it takes longer than so many hundredths of what it would take on GPUs of its own.
LATE_PERCENT = 105
#: Requests of so many GPUs are gangs.
GANG = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one policy did with a trace. The names are those of the bench `philly`."""

    requests: int
    finished: int
    #: Never started, or ended before their work was done: too wide for their quota, say.
    refused: int
    mean_wait_s: float
    p50_wait_s: float
    p99_wait_s: float
    #: Worst and mean finish-time fairness; how many of a hundred requests were treated unfairly.
    worst_rho: float
    mean_rho: float
    unfair_percent: float
    jain: float
    share_error_percent: float
    utilisation: float
    reclaims: int
    suspended: int
    #: GPU-seconds computed again.
    work_lost_gpu_s: float
    gangs_total: int
    gangs_started: int
    gangs_ended: int


def figures(played: Played, projects: Sequence[Project]) -> Figures:
    """Work out the figures of a replay; `projects` say what each deserves, whatever the policy was."""
    jobs = played.jobs
    done = [job for job in jobs if job.finished >= 0]
    waits = sorted(job.finished - job.arrival - job.duration for job in done)
    names = {job.project for job in jobs}
    alone = finishes(jobs, played.gpus // max(1, len(names)))
    rhos = [rho(job, alone[job.id]) for job in done if job.id in alone]
    late = sum(unfair(job, alone[job.id]) for job in jobs if job.id in alone)
    parts, error = shares(jobs, played.gpus, projects)
    gangs = [job for job in jobs if job.gpus >= GANG]
    return Figures(
        requests=len(jobs),
        finished=len(done),
        refused=sum(job.refused for job in jobs),
        mean_wait_s=round(mean(waits) / SECOND, 1),
        p50_wait_s=round(percentile(waits, 50) / SECOND, 1),
        p99_wait_s=round(percentile(waits, 99) / SECOND, 1),
        worst_rho=round(max(rhos, default=0.0), 3),
        mean_rho=round(mean(rhos), 3),
        unfair_percent=round(100 * late / max(1, len(alone)), 3),
        jain=round(jain(parts), 4),
        share_error_percent=round(error, 3),
        utilisation=round(utilisation(played), 4),
        reclaims=played.pool.ledger.count,
        suspended=sum(job.suspended for job in jobs),
        work_lost_gpu_s=round(played.lost / WHOLE / SECOND, 1),
        gangs_total=len(gangs),
        gangs_started=sum(job.started >= 0 for job in gangs),
        gangs_ended=sum(job.finished >= 0 for job in gangs),
    )


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def percentile(ranked: Sequence[float], percent: int) -> float:
    """The value that so many of a hundred do not pass; 0 of nothing."""
    return ranked[min(len(ranked) - 1, len(ranked) * percent // 100)] if ranked else 0.0


def jain(parts: Sequence[float]) -> float:
    """Jain's index of fairness: 1 when all parts are equal, 1/n when one has everything.

    Example:
        >>> jain([1.0, 1.0]), jain([1.0, 0.0])
        (1.0, 0.5)
    """
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 1.0


def finishes(jobs: Iterable[Job], gpus: int) -> dict[str, int]:
    """When each request would end if its project had so many GPUs of its own; wider ones are left out."""
    lines: dict[str, list[Job]] = defaultdict(list)
    for job in sorted(jobs, key=lambda each: (each.arrival, each.id)):
        if job.size <= gpus * WHOLE:
            lines[job.project].append(job)
    found: dict[str, int] = {}
    for line in lines.values():
        found.update(_in_turn(line, gpus))
    return found


def _in_turn(line: Iterable[Job], gpus: int) -> dict[str, int]:
    """First come, first served on some GPUs; nobody passes."""
    free, now = gpus * WHOLE, 0
    running: list[tuple[int, int]] = []
    found: dict[str, int] = {}
    for job in line:
        now = max(now, job.arrival)
        while free < job.size or (running and running[0][0] <= now):
            end, count = heapq.heappop(running)
            now, free = max(now, end), free + count
        free -= job.size
        found[job.id] = now + job.duration
        heapq.heappush(running, (now + job.duration, job.size))
    return found


def rho(job: Job, alone: int) -> float:
    """Finish-time fairness of a request that would have finished at `alone` by itself."""
    return (job.finished - job.arrival) / (alone - job.arrival)


def unfair(job: Job, alone: int) -> bool:
    """Whether a request took longer than sharing excuses; one that never finished did."""
    defaults = Defaults()
    least = (alone - job.arrival) * LATE_PERCENT // 100 + defaults.min_run + defaults.grace
    return job.finished < 0 or job.finished - job.arrival > least


def utilisation(played: Played) -> float:
    """Work done up to the last arrival, as a part of what all GPUs could do."""
    until = max((job.arrival for job in played.jobs), default=0)
    done = sum(job.size * max(0, min(end, until) - begin) for job in played.jobs for begin, end in job.runs)
    return (done - played.lost) / (played.gpus * WHOLE * until) if until else 0.0


def shares(jobs: Sequence[Job], gpus: int, projects: Sequence[Project]) -> tuple[list[float], float]:
    """What each project was served of what it deserved; how many of a hundred are missing of the whole."""
    until = max((job.arrival for job in jobs), default=0)
    tree = Tree(tuple(projects), Decay(Defaults().half_life))
    tree.capacity({ANY: gpus * WHOLE})
    served: dict[str, int] = defaultdict(int)
    deserved: dict[str, int] = defaultdict(int)
    got: dict[str, int] = defaultdict(int)
    names = sorted({job.project for job in jobs})
    changes, at = _changes(jobs), 0
    for look in range(1, LOOKS + 1):
        when = until * look // LOOKS
        while at < len(changes) and changes[at][0] < when:
            _, _, job, kind, sign = changes[at]
            at += 1
            if kind == "run":
                served[job.project] += sign * job.size
            else:
                leaf = tree.user(job.project, job.user)
                tree.ask(leaf, job.id, ((ANY, job.size),) if sign > 0 else ())
        tree.refresh()
        for name in names:
            share = tree.project(name).share[ANY]
            deserved[name] += share
            got[name] += min(share, served[name])
    parts = [got[name] / deserved[name] for name in names if deserved[name]]
    whole = sum(deserved.values())
    return parts, 100 * (1 - sum(got.values()) / whole) if whole else 0.0


def _changes(jobs: Iterable[Job]) -> list[tuple[int, str, Job, str, int]]:
    """When requests came and ended ("wish"), and when they ran and stopped ("run"), in order."""
    found: list[tuple[int, str, Job, str, int]] = []
    for job in jobs:
        if job.started < 0 and job.refused:
            continue
        found.append((job.arrival, job.id, job, "wish", 1))
        if job.finished >= 0:
            found.append((job.finished, job.id, job, "wish", -1))
        for begin, end in job.runs:
            found += [(begin, job.id, job, "run", 1), (end, job.id, job, "run", -1)]
    found.sort(key=lambda each: (each[0], each[1], each[4]))
    return found
