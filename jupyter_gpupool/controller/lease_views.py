"""What people see of leases and of the queue: pure functions from the pool's records to JSON.

Rule 1: why a request waits and until when is worked out for each answer, and costs the more the more run and
        wait; so a list stops to explain after `PATIENCE_S`.
Rule 2: the version of a lease differs whenever what is said of it differs.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.overuse import shown
from jupyter_gpupool.controller.views import WAITING, simulated, when
from jupyter_gpupool.core.model import WHOLE, LeaseState, Request, SliceState
from jupyter_gpupool.core.state import SchedulerState, gpus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.controller.auth import Person
    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.core.explain import Explanation
    from jupyter_gpupool.core.model import Refusal, Slice
    from jupyter_gpupool.core.pool import Pool
    from jupyter_gpupool.core.state import Lease

#: How many seconds of explaining go into one answer.
PATIENCE_S = 0.05
#: Fields of a request that are the pool's own business, or written in another way.
_NOT_ASKED = {
    "id",
    "user",
    "groups",
    "project",
    "name",
    "arrived",
    "count",
    "milli",
    "max_count",
    "min_count",
    "options",
}


def may_see(lease: Lease, person: Person, reach: frozenset[str]) -> bool:
    """Return whether a lease is a person's, is shared with them, or they administer the pool."""
    return person.admin or lease.request.user == person.user or lease.id in reach


def lease(face: ControllerFace, record: Lease, *, explained: bool = True) -> dict[str, Any]:
    """Return a lease as those who may see it see it.

    Args:
        face: The controller.
        record: The lease.
        explained: Whether to work out why it waits and until when, which costs the more the more wait.
    """
    request, clock = record.request, face.clock
    waits = record.state in WAITING
    why = face.pool.explain(record.id, clock.now()) if waits and explained else None
    reasons = refusals(why.reasons) if why else []
    slices = [_slice(face, each) for each in record.slices.values()]
    shared, notes = list(face.store.shared_with(record.id)), face.store.notes(record.id)
    return {
        "id": record.id,
        "name": request.name,
        "user": request.user,
        "project": request.project,
        "state": record.state.value,
        "version": lease_version(record, why, beside(face, record)),
        "why": record.why or (reasons[0]["sentence"] if reasons else ""),
        "requested": requested(request),
        "gpus": held(record) / WHOLE,
        "submitted_at": clock.wall(request.arrived),
        "granted_at": when(face, record.granted_at),
        "started_at": when(face, record.started_at),
        "ends_at": when(face, record.ends_at),
        "ended_at": when(face, record.ended_at),
        "place": (why.place or None) if why else None,
        "expected_start": when(face, why.expected_start) if why else None,
        "reasons": reasons,
        "progress": progress(record),
        "slices": slices,
        "suspending": record.suspending,
        "sure": record.sure,
        "wanted": record.wanted,
        "surplus": len(record.extra),
        "holds": _holds(record),
        "preemptible": request.preemptible
        or not request.interactive
        or record.idle_steps > face.pool.defaults.idle_warnings,
        "interactive": request.interactive,
        "idle_since": when(face, record.idle_since),
        "idle_timeout": (request.idle_timeout or face.pool.defaults.idle_timeout) / 1000,
        "simulated": _simulated(face.pool, record),
        "shared_with": shared,
        "notes": notes,
    }


def is_over(record: Lease) -> bool:
    """Return whether a lease has ended, or is ending for good; one that is being suspended is not over."""
    draining = record.state is LeaseState.DRAINING and not record.suspending
    return draining or record.state is LeaseState.ENDED


def _holds(record: Lease) -> dict[str, Any]:
    """Return what a lease would lose for good if it were suspended."""
    parts = [{"name": name, "size": size} for name, size in record.holds]
    return {"parts": parts, "count": record.holds_count, "size": record.holds_size}


def beside(face: ControllerFace, record: Lease) -> str:
    """Return what is said of a lease and is none of the pool's: with whom it is shared, limits, notes."""
    limits = [dict(face.layers(each)) for each in record.slices]
    return repr((face.store.shared_with(record.id), limits, face.store.notes(record.id)))


def lease_version(record: Lease, why: Explanation | None, told: str) -> int:
    """Return a number that differs whenever what is said of a lease differs.

    A waiting lease's place and reasons change with what others do, so they are in it.

    Args:
        record: The lease.
        why: Why it waits.
        told: As `beside` answers.
    """
    told += repr((why.place, why.expected_start, why.reasons)) if why else ""
    return (record.version << 20) | (zlib.crc32(told.encode()) & 0xFFFFF)


