"""The tree of projects as an administrator writes it, in JSON or in a configuration file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields
from jupyter_gpupool.controller.fields import Field, Wrong, shown
from jupyter_gpupool.controller.parse import read_fields
from jupyter_gpupool.core.model import ANY, WHOLE, Amounts, Project, Reason, Refusal, UserShare

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


def _amounts(what: str) -> Any:
    """Make the reader of amounts: GPUs by model, `*` for all models together; a number is `*`."""

    def read(value: Any) -> Amounts:
        by_model = {ANY: value} if isinstance(value, int | float) and not isinstance(value, bool) else value
        if not isinstance(by_model, dict) or len(by_model) > MOST:
            raise Wrong(
                f"{what}={shown(value)} is not GPUs by model.", f'Give {what}={{"*": 8}}, or one number.'
            )
        return tuple(sorted((str(model), _milli(what, number)) for model, number in by_model.items()))

    return read


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
    "limit": Field(_amounts("limit"), _AMOUNTS, "GPUs that are never passed."),
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
#: What an administrator's body holds.
BODY: dict[str, Field] = {
    "projects": Field(lambda value: value, {"type": "array", "items": {"type": "object"}}, "The whole tree."),
}


def parse_projects(body: Any) -> tuple[tuple[Project, ...], list[Refusal]]:
    """Read a tree of projects: the projects, or what is wrong. Whether they add up the core says."""
    said, wrong = read_fields(body, BODY)
    many = said.get("projects")
    if wrong:
        return (), wrong
    if not isinstance(many, list) or not 0 < len(many) <= MOST:
        sentence = f"projects is not a list of 1 to {MOST} projects."
        return (), [Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, field="projects")]
    found: list[Project] = []
    for number, each in enumerate(many):
        try:
            found.append(Project(**_read(each, PROJECT)))
        except Wrong as no:
            field = f"projects[{number}]"
            wrong.append(Refusal(reason=no.reason, sentence=no.sentence, advice=no.advice, field=field))
    return (tuple(found), []) if not wrong else ((), wrong)
