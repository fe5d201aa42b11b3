"""How often one caller may call: a token bucket each, so that nobody's loop takes the API from the others."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many callers are remembered; those who have not called for long are forgotten first.
CALLERS = 10_000


class Limiter:
    """Token buckets by caller.

    Args:
        rate: Calls a second that are always fine.
        burst: Calls that may come at once after a pause.
        clock: Seconds.
    """

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        #: Caller -> (what is left, when that was), the one who called last at the end.
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, caller: str) -> float:
        """Count a call; return 0 if it is fine, else after how many seconds the next one is."""
        now = self._clock()
        left, then = self._left.pop(caller, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        fine = left >= 1
        self._left[caller] = (left - 1 if fine else left, now)
        if len(self._left) > CALLERS:
            del self._left[next(iter(self._left))]
        return 0.0 if fine else (1 - left) / self._rate
