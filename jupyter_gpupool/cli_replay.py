"""`jupyter gpupool replay` and `trace`: what other quotas would have done to the same requests.

Rule 1: the very rules of a pool decide (`replay`), in virtual time; no pool needs to run.
Rule 2: nothing here changes a pool: a trace is read, or written from the journal of the pool on this machine.
"""

from __future__ import annotations

import csv
import re
from argparse import ArgumentTypeError
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool import tables
from jupyter_gpupool._http import PoolError
from jupyter_gpupool.cli_pool import journal, option, projects_file
from jupyter_gpupool.commands import Command, Misuse
from jupyter_gpupool.core.model import ANY, WHOLE, Project, Reason, UserShare

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Mapping, Sequence

    from jupyter_gpupool.replay import Job

POLICIES = ("ours", "fifo", "quota-only")
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no number of GPUs: give one of at least 1")
    return int(text)


def _span(text: str) -> int:
    found = re.fullmatch(r"(\d+)([mhdw])", text)
    if not found or not int(found[1]):
        raise ArgumentTypeError(f"{text!r} is no time: write 30d, 12h or 4w")
    return int(found[1]) * _UNITS[found[2]]


# --------------------------------------------------------------------------------------------------- replay


def _replay(_: None, args: Namespace) -> Any:
    from jupyter_gpupool import replay
    from jupyter_gpupool.replay_figures import figures

    try:
        jobs = replay.read(Path(args.trace))
    except replay.TraceError as error:
        raise Misuse(str(error)) from error
    said = _configuration(args.projects) if args.projects else {}
    projects = _checked(args.projects, said["projects"], jobs, args.gpus) if "projects" in said else ()
    projects = projects or replay.equal(jobs, args.gpus)
    found = {}
    for policy in POLICIES if args.policy == "all" else (args.policy,):
        played = replay.play(jobs, args.gpus, policy, projects, defaults=said.get("defaults"))
        found[policy] = asdict(figures(played, projects))
    return Compared(args.gpus, found)


def _configuration(file: str) -> dict[str, Any]:
    """The projects and defaults of a file, as far as it has them.

    Raises:
        Misuse: It cannot be read, or says what cannot be.
    """
    from jupyter_gpupool.controller.tree import parse_config

    found, wrong = parse_config(projects_file(file))
    if wrong:
        raise Misuse(f"{file}: {wrong[0].sentence} {wrong[0].advice}".strip())
    return found


def _checked(file: str, projects: Sequence[Project], jobs: Sequence[Job], gpus: int) -> tuple[Project, ...]:
    """The projects, for GPUs that are all alike.

    Raises:
        Misuse: They do not add up, or the trace has others.
    """
    from jupyter_gpupool.core import quotas

    alike = tuple(_alike(each) for each in projects)
    wrong = quotas.check(alike, {ANY: gpus * WHOLE})
    if wrong:
        raise Misuse(f"{file}: {wrong[0].sentence} {wrong[0].advice}".strip())
    missing = sorted({job.project for job in jobs} - {each.name for each in alike})
    if missing:
        names = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
        raise Misuse(f"{file} does not have all projects of the trace: add {names}.")
    return alike


def _alike(project: Project) -> Project:
    """A project's numbers without models: a trace does not say which GPUs it was."""
    users = tuple(replace(each, **_plain(each)) for each in project.users)
    return replace(project, users=users, **_plain(project))


def _plain(of: Project | UserShare) -> dict[str, Any]:
    return {
        name: ((ANY, dict(amounts).get(ANY) or sum(dict(amounts).values())),) if amounts else ()
        for name, amounts in (("quota", of.quota), ("limit", of.limit))
    }


