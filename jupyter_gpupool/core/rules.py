"""The health rules: an ordered table, a sentence each; the first that matches is the verdict on a device.

Rule 1: the table is read from top to bottom, worst first, and the first rule that matches wins.
Rule 2: a rule sees one `Case`: what is remembered of one device, the time, the thresholds, and which programs
        have had the same trouble elsewhere. It never sees another device's history.
Rule 3: an application error never condemns by itself; only its repetition does, and only where no program
        explains it.
Rule 4: what fails in the monitor or the container is in no rule at all.

Not its business: remembering (`history`), the way back and telling about it (`health`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core import history
from jupyter_gpupool.core.model import Verdict
from jupyter_gpupool.core.xids import XidClass

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jupyter_gpupool.core.history import History, Incident
    from jupyter_gpupool.core.thresholds import Thresholds

#: The program's name for links between GPUs in `Case.spreading`: a link has two ends, and both report.
LINKS = "links between GPUs"
#: NVML's recovery actions (field 230) as a person would say them, by what they ask for.
RESET_ACTIONS = {1: "reset the GPU", 2: "reboot the node", 6: "reset the GPU's bus", 7: "reboot the system"}
DRAIN_ACTION = 4
OTHER_ACTIONS = {3: "drain peer-to-peer traffic", 5: "recover the IMEX domain"}

#: What a rule found, as the words of its sentence; None: it does not match.
Found = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Case:
    """What a rule may look at."""

    now: int
    history: History
    limits: Thresholds
    #: Programs whose errors came on several devices, and those devices: theirs is the fault.
    spreading: Mapping[str, list[str]] = field(default_factory=dict)

    def own(self, kind: XidClass) -> list[Incident]:
        """Give the incidents of a class that neither a spreading program nor a link explains."""
        if kind is XidClass.LINK:
            return [] if LINKS in self.spreading else self.history.of(kind)
        program = kind is XidClass.APPLICATION
        return [each for each in self.history.of(kind) if not (program and self.blamed(each))]

    def blamed(self, incident: Incident) -> list[str]:
        """Give the spreading programs that may have caused an incident."""
        return [program for program in incident.programs or [""] if program in self.spreading]

    def latest(self, kind: XidClass, within: int) -> Incident | None:
        """Give the last incident of a class, if it is not older than `within` ms."""
        recent = [each for each in self.history.of(kind) if self.now - each.last < within]
        return max(recent, key=lambda each: each.last, default=None)

    def enough(self) -> int:
        """Say how many incidents of one class take a device out; on probation fewer do."""
        limits = self.limits
        return limits.repeats_programs if self.history.on_probation(self.now) else limits.repeats


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table."""

    name: str
    #: A verdict, or the name of the threshold that says it.
    verdict: Verdict | str
    #: The sentence for people, with the words that the condition has found.
    says: str
    when: Callable[[Case], Found]

    def judge(self, case: Case) -> Verdict:
        """Give the verdict where the rule matches."""
        if isinstance(self.verdict, Verdict):
            return self.verdict
        return Verdict(getattr(case.limits, self.verdict))


def _if(condition: object, **words: Any) -> Found:
    return words if condition else None


def _xid(kind: XidClass) -> Callable[[Case], Found]:
    """Match any incident of a class that has not been cured."""

    def when(case: Case) -> Found:
        incidents = case.history.of(kind)
        return _words(incidents[-1]) if incidents else None

    return when


def _words(incident: Incident) -> dict[str, Any]:
    return {"codes": ", ".join(incident.labels), "meaning": incident.meaning}


def _lost(case: Case) -> Found:
    return _if(case.history.error == history.LOST)


def _missing(case: Case) -> Found:
    since = case.history.missing
    return _if(since is not None and case.now - since >= case.limits.missing)


def _reset_required(case: Case) -> Found:
    return _if(case.history.error == history.RESET_REQUIRED)


def _recovery_reset(case: Case) -> Found:
    action = RESET_ACTIONS.get(case.history.action or 0)
    return _if(action, action=action)


def _recovery_drain(case: Case) -> Found:
    return _if(case.history.action == DRAIN_ACTION)


def _recovery_other(case: Case) -> Found:
    action = case.history.action
    return _if(action, action=OTHER_ACTIONS.get(action or 0, f"action {action}"))


def _latched(case: Case) -> Found:
    return _if(case.history.latched, times=max(len(case.history.strikes), case.limits.strikes))


