"""What the pool has confirmed, kept apart from the pool, and held against what it says later.

Rule 1: an answer counts when it has arrived. What got no answer is asked again, with the same key.
Rule 2: `lost` is what was confirmed and is not so any more; `doubled`, what is there twice: a request, a part
        of a device, or a request that was refused and is there all the same; `leaked`, what is still taken
        when all is given back.
Rule 3: nothing of the product's is used to judge: only what its API answers, and what the machine shows.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

#: Seconds by which two tellings of one time may differ: people's times follow the wall clock.
JITTER = 1.5
WHOLE = 1000
#: Where a pool lists so many ended leases, it has forgotten older ones: it keeps a thousand, and some of them
#: fall between two pages.
KEPT = 900
#: Why a lease may end that nobody has given back: by a limit, or because its processes were killed too often.
GIVEN_UP = re.compile(r"failed: |its time limit was reached")
GONE = ("draining", "ended")


@dataclass
class Asked:
    """A request as its sender knows it."""

    key: str
    name: str
    gpus: float
    #: The lease's id, once it was confirmed; the answer was a no: `refused`.
    id: str = ""
    refused: bool = False
    #: It was given back: asked for, and confirmed.
    releasing: bool = False
    released: bool = False
    #: As last seen or confirmed, in seconds since the epoch.
    granted_at: float = 0.0
    ends_at: float = 0.0


@dataclass
class Wish:
    """Something that can be set, such as a quota: what it is, and what it may be until there is an answer."""

    confirmed: Any
    asked: Any = None

    def allows(self, value: Any) -> bool:
        return value in (self.confirmed, self.asked) if self.asked is not None else value == self.confirmed


@dataclass
class Record:
    """What was confirmed, by all users together."""

    asked: dict[str, Asked] = field(default_factory=dict)
    wishes: dict[str, Wish] = field(default_factory=dict)
    confirmed: int = 0
    findings: dict[tuple[str, str], str] = field(default_factory=dict)
    given_up: Counter[str] = field(default_factory=Counter)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def confirm(self) -> None:
        with self.lock:
            self.confirmed += 1

    def find(self, kind: str, what: str, sentence: str) -> None:
        """Note a breach once: `kind` is lost, doubled or leaked, `what` names the thing."""
        with self.lock:
            self.findings.setdefault((kind, what), sentence)

    def count(self, kind: str) -> int:
        return sum(found == kind for found, _ in self.findings)

    # --------------------------------------------------------------------------------------------- comparing

    def hold_against(
        self, leases: list[dict[str, Any]], devices: list[dict[str, Any]], settings: dict[str, Any]
    ) -> None:
        """Compare the record with what the pool says now; call it with the lock held since before asking.

        Args:
            leases: All that it lists, page by page.
            devices: All devices with what is granted of them, as they were at one moment.
            settings: What the wishes are now, by the same names.
        """
        known = {each["id"]: each for each in leases}
        full = sum(each["state"] == "ended" for each in leases) >= KEPT
        self._look_for_doubles(leases)
        for asked in self.asked.values():
            if asked.id and not (full and asked.releasing and asked.id not in known):
                self._look_at(asked, known.get(asked.id))
        self._look_at_devices(devices)
        for name, value in settings.items():
            if name in self.wishes and not self.wishes[name].allows(value):
                self.find("lost", name, f"{name} is {value}, and was confirmed as {self.wishes[name]}")

    def _look_for_doubles(self, leases: list[dict[str, Any]]) -> None:
        names = defaultdict(set)
        for each in leases:
            names[each["name"]].add(each["id"])
        for asked in self.asked.values():
            found = names[asked.name]
            if len(found) > 1:
                self.find("doubled", asked.name, f"{asked.name} is there as {sorted(found)}")
            if asked.refused and found:
                self.find("doubled", asked.name, f"{asked.name} was refused and is there")

    def _look_at(self, asked: Asked, now: dict[str, Any] | None) -> None:
        if now is None:
            self.find("lost", asked.name, f"{asked.name} ({asked.id}) is not there")
            return
        state, granted = now["state"], now["granted_at"] or 0.0
        if asked.released and state not in GONE:
            self.find("lost", f"{asked.name} released", f"{asked.name} was given back and is {state}")
        if state in GONE and not asked.releasing:
            if GIVEN_UP.match(now["why"]):
                self.given_up[now["why"][:60]] += state == "ended"
                asked.releasing = state == "ended"
            else:
                self.find("lost", asked.name, f"{asked.name} has ended by itself: {now['why']}")
        if asked.granted_at and abs(granted - asked.granted_at) > JITTER:
            words = f"{asked.name} was granted at {asked.granted_at}, and now at {granted}"
            self.find("lost", f"{asked.name} granted", words)
        asked.granted_at = asked.granted_at or granted
        if state not in GONE and asked.ends_at and now["ends_at"] < asked.ends_at - JITTER:
            words = f"{asked.name} was to end at {asked.ends_at}, and now at {now['ends_at']}"
            self.find("lost", f"{asked.name} extended", words)

    def _look_at_devices(self, devices: list[dict[str, Any]]) -> None:
        for each in devices:
            milli = sum(part["milli"] for part in each["parts"])
            if milli > WHOLE:
                self.find("doubled", each["name"], f"{milli} thousandths of {each['name']} are granted")

    def look_at_machine(self, there: dict[str, set[str]], milli: dict[str, int]) -> None:
        """Compare what really runs: on each device the leases whose processes have a context there.

        Args:
            there: Ids of leases by device.
            milli: Thousandths of a GPU that one slice of a lease has, by the lease's id.
        """
        for device, leases in there.items():
            if sum(milli.get(each, WHOLE) for each in leases) > WHOLE:
                self.find("doubled", f"on {device}", f"processes of {sorted(leases)} are on {device} at once")
