"""Routes that change the pool, and those by which people and agents get in."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields, usage_views, views
from jupyter_gpupool.controller.acquaintances import no_account
from jupyter_gpupool.controller.auth import ONCE_AGE, SCOPES, valid_user
from jupyter_gpupool.controller.fields import Field, shown
from jupyter_gpupool.controller.lease_views import is_over
from jupyter_gpupool.controller.parse import read_fields
from jupyter_gpupool.controller.problems import Problem, Trouble
from jupyter_gpupool.controller.router import Answer, Call, Route, accepted, cause
from jupyter_gpupool.controller.tree import parse_config
from jupyter_gpupool.core.model import (
    ConfigChanged,
    ConsolidationAsked,
    Cordoned,
    LeaseRekeyed,
    Reason,
    Uncordoned,
)

if TYPE_CHECKING:
    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.core.model import PoolEvent
    from jupyter_gpupool.core.pool import Pool
    from jupyter_gpupool.core.state import DeviceRecord, Lease

#: The common name of an agent's certificate holds so much of it.
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
#: An XID as the driver numbers them.
MOST_XID = 1000
#: After so many seconds the controller ends, so that the answer is out.
STOP_S = 0.2

ACTIONS = ("cordon", "drain", "uncordon", "undrain", "retire", "drill", "undrill")
#: How what takes something out is said afterwards.
DONE = {"cordon": "cordoned", "drain": "drained", "retire": "retired"}
HEALTH: dict[str, Field] = {
    "action": Field(fields.one_of("action", [*ACTIONS]), {"enum": [*ACTIONS]}, "What to do."),
    "why": Field(fields.text("why", 0, 500), {"type": "string"}, "For everybody to read."),
    "deadline": Field(
        fields.duration, {"type": ["string", "number"]}, "Of a drain; default: the pool's, to retire a day."
    ),
    "xid": Field(fields.whole("xid", 1, MOST_XID), {"type": "integer"}, "Of a drill; default: 79."),
}
KINDS = ("lasting", "login", "agent")
TOKEN: dict[str, Field] = {
    "kind": Field(
        fields.one_of("kind", [*KINDS]),
        {"enum": [*KINDS]},
        "A token to keep; or one that works once, in a line for a person's login or for an agent.",
    ),
    "user": Field(fields.text("user", 1, 128), {"type": "string"}, "For whom; default: oneself."),
    "scopes": Field(fields.texts("scopes", 3), {"type": "array", "items": {"enum": [*SCOPES]}}, "What for."),
    "groups": Field(
        fields.texts("groups", 100), {"type": "array", "items": {"type": "string"}}, "The person's."
    ),
    "expires_in": Field(fields.duration, {"type": ["string", "number"]}, "Default: never; a day for a line."),
    "label": Field(
        fields.text("label", 0, 100), {"type": "string"}, "What it is for, in the list of tokens."
    ),
}
LOGIN: dict[str, Field] = {"token": Field(fields.text("token", 1, 200), {"type": "string"}, "Of the line.")}
_RESTART = Field(
    fields.yes_no("restart"),
    {"enum": ["true", "false"]},
    "Leases whose keys its person has had start anew on new keys; what they compute and hold is lost.",
)
AGENT: dict[str, Field] = {
    **LOGIN,
    "name": Field(fields.text("name", 1, 50), {"type": "string"}, "The node's name in the pool."),
}
CONSOLIDATE: dict[str, Field] = {
    "dry_run": Field(fields.flag("dry_run"), {"type": "boolean"}, "Only say what would move."),
}
STOP: dict[str, Field] = {
    "why": Field(fields.text("why", 0, 500), {"type": "string"}, "For the log."),
    "everything": Field(fields.flag("everything"), {"type": "boolean"}, "End agents and leases too."),
}


def _read(call: Call, table: dict[str, Field], *needed: str) -> dict[str, Any]:
    """Read the body; the fields `needed` must be there."""
    said, wrong = read_fields(call.body, table)
    if wrong:
        raise Problem.refused(wrong)
    for name in needed:
        if name not in said:
            raise Problem(
                Reason.BAD_REQUEST, f"{name} is missing.", f"Give {name}: {table[name].about}", field=name
            )
    return said


# ----------------------------------------------------------------------------------------------- the pool


async def set_projects(call: Call) -> Answer:
    """Put a new tree of projects, or other defaults, in place of the present ones."""
    face = call.controller
    said, wrong = parse_config(call.body)
    if wrong:
        raise Problem.refused(wrong)
    config = {"projects": face.pool.projects, "defaults": face.pool.defaults, **said}
    accepted(call, ConfigChanged(now=face.clock.now(), cause=cause(call), **config))
    found = usage_views.figures(call.memory, face)
    return Answer(usage_views.projects(face, call.asker, found))


async def health(call: Call) -> Answer:
    """Take a device or node out of service or back, or break it for practice."""
    face, said = call.controller, _read(call, HEALTH, "action")
    target, action = resolve(face.pool, call.path["target"]), said["action"]
    if action in ("drill", "undrill"):
        if target not in face.pool.devices:
            raise Problem(
                Reason.BAD_REQUEST, f"A drill is for a device; {target} is a node.", "Name a device."
            )
        failed = await face.drill(target, said.get("xid", 79) if action == "drill" else 0)
        if failed:
            raise Problem(Trouble.NOT_READY, failed, "Try again when its agent is back.")
        return _ordered(face.pool, target)
    accepted(call, _order(call, target, action, said))
    if action != "cordon":
        face.decided(target, fit=action in ("uncordon", "undrain"))
    return _ordered(face.pool, target)


def _order(call: Call, target: str, action: str, said: dict[str, Any]) -> PoolEvent:
    """Write what an administrator has said of a device or node as an event for the pool."""
    why, now = said.get("why", ""), call.controller.clock.now()
    if action not in DONE:
        return Uncordoned(now=now, cause=cause(call), target=target, why=why)
    why = why or f"{DONE[action]} by {call.asker.user}"
    return Cordoned(
        now=now,
        cause=cause(call),
        target=target,
        why=f"retired: {why}" if action == "retire" and said.get("why") else why,
        drain=action != "cordon",
        deadline=said.get("deadline", 0),
        retire=action == "retire",
    )


def _ordered(pool: Pool, target: str) -> Answer:
    """Say what was meant, people write "gpu3" for a device of some node; and what still keeps work off it."""
    if target in pool.nodes:
        return Answer({"target": target, "name": target, "cordoned": pool.nodes[target].cordoned})
    return Answer(
        {"target": target, "name": pool.device_name(target), "cordoned": _cordon(pool, pool.devices[target])}
    )


def _cordon(pool: Pool, record: DeviceRecord) -> str:
    """Say why a device takes no new work: by an order of its own, or by one on its node."""
    return record.cordoned or pool.nodes[record.device.node].cordoned


async def evidence(call: Call) -> Answer:
    """Say what a device's verdict rests on: the rule, the times, the incidents, the last readings."""
    pool = call.controller.pool
    target = resolve(pool, call.path["target"])
    if target not in pool.devices:
        said = f"Verdicts are on devices; {target} is a node."
        raise Problem(Reason.BAD_REQUEST, said, f"Name a device of it, such as {target}/gpu0.")
    record = pool.devices[target]
    found = {
        "device": target,
        "name": pool.device_name(target),
        "verdict": record.verdict.value,
        "sentence": record.sentence,
        "probation": record.probation,
        "cordoned": _cordon(pool, record),
        "evidence": json.loads(record.evidence or "{}"),
    }
    return Answer(found)


