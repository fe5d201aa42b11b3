"""Is it fit: readings and NVML events in, changed verdicts out.

Rule 1: a `Judge` judges the devices of one node by the table in `rules`; a `PoolJudge` (`poolhealth`) judges
        what needs the whole pool: programs that fail on several nodes, and the circuit breaker.
Rule 2: a verdict that takes a device out stands until something cures it: a reset, a reboot, a clean period,
        a program that turns out to be at fault, or a person. What comes back is on probation, except after a
        program's fault. What was taken out three times in a week stays out until a person says so.
Rule 3: only changes are told, each with its evidence. A restart of a worker is told anew for each incident.
Rule 4: a finding is about something else than a device: the monitor, a program, links. It condemns nothing.
Rule 5: the same inputs give the same outputs, and `snapshot` keeps all that they depend on.

Not its business: reading the driver (`driver`, `node`), moving work (`pool`), naming exceptions (`faults`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core import history as memory
from jupyter_gpupool.core.findings import Finding, FindingKind, evidence
from jupyter_gpupool.core.history import CONDEMNED, History, Incident, Programs, rank
from jupyter_gpupool.core.model import Verdict, VerdictChanged
from jupyter_gpupool.core.poolhealth import PoolJudge, PoolOutcome
from jupyter_gpupool.core.rules import LINKS, RULES, Case, first_match
from jupyter_gpupool.core.thresholds import Thresholds
from jupyter_gpupool.core.xids import CLASSES, WHOLE_DEVICE, XidClass, concerned, lookup_event

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.core.model import Device, NvmlEvent, Reading

__all__ = [
    "CONDEMNED",
    "RULES",
    "Finding",
    "FindingKind",
    "Judge",
    "Outcome",
    "PoolJudge",
    "PoolOutcome",
    "Thresholds",
    "concerned",
]

#: Two cures that are treated in their own way.
_PERSON, _PROGRAM = "a person's decision", "the program's fault"
#: How many devices that are long gone are remembered, in case they come back.
_MOST_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What follows from one input."""

    changes: tuple[VerdictChanged, ...] = ()
    findings: tuple[Finding, ...] = ()
    #: Devices on which NVML is to be asked at once, because an event says too little.
    poll: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            changes=self.changes + other.changes,
            findings=self.findings + other.findings,
            poll=self.poll + other.poll,
        )


