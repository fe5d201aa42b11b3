"""A lease's scheduler lets notebooks find the shells of its slices, and reach those that they cannot.

A notebook calls the host of a slice itself. Where only the scheduler's port is open to it, the scheduler
passes the words on; they are not for it, and it reads none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from distributed.comm import connect
from distributed.core import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.lease.idle import IdleWatch


def handlers(scheduler: Any, idle: IdleWatch) -> dict[str, Callable[..., Any]]:
    """Return what the scheduler answers to about cells.

    Args:
        scheduler: The lease's.
        idle: Is told that cells run.
    """

    async def where(part: str) -> str:
        return _host_of(scheduler, part)

    async def touch() -> None:
        idle.touch()

    async def cells(comm: Any, part: str) -> Any:
        address = _host_of(scheduler, part)
        if address:
            beyond = await connect(address, **scheduler.connection_args)
            await beyond.write({"op": "gpupool_cells", "reply": False})
            await _join(comm, beyond)
        comm.abort()
        return Status.dont_reply

    return {"gpupool_where": where, "gpupool_touch": touch, "gpupool_cells": cells}


def _host_of(scheduler: Any, part: str) -> str:
    worker = scheduler.workers.get(scheduler.aliases.get(part))
    return "" if worker is None else str(worker.nanny or "")


async def _join(one: Any, other: Any) -> None:
    """Pass everything on, both ways, until either side hangs up."""

    async def pass_on(source: Any, target: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                await target.write(await source.read())

    ways = [asyncio.create_task(pass_on(one, other)), asyncio.create_task(pass_on(other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        other.abort()