def resolve(pool: Pool, target: str) -> str:
    """Return the node's name or the device's UUID that a person means.

    Devices are called by UUID, as "node-1/gpu3", or as "gpu7", counted over the nodes in their order.

    Raises:
        Problem: There is none of that name.
    """
    if target in pool.nodes or target in pool.devices:
        return target
    ordered = sorted(pool.devices.values(), key=lambda each: (each.device.node, each.device.index))
    names = {pool.device_name(each.device.uuid): each.device.uuid for each in ordered}
    names |= {f"gpu{number}": each.device.uuid for number, each in enumerate(ordered)}
    if target not in names:
        raise Problem(
            Trouble.NOT_FOUND,
            f"The pool has no node or device {shown(target)}.",
            f"Its nodes: {', '.join(sorted(pool.nodes)) or 'none yet'}; devices are called node/gpu0.",
        )
    return names[target]


async def consolidate(call: Call) -> Answer:
    """Move small slices together so that whole GPUs come free; with `dry_run` only say which would."""
    said, pool = _read(call, CONSOLIDATE), call.controller.pool
    dry = said.get("dry_run", False)
    view = views.consolidation(pool, dry=dry)
    if not dry:
        accepted(call, ConsolidationAsked(now=call.controller.clock.now(), cause=cause(call)))
    return Answer(view)


async def stop(call: Call) -> Answer:
    """End the controller; leases go on and are found again at its next start, unless everything is to end."""
    said = _read(call, STOP)
    why = said.get("why") or f"stopped by {call.asker.user}"
    end = functools.partial(call.controller.stop, why, everything=said.get("everything", False))
    asyncio.get_running_loop().call_later(STOP_S, end)
    return Answer({"stopping": True}, HTTPStatus.ACCEPTED)


