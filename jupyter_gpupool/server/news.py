"""What the pool tells, put on Jupyter's event bus: one long poll a server, however many tabs listen.

Rule 1: nothing is lost and nothing said twice while the server runs: each question names the last number.
Rule 2: no readings: the bus reaches every tab. That a lease is another is said, not how: read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._http import Call, PoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jupyter_gpupool.server.link import Link

logger = logging.getLogger(__name__)
#: Notices in one answer.
PAGE = 500
#: Seconds between two questions at least, so that a busy pool does not make a busy server.
REST_S = 0.1


class News:
    """Asks for news and emits them.

    Args:
        link: The way to the pool.
        emit: Puts data on the event bus, by the name of its schema.
        fresh: Called before anything is emitted: older answers are not good any more.
        poll_s: For so many seconds the pool is asked to hold the question.
    """

    def __init__(
        self,
        link: Link,
        emit: Callable[[str, Mapping[str, Any]], None],
        fresh: Callable[[], None],
        poll_s: float,
    ) -> None:
        self._link = link
        self._emit = emit
        self._fresh = fresh
        self._poll_s = poll_s
        #: What the last answer said to ask with; None: nothing was heard yet.
        self._after: int | None = None
        self._mark: int | None = None
        self._leases: dict[str, dict[str, Any]] = {}

    async def run(self) -> None:
        """Ask for as long as the server runs."""
        while True:
            try:
                await self._round()
                await asyncio.sleep(REST_S)
            except PoolError as error:
                await self._wait(error)
            except Exception:  # what is told by a newer pool must not silence it
                logger.exception("news of the GPU pool could not be understood")
                await asyncio.sleep(5)

    async def _wait(self, error: PoolError) -> None:
        """Wait until it is worth another try."""
        logger.debug("no news of the GPU pool: %s", error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._link.wake.wait(), max(REST_S, self._link.pause()))

    async def _round(self) -> None:
        if self._after is None:
            await self._catch_up()
            return
        answer = await self._ask(self._after, self._poll_s)
        self._after = answer["next"]
        other, self._mark = answer["leases"] != self._mark, answer["leases"]
        if answer["notices"] or answer["missed"] or other:
            self._fresh()
        if answer["missed"]:
            said = {"state": "connected", "reason": "", "sentence": "", "advice": "", "missed": True}
            self._emit("pool", said)
        for notice in answer["notices"]:
            self._emit("notice", notice)
        if other:
            await self._tell_leases()

    async def _catch_up(self) -> None:
        """Find the last number without telling what was said before this server ran."""
        after = 0
        while (answer := await self._ask(after, 0))["notices"]:
            after = answer["next"]
        await self._read_leases()
        self._after, self._mark = answer["next"], answer["leases"]

    async def _ask(self, after: int, wait: float) -> Any:
        params = {"after": str(after), "limit": str(PAGE)}
        if wait:
            params["wait"] = f"{wait:.3f}"
            if self._mark is not None:
                params["leases"] = str(self._mark)
        call = Call(
            method="GET", path="/v1/notices", params=params, wait=wait, expects="next", repeatable=False
        )
        return await self._link.send(call)

    async def _read_leases(self) -> dict[str, dict[str, Any]]:
        """Read one's leases; return those that were known before."""
        before, keys = self._leases, ("version", "state", "name")
        found: dict[str, dict[str, Any]] = {}
        asked: dict[str, str] = {}
        while True:
            call = Call(method="GET", path="/v1/leases", params=asked, expects="leases", repeatable=False)
            answer = await self._link.send(call)
            found |= {each["id"]: {key: each[key] for key in keys} for each in answer["leases"]}
            if not answer["next"]:
                break
            asked = {"after": answer["next"]}
        self._leases = found
        return before

    async def _tell_leases(self) -> None:
        before = await self._read_leases()
        for ident, lease in self._leases.items():
            if before.get(ident) != lease:
                self._emit("lease", {"lease": ident, **lease, "gone": False})
        for ident in before.keys() - self._leases.keys():
            self._emit("lease", {"lease": ident, **before[ident], "gone": True})
