"""What a widget shows of a lease or a pool: looked at by one thread, and only while somebody sees it.

Rule 1: no thread runs while no view is in sight. A page says when one comes into sight and when it leaves;
        one that is not heard of for `LOST_S` is taken to have gone, unless the kernel was too busy to hear.
Rule 2: a look is a long poll: a change of the lease is seen at once, and readings every `PACE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from jupyter_gpupool import _steps as steps
from jupyter_gpupool import display
from jupyter_gpupool._http import PoolError
from jupyter_gpupool.core.model import WHOLE, LeaseState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jupyter_gpupool._http import Address
    from jupyter_gpupool.client import AsyncPool

#: Seconds between two looks at the readings, and after one that has failed.
PACE_S, AGAIN_S = 2.0, 5.0
#: Seconds without a word from the page after which a view is taken to be gone; it speaks every 20 s.
LOST_S = 70.0
#: Devices of a pool that are drawn; a page of thousands helps nobody.
MOST = 128


class Seen(Protocol):
    """A widget, as far as the thread that looks knows it."""

    address: Address

    def wanted(self) -> bool:
        """Return whether somebody sees it."""

    async def look(self, pool: AsyncPool) -> None:
        """Look again and again, and show what is seen."""


class Watch:
    """The thread that looks for all widgets in sight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[Seen] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event

    def poke(self, widget: Seen) -> None:
        """Begin or end to look for a widget, as it is wanted."""
        with self._lock:
            (self._seen.add if widget.wanted() else self._seen.discard)(widget)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._changed.set)
            elif self._seen:
                self._loop = asyncio.new_event_loop()
                self._changed = asyncio.Event()
                threading.Thread(
                    target=self._run, args=(self._loop,), name="gpupool-widget", daemon=True
                ).start()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve())
        finally:
            with self._lock:
                self._loop = self._loop if self._loop is not loop else None
            loop.close()

    async def _serve(self) -> None:
        looks: dict[Seen, asyncio.Task[None]] = {}
        pools: dict[Address, AsyncPool] = {}
        while self._sort(looks, pools):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOST_S / 4)
            self._changed.clear()
        for task in looks.values():
            task.cancel()
        await asyncio.gather(*looks.values(), return_exceptions=True)
        for pool in pools.values():
            await pool.close()

    def _sort(self, looks: dict[Seen, asyncio.Task[None]], pools: dict[Address, AsyncPool]) -> bool:
        """Begin new looks and end those that nobody wants; return whether any is left."""
        from jupyter_gpupool.client import AsyncPool

        with self._lock:
            self._seen = {each for each in self._seen if each.wanted()}
            if not self._seen:
                self._loop = None  # whoever comes now starts another thread
                return False
            seen = set(self._seen)
        for each in seen - looks.keys():
            at = each.address
            pool = pools.setdefault(at, AsyncPool(at.url, at.token, at.ca, source=at.source))
            looks[each] = asyncio.create_task(each.look(pool))
        for each in looks.keys() - seen:
            looks.pop(each).cancel()
        return True


async def pause(since: float) -> None:
    """Wait until `PACE_S` after a time of the monotonic clock."""
    await asyncio.sleep(max(0.1, since + PACE_S - time.monotonic()))


# ------------------------------------------------------------------------------------------- what is shown