# ------------------------------------------------------------------------------------------------ getting in


async def create_token(call: Call) -> Answer:
    """Make a token, or a line for a login or for an agent; it is shown this once."""
    said = _read(call, TOKEN)
    kind, user = said.get("kind", "lasting"), said.get("user", call.asker.user)
    scopes = said.get("scopes", ("read", "use"))
    tokens, groups = call.controller.tokens, said.get("groups", ())
    _may_create(call, kind, user, scopes, groups)
    expires = said["expires_in"] / 1000 if "expires_in" in said else None
    if kind == "lasting":
        label = said.get("label", "")
        text = tokens.create(user, scopes, groups=groups, expires_in=expires, label=label)
        return _token(call, kind=kind, token=text, user=user, line="")
    if expires is not None and expires > ONCE_AGE:
        sentence = "A line is good for a day at most; the token that it is exchanged for lasts."
        raise Problem(Reason.BAD_REQUEST, sentence, "Give a day, or less.", field="expires_in")
    more = {} if expires is None else {"expires_in": expires}
    user = "" if kind == "agent" else user
    text = tokens.create_once(kind, user=user, scopes=scopes, groups=groups, **more)
    line = call.controller.authority.line(call.url, text, kind)
    return _token(call, kind=kind, token=text, user=user, line=line)


def _token(call: Call, **made: str) -> Answer:
    """Answer with a token that was made, and a warning where its person's leases could not run."""
    words = no_account(call.controller, made["user"]) if made["user"] else ""
    return Answer({**made, "warning": words} if words else made, HTTPStatus.CREATED)


def _may_create(call: Call, kind: str, user: str, scopes: tuple[str, ...], groups: tuple[str, ...]) -> None:
    """Raise where the token would be more than its maker is; groups make somebody a project's member."""
    person = call.asker
    if not set(scopes) <= set(SCOPES) or not scopes:
        raise Problem(
            Reason.BAD_REQUEST, f"The scopes are {', '.join(SCOPES)}.", "Give some of them.", field="scopes"
        )
    if not valid_user(user):
        sentence = f"{shown(user)} cannot be the name of a user."
        raise Problem(Reason.BAD_REQUEST, sentence, "Give a name without spaces or slashes.", field="user")
    if person.admin:
        return
    row = call.controller.store.token(person.token) or {"expires": 0}
    lasts = row["expires"] is None  # a token that expires must not make one that does not
    more = not set(scopes) <= person.scopes or not set(groups) <= set(person.groups)
    if kind == "agent" or user != person.user or more or not lasts:
        raise Problem(
            Trouble.NOT_ALLOWED,
            "This token cannot make that one: it would be for more, for longer or for somebody else.",
            "Ask an administrator of the pool.",
        )


async def list_tokens(call: Call) -> Answer:
    """List one's tokens, or everybody's for administrators; never what could be used."""
    return Answer({"tokens": call.controller.tokens.list(None if call.asker.admin else call.asker.user)})


async def revoke_token(call: Call) -> Answer:
    """Make a token worthless; answer with the leases whose keys its person has had, and may have kept."""
    ident, restart = call.path["token"], call.query.get("restart", False)
    user = (call.controller.store.token(ident) or {}).get("user", "")
    if not user or not (call.asker.admin or user == call.asker.user):
        raise Problem(
            Trouble.NOT_FOUND,
            f"You have no token {shown(ident)}.",
            "`jupyter gpupool token list` lists them.",
        )
    held = _held(call.controller, user)
    anew = [each for each in held if restart and (call.asker.admin or each.request.user == user)]
    for each in anew:
        now, why = call.controller.clock.now(), f"a token of {user} was revoked"
        accepted(call, LeaseRekeyed(now=now, cause=cause(call), lease=each.id, why=why))
    # Last: what fails before it can be said again.
    call.controller.tokens.revoke(ident)
    kept = [each for each in held if each not in anew]
    return Answer({"restarted": [*map(_named, anew)], "kept": [*map(_named, kept)]})


def _held(face: ControllerFace, user: str) -> list[Lease]:
    """Return the leases that a person may reach and has the keys of."""
    reach = face.store.shared_to(user)
    found = (each for each in face.pool.leases.values() if each.request.user == user or each.id in reach)
    return [each for each in found if not is_over(each) and face.keys.has(each.id, user)]


def _named(record: Lease) -> dict[str, str]:
    return {"id": record.id, "name": record.request.name, "user": record.request.user}


