"""Routes of requests and leases."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields, lease_views, views
from jupyter_gpupool.controller.acquaintances import warning
from jupyter_gpupool.controller.fields import Field
from jupyter_gpupool.controller.parse import PROCESS, Asker, parse_change, parse_request, read_fields
from jupyter_gpupool.controller.problems import Problem, Trouble, unknown_lease
from jupyter_gpupool.controller.router import Answer, Call, Route, accepted, cause
from jupyter_gpupool.controller.routes_admin import resolve
from jupyter_gpupool.controller.store import Once
from jupyter_gpupool.core.model import (
    LeaseExtended,
    LeaseKept,
    LeaseRekeyed,
    LeaseReleased,
    LeaseScaled,
    LeaseState,
    Reason,
    RequestSubmitted,
    RequestWithdrawn,
)

if TYPE_CHECKING:
    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.core.model import PoolEvent, Request
    from jupyter_gpupool.core.state import Lease

#: Seconds between two looks at why a request waits, for one who waits for news of it: each look costs.
LOOK_S = 0.25
#: The most leases in one answer.
PAGE = 500
KEY_LENGTH = 200


# ------------------------------------------------------------------------------------------- asking for one


async def request(call: Call) -> Answer:
    """Take in a request, or with `dry_run` say what would come of it."""
    face, person = call.controller, call.asker
    only = views.one_user(face)
    if only not in (None, person.user):
        raise Problem(
            Reason.ONE_USER_ONLY,
            f"This pool serves {only} only: its agents cannot run processes as other users.",
            "Its administrator can start the agents as root, or set trust_users.",
        )
    dry = call.query.get("dry_run", False)
    once = None if dry else _once(call)
    if once and (known := _known(face, once)):
        return _made(face, known)
    wanted = _parsed(call)
    if dry:
        return Answer(_trial(face, wanted))
    accepted(call, RequestSubmitted(now=wanted.arrived, cause=cause(call), request=wanted), once)
    return _made(face, face.pool.leases[wanted.id])


def _once(call: Call) -> Once | None:
    """Return the idempotency key that the request came with."""
    key = call.headers.get("idempotency-key")
    if key is None:
        return None
    if not key.isprintable() or not 0 < len(key) <= KEY_LENGTH:
        raise Problem(Reason.BAD_REQUEST, f"An Idempotency-Key has 1 to {KEY_LENGTH} printable characters.")
    body = json.dumps(call.body, sort_keys=True).encode()
    return Once(call.asker.user, key, hashlib.sha256(body).hexdigest())


def _known(face: ControllerFace, once: Once) -> Lease | None:
    """Return the lease that an idempotency key has led to before."""
    seen = face.store.seen(once.user, once.key, face.clock.now())
    if seen is None:
        return None
    if seen.fingerprint != once.fingerprint:
        sentence = "This Idempotency-Key came with another request before."
        raise Problem(Trouble.KEY_REUSED, sentence, "Use a new key for each request.")
    if seen.lease not in face.pool.leases:
        sentence = f"The request of this key is over: it was refused, or its lease {seen.lease} has ended."
        raise Problem(Reason.LEASE_OVER, sentence, "Request anew, with a new key.")
    return face.pool.leases[seen.lease]


def _is_done(face: ControllerFace, once: Once, record: Lease) -> bool:
    """Whether this change of the lease, by its key, has been made; its answer was lost."""
    known = _known(face, once)
    if known is not None and known.id != record.id:
        sentence = "This Idempotency-Key came with a change of another lease before."
        raise Problem(Trouble.KEY_REUSED, sentence, "Use a new key for each change.")
    return known is not None


def _parsed(call: Call) -> Request:
    face, user = call.controller, call.asker.user
    asker = Asker(
        id=_new_id(face),
        user=user,
        groups=call.asker.groups,
        now=face.clock.now(),
        project="",
        name=_free_name(face, user),
    )
    wanted, wrong = parse_request(call.body, asker)
    if wanted is None:
        raise Problem.refused(wrong)
    return replace(wanted, exclude=tuple(_excluded(face, each) for each in wanted.exclude))


def _excluded(face: ControllerFace, name: str) -> str:
    """Return the node or UUID that a name to be left out stands for.

    Raises:
        Problem: It stands for nothing, so that leaving it out would change nothing.
    """
    if not face.pool.nodes:
        return name
    try:
        return resolve(face.pool, name)
    except Problem as no:
        raise Problem(Reason.UNKNOWN_NODE, no.sentence, no.advice, field="exclude") from None


def _new_id(face: ControllerFace) -> str:
    while (ident := secrets.token_hex(5)) in face.pool.leases:
        pass
    return ident


def _free_name(face: ControllerFace, user: str) -> str:
    """Return the first of lease-1, lease-2… that is no name of the person's leases now."""
    live = [each for each in face.pool.leases.values() if each.state is not LeaseState.ENDED]
    taken = {each.request.name for each in live if each.request.user == user}
    return next(name for n in range(1, len(taken) + 2) if (name := f"lease-{n}") not in taken)


