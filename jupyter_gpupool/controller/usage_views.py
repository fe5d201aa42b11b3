"""What people see of fair shares: quotas, shares, the ledger and reclaims, as JSON.

Rule 1: amounts leave as GPUs and GPU-seconds, times as seconds.
Rule 2: everybody sees who has, deserves and has used how much; the names and ids of leases see those who may
        reach them, and who else is in a project administrators.
Rule 3: what is borrowed is above a quota; who has none borrows nothing.
Rule 4: the figures are worked out for all who ask within `FRESH_S` while nothing changes; otherwise a look
        at them that costs is not taken again before it has paid off.
"""

from __future__ import annotations

import time
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.lease_views import may_see
from jupyter_gpupool.controller.views import when
from jupyter_gpupool.core.model import ANY, HOUR, WHOLE, Defaults
from jupyter_gpupool.core.tree import CPUS, MEMORY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_gpupool.controller.auth import Person
    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.core.ledger import Reclaim, Victim
    from jupyter_gpupool.core.model import Amounts, Project

#: For so many seconds the same figures serve everybody who asks, while nothing changes.
FRESH_S = 1.0
#: So many times its cost passes before the next look.
REST = 4
#: Thousandths of a GPU times milliseconds, in a GPU-second.
_SECOND = WHOLE * 1000
#: Defaults that are no times.
_NUMBERS = ("idle_warnings", "reservations", "ageing_most", "passing", "model_weights")


class Figures:
    """The pool's figures as last worked out."""

    def __init__(self) -> None:
        #: Until when they are good: whatever happens, and while nothing does.
        self._good_until = self._fresh_until = 0.0
        self._version = -1
        self._projects: Any = None
        self._figures: dict[str, Any] = {}

    def look(self, face: ControllerFace) -> dict[str, Any]:
        """Return the figures; another configuration is seen at once."""
        now, pool = time.monotonic(), face.pool
        until = self._fresh_until if pool.version == self._version else self._good_until
        if now >= until or self._projects is not pool.projects:
            self._version, self._projects = pool.version, pool.projects
            self._figures = pool.usage(face.clock.now())
            end = time.monotonic()
            self._good_until, self._fresh_until = end + REST * (end - now), end + FRESH_S
        return self._figures


def figures(memory: dict[str, Any], face: ControllerFace) -> dict[str, Any]:
    """Return the pool's figures; `memory` is that of the server's handlers."""
    found: Figures = memory.setdefault("figures", Figures())
    return found.look(face)


# ------------------------------------------------------------------------------------------------ projects