async def login(call: Call) -> Answer:
    """Exchange the token of a login line, which works once, for one to keep."""
    said = _read(call, LOGIN, "token")
    found = call.controller.tokens.login(said["token"], call.peer)
    if found is None:
        raise _used()
    return Answer({"token": found[0], "user": found[1]})


async def join(call: Call) -> Answer:
    """Exchange the token of a join line, which works once, for the certificate of a node's agent."""
    face, said = call.controller, _read(call, AGENT, "token", "name")
    name = said["name"]
    if not NODE_NAME.fullmatch(name):
        sentence = f"{shown(name)} cannot be the name of a node."
        raise Problem(
            Reason.BAD_REQUEST,
            sentence,
            "Use up to 50 letters, digits, dots, dashes and underscores.",
            field="name",
        )
    if face.tokens.redeem(said["token"], "agent", name) is None:
        raise _used()
    made = face.authority.agent_credentials(name)
    face.certificates.issued(name, made["cert"])
    return Answer({"name": name, "comm": face.address, **made})


async def remove(call: Call) -> Answer:
    """Make the certificates of a node's agent worthless and hang up on it; a new line lets it join anew."""
    face, node = call.controller, call.path["node"]
    if node not in face.pool.nodes and not face.certificates.some(node):  # it may have joined only just now
        nodes = ", ".join(sorted(face.pool.nodes)) or "none yet"
        raise Problem(Trouble.NOT_FOUND, f"The pool has no node {shown(node)}.", f"Its nodes: {nodes}.")
    await face.remove(node)
    return Answer(None, HTTPStatus.NO_CONTENT)


def _used() -> Problem:
    return Problem(
        Trouble.WRONG_TOKEN,
        "This line is not good any more: it works once, for a day.",
        "Ask an administrator of the pool for a new one.",
        headers={"WWW-Authenticate": 'Bearer realm="gpupool"'},
    )


ROUTES = (
    Route(
        method="PUT",
        path="/v1/projects",
        handler=set_projects,
        about="Put a new tree of projects, or other defaults, in place of the present ones.",
        scope="admin",
        body="Projects",
        answers={200: "ProjectsNow"},
    ),
    Route(
        method="GET",
        path="/v1/health/{target+}",
        handler=evidence,
        about="Say what a device's verdict rests on.",
        answers={200: "Evidence"},
        problems=(404,),
    ),
    Route(
        method="POST",
        path="/v1/health/{target+}",
        handler=health,
        about="Take a device or node out of service or back, or break a device for practice.",
        scope="admin",
        body="Health",
        answers={200: "Ordered"},
        problems=(404, 409),
    ),
    Route(
        method="POST",
        path="/v1/consolidate",
        handler=consolidate,
        about="Move small slices of leases that lose nothing by it together, so that whole GPUs come free.",
        scope="admin",
        body="Consolidate",
        answers={200: "Consolidation"},
    ),
    Route(
        method="POST",
        path="/v1/tokens",
        handler=create_token,
        about="Make a token, or a line for a login or for an agent; it is shown this once.",
        scope="use",
        body="NewToken",
        answers={201: "Token"},
    ),
    Route(
        method="GET",
        path="/v1/tokens",
        handler=list_tokens,
        about="List your tokens; for administrators, everybody's.",
        answers={200: "Tokens"},
    ),
    Route(
        method="DELETE",
        path="/v1/tokens/{token}",
        handler=revoke_token,
        about="Make a token worthless. Keys of leases that its person has stay good until those start anew.",
        scope="use",
        query={"restart": _RESTART},
        answers={200: "Revoked"},
        problems=(404,),
    ),
    Route(
        method="POST",
        path="/v1/login",
        handler=login,
        about="Exchange the token of a login line, which works once, for one to keep.",
        scope="",
        body="Login",
        answers={200: "LoggedIn"},
        problems=(401,),
    ),
    Route(
        method="POST",
        path="/v1/agents",
        handler=join,
        about="Exchange the token of a join line, which works once, for the certificate of a node's agent.",
        scope="",
        body="Join",
        answers={200: "Joined"},
        problems=(401,),
    ),
    Route(
        method="DELETE",
        path="/v1/agents/{node}",
        handler=remove,
        about="Make the certificates of a node's agent worthless and hang up on it.",
        scope="admin",
        answers={204: ""},
        problems=(404,),
    ),
    Route(
        method="POST",
        path="/v1/stop",
        handler=stop,
        about="End the controller; leases go on.",
        scope="admin",
        body="Stop",
        answers={202: "Stopping"},
    ),
)
