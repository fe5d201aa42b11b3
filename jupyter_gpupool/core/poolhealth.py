"""What only the whole pool can judge: programs that fail on several nodes, and too many condemned at once.

Rule 1: a node judges its own devices (`health.Judge`); this looks at what the nodes have judged before the
        pool acts on it.
Rule 2: a program with application errors on GPUs of several nodes is at fault itself: devices that were
        retired for its errors alone are let off, and the nodes are told.
Rule 3: more than half of the pool condemned within minutes is more likely one cause than many: the circuit
        breaker stops, nothing more is taken out, and a person decides. What was condemned stays condemned.
Rule 4: a device that comes back is never held up.

Not its business: single devices (`health`), what follows from a verdict (`pool`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.findings import Finding, FindingKind
from jupyter_gpupool.core.history import CONDEMNED, Programs
from jupyter_gpupool.core.model import Verdict, VerdictChanged, decode, encode
from jupyter_gpupool.core.thresholds import Thresholds
from jupyter_gpupool.core.xids import XidClass

if TYPE_CHECKING:
    from collections.abc import Iterable

#: In place of a time: a person has looked at it, so that it counts for no further stop.
_LOOKED_AT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOutcome:
    """What the pool is to be told, what people are, and whom the nodes are to blame (`Judge.blame`)."""

    changes: tuple[VerdictChanged, ...] = ()
    findings: tuple[Finding, ...] = ()
    blamed: tuple[str, ...] = ()


class PoolJudge:
    """Looks at the verdicts of all nodes before the pool gets them."""

    def __init__(self, limits: Thresholds | None = None) -> None:
        """Know nothing yet."""
        self.limits = limits or Thresholds()
        self.programs = Programs()
        #: Programs that have been blamed and told about.
        self.told: list[str] = []
        #: device -> node, for devices with application errors.
        self.nodes: dict[str, str] = {}
        #: device -> when it was condemned, while it is.
        self.condemned: dict[str, int] = {}
        #: device -> the verdict that waits for a person, in the order of arrival.
        self.held: dict[str, VerdictChanged] = {}
        #: When the breaker stopped; 0: it has not.
        self.stopped: int = 0

    def take(self, node: str, change: VerdictChanged, devices: int) -> PoolOutcome:
        """Take a node's verdict, and give what the pool is to be told instead.

        Args:
            node: Who has judged.
            change: The verdict, with the evidence that `Judge` writes.
            devices: How many devices the pool has.
        """
        blamed = self._note(node, change)
        change = self._let_off(change)
        findings = tuple(self._at_fault(program, change.now) for program in blamed)
        told, more = self._break(change, devices)
        return PoolOutcome(changes=(told,), findings=findings + more, blamed=blamed)

    def decide(self, devices: Iterable[str], now: int, *, go_on: bool) -> PoolOutcome:
        """A person decides about verdicts that are held: carry them out, or drop them.

        When none is held any more the breaker closes, and what was looked at counts for no further stop.

        Args:
            devices: UUIDs of the devices; those without a held verdict are left alone.
            now: milliseconds
            go_on: Carry the verdicts out.
        """
        held = tuple(replace(self.held.pop(each), now=now) for each in devices if each in self.held)
        if go_on:
            self.condemned.update(dict.fromkeys((change.device for change in held), _LOOKED_AT))
        if not self.held:
            self._close()
        return PoolOutcome(changes=held if go_on else ())

    def _close(self) -> None:
        if self.stopped:
            self.stopped = 0
            self.condemned = dict.fromkeys(self.condemned, _LOOKED_AT)

    def forget(self, device: str) -> None:
        """Forget a device that has left the pool."""
        for table in (self.nodes, self.condemned, self.held):
            table.pop(device, None)

    def snapshot(self) -> dict[str, Any]:
        """Write everything that later answers depend on as JSON-able data."""
        return {
            "programs": asdict(self.programs),
            "told": list(self.told),
            "nodes": dict(self.nodes),
            "condemned": dict(self.condemned),
            "held": [encode(change) for change in self.held.values()],
            "stopped": self.stopped,
        }

    @classmethod
    def restore(cls, data: dict[str, Any], limits: Thresholds | None = None) -> PoolJudge:
        """Read back what `snapshot` wrote."""
        judge = cls(limits)
        judge.programs = Programs(**data["programs"])
        judge.told, judge.nodes, judge.condemned = data["told"], data["nodes"], data["condemned"]
        held = [decode(VerdictChanged, each) for each in data["held"]]
        judge.held = {change.device: change for change in held}
        judge.stopped = data["stopped"]
        return judge

    # ----------------------------------------------------------------------------------------------- programs

    def _note(self, node: str, change: VerdictChanged) -> tuple[str, ...]:
        """Remember whose application errors came where; give the programs just found to spread."""
        incidents = json.loads(change.evidence).get("incidents", [])
        latest = max((incident["last"] for incident in incidents), default=0)
        for incident in incidents:
            if incident["kind"] == XidClass.APPLICATION and incident["programs"]:
                self.nodes[change.device] = node
                # The node's clock is its own; how long ago it was is what counts.
                ago = latest - incident["last"]
                self.programs.note(incident["programs"], change.device, change.now - ago)
        self.programs.forget(change.now, self.limits.window)
        known = {device for devices in self.programs.seen.values() for device in devices}
        self.nodes = {device: name for device, name in self.nodes.items() if device in known}
        spreading = self._spreading()
        new = tuple(program for program in spreading if program not in self.told)
        self.told = list(spreading)
        return new

    def _spreading(self) -> dict[str, list[str]]:
        """Give the programs that have failed on several nodes (what spreads on one, the node sees itself)."""
        found = self.programs.spreading(self.limits.spread)
        return {
            program: devices
            for program, devices in found.items()
            if len({self.nodes[device] for device in devices if device in self.nodes}) > 1
        }

    def _let_off(self, change: VerdictChanged) -> VerdictChanged:
        """A device retired for the errors of programs that fail everywhere only has its worker restarted."""
        evidence = json.loads(change.evidence)
        programs = evidence.get("programs", [])
        explained = bool(programs) and all(program in self.told for program in programs)
        if evidence.get("rule") != "application repeated" or not explained:
            return change
        names = " and ".join(f"{program}'s program" for program in programs)
        says = f"Its errors came under {names}, which fails on other nodes too: the fault is its own."
        return replace(
            change, verdict=Verdict.RESTART_WORKER, sentence=says, cause="health: program at fault"
        )

    def _at_fault(self, program: str, now: int) -> Finding:
        devices = self._spreading()[program]
        nodes = sorted({self.nodes[device] for device in devices if device in self.nodes})
        says = f"The same kind of error came on {len(devices)} GPUs of {', '.join(nodes)} under {program}'s "
        says += "program: the fault is its own, not the GPUs'."
        evidence = json.dumps({"devices": devices})
        return Finding(now=now, about=FindingKind.PROGRAM, subject=program, sentence=says, evidence=evidence)

    # ------------------------------------------------------------------------------------ the circuit breaker

    def _break(self, change: VerdictChanged, devices: int) -> tuple[VerdictChanged, tuple[Finding, ...]]:
        """Pass a verdict on, or hold it where it would be one too many."""
        device = change.device
        if change.verdict not in CONDEMNED:
            self.condemned.pop(device, None)
            if self.held.pop(device, None) and not self.held:
                self._close()
            return change, ()
        if device in self.condemned:
            return change, ()
        if not self.stopped and not self._too_many(change.now, devices):
            self.condemned[device] = change.now
            return change, ()
        return self._hold(change, devices)

    def _too_many(self, now: int, devices: int) -> bool:
        limits = self.limits
        recent = 1 + sum(
            1 for at in self.condemned.values() if at > max(now - limits.breaker_window, _LOOKED_AT)
        )
        return recent >= limits.breaker_least and 100 * recent > limits.breaker_percent * devices

    def _hold(self, change: VerdictChanged, devices: int) -> tuple[VerdictChanged, tuple[Finding, ...]]:
        first = not self.stopped
        self.stopped = self.stopped or change.now
        self.held[change.device] = change
        says = (
            f"Judged {change.verdict}, but held for a person's decision: too many at once. {change.sentence}"
        )
        held = replace(change, verdict=Verdict.WATCH, sentence=says, cause="health: circuit breaker")
        return held, ((self._ask(change.now, devices),) if first else ())

    def _ask(self, now: int, devices: int) -> Finding:
        minutes = self.limits.breaker_window // 60_000
        says = (
            f"More than {self.limits.breaker_percent} % of the pool's {devices} GPUs were condemned within "
        )
        says += f"{minutes} minutes. That is more likely one cause than many, so nothing more is taken out: "
        says += "find the cause, then drain the GPUs that are bad and uncordon those that are not."
        return Finding(now=now, about=FindingKind.POOL, subject="pool", sentence=says)
