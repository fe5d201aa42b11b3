"""Which leases do nothing: what their schedulers claim, held against what the GPUs' readings say.

A lease's scheduler runs its owner's code, so that it is idle is only a claim; it counts from the moment from
which none of its devices was in use any more. A device whose driver does not tell its utilisation is taken to
be idle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import LeaseBusy, LeaseIdle, LeaseState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from jupyter_gpupool.core.model import PoolEvent, Reading
    from jupyter_gpupool.core.state import Lease

#: A GPU that is in use for more than so many percent of a reading's time does something.
BUSY = 5


@dataclass(slots=True)
class Idleness:
    """What is claimed, and when each device was last seen in use; times by the pool's clock."""

    _claims: dict[str, int] = field(default_factory=dict)
    _used: dict[str, int] = field(default_factory=dict)

    def claim(self, lease: str, since: int) -> None:
        """A lease's scheduler says that it has done nothing since then.

        It says so again and again, and never sooner than it is so: of two claims the earlier is true.
        """
        self._claims[lease] = min(since, self._claims.get(lease, since))

    def remember(self, leases: Iterable[Lease]) -> None:
        """The controller has started anew: what was idle still is, unless its scheduler says otherwise."""
        for lease in leases:
            if lease.idle_since:
                self.claim(lease.id, lease.idle_since)

    def withdraw(self, lease: str) -> None:
        """A lease's scheduler says that it works again, or the lease has ended."""
        self._claims.pop(lease, None)

    def seen(self, reading: Reading, now: int) -> None:
        """A device has been read."""
        if (reading.utilisation or 0) > BUSY:
            self._used[reading.device] = now

    def changes(
        self, leases: Mapping[str, Lease], readings: Mapping[str, Reading], now: int
    ) -> Iterator[PoolEvent]:
        """Give a pool event for each lease whose idleness is not what the pool takes it to be."""
        for ident, lease in leases.items():
            if lease.state is not LeaseState.ACTIVE or not (ident in self._claims or lease.idle_since):
                continue
            devices = [each.device for each in lease.slices.values()]
            idle = ident in self._claims and not _in_use(devices, readings)
            # What it has done before it was suspended is no idleness of what it has been granted since.
            used = (self._used.get(each, 0) for each in devices)
            since = max([self._claims.get(ident, 0), lease.granted_at, *used])
            if lease.idle_since and not idle:
                yield LeaseBusy(now=now, cause="readings", lease=ident)
            elif idle and not lease.idle_since:
                yield LeaseIdle(now=now, cause="readings", lease=ident, since=min(since, now))


def _in_use(devices: Iterable[str], readings: Mapping[str, Reading]) -> bool:
    found = [readings[each] for each in devices if each in readings]
    return any((each.utilisation or 0) > BUSY for each in found)
