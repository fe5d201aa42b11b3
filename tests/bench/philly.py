"""Bench `philly`: 109 days of a real cluster, 82,247 requests of 15 tenants, under three policies.

The trace (tests/data) goes through the product's own `core.pool` in virtual time, every tenant with the same
quota. Capacity is a part of the mean demand, 374 GPUs: 0.75 makes 281, 1.2 makes 449. What each figure means
stands in `jupyter_gpupool.replay_figures`; `share_violations` are counted by `tests.share_checker`, which
sees pool events and instructions only. Times are of the processor, without the checker's own.

    python -m tests.bench.philly [--policy ours|fifo|quota-only|all] [--capacity 0.75] [--trace FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool import replay
from jupyter_gpupool.replay_figures import figures
from tests.share_checker import Checker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jupyter_gpupool.core.model import Instruction, PoolEvent
    from jupyter_gpupool.replay import Job

TRACE = Path(__file__).parents[1] / "data" / "philly.csv.gz"
#: `--quick` plays so many of the first requests, on GPUs by their own mean demand.
QUICK = 6000
#: So many things that have happened are shown to the checker together.
HEARD = 10_000
#: What else a result has besides the figures of a replay.
KEYS = (
    *("mean_wait_s", "p99_wait_s", "worst_rho", "unfair_percent", "jain", "utilisation", "share_violations"),
    *("reclaims", "work_lost_gpu_s", "gangs_started", "gangs_ended", "gangs_total"),
    *("requests", "finished", "refused", "suspended", "share_error_percent", "p50_wait_s", "mean_rho"),
    "replay_s",
)


class Watch:
    """Lets a checker see everything, and knows how long that took."""

    def __init__(self, checker: Checker) -> None:
        """Watch for a checker."""
        self.checker = checker
        self.seconds = 0.0
        self.heard: list[tuple[PoolEvent | Instruction, int]] = []

    def __call__(self, item: PoolEvent | Instruction, now: int) -> None:
        """Take in what has happened; it is passed on many at a time, as a look at the clock costs too."""
        self.heard.append((item, now))
        if len(self.heard) >= HEARD:
            self.judge()

    def judge(self) -> None:
        """Let the checker see what has happened since it was last asked."""
        begin = time.thread_time()
        for item, now in self.heard:
            self.checker(item, now)
        self.heard.clear()
        self.seconds += time.thread_time() - begin


def capacity(jobs: Sequence[Job], part: float) -> int:
    """So many GPUs are this part of the mean demand."""
    work = sum(job.gpus * job.duration for job in jobs)
    return max(1, round(part * work / max(1, *(job.arrival for job in jobs))))


def run(jobs: Sequence[Job], gpus: int, policy: str) -> dict[str, Any]:
    """Play the trace under a policy."""
    projects = replay.equal(jobs, gpus)
    quota = gpus // len(projects)
    watch = Watch(Checker(gpus, quota, {job.id: job.project for job in jobs}))
    begin = time.thread_time()
    played = replay.play(jobs, gpus, policy, look=watch)
    watch.judge()
    seconds = time.thread_time() - begin - watch.seconds
    found = asdict(figures(played, projects))
    found["share_violations"] = len(watch.checker.violations)
    found["replay_s"] = round(seconds, 1)
    return {key: found[key] for key in KEYS}


def main() -> None:
    """Run the bench; the last line on stdout is its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", choices=[*replay.POLICIES, "all"], default="all")
    parser.add_argument("--capacity", type=float, default=0.75, help="GPUs, as a part of the mean demand")
    parser.add_argument("--trace", type=Path, default=TRACE, help="CSV, maybe compressed")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} requests only")
    options = parser.parse_args()
    jobs = replay.read(options.trace)
    jobs = jobs[:QUICK] if options.quick else jobs
    gpus = capacity(jobs, options.capacity)
    print(f"{len(jobs)} requests, {gpus} GPUs", flush=True)
    policies = replay.POLICIES if options.policy == "all" else (options.policy,)
    results = {}
    for policy in policies:
        results[policy] = run(jobs, gpus, policy)
        print(policy, json.dumps(results[policy]), flush=True)
    seconds = max(each["replay_s"] for each in results.values())
    print(json.dumps({"replay_s": seconds, "requests": len(jobs), "gpus": gpus, "policies": results}))


if __name__ == "__main__":
    main()
