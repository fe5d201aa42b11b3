"""What a lease's scheduler says to its clients when the lease ends, before it hangs up.

Dask's own clients would only see a connection that is lost, try to connect again for half a minute, and then
say that the scheduler does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from jupyter_gpupool.core.model import FAREWELL

#: Seconds that clients have to hear it; one that does not read keeps nobody from ending.
HEAR_S = 0.5


async def say_farewell(scheduler: Any, why: str) -> None:
    """Tell all clients that the lease has ended: what they wait for fails with that, not with a time-out.

    Args:
        scheduler: The lease's.
        why: Why it has ended.
    """
    words = f"The lease has ended: {why}." if why else "The lease has ended."
    said = {"reason": "lease-ended", "msg": f"{words} Request a new one."}
    for client, comm in scheduler.client_comms.items():
        state = scheduler.clients.get(client)
        keys = [] if state is None else [task.key for task in state.wants_what]
        with contextlib.suppress(OSError):  # it has just left
            comm.send({"op": "cancelled-keys", "keys": keys, **said})
    scheduler.log_event(FAREWELL, {"ended": why})
    heard = (_flush(comm) for comm in scheduler.client_comms.values())
    await asyncio.gather(*heard, return_exceptions=True)


async def _flush(comm: Any) -> None:
    async with asyncio.timeout(HEAR_S):
        await comm.close()
