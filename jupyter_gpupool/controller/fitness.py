"""The fitness of the whole pool: what the nodes have judged, before the pool acts on it.

The rules are `core.poolhealth`; here are their memory, kept with the journal, the thresholds of the pool, and
whom to tell.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.records import StoreError
from jupyter_gpupool.core.findings import FindingKind
from jupyter_gpupool.core.health import CONDEMNED, PoolJudge, PoolOutcome, Thresholds
from jupyter_gpupool.core.model import ANY, Notice, Notify

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_gpupool.controller.machine import Controller
    from jupyter_gpupool.core.model import VerdictChanged
    from jupyter_gpupool.wire import Message

logger = logging.getLogger(__name__)

#: The name of its memory among the store's facts, and of the file of thresholds in the controller's folder.
FACT, FILE = "fitness", "thresholds.json"
#: The longest sentence of an agent's that is shown, in characters.
LONGEST = 500


class ThresholdsError(ValueError):
    """The file of thresholds is wrong; its text is one sentence that says how."""


class PoolFitness:
    """Judges what needs the whole pool.

    Args:
        controller: For whom.

    Raises:
        ThresholdsError: The file of thresholds is wrong.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._said = read_thresholds(controller.authority.folder / FILE)
        limits = Thresholds.parse(self._said)
        self._judge = PoolJudge(limits)
        try:
            if known := controller.store.get(FACT):
                self._judge = PoolJudge.restore(known, limits)
        except (KeyError, TypeError, ValueError):
            logger.exception("What was known of the pool's fitness is not used; it begins anew.")

    def greet(self, node: str) -> None:
        """Tell an agent that presents itself the pool's thresholds, and whose programs are at fault."""
        orders: list[Message] = [{"order": "thresholds", "limits": self._said}]
        orders += [{"order": "blame", "user": user} for user in self._judge.told]
        self._controller.agents.tell(node, *orders)

    def take(self, node: str, change: VerdictChanged) -> None:
        """Take a node's verdict, and let the pool have what becomes of it.

        Raises:
            StoreError: It could not be journaled; it is to come again.
        """
        self._follow(self._judge.take(node, change, len(self._controller.pool.devices)))

    def decided(self, target: str, *, fit: bool) -> None:
        """An administrator has said of a device or node that it is fit, or that its work is to move.

        Args:
            target: A device's UUID or a node's name.
            fit: It is: histories are forgotten, held verdicts dropped. Else held verdicts are carried out.
        """
        devices = self._controller.pool.devices
        named = [uuid for uuid, each in devices.items() if target in (uuid, each.device.node)]
        self._follow(self._judge.decide(named, self._controller.clock.now(), go_on=not fit))
        for uuid in named if fit else ():
            record = devices[uuid]
            if record.verdict in CONDEMNED:
                self._controller.agents.tell(record.device.node, {"order": "forgive", "device": uuid})

    def found(self, report: Message) -> None:
        """Tell a finding of an agent's to whom it concerns."""
        about, subject = str(report.get("about")), str(report.get("subject") or "")
        user = subject if about == FindingKind.PROGRAM and subject else ANY
        self._tell(user, str(report.get("sentence") or ""))

    def _follow(self, outcome: PoolOutcome) -> None:
        for change in outcome.changes:
            if not self._controller.hearing.is_known(change):
                self._controller.submit(change)
        for finding in outcome.findings:
            self._tell(finding.subject if finding.about is FindingKind.PROGRAM else ANY, finding.sentence)
        for user in outcome.blamed:
            for node in self._controller.agents.nodes:
                self._controller.agents.tell(node, {"order": "blame", "user": user})
        self._controller.store.put(FACT, self._judge.snapshot())

    def _tell(self, user: str, sentence: str) -> None:
        """Tell somebody what is no pool event."""
        if not sentence:
            return
        logger.warning("%s", sentence[:LONGEST])
        notice = Notify(user=user, notice=Notice.DEVICE, lease="", sentence=sentence[:LONGEST])
        with contextlib.suppress(StoreError):
            self._controller.store.add_notices(None, [notice])
        self._controller.wake()


def read_thresholds(path: Path) -> dict[str, Any]:
    """Read the pool's thresholds; none where there is no file.

    Raises:
        ThresholdsError: They are wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        Thresholds.parse(data)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise ThresholdsError(f"{path} is not a file of health thresholds: {error}") from error
    return dict(data)
