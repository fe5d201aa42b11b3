"""What the controller makes of agents' reports: pool events, readings, warnings, answers.

Rule 1: whatever an agent says, nothing here raises but for a journal that cannot be written; then the report
        is left, to come again.
Rule 2: a node that presents itself is told what it may have missed, and what it runs that nobody knows ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool import wire
from jupyter_gpupool.controller import versions
from jupyter_gpupool.controller.idleness import Idleness
from jupyter_gpupool.controller.overuse import Overuse
from jupyter_gpupool.controller.records import Heard, StoreError
from jupyter_gpupool.controller.reports import BadReportError, Said, to_event
from jupyter_gpupool.core.model import (
    ANY,
    LeaseBusy,
    LeaseFailed,
    LeaseIdle,
    LeaseStarted,
    NodeJoined,
    Notice,
    Notify,
    Reading,
    SliceFailed,
    SliceStarted,
    Verdict,
    VerdictChanged,
    decode,
)
from jupyter_gpupool.core.state import SchedulerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.controller.machine import Controller
    from jupyter_gpupool.wire import Message

logger = logging.getLogger(__name__)

#: The longest sentence of an agent's that is shown, in characters.
LONGEST = 500


class Hearing:
    """Hears the agents.

    Args:
        controller: For whom.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.readings: dict[str, Reading] = {}
        self.idleness = Idleness()
        self.overuse = Overuse(lambda: controller.pool, self._tell, controller.wake)
        self._read_at: dict[str, float] = {}
        #: What is no pool event; everything else is looked up in `reports.TABLE`.
        self._others: dict[str, Callable[[str, Message], None]] = {
            "readings": self._take_readings,
            "answer": self._take_answer,
            "finding": self._take_finding,
            "layers": self.overuse.take_layers,
            "over_share": self.overuse.take_over,
            "stray": self.overuse.take_stray,
            "actors_stay": self._take_actors,
        }

    def on_reports(self, worker: str = "", reports: Any = (), **_more: Any) -> None:
        """Take an agent's reports, in their order; never raises."""
        node = self._controller.agents.node_of(worker)
        if not node or not isinstance(reports, tuple | list):
            return
        try:
            self._controller.agents.hear(node, reports, self._take)
        except StoreError as error:
            logger.error("%s What %s has reported is taken later.", error, node)  # noqa: TRY400 - one sentence

    def _take(self, node: str, report: Message) -> None:
        """Take one report.

        Raises:
            StoreError: It could not be journaled; it is to come again.
        """
        take = self._others.get(str(report.get("report")), self._take_event)
        try:
            take(node, report)
        except StoreError:
            raise
        except BadReportError as error:
            logger.warning("A report of %s is not taken: %s", node, error)
        except Exception:
            logger.exception("A report of %s is not taken: %.200r", node, report)

    def _take_event(self, node: str, report: Message) -> None:
        """Take a report that is a pool event, or leads to one."""
        now, home = self._controller.clock.now(), self._controller.home
        event = to_event(Said(node, now, report, self._node_of_slice, self.node_of_device, home))
        if isinstance(event, LeaseIdle):
            self.idleness.claim(event.lease, event.since)
        elif isinstance(event, LeaseBusy):
            self.idleness.withdraw(event.lease)
        elif isinstance(event, NodeJoined):
            self._join(event, report)
        elif isinstance(event, VerdictChanged):
            if not self.is_known(event):
                self._controller.fitness.take(node, event)
        elif event is not None:
            if isinstance(event, LeaseStarted):
                self._controller.keys.note_dashboard(event.lease, str(report.get("dashboard", "")))
            self._controller.submit(event, heard=_heard(node, report))
            if isinstance(event, SliceStarted | SliceFailed):
                self._end_if_unknown(node, event.slice)

    def _end_if_unknown(self, node: str, ident: str) -> None:
        """End a slice that the pool has given up and a node has started all the same."""
        lease = ident.rpartition("/")[0]
        if self._node_of_slice(ident) == "":
            self._controller.agents.tell(node, {"order": "stop_slice", "lease": lease, "slice": ident})

    def is_known(self, event: VerdictChanged) -> bool:
        """Whether a verdict is only said again, as agents do at each connection."""
        if event.verdict is Verdict.RESTART_WORKER:
            return False
        known = self._controller.pool.devices[event.device]
        if (known.verdict, known.probation) != (event.verdict, event.probation):
            return False
        return event.verdict is Verdict.FINE or known.sentence == event.sentence

    # ------------------------------------------------------------------------------------------- joining

    def _join(self, event: NodeJoined, report: Message) -> None:
        """A node's agent presents itself."""
        node = event.node.name
        if report.get("head"):
            self._controller.keys.note_head(node)
        self._controller.submit(event)
        versions.note(self._controller.store, node, self._controller.agents.speaks(node))
        running = {str(each) for each in report.get("leases") or ()}
        self._tell_of_lost_schedulers(node, running)
        self._end_unknown_schedulers(node, running | {str(each) for each in report.get("remains") or ()})
        self._controller.again(node)
        self._controller.fitness.greet(node)
        for refused in report.get("refused") or ():
            self._warn(str(refused.get("sentence", "")))

    def _tell_of_lost_schedulers(self, node: str, running: set[str]) -> None:
        """Tell the pool which leases' schedulers should run on a node and do not."""
        home, now = self._controller.home, self._controller.clock.now()
        up = [each for each in self._controller.pool.leases.values() if each.scheduler is SchedulerState.UP]
        for lease in up:
            if lease.id not in running and home(lease.id) == node:
                why = f"it does not run on {node} any more"
                self._controller.submit(
                    LeaseFailed(now=now, cause=f"agent of {node}", lease=lease.id, why=why)
                )

    def _end_unknown_schedulers(self, node: str, running: set[str]) -> None:
        """End the schedulers that a node runs and the pool has given up."""
        for ident in sorted(running):
            lease = self._controller.pool.leases.get(ident)
            wanted = lease is not None and lease.scheduler is not SchedulerState.NONE
            if not wanted or self._controller.home(ident) != node:
                self._controller.agents.tell(node, {"order": "end_lease", "lease": ident})

    # -------------------------------------------------------------------------------- readings and the rest

    def _take_readings(self, node: str, report: Message) -> None:
        now = time.monotonic()
        for reading in [decode(Reading, each) for each in report.get("readings") or ()]:
            if self.node_of_device(reading.device) == node:
                self.readings[reading.device] = reading
                self._read_at[reading.device] = now
                self.idleness.seen(reading, self._controller.clock.now())
        self._controller.wake()

    def age(self, device: str) -> float:
        """Return how old the last reading of a device is, in seconds; infinite where there is none."""
        return time.monotonic() - self._read_at.get(device, float("-inf"))

    def _take_answer(self, _node: str, report: Message) -> None:
        self._controller.agents.answered(report)

    def _take_finding(self, _node: str, report: Message) -> None:
        self._controller.fitness.found(report)

    def _take_actors(self, node: str, report: Message) -> None:
        """Tell an owner of actors that cannot move off a worker that is to leave."""
        pool, part = self._controller.pool, str(report.get("slice"))
        lease = pool.leases.get(part.rpartition("/")[0])
        if lease is None or part not in lease.slices or self._controller.home(lease.id) != node:
            raise BadReportError(f"actors of {part} are not for {node} to speak of")
        actors = {str(key): str(why) for key, why in dict(report.get("actors") or {}).items()}
        keys = ", ".join(actors)[:LONGEST]
        sentence = (
            f"{lease.request.name}: actors on {pool.device_name(lease.slices[part].device)} cannot move "
            f"({keys}); the worker waits {int(report.get('seconds') or 0)} s for you to release them. "
            "An actor whose class has checkpoint() and restore(state) would have been moved."
        )
        data = json.dumps({"slice": part, "actors": actors})
        user, kind = lease.request.user, Notice.MIGRATING
        self._tell(Notify(user=user, notice=kind, lease=lease.id, sentence=sentence, data=data))

    def _warn(self, sentence: str) -> None:
        """Tell the administrators something that is no pool event."""
        if not sentence:
            return
        logger.warning("%s", sentence[:LONGEST])
        self._tell(Notify(user=ANY, notice=Notice.DEVICE, lease="", sentence=sentence[:LONGEST]))

    def _tell(self, notice: Notify) -> None:
        """Give a person a notice that follows from no pool event."""
        with contextlib.suppress(StoreError):
            self._controller.store.add_notices(None, [notice])
        self._controller.wake()

    # ------------------------------------------------------------------------------------------- who is where

    def _node_of_slice(self, ident: str) -> str:
        pool = self._controller.pool
        lease = pool.leases.get(ident.rpartition("/")[0])
        if lease is not None and ident in lease.slices:
            return lease.slices[ident].node
        given_up = (
            name for name, each in pool.nodes.items() if ident in each.ghosts or ident in each.strangers
        )
        return next(given_up, "")

    def node_of_device(self, uuid: str) -> str:
        """Return the node that a device is in, or ""."""
        record = self._controller.pool.devices.get(uuid)
        return record.device.node if record else ""


def _heard(node: str, report: Message) -> Heard | None:
    """Say which of the node's reports this is, where it is one that is sent until it is acknowledged."""
    seq, boot = wire.number(report)
    return Heard(node, boot, seq) if seq else None
