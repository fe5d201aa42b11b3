"""What is remembered of a device: incidents, baselines and samples, bounded, and as plain as JSON.

Rule 1: nothing here judges. A `History` answers how often, since when, how much; `rules` says the rest.
Rule 2: everything is bounded, by time and by number, however often the driver speaks.
Rule 3: one fault is logged many times; errors of one class within seconds are one incident.
Rule 4: what the driver does not support (`None`) leaves everything as it is.
Rule 5: a device that was broken and answers again has been reset; so has one whose volatile counts fell.

Not its business: clocks (times ride on readings and events), what counts as bad (`rules`, `thresholds`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Reading, Verdict, encode
from jupyter_gpupool.core.xids import Xid, XidClass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.core.thresholds import Thresholds

#: The clocks' event reasons that mean "slower than it should be": hardware, hardware thermal, power brake.
#: Software power cap (0x4) is normal at full load and idle (0x1) is idle.
SLOW_BITS = 0x8 | 0x40 | 0x80
#: Errors of every call on a device that say something of the device.
LOST, RESET_REQUIRED = "GPU_IS_LOST", "RESET_REQUIRED"
BROKEN = (LOST, RESET_REQUIRED)
ILL = ("INSUFFICIENT_POWER", "IRQ_ISSUE", "CORRUPTED_INFOROM")
#: The driver does not know the device any more, or this process may not see it.
UNFOUND = ("GPU_NOT_FOUND", "NOT_FOUND")
#: Bounds in number, beside those in time: incidents of one class, other signs, samples, readings kept.
MOST_INCIDENTS, MOST_SIGNS, MOST_SAMPLES, MOST_READINGS = 16, 16, 240, 4
#: Verdicts that take a device out of service.
CONDEMNED = (Verdict.RETIRE_SOON, Verdict.EVACUATE, Verdict.GONE)


def rank(verdict: Verdict) -> int:
    """Give the place of a verdict from best (0) to worst."""
    return list(Verdict).index(verdict)


@dataclass(slots=True, kw_only=True)
class Incident:
    """Errors of one class on one device within seconds: one fault."""

    kind: str
    #: "XID 13", "XID 43"…, in the order of arrival, and the meaning of the first.
    labels: list[str]
    meaning: str
    first: int
    last: int
    count: int = 1
    #: The GPU instance that it concerns, or -1: the whole device.
    instance: int = -1
    #: The users whose programs were there. More than one: it may be any of them. None: it is not known.
    programs: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class History:
    """All that is remembered of one device; every field is JSON-able, `Incident`s included."""

    device: str
    #: "node-1/gpu3", for people.
    name: str
    pci: str = ""
    #: In MIG mode the links read as down, which means nothing.
    mig: bool = False
    #: When it was first seen or last read, error or not.
    heard: int = 0
    #: Since when the driver does not list it any more.
    missing: int | None = None
    #: The device's own error, until a reading without one.
    error: str = ""
    #: It has been broken or missing: if it answers again, it has been reset.
    away: bool = False
    #: The monitor's last error on it, for saying it once.
    monitor: str = ""
    action: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    #: Signs that a person has seen and accepted.
    accepted: list[str] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    #: The volatile count of the last reading, and [time of the reading before, time, increase].
    ecc: int | None = None
    ecc_signs: list[list[int]] = field(default_factory=list)
    #: [time, 1 where slowed down]
    samples: list[list[int]] = field(default_factory=list)
    #: The widest link so far, the present one, and for how many readings it has been narrower.
    width_base: int = 0
    width: int = 0
    narrow_for: int = 0
    #: Links that have been up, those of them that are down now, and for how many readings.
    links_base: list[int] = field(default_factory=list)
    links_down: list[int] = field(default_factory=list)
    down_for: int = 0
    #: The count of the last reading, and [time, increase].
    link_errors: int | None = None
    link_signs: list[list[int]] = field(default_factory=list)
    #: The last readings, as evidence.
    readings: list[dict[str, Any]] = field(default_factory=list)
    #: The last sign of trouble that could condemn it.
    bad_at: int = 0
    #: When it was taken out, within the week.
    strikes: list[int] = field(default_factory=list)
    #: It stays out until a person says so.
    latched: bool = False
    probation_until: int = 0
    #: What brought it back the last time, for people.
    back_after: str = ""
    #: The present verdict: what, by which rule, since when, and the key by which a repetition is told.
    verdict: str = Verdict.FINE.value
    rule: str = "fine"
    sentence: str = ""
    since: int = 0
    key: str = ""

    # ------------------------------------------------------------------------------------------- what is told

    def take_incident(
        self, row: Xid, now: int, instance: int, programs: Iterable[str], limits: Thresholds
    ) -> Incident:
        """Remember an error of the driver, merging it with the last one of its class within seconds."""
        same = [
            each
            for each in self.of(row.kind)
            if each.instance == instance
            and now - each.last <= limits.coalesce
            and now - each.first <= limits.burst
        ]
        if row.kind not in (XidClass.INFO, XidClass.SECONDARY):
            self.bad_at = max(self.bad_at, now)
        if same:
            return _merge(same[-1], row.label, now, programs)
        incident = Incident(
            kind=row.kind.value,
            labels=[row.label],
            meaning=row.meaning,
            first=now,
            last=now,
            instance=instance,
            programs=sorted(set(programs)),
        )
        self.incidents.append(incident)
        self._bound(row.kind)
        return incident

    def _bound(self, kind: XidClass) -> None:
        """Drop the oldest of its own class only: a flood of one must not wash away what another has shown."""
        for oldest in self.of(kind)[:-MOST_INCIDENTS]:
            self.incidents.remove(oldest)

    def take_reading(self, reading: Reading) -> bool:
        """Remember a reading without an error; True where it shows that the device has been reset since."""
        reset = self._shows_reset(reading)
        self.error, self.missing, self.monitor, self.away = "", None, "", False
        self.action = self.action if reading.recovery_action is None else reading.recovery_action
        self.remap_pending = _known(reading.remap_pending, self.remap_pending)
        self.remap_failed = _known(reading.remap_failed, self.remap_failed)
        self._take_ecc(reading)
        self._take_slowdown(reading)
        self._take_width(reading)
        self._take_links(reading)
        self.heard = reading.now
        self.keep_reading(reading)
        return reset

    def take_error(self, reading: Reading, error: str) -> None:
        """Remember that the device itself answers with an error."""
        self.error, self.missing, self.heard = error, None, reading.now
        if error in BROKEN:
            self.away, self.bad_at = True, max(self.bad_at, reading.now)
        self.keep_reading(reading)

    def keep_reading(self, reading: Reading) -> None:
        """Keep a reading as evidence, without what is not supported."""
        data = encode(reading)
        for absent in [name for name, value in data.items() if value in (None, "", [])]:
            del data[absent]
        data.pop("device")
        data.pop("processes", None)  # whose processes run is nobody else's business
        self.readings = [*self.readings, data][-MOST_READINGS:]

    def _shows_reset(self, reading: Reading) -> bool:
        fallen = self.ecc is not None and reading.ecc_uncorrected is not None
        return (
            self.away
            or (bool(self.action) and reading.recovery_action == 0)
            or (fallen and (reading.ecc_uncorrected or 0) < (self.ecc or 0))
        )

    def _take_ecc(self, reading: Reading) -> None:
        if reading.ecc_uncorrected is None:
            return
        grown = reading.ecc_uncorrected - (self.ecc if self.ecc is not None else reading.ecc_uncorrected)
        if grown > 0:
            self.bad_at = max(self.bad_at, reading.now)
            self.ecc_signs = [*self.ecc_signs, [self.heard, reading.now, grown]][-MOST_SIGNS:]
        self.ecc = reading.ecc_uncorrected

    def _take_slowdown(self, reading: Reading) -> None:
        if reading.slowdown is not None:
            slow = int(bool(reading.slowdown & SLOW_BITS))
            self.samples = [*self.samples, [reading.now, slow]][-MOST_SAMPLES:]

    def _take_width(self, reading: Reading) -> None:
        if reading.pcie_width is None:
            return
        self.width = reading.pcie_width
        self.width_base = max(self.width_base, self.width)
        self.narrow_for = self.narrow_for + 1 if self.width < self.width_base else 0

    def _take_links(self, reading: Reading) -> None:
        if reading.nvlinks is not None and not self.mig:
            up = {link for link, state in enumerate(reading.nvlinks) if state}
            self.links_base = sorted(up | set(self.links_base))
            self.links_down = sorted(set(self.links_base) - up)
            self.down_for = self.down_for + 1 if self.links_down else 0
        if reading.nvlink_errors is not None:
            grown = reading.nvlink_errors - (self.link_errors or 0)
            if self.link_errors is not None and grown > 0:
                self.link_signs = [*self.link_signs, [reading.now, grown]][-MOST_SAMPLES:]
            self.link_errors = reading.nvlink_errors

    # --------------------------------------------------------------------------------------- what is answered

    def of(self, *kinds: XidClass) -> list[Incident]:
        """Give the incidents of these classes, oldest first."""
        return [each for each in self.incidents if each.kind in kinds]

    def answers_again(self, now: int, gap: int) -> bool:
        """Say whether it answers `gap` ms after it was said to be off the bus: it must have been reset."""
        return any(now - each.last >= gap for each in self.of(XidClass.GONE))

    def unexplained_ecc(self, now: int, gap: int) -> int:
        """Count uncorrected memory errors that no contained one explains, once it has had `gap` ms to."""
        contained = self.of(XidClass.CONTAINED)
        return sum(
            grown
            for before, at, grown in self.ecc_signs
            if at + gap <= now and not any(before - gap <= each.last <= at + gap for each in contained)
        )

    def slow_share(self, now: int, window: int) -> tuple[int, int]:
        """Give the percentage of samples with a slowdown within `window` ms, and the number of samples."""
        recent = [slow for at, slow in self.samples if at > now - window]
        return (100 * sum(recent) // len(recent) if recent else 0), len(recent)

    def link_errors_within(self, now: int, window: int) -> int:
        """Count the NVLink errors within `window` ms."""
        return sum(grown for at, grown in self.link_signs if at > now - window)

    def on_probation(self, now: int) -> bool:
        """Say whether it came back recently."""
        return now < self.probation_until

    # -------------------------------------------------------------------------------------- what is forgotten

    def forget(self, now: int, limits: Thresholds) -> None:
        """Drop what is older than its window."""
        self.incidents = [each for each in self.incidents if each.last > now - limits.window]
        self.ecc_signs = [sign for sign in self.ecc_signs if sign[1] > now - limits.window]
        self.samples = [sample for sample in self.samples if sample[0] > now - limits.slow_window]
        self.link_signs = [sign for sign in self.link_signs if sign[0] > now - limits.link_window]
        self.strikes = [at for at in self.strikes if at > now - limits.strike_window]

    def cure(self) -> None:
        """Forget every sign that a reset ends; what still shows will show again in the next reading."""
        self.incidents, self.ecc_signs, self.samples, self.link_signs = [], [], [], []
        self.narrow_for, self.down_for = 0, 0

    def accept(self) -> None:
        """Take the present state as the baseline: a person has looked at it."""
        self.cure()
        self.latched, self.strikes = False, []
        self.width_base, self.links_base, self.links_down = self.width, [], []
        signs = {"remap_failed": self.remap_failed, "remap_pending": self.remap_pending}
        self.accepted = [name for name, there in signs.items() if there]

    # --------------------------------------------------------------------------------------------------- JSON

    def to_json(self) -> dict[str, Any]:
        """Write all of it as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> History:
        """Read back what `to_json` wrote; fields of another version are left out."""
        known = {each.name for each in fields(cls)}
        rest = {name: value for name, value in data.items() if name in known and name != "incidents"}
        incidents = [Incident(**each) for each in data.get("incidents", [])]
        return cls(incidents=incidents, **rest)


