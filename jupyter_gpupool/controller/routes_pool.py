"""Routes that look at the pool: what it has, how it is, who waits, what is new."""

from __future__ import annotations

import asyncio
import functools
import time
import zlib
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields, lease_views, usage_views, views
from jupyter_gpupool.controller.fields import Field
from jupyter_gpupool.controller.router import Answer, Call, Route

if TYPE_CHECKING:
    from jupyter_gpupool.controller.auth import Person
    from jupyter_gpupool.controller.face import ControllerFace

#: The most rows in one answer.
PAGE = 500
#: For so many seconds the same look at the devices serves everybody who asks.
FRESH_S = 0.25
#: A look at very many devices costs; so many times its cost passes before the next one.
REST = 4


async def pool(call: Call) -> Answer:
    """Say what the pool is and how it stands."""
    face, person = call.controller, call.asker
    version, common = call.memory.get("pool", (-1, {}))
    if version != face.pool.version:
        common = views.pool(face)
        call.memory["pool"] = (face.pool.version, common)
    user = {"name": person.user, "admin": person.admin, "scopes": sorted(person.scopes)}
    return Answer({**common, "user": user})


class Devices:
    """The devices as last looked at, each with the number of its last change, so that news can be told.

    Sequence numbers begin with the time of the controller's start: those of an earlier one are all older.
    """

    def __init__(self) -> None:
        self.sequence = time.time_ns() // 1_000_000
        #: UUID -> (number of the last change, digest, row), and of those that are gone.
        self._rows: dict[str, tuple[int, int, dict[str, Any]]] = {}
        self._gone: dict[str, int] = {}
        #: Until when the rows are good: whatever happens, and while nothing does.
        self._good_until = 0.0
        self._fresh_until = 0.0
        self._version = -1

    def answer(self, face: ControllerFace, person: Person, since: int) -> dict[str, Any]:
        """Return what has changed after `since`, as the person may see it, and the number to ask with."""
        self._look(face)
        since = 0 if since > self.sequence else since
        seen = None if person.admin else reachable(face, person)
        fresh = [row for at, _, row in self._rows.values() if at > since]
        return {
            "devices": [views.masked(row, seen) for row in fresh],
            "gone": sorted(uuid for uuid, at in self._gone.items() if at > since > 0),
            "sequence": self.sequence,
            "simulated": views.simulated(face.pool),
        }

    def _look(self, face: ControllerFace) -> None:
        """Look at the devices, unless that has just been done."""
        now = time.monotonic()
        if now < (self._fresh_until if face.pool.version == self._version else self._good_until):
            return
        self._version = face.pool.version
        self._renew(face)
        cost = time.monotonic() - now
        self._good_until, self._fresh_until = now + REST * cost, now + max(FRESH_S, REST * cost)

    def _renew(self, face: ControllerFace) -> None:
        rows = {row["uuid"]: row for row in views.devices(face)}
        changed = [uuid for uuid, row in rows.items() if self._differs(uuid, row)]
        gone = self._rows.keys() - rows.keys()
        if changed or gone:
            self.sequence += 1
        for uuid in gone:
            self._gone[uuid] = self.sequence
        # In the order of nodes and indexes, with the age of readings as it is now.
        self._rows = {uuid: (*self._number(uuid, row, uuid in changed), row) for uuid, row in rows.items()}

    def _differs(self, uuid: str, row: dict[str, Any]) -> bool:
        return uuid not in self._rows or self._rows[uuid][1] != _digest(row)

    def _number(self, uuid: str, row: dict[str, Any], changed: bool) -> tuple[int, int]:  # noqa: FBT001 - private
        self._gone.pop(uuid, None)
        return (self.sequence, _digest(row)) if changed else self._rows[uuid][:2]


def _digest(row: dict[str, Any]) -> int:
    """Return a number of a device's row that the mere passing of time leaves as it is."""
    reading = {name: value for name, value in (row["reading"] or {}).items() if name != "age_s"}
    return views.digest({**row, "reading": reading})


def reachable(face: ControllerFace, person: Person) -> frozenset[str]:
    """Return the ids of the leases that are a person's own or shared with them."""
    own = (ident for ident, each in face.pool.leases.items() if each.request.user == person.user)
    return face.store.shared_to(person.user).union(own)


async def devices(call: Call) -> Answer:
    """List devices with what is on them and how they are; with `since`, those that have changed."""
    looks = call.memory.setdefault("devices", Devices())
    return Answer(looks.answer(call.controller, call.asker, call.query.get("since", 0)))


async def queue(call: Call) -> Answer:
    """List who waits, the next one first."""
    return Answer({"queue": lease_views.queue(call.controller, call.asker, call.query.get("limit", 100))})


async def projects(call: Call) -> Answer:
    """List the projects with their quotas and how they stand, and the pool's defaults."""
    found = usage_views.figures(call.memory, call.controller)
    return Answer(usage_views.projects(call.controller, call.asker, found))


async def usage(call: Call) -> Answer:
    """List who has, deserves and has used how much."""
    found = usage_views.figures(call.memory, call.controller)
    return Answer(usage_views.usage(call.controller, found))


