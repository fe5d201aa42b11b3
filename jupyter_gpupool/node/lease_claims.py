"""What a process of a lease says, as the pool may hear it.

It is a claim of code that the lease's owner runs: only known fields pass, of the right type and a bounded
length, and only about the lease itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_gpupool.node.lease_table import Entry

#: A report names so many keys at most, and so many characters of each.
_KEYS, _LONGEST = 1000, 300
#: Of what it holds, so many parts are named; no number is larger; and no drain undoes more milliseconds.
_PARTS, _MOST, _MOST_WORK = 10, 10**15, 30 * 24 * 3600 * 1000


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
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return None if report is None else {**report, "lease": entry.lease}


def text(value: Any, length: int = _LONGEST) -> str:
    """Read a text of bounded length."""
    return str(value)[:length]


def _drained(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    part = message["slice"]
    if not entry.is_scheduler or not isinstance(part, str) or part.rpartition("/")[0] != entry.lease:
        return None
    forced, lost = (_keys(message.get(name)) for name in ("forced", "lost"))
    work = max(0, min(int(message.get("work") or 0), _MOST_WORK))
    return {"report": "slice_drained", "slice": part, "forced": forced, "lost": lost, "work": work}


def _stays(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    """Say which actors keep a worker that is to leave, and why they cannot move."""
    part, actors = message["slice"], message["actors"]
    if not entry.is_scheduler or not isinstance(part, str) or part.rpartition("/")[0] != entry.lease:
        return None
    said = {text(key): text(why) for key, why in list(actors.items())[:_KEYS]}
    return {"report": "actors_stay", "slice": part, "actors": said, "seconds": int(message["seconds"])}


def _keys(value: Any) -> list[str]:
    return [text(key) for key in value[:_KEYS]] if isinstance(value, list) else []


def _idle(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    return {"report": "lease_idle", "since": int(message["since"])} if entry.is_scheduler else None


def _busy(entry: Entry, _: dict[str, Any]) -> dict[str, Any] | None:
    return {"report": "lease_busy"} if entry.is_scheduler else None


def _holds(entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
    if not entry.is_scheduler:
        return None
    parts = [(text(key), _size(size)) for key, size in message["parts"][:_PARTS]]
    count, size = min(_MOST, max(len(parts), int(message["count"]))), _size(message["size"])
    return {"report": "lease_holds", "parts": parts, "count": count, "size": size}


def _size(value: Any) -> int:
    return max(0, min(int(value), _MOST))


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