def lease_said(
    lease: Mapping[str, Any], devices: Iterable[Mapping[str, Any]], tasks: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return what a widget draws of a lease.

    Args:
        lease: As the API says it.
        devices: Those of the pool, as the API says them; none: not looked at yet.
        tasks: How many there are by state, or None where its scheduler was not asked.
    """
    rows = {each["uuid"]: each for each in devices}
    progress = lease.get("progress") or {}
    asked = lease.get("requested") or {}
    return {
        "id": lease["id"],
        "name": lease["name"] or lease["id"],
        "state": lease["state"],
        "words": _words(lease),
        "simulated": bool(lease.get("simulated")),
        "ends": lease["ends_at"],
        "idle": lease.get("idle_since"),
        "workers": [progress.get("workers", 0), progress.get("of", 0)],
        "tasks": dict(tasks) if tasks is not None else None,
        "devices": [_slice(each, rows.get(each["device"], {})) for each in lease["slices"]],
        "can": _can(lease),
        "most": asked.get("max_gpus") or 0,
        "gpus": lease["gpus"],
    }


def _words(lease: Mapping[str, Any]) -> str:
    if lease["state"] in steps.WAITING:
        return display.waiting_words(lease)
    return "" if lease["state"] == LeaseState.ACTIVE else str(lease["why"] or "")


def _can(lease: Mapping[str, Any]) -> list[str]:
    """Say what can be done with a lease now, for whose it is."""
    if steps.is_over(lease):
        return []
    if lease["state"] != LeaseState.ACTIVE:
        return ["release"]  # it waits, for the first time or to go on
    elastic = ["scale"] if (lease.get("requested") or {}).get("max_gpus") else []
    return ["extend", *(["keep"] if lease.get("idle_since") else []), *elastic, "release"]


def _slice(part: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    reading = device.get("reading") or {}
    whole = part["milli"] >= WHOLE
    return {
        "name": part["device_name"],
        "model": part["model"],
        "part": "" if whole else part.get("profile") or f"{display.gpus(part['milli'])} of it",
        "state": part["state"],
        "verdict": device.get("verdict", ""),
        "utilisation": reading.get("utilisation"),
        "used": reading.get("memory_used"),
        "memory": device.get("memory") or part["vram"],
        "temperature": reading.get("temperature"),
    }


def pool_said(
    pool: Mapping[str, Any], devices: Sequence[Mapping[str, Any]], leases: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what a widget draws of a pool, one's own leases included."""
    return {
        "lines": display.pool_words(pool),
        "simulated": bool(pool["simulated"]),
        "devices": [_tile(each) for each in devices[:MOST]],
        "more": max(0, len(devices) - MOST),
        "leases": [lease_said(each, devices, None) for each in leases],
    }


def _tile(device: Mapping[str, Any]) -> dict[str, Any]:
    reading = device.get("reading") or {}
    users = dict.fromkeys(part.get("user") or "somebody" for part in device["parts"])
    return {
        "name": device["name"],
        "model": device["model"],
        "verdict": device["verdict"],
        "why": device.get("verdict_sentence") or "",
        "free": device["free_milli"] / WHOLE,
        "by": list(users),
        "utilisation": reading.get("utilisation"),
        "used": reading.get("memory_used"),
        "memory": device["memory"],
        "temperature": reading.get("temperature"),
    }


# --------------------------------------------------------------------------------------------- reading it


async def read_devices(pool: AsyncPool) -> list[dict[str, Any]]:
    """Read the devices of a pool."""
    answer = await pool.carry_out(steps.read("/v1/devices", "devices"))
    return list(answer["devices"])


class Counter:
    """Asks a lease's scheduler for the number of its tasks, over a connection that stays.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._scheduler: Any = None

    async def count(self, lease: steps.LeaseData) -> dict[str, int] | None:
        """Return how many tasks there are by state; None where that cannot be said."""
        if lease["state"] != LeaseState.ACTIVE:
            return None
        try:
            if self._scheduler is None:
                self._scheduler = await self._reach(lease)
            found: dict[str, int] = await asyncio.wait_for(self._scheduler.gpupool_tasks(), PACE_S)
        except (OSError, TimeoutError, PoolError):
            await self.close()
            return None
        return found

    async def _reach(self, lease: steps.LeaseData) -> Any:
        from distributed.core import rpc

        connection = await self._pool.carry_out(steps.connection(lease))
        return rpc(
            connection["address"],
            connection_args=steps.security(connection).get_connection_args("client"),
        )

    async def close(self) -> None:
        """Hang up."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            await scheduler.close_rpc()