def _known(value: bool | None, before: bool) -> bool:  # noqa: FBT001  # a reading's two-and-a-half values
    return before if value is None else value


def _merge(incident: Incident, label: str, now: int, programs: Iterable[str]) -> Incident:
    incident.last, incident.count = now, incident.count + 1
    if label not in incident.labels:
        incident.labels = [*incident.labels, label][:MOST_SIGNS]
    incident.programs = sorted({*incident.programs, *programs})[:MOST_SIGNS]
    return incident


@dataclass(slots=True)
class Programs:
    """On which devices the programs of each user have had errors of their own kind."""

    #: program -> device -> time of the last one. "" stands for programs that are not known.
    seen: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Programs that the pool has found to spread over nodes, and when.
    blamed: dict[str, int] = field(default_factory=dict)
    #: Bound in number.
    most: int = 256

    def note(self, programs: Iterable[str], device: str, now: int) -> None:
        """Remember that an error came on `device` while these programs were there."""
        for program in list(programs) or [""]:
            devices = self.seen.pop(program, {})
            devices.pop(device, None)
            self.seen[program] = {**devices, device: now}
        for oldest in list(self.seen)[: -self.most]:
            del self.seen[oldest]

    def forget(self, now: int, window: int) -> None:
        """Drop what is older than `window` ms."""
        for program, devices in list(self.seen.items()):
            recent = {device: at for device, at in devices.items() if at > now - window}
            self.seen[program] = dict(list(recent.items())[-self.most :])
            if not recent:
                del self.seen[program]
        self.blamed = {program: at for program, at in self.blamed.items() if at > now - window}

    def spreading(self, least: int) -> dict[str, list[str]]:
        """Give the programs with errors on `least` devices or more, and those devices."""
        found = {program: sorted(devices) for program, devices in self.seen.items() if len(devices) >= least}
        for program in self.blamed:
            found.setdefault(program, sorted(self.seen.get(program, {})))
        return dict(sorted(found.items()))