def _trial(face: ControllerFace, wanted: Request) -> dict[str, Any]:
    why = face.pool.would(wanted, wanted.arrived)
    if why.reasons and not why.starts_now and not why.place:  # it would not even wait
        raise Problem.refused(why.reasons)
    return lease_views.explanation(face, why)


def _made(face: ControllerFace, record: Lease) -> Answer:
    headers = {"Location": f"/v1/leases/{record.id}"}
    return Answer(lease_views.lease(face, record), HTTPStatus.CREATED, headers)


# -------------------------------------------------------------------------------------- looking at them


def reached(call: Call) -> Lease:
    """Return the lease of the path, if the person may know of it.

    Raises:
        Problem: There is none, which is also what another person's lease looks like.
    """
    face, ident = call.controller, call.path["lease"]
    record = face.pool.leases.get(ident)
    if record is None or not lease_views.may_see(record, call.asker, face.store.shared_to(call.asker.user)):
        raise unknown_lease(ident[:64])
    return record


def owned(call: Call, *, admin: bool) -> Lease:
    """Return the lease of the path, if the person may change it: its owner, or with `admin` administrators.

    Raises:
        Problem: It is another's.
    """
    record = reached(call)
    if record.request.user != call.asker.user and not (admin and call.asker.admin):
        name, owner = record.request.name, record.request.user
        raise Problem(
            Reason.NOT_YOURS, f"{name} is {owner}'s lease; only {owner} can do that.", f"Ask {owner}."
        )
    return record


async def leases(call: Call) -> Answer:
    """List leases: one's own and those shared with one, or with `all` whatever one may see; newest first."""
    face, person, query = call.controller, call.asker, call.query
    reach = face.store.shared_to(person.user)
    found = [
        each
        for each in face.pool.leases.values()
        if (each.request.user == person.user or each.id in reach or (query.get("all") and person.admin))
        and query.get("state") in (None, each.state.value)
    ]
    found.sort(key=lambda each: (-each.request.arrived, each.id))
    start = next((n for n, each in enumerate(found, start=1) if each.id == query.get("after")), 0)
    page = found[start : start + query.get("limit", PAGE)]
    end = time.monotonic() + lease_views.PATIENCE_S
    rows = [lease_views.lease(face, each, explained=time.monotonic() < end) for each in page]
    more = page[-1].id if page and start + len(page) < len(found) else None
    return Answer({"leases": rows, "next": more})


async def lease(call: Call) -> Answer:
    """Show a lease; with `wait` and `version`, as soon as it is not that version any more."""
    face, loop = call.controller, asyncio.get_running_loop()
    end = loop.time() + call.query.get("wait", 0.0)
    while True:
        record = reached(call)
        view = lease_views.lease(face, record)
        if view["version"] != call.query.get("version") or loop.time() >= end:
            return Answer(view)
        await _news(call, record, end)


async def _news(call: Call, record: Lease, end: float) -> None:
    """Return when a lease has changed; where it waits, also soon after anything has: its place may have.

    Args:
        call: Who waits.
        record: The lease.
        end: The event loop's time at which to return in any case.
    """
    face, now = call.controller, asyncio.get_running_loop().time
    version, seen, look = record.version, face.pool.version, now() + LOOK_S
    ident, waits, told = record.id, record.state in views.WAITING, lease_views.beside(face, record)
    revisions = face.layers_revision, face.store.revision

    def changed() -> bool:
        found = face.pool.leases.get(ident)
        return found is None or found.version != version or otherwise(found)

    def otherwise(found: Lease) -> bool:
        """Whether what is none of the pool's has changed; it is read only if it may have."""
        nonlocal revisions
        latest = face.layers_revision, face.store.revision
        if latest == revisions:
            return False
        if lease_views.beside(face, found) != told:
            return True
        revisions = latest
        return False

    await call.waiters.until(lambda: changed() or (waits and face.pool.version != seen), end)
    await call.waiters.until(changed, min(look, end))


async def explain(call: Call) -> Answer:
    """Say why a lease is where it is."""
    face, record = call.controller, reached(call)
    said = lease_views.explanation(face, face.pool.explain(record.id, face.clock.now()))
    if record.state not in views.WAITING:  # what happened to it lately is why it is as it is
        said["sentences"] += lease_views.standing(face, record)
    return Answer(said)