def _remap_failed(case: Case) -> Found:
    return _if(case.history.remap_failed and "remap_failed" not in case.history.accepted)


def _remap_pending(case: Case) -> Found:
    return _if(case.history.remap_pending and "remap_pending" not in case.history.accepted)


def _ecc(case: Case) -> Found:
    errors = case.history.unexplained_ecc(case.now, case.limits.coalesce)
    return _if(case.limits.ecc_uncorrected and errors >= case.limits.ecc_uncorrected, errors=errors)


def _repeated(kind: XidClass) -> Callable[[Case], Found]:
    """Match several incidents of a class on one device."""

    def when(case: Case) -> Found:
        incidents = case.own(kind)
        return _if(len(incidents) >= case.enough(), times=len(incidents), **_last_words(incidents))

    return when


def _application_repeated(case: Case) -> Found:
    """Two are enough under different programs; a program that fails alone on one GPU gets more chances."""
    incidents = case.own(XidClass.APPLICATION)
    least = case.enough() if _common_program(incidents) else case.limits.repeats_programs
    return _if(len(incidents) >= least, times=len(incidents), **_last_words(incidents))


def _common_program(incidents: list[Incident]) -> bool:
    """Say whether one program may have caused them all."""
    sets = [set(each.programs) for each in incidents]
    return bool(sets) and bool(set.intersection(*sets))


def _last_words(incidents: list[Incident]) -> dict[str, Any]:
    return _words(incidents[-1]) if incidents else {}


def _contained(case: Case) -> Found:
    incident = case.latest(XidClass.CONTAINED, case.limits.restart_hold)
    return _if(incident, **_last_words([incident] if incident else []))


def _application_spread(case: Case) -> Found:
    incident = case.latest(XidClass.APPLICATION, case.limits.restart_hold)
    blamed = case.blamed(incident) if incident else []
    if incident is None or not blamed:
        return None
    devices = sorted({device for program in blamed for device in case.spreading[program]})
    return {**_words(incident), "gpus": max(len(devices), case.limits.spread), "program": _programs(blamed)}


def _programs(programs: list[str]) -> str:
    return " or ".join(f"{each}'s program" if each else "a program of nobody known" for each in programs)


def _application(case: Case) -> Found:
    incident = case.latest(XidClass.APPLICATION, case.limits.restart_hold)
    return _if(incident, **_last_words([incident] if incident else []))


def _ill(case: Case) -> Found:
    return _if(case.history.error in history.ILL, error=case.history.error)