class Compared(dict[str, Any]):
    """The figures of a trace under one policy or several, shown side by side."""

    def __init__(self, gpus: int, policies: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(gpus=gpus, policies=policies)

    def __repr__(self) -> str:
        policies = self["policies"]
        rows = [
            {"what": what, **{policy: say(each) for policy, each in policies.items()}} for what, say in ROWS
        ]
        columns: list[tables.Column] = [("", lambda row: row["what"])]
        columns += [(policy, _cell(policy)) for policy in policies]
        first = next(iter(policies.values()))
        head = f"{first['requests']:,} requests on {self['gpus']} GPUs, in virtual time."
        return "\n".join([head, "", tables.table(columns, rows)])


def _cell(policy: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row[policy]


def _time(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: _spell(found[key])


def _spell(seconds: float) -> str:
    """Seconds as people say them.

    >>> _spell(42.4), _spell(600), _spell(90000.0)
    ('42 s', '10.0 min', '25.0 h')
    """
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


#: What is shown of a replay, line by line.
ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...] = (
    ("finished", lambda found: f"{found['finished']:,}"),
    ("never started, or cut off", lambda found: f"{found['refused']:,}"),
    ("mean wait", _time("mean_wait_s")),
    ("half wait at most", _time("p50_wait_s")),
    ("99 of 100 wait at most", _time("p99_wait_s")),
    ("utilisation", lambda found: f"{100 * found['utilisation']:.1f} %"),
    ("Jain's index of what was deserved", lambda found: f"{found['jain']:.3f}"),
    ("share error", lambda found: f"{found['share_error_percent']:.1f} %"),
    ("finish-time fairness, mean", lambda found: f"{found['mean_rho']:.2f}"),
    ("finish-time fairness, worst", lambda found: f"{found['worst_rho']:.2f}"),
    ("later than on GPUs of one's own", lambda found: f"{found['unfair_percent']:.2f} %"),
    ("reclaims", lambda found: f"{found['reclaims']:,}"),
    ("GPU hours computed again", lambda found: f"{found['work_lost_gpu_s'] / 3600:.1f}"),
    (
        "gangs of 32 GPUs and more that ended",
        lambda found: f"{found['gangs_ended']} of {found['gangs_total']}",
    ),
)


# ---------------------------------------------------------------------------------------------------- trace


def _trace(_: None, args: Namespace) -> str:
    from jupyter_gpupool.controller.backup import requests_of
    from jupyter_gpupool.controller.store import StoreError

    file = Path(args.file)
    try:
        rows = requests_of(journal(args), args.since)
    except StoreError as error:
        raise PoolError(Reason.STORE_FAILED, str(error)) from error
    if not rows:
        return "Nothing has run on this pool in that time; no file was written."
    try:
        with file.open("x", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            writer.writerow(("timestamp", "duration", "gpus", "project", "user"))
            writer.writerows(_row(each) for each in rows)
    except OSError as error:
        raise Misuse(f"{file} cannot be written: {error.strerror}. Name a new file.") from error
    return f"{file} has {len(rows):,} requests; `jupyter gpupool replay {file} --gpus N` plays them."


def _row(each: Mapping[str, Any]) -> tuple[Any, ...]:
    when = datetime.fromtimestamp(each["time"], UTC).isoformat(timespec="milliseconds")
    gpus = each["milli"] / WHOLE
    whole = int(-(-gpus // 1)) if gpus >= 1 else gpus
    return when, each["seconds"], whole, each["project"], each["user"]


REPLAYS: tuple[Command, ...] = (
    Command(
        name="replay",
        help="Play a trace of requests through the pool's own rules, in virtual time.",
        arguments=(
            option("trace", "CSV: timestamp, duration (s), gpus, maybe project and user; .gz too", "TRACE"),
            option("--gpus", "how many GPUs the pool has", "N", type=_count, required=True),
            option("--projects", "YAML as for set-projects (default: equal quotas)", "FILE"),
            option(
                "--policy",
                f"{', '.join(POLICIES)}, or all beside each other (default: ours)",
                "POLICY",
                choices=[*POLICIES, "all"],
                default="ours",
            ),
        ),
        run=_replay,
        pool=False,
    ),
    Command(
        name="trace",
        help="Write what has run on the pool on this machine to a new file, as a trace for replay.",
        arguments=(
            option("file", "the new file, CSV", "FILE"),
            option(
                "--since", "30d, 12h, 4w back from now (default: 30d)", "TIME", type=_span, default=2_592_000
            ),
            option("--dir", "the controller's folder (default: that of the pool on this machine)", "PATH"),
        ),
        run=_trace,
        pool=False,
    ),
)
