"""What agents report, as pool events: one row a report, and who may say it.

Rule 1: a report is a claim. A node speaks for its own devices and slices; for a lease, the node on which the
        lease's scheduler runs. What it says of anything else is dropped and logged.
Rule 2: nothing is decided here: a row names the pool event and takes its fields from the report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import (
    Instance,
    InstanceCreated,
    InstanceFailed,
    LeaseBusy,
    LeaseFailed,
    LeaseFreed,
    LeaseHolds,
    LeaseIdle,
    LeaseStarted,
    Node,
    NodeJoined,
    OutsideUse,
    SliceDrained,
    SliceFailed,
    SliceFreed,
    SliceStarted,
    Verdict,
    VerdictChanged,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.core.model import PoolEvent
    from jupyter_gpupool.wire import Message

#: The longest sentence that is taken from a report, in characters.
LONGEST = 2000


class BadReportError(ValueError):
    """A report that says what it may not, or lacks what it must have."""


@dataclass(frozen=True, slots=True)
class Said:
    """A report, and what is known of who says it."""

    node: str
    now: int
    report: Message
    #: Which node a slice is on, a device is in, a lease's scheduler runs on; "" where nobody knows.
    node_of_slice: Callable[[str], str]
    node_of_device: Callable[[str], str]
    home_of_lease: Callable[[str], str]

    def text(self, name: str) -> str:
        """Return a field that must be text."""
        value = self.report.get(name)
        if not isinstance(value, str):
            raise BadReportError(f"{name} is missing")
        return value[:LONGEST]

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list of texts."""
        return tuple(str(each)[:LONGEST] for each in self.report.get(name) or ())

    def number(self, name: str) -> int:
        """Return a field that must be a whole number."""
        value = self.report.get(name)
        if not isinstance(value, int):
            raise BadReportError(f"{name} is no number")
        return value

    @property
    def head(self) -> dict[str, Any]:
        """What every pool event has."""
        return {"now": self.now, "cause": f"agent of {self.node}"}


def _own_slice(said: Said) -> bool:
    """The slice is on the node, or nobody's (any more)."""
    return said.node_of_slice(said.text("slice")) in ("", said.node)


def _own_or_home(said: Said) -> bool:
    """The slice is on the node, or of a lease whose scheduler runs on it."""
    lease = said.text("slice").rpartition("/")[0]
    return _own_slice(said) or said.home_of_lease(lease) == said.node


def _home_of_slice(said: Said) -> bool:
    return said.home_of_lease(said.text("slice").rpartition("/")[0]) in ("", said.node)


def _home(said: Said) -> bool:
    """The lease's scheduler runs on the node."""
    return said.home_of_lease(said.text("lease")) in ("", said.node)


def _own_device(said: Said) -> bool:
    return said.node_of_device(said.text("device")) == said.node


def _anybody(_said: Said) -> bool:
    return True


def _joined(said: Said) -> PoolEvent:
    node = decode(Node, said.report.get("node"))
    if node.name != said.node or any(each.node != said.node for each in node.devices):
        raise BadReportError(f"it calls itself {node.name}")
    return NodeJoined(**said.head, node=node, adopted=said.texts("adopted"))


def _verdict(said: Said) -> PoolEvent:
    evidence = said.report.get("evidence", "{}")
    return VerdictChanged(
        **said.head,
        device=said.text("device"),
        verdict=Verdict(said.text("verdict")),
        sentence=said.text("sentence"),
        evidence=evidence if isinstance(evidence, str) else json.dumps(evidence),
        probation=bool(said.report.get("probation")),
    )


def _drained(said: Said) -> PoolEvent:
    forced, lost = said.texts("forced"), said.texts("lost")
    work = said.report.get("work")
    done = work if isinstance(work, int) and work > 0 else 0
    return SliceDrained(**said.head, slice=said.text("slice"), forced=forced, lost=lost, work=done)


def _holds(said: Said) -> PoolEvent:
    parts = tuple((str(name)[:LONGEST], int(size)) for name, size in said.report.get("parts") or ())
    count, size = said.number("count"), said.number("size")
    return LeaseHolds(**said.head, lease=said.text("lease"), parts=parts, count=count, size=size)


def _instance_created(said: Said) -> PoolEvent:
    number = said.number("gpu_instance") if "gpu_instance" in said.report else -1
    device, made = str(said.report.get("device", "")), said.report.get("instance")
    if device and said.node_of_device(device) != said.node:
        raise BadReportError(f"{device} is not its device")
    return InstanceCreated(
        **said.head,
        slice=said.text("slice"),
        uuid=said.text("uuid"),
        gpu_instance=number,
        device=device,
        instance=decode(Instance, made) if made else None,
    )


#: Report -> who may say it, and the pool event that it is.
TABLE: dict[str, tuple[Callable[[Said], bool], Callable[[Said], PoolEvent]]] = {
    "joined": (_anybody, _joined),
    "scheduler_started": (
        _home,
        lambda said: LeaseStarted(**said.head, lease=said.text("lease"), address=said.text("address")),
    ),
    "scheduler_failed": (
        _home,
        lambda said: LeaseFailed(**said.head, lease=said.text("lease"), why=said.text("why")),
    ),
    "slice_started": (_own_or_home, lambda said: SliceStarted(**said.head, slice=said.text("slice"))),
    "slice_failed": (
        _own_or_home,
        lambda said: SliceFailed(**said.head, slice=said.text("slice"), why=said.text("why")),
    ),
    "slice_drained": (_home_of_slice, _drained),
    "slice_freed": (_own_slice, lambda said: SliceFreed(**said.head, slice=said.text("slice"))),
    "lease_freed": (_home, lambda said: LeaseFreed(**said.head, lease=said.text("lease"))),
    "lease_idle": (
        _home,
        # how long, as the agent's clock is not the pool's
        lambda said: LeaseIdle(
            **said.head, lease=said.text("lease"), since=said.now - max(0, said.number("idle_for"))
        ),
    ),
    "lease_holds": (_home, _holds),
    "lease_busy": (_home, lambda said: LeaseBusy(**said.head, lease=said.text("lease"))),
    "verdict": (_own_device, _verdict),
    "outside_use": (
        _own_device,
        lambda said: OutsideUse(
            **said.head, device=said.text("device"), who=str(said.report.get("who", ""))[:LONGEST]
        ),
    ),
    "instance_created": (
        _own_slice,
        _instance_created,
    ),
    "instance_failed": (
        _own_slice,
        lambda said: InstanceFailed(**said.head, slice=said.text("slice"), why=said.text("why")),
    ),
}


def to_event(said: Said) -> PoolEvent | None:
    """Return the pool event that a report is, or None where it is something else (a reading, an answer).

    Raises:
        BadReportError: It is malformed, or not the node's to say.
    """
    name = said.text("report")
    if name not in TABLE:
        return None
    may, make = TABLE[name]
    if not may(said):
        raise BadReportError(f"{name} is not for {said.node} to say")
    try:
        return make(said)
    except (ValueError, TypeError, AttributeError) as error:
        raise BadReportError(f"{name}: {error}") from error