def _slow(case: Case) -> Found:
    share, samples = case.history.slow_share(case.now, case.limits.slow_window)
    enough = samples >= case.limits.slow_least and share >= case.limits.slow_percent
    return _if(enough, share=share, minutes=case.limits.slow_window // 60_000)


def _narrow(case: Case) -> Found:
    seen = case.history
    return _if(seen.narrow_for >= case.limits.steady, width=seen.width, base=seen.width_base)


def _link_down(case: Case) -> Found:
    seen = case.history
    return _if(seen.down_for >= case.limits.steady, links=", ".join(map(str, seen.links_down)))


def _link_errors(case: Case) -> Found:
    errors = case.history.link_errors_within(case.now, case.limits.link_window)
    return _if(errors >= case.limits.link_errors, errors=errors, minutes=case.limits.link_window // 60_000)


def _recent(*kinds: XidClass) -> Callable[[Case], Found]:
    """Match an incident of these classes that is still worth a look."""

    def when(case: Case) -> Found:
        latest = [each for kind in kinds if (each := case.latest(kind, case.limits.watch))]
        return _words(max(latest, key=lambda each: each.last)) if latest else None

    return when


def _secondary(case: Case) -> Found:
    incidents = case.history.of(XidClass.SECONDARY)
    recent = case.latest(XidClass.SECONDARY, case.limits.watch)
    return _if(recent and len(incidents) >= case.enough(), times=len(incidents), **_last_words(incidents))


def _probation(case: Case) -> Found:
    return _if(case.history.on_probation(case.now), cause=case.history.back_after)


_V = Verdict

#: Evaluated in order; the first match wins.
RULES: tuple[Rule, ...] = (
    Rule("lost", _V.GONE, "The driver has lost the GPU: it does not answer on its bus.", _lost),
    Rule("missing", _V.GONE, "The driver does not list the GPU any more.", _missing),
    Rule(
        "xid gone",
        _V.GONE,
        "{codes} ({meaning}): it is gone until the node is rebooted.",
        _xid(XidClass.GONE),
    ),
    Rule("reset required", _V.EVACUATE, "The driver says that the GPU must be reset.", _reset_required),
    Rule("recovery: reset", _V.EVACUATE, "The driver recommends: {action}.", _recovery_reset),
    Rule("xid reset", _V.EVACUATE, "{codes} ({meaning}): it must be reset.", _xid(XidClass.RESET)),
    Rule(
        "recovery: drain",
        _V.RETIRE_SOON,
        "The driver recommends to drain the GPU, then to reset it.",
        _recovery_drain,
    ),
    Rule(
        "three strikes",
        _V.RETIRE_SOON,
        "It was taken out {times} times within a week; it stays out until a person says that it is fit.",
        _latched,
    ),
    Rule(
        "remap failed",
        _V.RETIRE_SOON,
        "A defective memory row could not be replaced; the GPU should be exchanged.",
        _remap_failed,
    ),
    Rule(
        "memory errors",
        _V.RETIRE_SOON,
        "{errors} new uncorrected memory error(s) that no single process accounts for.",
        _ecc,
    ),
    Rule(
        "contained repeated",
        _V.RETIRE_SOON,
        "{codes} ({meaning}) came {times} times on this GPU.",
        _repeated(XidClass.CONTAINED),
    ),
    Rule(
        "link repeated",
        _V.RETIRE_SOON,
        "{codes} ({meaning}) came {times} times on this GPU and on no other.",
        _repeated(XidClass.LINK),
    ),
    Rule(
        "application repeated",
        _V.RETIRE_SOON,
        "{codes} ({meaning}) came {times} times on this GPU, and no program explains it.",
        _application_repeated,
    ),
    Rule(
        "contained",
        _V.RESTART_WORKER,
        "{codes} ({meaning}): the worker is restarted on the same GPU.",
        _contained,
    ),
    Rule(
        "application spread",
        _V.RESTART_WORKER,
        "{codes} ({meaning}) came on {gpus} GPUs under {program}: the fault is the program's.",
        _application_spread,
    ),
    Rule(
        "application",
        _V.RESTART_WORKER,
        "{codes} ({meaning}): most likely the program's fault; the worker is restarted.",
        _application,
    ),
    Rule("driver error", _V.WATCH, "The driver answers {error}; nothing is moved.", _ill),
    Rule("recovery: other", _V.WATCH, "The driver recommends: {action}.", _recovery_other),
    Rule(
        "remap pending",
        "remap_pending",
        "A defective memory row is to be replaced at the next reset; work may go on until then.",
        _remap_pending,
    ),
    Rule(
        "slowed down",
        "slow",
        "Heat or power has slowed it down in {share} % of the readings of {minutes} minutes.",
        _slow,
    ),
    Rule("narrow PCIe", "narrow", "Its PCIe link is {width} lanes wide; it has been {base}.", _narrow),
    Rule("NVLink down", "link_down", "NVLinks that have been up are down: {links}.", _link_down),
    Rule("NVLink errors", _V.WATCH, "{errors} NVLink errors within {minutes} minutes.", _link_errors),
    Rule("link", _V.WATCH, "{codes} ({meaning}).", _recent(XidClass.LINK)),
    Rule(
        "xid warns",
        _V.WATCH,
        "{codes} ({meaning}): the published advice disagrees, so nothing is moved.",
        _recent(XidClass.WARN),
    ),
    Rule("secondary repeated", _V.WATCH, "{codes} ({meaning}) came {times} times.", _secondary),
    Rule(
        "after a restart",
        _V.WATCH,
        "{codes} ({meaning}) came here; the worker has been restarted since.",
        _recent(XidClass.APPLICATION, XidClass.CONTAINED),
    ),
    Rule(
        "probation",
        _V.FINE,
        "It is back after {cause}; for a while it is watched more closely.",
        _probation,
    ),
    Rule("fine", _V.FINE, "Nothing is known against it.", lambda _: {}),
)


def first_match(case: Case) -> tuple[Rule, Verdict, dict[str, Any]]:
    """Give the first rule that matches, its verdict, and the words that it found."""
    for rule in RULES:
        found = rule.when(case)
        if found is not None:
            return rule, _shown(rule.judge(case), case.limits), found
    raise AssertionError("the last rule matches everything")


def _shown(verdict: Verdict, limits: Thresholds) -> Verdict:
    """Give the verdict that is acted on: where a pool only observes, none that touches work."""
    return Verdict.WATCH if limits.observe and verdict is not Verdict.FINE else verdict
