"""The tree of projects and the pool's defaults as an administrator writes them, in JSON or in a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields
from jupyter_gpupool.controller.fields import Field, Wrong, shown
from jupyter_gpupool.controller.parse import read_fields
from jupyter_gpupool.core.model import (
    ANY,
    HOUR,
    WHOLE,
    Amounts,
    Defaults,
    Project,
    Reason,
    Refusal,
    UserShare,
)
from jupyter_gpupool.core.tree import CPUS, MEMORY

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The most projects, and the most users with numbers of their own in one of them.
MOST = 10_000
PROJECT_NAME = re.compile(r"[^\s/*@][^/\x00-\x1f\x7f]{0,127}")


def _name(value: Any) -> str:
    if not isinstance(value, str) or not PROJECT_NAME.fullmatch(value):
        raise Wrong(
            f"{shown(value)} cannot be the name of a project.", 'Use up to 128 characters, no "/" among them.'
        )
    return value


def _amounts(what: str, *, host: bool = False) -> Any:
    """Make the reader of amounts: GPUs by model, `*` for all models together; a number is `*`.

    Args:
        what: The field's name.
        host: Whether CPUs (`cpus`) and memory (`memory`) of the host are amounts too.
    """

    def read(value: Any) -> Amounts:
        by_model = {ANY: value} if isinstance(value, int | float) and not isinstance(value, bool) else value
        if not isinstance(by_model, dict) or len(by_model) > MOST:
            raise Wrong(
                f"{what}={shown(value)} is not GPUs by model.", f'Give {what}={{"*": 8}}, or one number.'
            )
        return tuple(sorted((str(key), _amount(what, key, number, host)) for key, number in by_model.items()))

    return read


def _amount(what: str, key: Any, value: Any, host: bool) -> int:  # noqa: FBT001 - private
    if key not in (CPUS, MEMORY):
        return _milli(what, value)
    if not host:
        raise Wrong(
            f"{what}: {key} of the host cannot be guaranteed.", "Leave it out, or give it as a limit."
        )
    return fields.size(value) if key == MEMORY else fields.cpus(value)


def _milli(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= fields.MOST:
        raise Wrong(
            f"{what}: {shown(value)} is not a number of GPUs.", f"Give numbers from 0 to {fields.MOST}."
        )
    return round(value * WHOLE)


def _time(value: Any) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else fields.duration(value)


_AMOUNTS = {"type": ["object", "number"], "additionalProperties": {"type": "number"}}
_TIME = {"type": ["string", "number"]}
_NUMBERS: dict[str, Field] = {
    "quota": Field(_amounts("quota"), _AMOUNTS, "Guaranteed GPUs, by model; * for all models together."),
    "limit": Field(
        _amounts("limit", host=True),
        {**_AMOUNTS, "additionalProperties": {"type": ["number", "string"]}},
        "GPUs that are never passed, by model; cpus and memory of hosts as well.",
    ),
    "weight": Field(fields.whole("weight", 1, 1_000_000), {"type": "integer"}, "Its part of the surplus."),
    "tier": Field(fields.whole("tier", -1000, 1000), {"type": "integer"}, "Who comes first in the surplus."),
}
USER: dict[str, Field] = {
    "name": Field(fields.text("name", 1, 128), {"type": "string"}, "The user."),
    **_NUMBERS,
}


def _users(value: Any) -> tuple[UserShare, ...]:
    if not isinstance(value, list) or len(value) > MOST:
        raise Wrong(
            f"users={shown(value)} is not a list of users.", 'Give users=[{"name": "ann", "quota": 2}].'
        )
    return tuple(UserShare(**_read(each, USER)) for each in value)


def _read(value: Any, table: Mapping[str, Field]) -> dict[str, Any]:
    said, wrong = read_fields(value, table)
    if wrong:
        raise Wrong(wrong[0].sentence, wrong[0].advice)
    if "name" not in said:
        raise Wrong(f"{shown(value)} has no name.", "Give each a name.")
    return said


PROJECT: dict[str, Field] = {
    "name": Field(_name, {"type": "string"}, "Unique in the pool."),
    "parent": Field(
        fields.text("parent", 0, 128), {"type": "string"}, "The project above; empty at the top."
    ),
    **_NUMBERS,
    "users": Field(
        _users, {"type": "array", "items": {"type": "object"}}, "Users with numbers of their own."
    ),
    "members": Field(
        fields.texts("members", MOST), {"type": "array", "items": {"type": "string"}}, "* for everybody."
    ),
    "default_time": Field(_time, _TIME, "Time limit of its leases where none is asked for; 0: the pool's."),
    "max_time": Field(_time, _TIME, "The longest time limit that may be asked for; 0: the pool's."),
}


def _weights(value: Any) -> Amounts:
    if not isinstance(value, dict) or len(value) > MOST:
        raise Wrong(
            f"model_weights={shown(value)} is not weights by model.", 'Give model_weights={"H100-80GB": 80}.'
        )
    read = fields.whole("A weight", 1, 1_000_000)
    return tuple(sorted((str(model), read(weight)) for model, weight in value.items()))


def _wait(about: str) -> Field:
    return Field(_time, _TIME, about)


def _span(about: str) -> Field:
    return Field(fields.duration, _TIME, about)


def _count(name: str, least: int, most: int, about: str) -> Field:
    return Field(fields.whole(name, least, most), {"type": "integer"}, about)


#: The numbers that hold for the whole pool; docs/defaults.md says of each what it is without and why.
DEFAULTS: dict[str, Field] = {
    "half_life": _span("After so long usage counts half."),
    "grace": _wait("Between the notice of a reclaim and its deadline."),
    "min_run": _wait("No lease is taken from before it has run so long, nor twice within it."),
    "time_limit": _span("Time limit of leases where neither the request nor the project says one."),
    "max_time": _span("The longest time limit that may be asked for."),
    "idle_timeout": Field(
        fields.idle,
        {"type": ["string", "number", "boolean"]},
        'After so long without work a lease counts as idle; or "never".',
    ),
    "idle_warnings": _count("idle_warnings", 0, 10, "Warnings before an idle lease may be taken."),
    "idle_warning_gap": _wait("Between the steps of the idle rule."),
    "charged_ahead": _wait("What starts is charged for so long at once."),
    "model_weights": Field(
        _weights,
        {"type": "object", "additionalProperties": {"type": "integer"}},
        "How fast usage runs on a GPU, by model; where none is said: its memory in GB.",
    ),
    "reservations": _count("reservations", 0, 1000, "So many blocked heads of the queue get a reservation."),
    "passing": Field(fields.flag("passing"), {"type": "boolean"}, "Small requests may pass a blocked head."),
    "node_silence": _span("A node that says nothing for so long is lost."),
    "drain_deadline": _span("How long a drain for health or maintenance may take."),
    "hold": _wait("How long freed parts are held for whom they were freed."),
    "ageing_step": _span("A step of priority is worth so long of waiting."),
    "ageing_most": _count("ageing_most", 0, 1000, "So many steps of priority count at most."),
}


#: What an administrator's body holds.
BODY: dict[str, Field] = {
    "projects": Field(
        lambda value: value,
        {"type": "array", "items": {"type": "object"}},
        "The whole tree. Default: it stays as it is.",
    ),
    "defaults": Field(
        lambda value: value,
        {"type": "object"},
        "Numbers for the whole pool; what is not named is as built in. Default: they stay as they are.",
    ),
}


def parse_config(body: Any) -> tuple[dict[str, Any], list[Refusal]]:
    """Read a configuration: `projects` and `defaults` as far as they are said, or what is wrong.

    Whether quotas add up the core says.
    """
    said, wrong = read_fields(body, BODY)
    found: dict[str, Any] = {}
    if not said and not wrong:
        sentence = "Neither projects nor defaults are given."
        wrong = [Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, advice="Give one of them.")]
    if "projects" in said:
        found["projects"], more = _projects(said["projects"])
        wrong += more
    if "defaults" in said:
        found["defaults"], more = _defaults(said["defaults"])
        wrong += more
    return (found, []) if not wrong else ({}, wrong)


def _defaults(value: Any) -> tuple[Defaults, list[Refusal]]:
    numbers, wrong = read_fields(value, DEFAULTS, "defaults.")
    found = Defaults(**numbers)
    if found.time_limit > found.max_time:
        limit, most = found.time_limit / HOUR, found.max_time / HOUR
        sentence = f"A time limit of {limit:g} h for all is more than the {most:g} h that may be asked for."
        advice = "Lower time_limit, or raise max_time."
        wrong.append(
            Refusal(reason=Reason.TIME_LIMIT, sentence=sentence, advice=advice, field="defaults.time_limit")
        )
    return found, wrong


def _projects(many: Any) -> tuple[tuple[Project, ...], list[Refusal]]:
    if not isinstance(many, list) or not 0 < len(many) <= MOST:
        sentence = f"projects is not a list of 1 to {MOST} projects."
        return (), [Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, field="projects")]
    found: list[Project] = []
    wrong: list[Refusal] = []
    for number, each in enumerate(many):
        try:
            found.append(Project(**_read(each, PROJECT)))
        except Wrong as no:
            field = f"projects[{number}]"
            wrong.append(Refusal(reason=no.reason, sentence=no.sentence, advice=no.advice, field=field))
    return tuple(found), wrong