class Judge:
    """Judges the devices of one node; every input carries its time (ms) and gives an `Outcome`."""

    def __init__(self, node: str, limits: Thresholds | None = None, *, boot: str = "") -> None:
        """Know no device yet.

        Args:
            node: The node's name.
            limits: The thresholds; the defaults if left out.
            boot: The boot id of the machine; another one later on means a reboot.
        """
        self.node = node
        self.limits = limits or Thresholds()
        self.boot = boot
        self.histories: dict[str, History] = {}
        self.programs = Programs()
        #: Programs, and links, whose spreading has been told.
        self.told: list[str] = []
        #: Look for readings that stopped; off where the reader's own watchdog tells of them.
        self.watches = True
        #: Devices whose readings have stopped, as has been told; the node's name: all of them.
        self.silent: list[str] = []
        #: The last error for which the driver listed nothing, as has been told.
        self.unlisted = False

    # ------------------------------------------------------------------------------------------------- inputs

    def devices(self, listed: Iterable[Device], now: int, *, boot: str = "") -> Outcome:
        """Take what the driver lists now; what it listed before and does not list now is missing."""
        present = {device.uuid: device for device in listed}
        if not present and self.histories:
            return self._nothing_listed(now)
        self.unlisted = False
        rebooted = bool(boot and self.boot and boot != self.boot)
        self.boot = boot or self.boot
        for device in present.values():
            self._list(device, now)
        for seen in self.histories.values():
            if seen.device not in present and seen.missing is None:
                seen.missing = now
        return self._settle_all(now, cure="a reboot" if rebooted else "")

    def reading(self, reading: Reading) -> Outcome:
        """Take what one poll says of one device."""
        seen = self._history(reading.device, reading.now)
        error = reading.error.upper().removeprefix("NVML_ERROR_")
        if not error:
            reset = seen.take_reading(reading) or seen.answers_again(reading.now, self.limits.coalesce)
            return self._settle(seen, reading.now, cure="a reset" if reset else "")
        if error in (*memory.BROKEN, *memory.ILL):
            seen.take_error(reading, error)
            return self._settle(seen, reading.now)
        return self._monitor_error(seen, reading, error)

    def event(self, event: NvmlEvent, programs: Iterable[str] = ()) -> Outcome:
        """Take what the driver has announced.

        Args:
            event: The announcement.
            programs: Whose programs were on the device (of a MIG instance: on that one): names of users. Not
                of leases, since a person who tries again after a crash has another lease each time.
        """
        seen = self._history(event.device, event.now)
        row = lookup_event(event, dict(self.limits.xids))
        instance = -1 if event.gpu_instance in WHOLE_DEVICE else event.gpu_instance
        owners = sorted(set(programs))
        seen.take_incident(row, event.now, instance, owners, self.limits)
        if row.kind is XidClass.APPLICATION:
            self.programs.note(owners, event.device, event.now)
        if row.kind is XidClass.LINK:
            self.programs.note([LINKS], event.device, event.now)
        poll = row.poll or CLASSES[row.kind].single is not Verdict.FINE
        return self._settle_all(event.now) + Outcome(poll=(event.device,) if poll else ())

    def tick(self, now: int) -> Outcome:
        """Let time pass: warnings end, clean periods end, readings are found to have stopped."""
        return self._settle_all(now) + (self._silence(now) if self.watches else Outcome())

    def blame(self, program: str, now: int) -> Outcome:
        """Learn from the pool that a program fails on other nodes too: nothing here is to suffer for it."""
        self.programs.blamed[program] = now
        return self._settle_all(now)

    def forgive(self, device: str, now: int) -> Outcome:
        """A person says that a device is fit: what it shows now is its baseline; it is back on probation."""
        if device not in self.histories:
            return Outcome()
        seen = self.histories[device]
        seen.accept()
        return self._settle(seen, now, cure=_PERSON)

    # ------------------------------------------------------------------------------------------------ answers

    def opinion(self, device: str, now: int) -> VerdictChanged:
        """Give the present verdict on a device, as it was last told."""
        seen = self.histories.get(device) or History(device=device, name=device, heard=now)
        return self._change(seen, now, None)

    def failed_just_now(self, device: str, now: int) -> bool:
        """Say whether the driver has announced a hardware error on a device within the last seconds."""
        seen = self.histories.get(device) if not self.limits.observe else None
        kinds = (XidClass.CONTAINED, XidClass.LINK, XidClass.RESET, XidClass.GONE)
        recent = seen.of(*kinds) if seen else []
        return any(now - each.last <= self.limits.coalesce for each in recent)

    def is_busy(self, device: str) -> bool:
        """Say whether a device was at work when it was last read."""
        seen = self.histories.get(device)
        last = seen.readings[-1] if seen and seen.readings else {}
        return bool(last.get("utilisation"))

    def opinions(self, now: int) -> tuple[VerdictChanged, ...]:
        """Give the verdicts that are not simply `fine`, for telling a controller that has missed them."""
        seen = [each for each in self.histories.values() if each.rule != "fine" or each.on_probation(now)]
        return tuple(self._change(each, now, None) for each in seen)

    def snapshot(self) -> dict[str, Any]:
        """Write everything that later verdicts depend on as JSON-able data."""
        return {
            "version": 1,
            "node": self.node,
            "boot": self.boot,
            "histories": [each.to_json() for each in self.histories.values()],
            "programs": asdict(self.programs),
            "told": list(self.told),
            "silent": list(self.silent),
            "unlisted": self.unlisted,
        }

    @classmethod
    def restore(cls, data: dict[str, Any], limits: Thresholds | None = None) -> Judge:
        """Read back what `snapshot` wrote.

        Raises:
            ValueError: The data is not a snapshot of this version.
        """
        if data.get("version") != 1:
            raise ValueError("Not a health snapshot of this version: start without it; histories begin anew.")
        judge = cls(data["node"], limits, boot=data["boot"])
        judge.histories = {each["device"]: History.from_json(each) for each in data["histories"]}
        judge.programs = Programs(**data["programs"])
        judge.told, judge.silent, judge.unlisted = data["told"], data["silent"], data["unlisted"]
        return judge

    # -------------------------------------------------------------------------------------------- the devices

    def _history(self, device: str, now: int) -> History:
        if device not in self.histories:
            self.histories[device] = History(
                device=device, name=f"{self.node}/{device}", heard=now, since=now
            )
        return self.histories[device]

    def _list(self, device: Device, now: int) -> None:
        """Take one device; one that sits where another one sat is its replacement and starts on probation."""
        fresh = device.uuid not in self.histories
        seen = self._history(device.uuid, now)
        seen.name, seen.pci, seen.mig = f"{self.node}/gpu{device.index}", device.pci, device.mig
        seen.away = seen.away or seen.rule == "missing"
        seen.missing = None
        others = [each for each in self.histories.values() if each.device != device.uuid]
        if fresh and any(device.pci and each.pci == device.pci for each in others):
            seen.probation_until, seen.back_after = now + self.limits.probation, "an exchange"

    # -------------------------------------------------------------------------------------------- the monitor

    def _nothing_listed(self, now: int) -> Outcome:
        """No device at all says more of the driver or the container than of the devices."""
        if self.unlisted:
            return Outcome()
        self.unlisted = True
        says = (
            f"The driver lists no GPU at all on {self.node}: look at the driver and the container's devices."
        )
        return Outcome(findings=(self._finding(FindingKind.MONITOR, self.node, says, now),))

    def _monitor_error(self, seen: History, reading: Reading, error: str) -> Outcome:
        seen.heard = reading.now
        if error in memory.UNFOUND and self._others_answer(seen, reading.now):
            seen.missing = reading.now if seen.missing is None else seen.missing
            return self._settle(seen, reading.now)
        if seen.monitor == error:
            return Outcome()
        seen.monitor = error
        says = (
            f"{seen.name} could not be read ({error}). That says nothing of the GPU, so its verdict stands."
        )
        return Outcome(findings=(self._finding(FindingKind.MONITOR, seen.device, says, reading.now),))

    def _others_answer(self, seen: History, now: int) -> bool:
        others = (each for each in self.histories.values() if each is not seen)
        return any(each.readings and self._answers(each, now) for each in others)

    def _answers(self, seen: History, now: int) -> bool:
        return not (seen.error or seen.monitor) and now - seen.heard < self.limits.silence

    def _silence(self, now: int) -> Outcome:
        """Readings that stopped are a finding about the monitor, told once."""
        present = [each for each in self.histories.values() if each.missing is None]
        silent = [each for each in present if now - each.heard >= self.limits.silence]
        subjects = {each.device: each for each in silent}
        if silent and len(silent) == len(present):
            subjects = {self.node: max(silent, key=lambda each: each.heard)}
        new = [name for name in subjects if name not in self.silent]
        self.silent = list(subjects)
        return Outcome(findings=tuple(self._stopped(name, subjects[name], now) for name in new))

    def _stopped(self, subject: str, seen: History, now: int) -> Finding:
        name = self.node if subject == self.node else seen.name
        ago = (now - seen.heard) // 1000
        says = f"Readings of {name} stopped {ago} s ago. The verdicts stand; the reader is looked after."
        return self._finding(FindingKind.MONITOR, subject, says, now)

    def _finding(self, kind: FindingKind, subject: str, says: str, now: int, **more: Any) -> Finding:
        return Finding(now=now, about=kind, subject=subject, sentence=says, evidence=json.dumps(more))

    # ------------------------------------------------------------------------------------------- the verdicts

    def _settle_all(self, now: int, *, cure: str = "") -> Outcome:
        """Judge every device: what happened on one may explain another."""
        outcome = self._spread(now)
        for seen in list(self.histories.values()):
            outcome += self._settle(seen, now, cure=cure if seen.missing is None else "")
        self._drop_the_long_gone(now)
        return outcome

    def _settle(self, seen: History, now: int, *, cure: str = "") -> Outcome:
        """Judge one device; `cure` names what may bring it back."""
        seen.forget(now, self.limits)
        before = Verdict(seen.verdict)
        if cure or self._clean(seen, now):
            seen.cure()
            cure = cure or "a clean period"
        case = Case(now, seen, self.limits, self.programs.spreading(self.limits.spread))
        _, verdict, _ = first_match(case)
        cure = cure or self._exonerated(case)
        if before in CONDEMNED and rank(verdict) < rank(before) and not cure:
            return Outcome()
        self._count(seen, before, verdict, cure, now)
        return self._tell(seen, case)

    def _clean(self, seen: History, now: int) -> bool:
        """A device that was taken out and answers without any new sign for long enough may come back."""
        quiet = now - max(seen.bad_at, seen.since) >= self.limits.clean
        return Verdict(seen.verdict) in CONDEMNED and quiet and self._answers(seen, now)

    def _exonerated(self, case: Case) -> str:
        """What was condemned for a program's repeated errors is cleared when that fails elsewhere too."""
        if case.history.rule not in ("application repeated", "link repeated"):
            return ""
        kind = XidClass.APPLICATION if case.history.rule == "application repeated" else XidClass.LINK
        explained = len(case.own(kind)) < len(case.history.of(kind))
        return _PROGRAM if explained else ""

    def _count(self, seen: History, before: Verdict, verdict: Verdict, cure: str, now: int) -> None:
        """Count a condemnation as a strike, and put what comes back on probation."""
        if verdict in CONDEMNED and before not in CONDEMNED:
            seen.strikes.append(now)
            seen.latched = seen.latched or 0 < self.limits.strikes <= len(seen.strikes)
        if before in CONDEMNED and verdict not in CONDEMNED:
            if cure == _PROGRAM:
                del seen.strikes[-1:]
            else:
                seen.probation_until, seen.back_after = now + self.limits.probation, cure

    def _tell(self, seen: History, case: Case) -> Outcome:
        """Tell a verdict that differs from the last one told; probation changes which rule matches."""
        rule, verdict, words = first_match(case)
        incident = _incident_of(verdict, seen)
        # The same incident, by whichever rule, asks for one restart only.
        about = incident.first if incident else f"{rule.name}|{seen.on_probation(case.now)}"
        key = f"{verdict}|{about}"
        if key == seen.key or (not seen.key and rule.name == "fine" and not seen.on_probation(case.now)):
            return Outcome()
        if seen.verdict != verdict or incident:
            seen.since = case.now
        seen.key, seen.rule, seen.verdict = key, rule.name, verdict.value
        seen.sentence = rule.says.format(**words)
        return Outcome(changes=(self._change(seen, case.now, incident),))

    def _change(self, seen: History, now: int, incident: Incident | None) -> VerdictChanged:
        return VerdictChanged(
            now=now,
            cause=f"health: {seen.rule}",
            device=seen.device,
            verdict=Verdict(seen.verdict),
            sentence=seen.sentence,
            evidence=evidence(seen, incident),
            probation=seen.on_probation(now),
        )

    # ------------------------------------------------------------------------------------------- the programs

    def _spread(self, now: int) -> Outcome:
        """Tell once of each program, and of the links, that have had the same trouble on several devices."""
        self.programs.forget(now, self.limits.window)
        spreading = self.programs.spreading(self.limits.spread)
        new = [program for program in spreading if program not in self.told]
        self.told = list(spreading)
        return Outcome(findings=tuple(self._spreads(each, spreading[each], now) for each in new))

    def _spreads(self, program: str, devices: list[str], now: int) -> Finding:
        names = ", ".join(self.histories[each].name for each in devices if each in self.histories)
        if program == LINKS:
            says = f"NVLink errors on {names}: look at the links between them."
            return self._finding(FindingKind.NODE, self.node, says, now, devices=devices)
        whose = f"{program}'s program" if program else "a program of nobody known"
        says = f"The same kind of error came on {names} under {whose}: the fault is its own, not the GPUs'."
        return self._finding(FindingKind.PROGRAM, program, says, now, devices=devices)

    def _drop_the_long_gone(self, now: int) -> None:
        """Forget devices that are listed no more, the longest gone first, beyond a bound or after a week."""
        gone = [each for each in self.histories.values() if each.missing is not None]
        gone.sort(key=lambda each: (-(each.missing or 0), each.device))
        old = [each for each in gone if now - (each.missing or 0) > self.limits.strike_window]
        for each in {each.device: each for each in [*gone[_MOST_DEVICES:], *old]}.values():
            if not each.latched:
                del self.histories[each.device]


def _incident_of(verdict: Verdict, seen: History) -> Incident | None:
    """Give the incident for which a worker is restarted: each is told, though the verdict is the same."""
    if verdict is not Verdict.RESTART_WORKER:
        return None
    candidates = seen.of(XidClass.APPLICATION, XidClass.CONTAINED)
    return max(candidates, key=lambda each: each.last, default=None)
