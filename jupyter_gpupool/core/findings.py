"""What is told beside a verdict: findings about something else than a device, and the evidence of a verdict.

Rule 1: a finding condemns no device. It is for a person: the owner of a program, or an administrator.
Rule 2: evidence is what the verdict rests on: the rule, the times, the incidents and the last readings.
Rule 3: both are bounded, and JSON text.

Not its business: when something is found (`health`, `poolhealth`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from jupyter_gpupool.core.xids import XidClass

if TYPE_CHECKING:
    from jupyter_gpupool.core.history import History, Incident

#: Incidents shown in the evidence, the latest ones.
_MOST_INCIDENTS = 8


class FindingKind(StrEnum):
    """What a finding is about; never a device."""

    MONITOR = "monitor"  # reading the driver does not work
    PROGRAM = "program"  # the subject is the user whose program it is, who is to be told
    NODE = "node"
    POOL = "pool"  # a person has to decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a person should know and that condemns no device."""

    now: int
    about: FindingKind
    #: A user, a node, the UUID of a device that cannot be read, or "pool".
    subject: str
    sentence: str
    #: More, for machines (JSON text).
    evidence: str = "{}"


def evidence(seen: History, incident: Incident | None) -> str:
    """Write what the present verdict rests on.

    Args:
        seen: The device.
        incident: The one incident that the verdict is about, where it is about one.
    """
    latest = sorted(seen.incidents, key=lambda each: each.last)[-_MOST_INCIDENTS:]
    data = {
        "rule": seen.rule,
        "since": seen.since,
        # By this `nodes` finds which slices of a device in MIG mode are concerned.
        "instance": incident.instance if incident else -1,
        "programs": incident.programs if incident else _programs_of(seen),
        "incidents": [asdict(each) for each in latest],
        "readings": seen.readings,
        "error": seen.error,
        "memory_errors": seen.ecc_signs,
        "strikes": seen.strikes,
        "probation_until": seen.probation_until,
    }
    return json.dumps(data, separators=(",", ":"))


def _programs_of(seen: History) -> list[str]:
    return sorted({program for each in seen.of(XidClass.APPLICATION) for program in each.programs})