async def connection(call: Call) -> Answer:
    """Hand out what it takes to reach a lease's scheduler: to its owner, and to whom it is shared with."""
    face, record = call.controller, reached(call)
    if call.asker.user not in (record.request.user, *face.store.shared_with(record.id)):
        owner = record.request.user
        raise Problem(
            Reason.NOT_YOURS, f"{record.request.name} is {owner}'s: not even an administrator can use it.", ""
        )
    found = face.connection(record.id, call.asker.user)
    if found is None:
        raise _not_ready(record)
    return Answer(found)


def _not_ready(record: Lease) -> Problem:
    name = record.request.name
    if lease_views.is_over(record):
        return Problem(
            Reason.LEASE_OVER, f"{name} has ended: {record.why or 'it is over'}.", "Request a new one."
        )
    return Problem(
        Trouble.NOT_READY, f"{name} is {record.state.value}: nobody can use it yet.", "Wait for it."
    )


async def logs(call: Call) -> Answer:
    """Return what a lease's processes have written."""
    record = reached(call)
    return Answer({"logs": await call.controller.logs(record.id)})


async def attach(call: Call) -> Answer:
    """Let a process of the owner's own, a notebook's kernel say, use the lease's devices on its machine."""
    record = owned(call, admin=False)
    if record.state is not LeaseState.ACTIVE:
        raise _not_ready(record)
    process, wrong = read_fields(call.body, PROCESS)
    if wrong:
        raise Problem.refused(wrong)
    if missing := PROCESS.keys() - process.keys():
        sentence = f"{', '.join(sorted(missing))} of the process is not given."
        advice = "Use `%gpupool attach` or `lease.attach()`, which say it all."
        raise Problem(Reason.BAD_REQUEST, sentence, advice)
    answer = await call.controller.attach(record.id, process)
    if answer.get("why"):
        raise Problem(
            Trouble.CANNOT_ATTACH,
            f"{record.request.name} cannot be used in this process: {answer['why']}.",
            "Cells (`%%gpupool`) and `lease.client()` reach its devices from anywhere.",
        )
    return Answer(answer)


# --------------------------------------------------------------------------------------- changing them


async def release(call: Call) -> Answer:
    """Give a lease back or withdraw a request; one that has ended is fine."""
    face, record = call.controller, owned(call, admin=True)
    if not lease_views.is_over(record):
        by_owner = call.asker.user == record.request.user
        why = "released by its owner" if by_owner else f"ended by administrator {call.asker.user}"
        now, by = face.clock.now(), cause(call)
        event: PoolEvent = LeaseReleased(now=now, cause=by, lease=record.id, why=why)
        if record.state is LeaseState.PENDING and by_owner:
            event = RequestWithdrawn(now=now, cause=by, lease=record.id)
        accepted(call, event)
    return Answer(None, HTTPStatus.NO_CONTENT)


async def change(call: Call) -> Answer:
    """Change one thing of a lease: its time, its size, that it is needed, or who else may use it."""
    face = call.controller
    what, value, wrong = parse_change(call.body)
    record = owned(call, admin=what in ("extend", "share"))
    if not wrong and call.query.get("restart") and what != "share":
        sentence, advice = "A restart goes with who may use a lease.", 'Say it with "share".'
        raise Problem(Reason.BAD_REQUEST, sentence, advice, field="restart")
    if wrong:
        raise Problem.refused(wrong)
    said: dict[str, Any] = {}
    once = _once(call) if what == "extend" else None  # everything else can be said twice
    if once and _is_done(face, once, record):
        return Answer(lease_views.lease(face, record))
    if what == "share":
        said = _share(call, record, value)
    else:
        now, by = face.clock.now(), cause(call)
        event: PoolEvent
        if what == "extend":
            event = LeaseExtended(now=now, cause=by, lease=record.id, by=value)
        elif what == "gpus":
            event = LeaseScaled(now=now, cause=by, lease=record.id, count=value)
        else:
            event = LeaseKept(now=now, cause=by, lease=record.id)
        accepted(call, event, once)
    return Answer({**lease_views.lease(face, record), **said})


