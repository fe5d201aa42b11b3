"""What a GPU's verdict rests on, in words: for `gpupool health GPU` in a notebook and a terminal.

Rule 1: it says what the pool has kept, and no more: the rule, since when, the incidents, the last reading.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Fields of a reading that are shown, and how.
READING: tuple[tuple[str, str], ...] = (
    ("error", "the driver says {}"),
    ("temperature", "{} °C"),
    ("utilisation", "{} % busy"),
    ("ecc_uncorrected", "{} uncorrected memory errors"),
    ("recovery_action", "recovery action {}"),
    ("slowdown", "slowdown bits {}"),
)


def evidence_words(said: Mapping[str, Any]) -> list[str]:
    """Say in lines what `GET /v1/health/DEVICE` answers.

    Args:
        said: The answer.

    >>> evidence_words({"name": "node-1/gpu3", "verdict": "fine", "sentence": "", "evidence": {}})
    ['node-1/gpu3 is fine.']
    """
    found = said.get("evidence") or {}
    sentence = said.get("sentence") or ""
    lines = [f"{said['name']} is {said['verdict']}{f': {sentence}' if sentence else '.'}"]
    if said.get("cordoned"):
        lines.append(f"It takes no new work: {said['cordoned']}.")
    if found.get("rule"):
        lines.append(f"By the rule “{found['rule']}”, since {_clock(found.get('since'))}.")
    lines += [_incident(each) for each in found.get("incidents") or ()]
    if found.get("readings"):
        lines.append(_reading(found["readings"][-1]))
    if found.get("strikes"):
        times = ", ".join(_clock(each) for each in found["strikes"])
        often = "once" if len(found["strikes"]) == 1 else f"{len(found['strikes'])} times"
        lines.append(f"It was taken out {often} within a week: {times}.")
    if said.get("probation"):
        lines.append(f"It is on probation until {_clock(found.get('probation_until'))}.")
    return lines


def _incident(each: Mapping[str, Any]) -> str:
    times = f"{each['count']} times from" if each["count"] > 1 else "at"
    where = f" on the MIG instance {each['instance']}" if each.get("instance", -1) >= 0 else ""
    whose = f", under programs of {', '.join(each['programs'])}" if each.get("programs") else ""
    return (
        f"    {', '.join(each['labels'])} ({each['meaning']}) {times} {_clock(each['first'])}{where}{whose}"
    )


def _reading(last: Mapping[str, Any]) -> str:
    words = [how.format(last[name]) for name, how in READING if last.get(name) not in (None, "", 0)]
    return f"Last read {_clock(last.get('now'))}: {', '.join(words) or 'nothing unusual'}."


def _clock(ms: Any) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(int(ms) / 1000)) if ms else "an unknown time"
