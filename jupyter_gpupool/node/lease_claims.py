"""What a process of a lease says, as the pool may hear it.

It is a claim of code that the lease's owner runs: only known fields pass, of the right type, within bounds,
and only about the lease itself. A number or a text that the agent's connection could not carry would cut the
whole node off from its controller, again and again: what cannot be sent is never taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_gpupool.node.lease_table import Entry

#: A report names so many keys at most, and so many characters of each.
_KEYS, _LONGEST = 1000, 300
#: Of what it holds, so many parts are named; no number is larger; and no drain undoes more milliseconds.
_PARTS, _MOST, _MOST_WORK = 10, 10**15, 30 * 24 * 3600 * 1000
#: What reading a claim raises where it is nonsense; infinity is none of the integers.
_NONSENSE = (TypeError, ValueError, KeyError, AttributeError, OverflowError)


def read_claim(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    """Turn what a process says into a report, or into nothing.

    Args:
        entry: Who says it.
        message: What it says.
    """
    kind = message.get("report")
    read = _CLAIMS.get(kind) if isinstance(kind, str) else None
    if read is None:
        return None
    try:
        report = read(entry, message)
    except _NONSENSE:
        return None
    return None if report is None else {**report, "lease": entry.lease}


def text(value: Any, length: int = _LONGEST) -> str:
    """Read a text of bounded length, each character of which can be sent."""
    return str(value)[:length].encode("utf-8", "replace").decode()


def _number(value: Any, most: int = _MOST) -> int:
    return max(0, min(int(value), most))


def _own_part(entry: Entry, message: dict[str, Any]) -> str:
    """Read which of its lease's slices a scheduler speaks of; "": of none."""
    part = message["slice"]
    known = entry.is_scheduler and isinstance(part, str) and part.rpartition("/")[0] == entry.lease
    return text(part) if known else ""


def _drained(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    if not (part := _own_part(entry, message)):
        return None
    forced, lost = (_keys(message.get(name)) for name in ("forced", "lost"))
    work = _number(message.get("work") or 0, _MOST_WORK)
    return {"report": "slice_drained", "slice": part, "forced": forced, "lost": lost, "work": work}


def _stays(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    """Say which actors keep a worker that is to leave, and why they cannot move."""
    if not (part := _own_part(entry, message)):
        return None
    said = {text(key): text(why) for key, why in list(message["actors"].items())[:_KEYS]}
    return {"report": "actors_stay", "slice": part, "actors": said, "seconds": _number(message["seconds"])}


def _keys(value: Any) -> list[str]:
    return [text(key) for key in value[:_KEYS]] if isinstance(value, list) else []


def _idle(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    return {"report": "lease_idle", "since": _number(message["since"])} if entry.is_scheduler else None


def _busy(entry: Entry, _: dict[str, Any]) -> dict[str, Any] | None:
    return {"report": "lease_busy"} if entry.is_scheduler else None


def _holds(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    if not entry.is_scheduler:
        return None
    parts = [(text(key), _number(size)) for key, size in message["parts"][:_PARTS]]
    count, size = max(len(parts), _number(message["count"])), _number(message["size"])
    return {"report": "lease_holds", "parts": parts, "count": count, "size": size}


def _first_task(entry: Entry, _: dict[str, Any]) -> dict[str, Any] | None:
    return None if entry.is_scheduler else {"report": "first_task", "slice": entry.key}


_CLAIMS = {
    "drained": _drained,
    "idle": _idle,
    "busy": _busy,
    "holds": _holds,
    "first_task": _first_task,
    "stays": _stays,
}