def held(record: Lease) -> int:
    """Return the thousandths of GPUs that a lease has or, before it has any, wants."""
    request = record.request
    asked = request.count * (request.milli or WHOLE)
    return sum(each.milli for each in record.slices.values() if each.replaces not in record.slices) or asked


def requested(request: Request) -> dict[str, Any]:
    """Return what was asked for, in the words of a request: only what was said."""
    gpus = request.count if request.milli in (0, WHOLE) else request.milli / WHOLE
    found: dict[str, Any] = {"gpus": gpus}
    if request.max_count:
        found["max_gpus"] = request.max_count
    if request.min_count:
        found["min_gpus"] = request.min_count
    for each in fields(Request):
        value = getattr(request, each.name)
        if each.name not in _NOT_ASKED and value != each.default:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    for name in ("time_limit", "idle_timeout"):
        if name in found:
            found[name] = found[name] / 1000
    if "cpus" in found:
        found["cpus"] = found["cpus"] / 1000
    return found


def progress(record: Lease) -> dict[str, Any]:
    """Return how far a lease's start is."""
    running = [each for each in record.slices.values() if each.state is SliceState.RUNNING]
    return {
        "scheduler": record.scheduler is SchedulerState.UP,
        "workers": len(running),
        "of": len(record.live()) or record.request.count,
    }


def _slice(face: ControllerFace, slice_: Slice) -> dict[str, Any]:
    view = face.pool
    record = view.devices.get(slice_.device)
    return {
        "id": slice_.id,
        "device": slice_.device,
        "device_name": view.device_name(slice_.device),
        "node": slice_.node,
        "model": record.device.model if record else "",
        "milli": slice_.milli,
        "vram": slice_.vram,
        "state": slice_.state.value,
        "profile": slice_.instance.profile if slice_.instance else "",
        "limits": shown(face.layers(slice_.id)),
    }


def _simulated(view: Pool, record: Lease) -> bool:
    nodes = [view.nodes[each.node] for each in record.slices.values() if each.node in view.nodes]
    return any(each.node.simulated for each in nodes) if nodes else simulated(view)


def refusals(many: Iterable[Refusal]) -> list[dict[str, str]]:
    """Return reasons as JSON."""
    return [
        {"reason": no.reason.value, "sentence": no.sentence, "advice": no.advice, "field": no.field}
        for no in many
    ]


def explanation(face: ControllerFace, why: Explanation) -> dict[str, Any]:
    """Return why a lease or request is where it is."""
    return {
        "starts_now": why.starts_now,
        "place": why.place or None,
        "expected_start": when(face, why.expected_start),
        "reasons": refusals(why.reasons),
        "sentences": list(why.sentences),
    }


def standing(face: ControllerFace, record: Lease) -> list[str]:
    """Say what a lease that does not wait has now, and then what was said of it lately, with its age."""
    live = record.live()
    names = ", ".join(sorted({face.pool.device_name(each.device) for each in live}))
    each_is = record.request.milli or WHOLE
    more = f", and wants {gpus(record.wanted * each_is)}" if record.wanted != len(live) else ""
    has = [f"It has {gpus(sum(each.milli for each in live))} now, on {names}{more}."] if live else []
    lately = face.store.dated_notes(record.id)
    return [*has, *(f"{_ago(age)}: {sentence}" for age, sentence in lately)]


def _ago(seconds: float) -> str:
    """Say how long ago something was, in its largest unit.

    >>> _ago(5.4), _ago(600), _ago(7300)
    ('5 s ago', '10 min ago', '2 h ago')
    """
    unit, length = next((each for each in (("h", 3600), ("min", 60)) if seconds >= each[1]), ("s", 1))
    return f"{seconds // length:g} {unit} ago"


def queue(face: ControllerFace, person: Person, most: int) -> list[dict[str, Any]]:
    """Return what waits, the next one first; why and until when only of what the person may see."""
    reach = face.store.shared_to(person.user)
    rows, end = [], time.monotonic() + PATIENCE_S
    for place, ident in enumerate(face.pool.order(most), start=1):
        record = face.pool.leases[ident]
        seen = may_see(record, person, reach)
        explained = seen and time.monotonic() < end
        why = face.pool.explain(ident, face.clock.now()) if explained else None
        rows.append(_waits(face, record, place, why, seen=seen))
    return rows


def _waits(
    face: ControllerFace, record: Lease, place: int, why: Explanation | None, *, seen: bool
) -> dict[str, Any]:
    return {
        "place": place,
        "id": record.id if seen else "",
        "name": record.request.name if seen else "",
        "user": record.request.user,
        "project": record.request.project,
        "gpus": held(record) / WHOLE,
        "submitted_at": face.clock.wall(record.request.arrived),
        "expected_start": when(face, why.expected_start) if why else None,
        "why": why.sentences[0] if why and why.sentences else "",
    }