def projects(face: ControllerFace, person: Person, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of projects with how each stands, and the pool's defaults."""
    rows = {each["project"]: each for each in found["projects"]}
    return {
        "projects": [_project(each, person, rows[each.name]) for each in face.pool.projects],
        "defaults": defaults(face.pool.defaults),
    }


def _project(project: Project, person: Person, row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {
        "name": project.name,
        "parent": project.parent,
        "quota": amounts(project.quota),
        "limit": amounts(project.limit),
        "weight": project.weight,
        "tier": project.tier,
        "default_time": project.default_time / 1000,
        "max_time": project.max_time / 1000,
        "held": _by_model(row["held"]),
        **standing(row),
    }
    if person.admin:
        users = [
            {
                "name": each.name,
                "quota": amounts(each.quota),
                "limit": amounts(each.limit),
                "weight": each.weight,
                "tier": each.tier,
            }
            for each in project.users
        ]
        shown |= {"users": users, "members": list(project.members)}
    return shown


def amounts(given: Amounts) -> dict[str, float]:
    """Return amounts as GPUs by model, CPUs, and bytes of memory."""
    return {key: amount if key == MEMORY else amount / WHOLE for key, amount in given}


def _by_model(given: Mapping[str, int]) -> dict[str, float]:
    """Return thousandths as GPUs by model, without their sum and what is no GPU."""
    apart = (ANY, CPUS, MEMORY)
    return {key: milli / WHOLE for key, milli in sorted(given.items()) if key not in apart and milli}


def defaults(given: Defaults) -> dict[str, Any]:
    """Return the pool's defaults, as they can be set."""
    found: dict[str, Any] = {}
    for each in fields_of(Defaults):
        value = getattr(given, each.name)
        found[each.name] = value if each.name in _NUMBERS else value / 1000
    return {**found, "model_weights": dict(given.model_weights)}


def standing(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a project or user stands."""
    has, sure = row["held"].get(ANY, 0), row["sure"]
    return {
        "gpus": has / WHOLE,
        "waiting": row["waiting"],
        "demand": row["demand"].get(ANY, 0) / WHOLE,
        "guaranteed": sure / WHOLE,
        "deserved": row["share"][ANY] / WHOLE,
        "deserved_by_model": _by_model(row["share"]),
        "served": row["served"][ANY] / WHOLE,
        "borrowed": (max(0, has - sure) if sure else 0) / WHOLE,
        "used": seconds(row["used"]),
        "decayed": seconds(row["decayed"]),
        "idle": seconds(row["idle"]),
        "lost": seconds(row["lost"]),
        "charged": seconds(row["charged"]),
    }


def seconds(amount: int) -> float:
    """Return thousandths of a GPU times milliseconds as GPU-seconds."""
    return round(amount / _SECOND, 1)


# ------------------------------------------------------------------------------------------ usage, reclaims


def usage(face: ControllerFace, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return how everybody stands, and the ledger."""
    counts: dict[tuple[str, str], int] = {}
    for record in face.pool.leases.values():
        if record.charges:
            key = (record.request.project, record.request.user)
            counts[key] = counts.get(key, 0) + 1
    users = sorted(found["users"], key=lambda row: (row["project"], row["user"]))
    return {
        "usage": [_user(row, counts) for row in users],
        "accounts": [_account(row) for row in found["accounts"]],
        "reclaims": found["reclaims"],
    }


def _user(row: Mapping[str, Any], counts: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    return {
        "project": row["project"],
        "user": row["user"],
        "leases": counts.get((row["project"], row["user"]), 0),
        "quota": amounts(tuple(row["quota"].items())),
        "limit": amounts(tuple(row["limit"].items())),
        "weight": row["weight"],
        "tier": row["tier"],
        **standing(row),
    }


def _account(row: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: row[name] for name in ("project", "user", "model", "kind")}
    return {**named, **{name: seconds(row[name]) for name in ("used", "decayed", "idle", "lost")}}


def history(face: ControllerFace, user: str) -> dict[str, Any]:
    """Return what a person used by the hour: hours in which nothing was used are left out."""
    now = face.clock.now()
    return {
        "user": user,
        "now": face.clock.wall(now),
        "hours": [
            {"time": face.clock.wall(hour * HOUR), "used": seconds(used), "idle": seconds(idle)}
            for hour, used, idle in face.pool.history(user, now)
        ],
    }


def reclaims(face: ControllerFace, person: Person, most: int) -> dict[str, Any]:
    """Return the latest reclaims, the last one first: who got it, from whom, and by which numbers."""
    reach = face.store.shared_to(person.user)
    ledger = face.pool.ledger

    def named(ident: str) -> dict[str, str]:
        record = face.pool.leases.get(ident)
        if record is None or not may_see(record, person, reach):
            return {"lease": "", "lease_name": ""}
        return {"lease": ident, "lease_name": record.request.name}

    latest = ledger.reclaims[::-1][:most]
    return {"reclaims": [_reclaim(face, each, named) for each in latest], "count": ledger.count}


def _reclaim(face: ControllerFace, each: Reclaim, named: Any) -> dict[str, Any]:
    return {
        "number": each.number,
        "time": when(face, each.now),
        **named(each.lease),
        "user": each.user,
        "project": each.project,
        "gpus": each.milli / WHOLE,
        "served": each.served / WHOLE,
        "deserved": each.share / WHOLE,
        "over_before": list(each.before),
        "over_after": list(each.after),
        "cost": seconds(each.cost),
        "victims": [_victim(victim, named) for victim in each.victims],
        "sentence": sentence(each),
    }


def _victim(each: Victim, named: Any) -> dict[str, Any]:
    return {
        **named(each.lease),
        "user": each.user,
        "project": each.project,
        "slices": each.slices,
        "gpus": each.milli / WHOLE,
        "whole": each.whole,
        "ran": each.ran / 1000,
        "of": each.of,
        "served": each.served / WHOLE,
        "deserved": each.share / WHOLE,
    }


def sentence(each: Reclaim) -> str:
    """Say a reclaim in one sentence."""
    given = ", ".join(_given(victim) for victim in each.victims)
    return (
        f"{each.user} ({each.project}) gets {each.milli / WHOLE:g} GPUs, and is then served"
        f" {each.served / WHOLE:g} of {each.share / WHOLE:g} deserved; back give {given}."
    )


def _given(victim: Victim) -> str:
    """Say what one lease gives back, and by which numbers."""
    amount = (
        f"{victim.milli / WHOLE:g} {'(all of a lease)' if victim.whole else 'of surplus'} of {victim.user}"
    )
    if not victim.of:  # written down before these numbers were kept
        return amount
    return f"{amount} ({victim.of} was served {victim.served / WHOLE:g} of {victim.share / WHOLE:g} deserved)"