async def history(call: Call) -> Answer:
    """Say what the person who asks used, by the hour."""
    return Answer(usage_views.history(call.controller, call.asker.user))


async def reclaims(call: Call) -> Answer:
    """List the latest reclaims: who got what, from whom, by which numbers, at which cost."""
    return Answer(usage_views.reclaims(call.controller, call.asker, call.query.get("limit", 100)))


async def notices(call: Call) -> Answer:
    """List what a person is told, after a number; with `wait`, as soon as there is something.

    With `leases` a change of one of the person's leases is something too.
    """
    face, person, loop = call.controller, call.asker, asyncio.get_running_loop()
    after, limit = call.query.get("after", 0), call.query.get("limit", 100)
    known, end = call.query.get("leases"), loop.time() + call.query.get("wait", 0.0)
    while True:
        found = face.store.notices(after, person.user, admin=person.admin, limit=limit)
        leases = lease_mark(call)
        if found.notices or found.missed or known not in (None, leases) or loop.time() >= end:
            answer = {"notices": found.notices, "next": found.next, "missed": found.missed, "leases": leases}
            return Answer(answer)
        after = found.next
        await call.waiters.until(functools.partial(_is_news, call, after, known), end)


def _is_news(call: Call, after: int, known: int | None) -> bool:
    person = call.asker
    told = call.controller.store.is_told(person.user, after, admin=person.admin)
    return told or (known is not None and known != lease_mark(call))


def lease_mark(call: Call) -> int:
    """Return a number that differs when any lease that is the person's or shared with them does."""
    pool, user = call.controller.pool, call.asker.user
    face = call.controller
    now = (pool.version, face.layers_revision)
    version, marks = call.memory.get("lease marks", ((), {}))
    if version != now:  # for all people at once, and once a change
        marks = {}
        for ident, each in pool.leases.items():
            owner = each.request.user
            told = f"{ident} {each.version} {[dict(face.layers(part)) for part in each.slices]}"
            marks[owner] = zlib.crc32(told.encode(), marks.get(owner, 0))
        call.memory["lease marks"] = (now, marks)
    mark = int(marks.get(user, 0))
    for ident in sorted(call.controller.store.shared_to(user)):
        shared = pool.leases.get(ident)
        mark = zlib.crc32(f"{ident} {shared.version if shared else 0}".encode(), mark)
    return mark


async def authority(call: Call) -> Answer:
    """Hand out the certificate of the pool's authority; who fetches it compares its fingerprint."""
    return Answer(call.controller.authority.ca_pem, headers={"Content-Type": "application/x-pem-file"})


def _text_limit(most: int) -> Field:
    return Field(fields.natural("limit", 1, most), {"type": "string"}, "How many at most.")


ROUTES = (
    Route(
        method="GET",
        path="/v1/pool",
        handler=pool,
        about="What the pool is, how it stands, and who you are to it.",
        answers={200: "Pool"},
    ),
    Route(
        method="GET",
        path="/v1/devices",
        handler=devices,
        about="Devices with what is on them and how they are.",
        query={
            "since": Field(
                fields.natural("since"),
                {"type": "string"},
                "The `sequence` of the last answer: only what is new.",
            )
        },
        answers={200: "Devices"},
    ),
    Route(
        method="GET",
        path="/v1/queue",
        handler=queue,
        about="Who waits, the next one first.",
        query={"limit": _text_limit(PAGE)},
        answers={200: "Queue"},
    ),
    Route(
        method="GET",
        path="/v1/projects",
        handler=projects,
        about="The projects with their quotas and how they stand; the pool's defaults.",
        answers={200: "ProjectsNow"},
    ),
    Route(
        method="GET",
        path="/v1/usage",
        handler=usage,
        about="Who has, deserves and has used how much; the ledger by user, project, model and kind.",
        answers={200: "Usage"},
    ),
    Route(
        method="GET",
        path="/v1/history",
        handler=history,
        about="What you used in each hour of the last two weeks, and how much of it while idle.",
        answers={200: "History"},
    ),
    Route(
        method="GET",
        path="/v1/reclaims",
        handler=reclaims,
        about="What was taken back lately: for whom, from whom, by which numbers, at which cost.",
        query={"limit": _text_limit(PAGE)},
        answers={200: "Reclaims"},
    ),
    Route(
        method="GET",
        path="/v1/notices",
        handler=notices,
        about="What you are told; with wait, as soon as there is something.",
        query={
            "after": Field(fields.natural("after"), {"type": "string"}, "The `next` of the last answer."),
            "wait": Field(
                fields.seconds(60), {"type": "string"}, "How long the answer may be held back, in seconds."
            ),
            "leases": Field(
                fields.natural("leases"),
                {"type": "string"},
                "The `leases` of the last answer: answer too when one of your leases is another since.",
            ),
            "limit": _text_limit(PAGE),
        },
        answers={200: "Notices"},
    ),
    Route(
        method="GET",
        path="/v1/ca.pem",
        handler=authority,
        about="The certificate of the pool's authority, to be compared with a fingerprint.",
        scope="",
        answers={200: "Certificate"},
    ),
)
