"""Whether a task's error is the GPU's: a worker asks, the agent has the device judged, the error waits.

The worker waits no longer than `PATIENCE`, so an agent that does not answer costs an error's delay and
nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.node.lease_table import Entry

#: Seconds that a task's error is held back at most.
PATIENCE = 2.0
#: Verdicts that need no new reading: nothing on such a device is the program's fault.
_CERTAIN = (Verdict.EVACUATE, Verdict.GONE)


class Verdicts:
    """The verdicts on this node's devices, as the agent tells them."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self._report = report
        self._last: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, set[asyncio.Future[dict[str, Any]]]] = {}

    def say(self, order: dict[str, Any]) -> None:
        """Take a verdict from the agent, changed or confirmed.

        A mild one in between answers nobody: the reading of a failing device may come before its XID.

        Args:
            order: device, verdict and sentence; `final` in the answer to a suspicion.
        """
        self._last[order["device"]] = order
        if not order.get("final") and order["verdict"] not in _CERTAIN:
            return
        for answer in self._waiting.pop(order["device"], ()):
            if not answer.done():
                answer.set_result(order)

    async def ask(self, entry: Entry, error: str) -> dict[str, Any]:
        """Answer a worker that suspects its device.

        Args:
            entry: The slice.
            error: What the worker saw.

        Returns:
            verdict and sentence; "fine" where the agent did not judge in time. `hardware`: whether the driver
            has announced a hardware error in the same moment. `busy`: whether the device is at work.
        """
        device = entry.slice.get("device", "")
        last = self._last.get(device)
        if last is None or last["verdict"] not in _CERTAIN:
            heard: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(device, set()).add(heard)
            suspicion = {"lease": entry.lease, "slice": entry.key, "device": device, "error": error}
            self._report({"report": "suspect", **suspicion})
            with contextlib.suppress(TimeoutError):
                last = await asyncio.wait_for(heard, PATIENCE)
            self._waiting.get(device, set()).discard(heard)
            if not heard.done() or heard.cancelled():
                last = {**(last or {}), "hardware": False, "busy": False}  # of an older suspicion
        last = last or {}
        answer = {"verdict": last.get("verdict", Verdict.FINE), "sentence": last.get("sentence", "")}
        return {**answer, **{name: bool(last.get(name)) for name in ("hardware", "busy")}}