def _share(call: Call, record: Lease, users: tuple[str, ...]) -> dict[str, str]:
    """Let exactly these others use a lease; who has its keys is shut out by new ones, which restart it."""
    face, others = call.controller, set(users) - {record.request.user}
    if others - set(face.store.shared_with(record.id)):
        owned(call, admin=False)  # an administrator can shut people out, and let nobody in
    if lease_views.is_over(record):
        raise _not_ready(record)
    only = views.one_user(face)
    if only is not None and others - {only}:
        raise Problem(Reason.ONE_USER_ONLY, f"This pool serves {only} only.", "", field="share")
    gone = sorted(set(face.store.shared_with(record.id)) - others)
    restart = call.query.get("restart", False)
    if not restart and (knowing := [each for each in gone if face.keys.has(record.id, each)]):
        raise _needs_restart(record, ", ".join(knowing))
    if restart:
        # First: after a crash between the two, who is still on the list is shut out when it is said again.
        why = f"{', '.join(gone)} may use it no more" if gone else "its owner wants that"
        accepted(call, LeaseRekeyed(now=face.clock.now(), cause=cause(call), lease=record.id, why=why))
    face.store.share(record.id, others)
    face.wake()
    anew = "It starts anew on new keys: connect and submit again." if restart else ""
    words = " ".join(filter(None, (anew, warning(face, record.request.name, others))))
    return {"warning": words} if words else {}


def _needs_restart(record: Lease, who: str) -> Problem:
    name = record.request.name
    return Problem(
        Trouble.NEEDS_RESTART,
        f"{who} can be shut out of {name} only by a restart on new keys, as the present ones are known: its "
        "scheduler and workers start anew on its GPUs, and what they compute and hold is lost.",
        f"Say restart too (`jupyter gpupool share {name} … --restart`), or release {name}.",
        field="share",
    )


_WAIT = Field(fields.seconds(60), {"type": "string"}, "How long the answer may be held back, in seconds.")
_RESTART = Field(
    fields.yes_no("restart"),
    {"enum": ["true", "false"]},
    "With share: on new keys, so that nobody else can reach it; what it computes and holds is lost.",
)
_VERSION = Field(fields.natural("version"), {"type": "string"}, "The version that is known already.")
_STATES = [each.value for each in LeaseState]

ROUTES = (
    Route(
        method="POST",
        path="/v1/requests",
        handler=request,
        about="Ask for a lease, or with dry_run=true learn what would come of it.",
        scope="use",
        query={
            "dry_run": Field(fields.yes_no("dry_run"), {"enum": ["true", "false"]}, "Only say what would be.")
        },
        body="Request",
        answers={201: "Lease", 200: "Explanation"},
        problems=(409,),
        once=True,
    ),
    Route(
        method="GET",
        path="/v1/leases",
        handler=leases,
        about="List leases and waiting requests, newest first.",
        query={
            "all": Field(
                fields.yes_no("all"), {"enum": ["true", "false"]}, "Everybody's, for administrators."
            ),
            "state": Field(fields.one_of("state", _STATES), {"enum": _STATES}, "Only those in this state."),
            "limit": Field(fields.natural("limit", 1, PAGE), {"type": "string"}, "How many at most."),
            "after": Field(fields.text("after", 1, 64), {"type": "string"}, "The `next` of the page before."),
        },
        answers={200: "Leases"},
    ),
    Route(
        method="GET",
        path="/v1/leases/{lease}",
        handler=lease,
        about="Show a lease; with wait and version, as soon as it is not that version any more.",
        query={"wait": _WAIT, "version": _VERSION},
        answers={200: "Lease"},
        problems=(404,),
    ),
    Route(
        method="DELETE",
        path="/v1/leases/{lease}",
        handler=release,
        about="Give a lease back, or withdraw a request.",
        scope="use",
        answers={204: ""},
        problems=(404, 409),
    ),
    Route(
        method="PATCH",
        path="/v1/leases/{lease}",
        handler=change,
        about="Change one thing of a lease: extend, keep, gpus or share. Whoever shares it runs code as you.",
        scope="use",
        once=True,
        query={"restart": _RESTART},
        body="Change",
        answers={200: "Lease"},
        problems=(404, 409),
    ),
    Route(
        method="GET",
        path="/v1/leases/{lease}/connection",
        handler=connection,
        about="How to reach the lease's scheduler, with its credentials.",
        scope="use",
        answers={200: "Connection"},
        problems=(404, 409),
    ),
    Route(
        method="POST",
        path="/v1/leases/{lease}/attach",
        handler=attach,
        about="Let a process of one's own, on the machine of the lease's devices, use them.",
        scope="use",
        body="Process",
        answers={200: "Attached"},
        problems=(404, 409),
    ),
    Route(
        method="GET",
        path="/v1/leases/{lease}/logs",
        handler=logs,
        about="What the lease's processes have written.",
        answers={200: "Logs"},
        problems=(404,),
    ),
    Route(
        method="GET",
        path="/v1/leases/{lease}/explain",
        handler=explain,
        about="Why a lease is where it is.",
        answers={200: "Explanation"},
        problems=(404,),
    ),
)
