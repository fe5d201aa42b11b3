"""A slice's Nanny and worker start beside their lease's scheduler, and wait for its address only to register.

Rule 1: Dask's own start is run, step by step as it is; only the first connection waits, on either side.
Rule 2: the worker hears the address from its host over a pipe that it was born with: bytes, nothing pickled.
Rule 3: a worker that is started anew later knows the scheduler from the beginning, as any worker of Dask's.

Dask would start scheduler, Nanny and worker one after the other, and use one core of those that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: The worker's option that brings the pipe.
OPTION = "early"


class Early:
    """Lets a Nanny that is yet to be started begin before its scheduler has an address.

    Args:
        nanny: It.
        scheduler: Its scheduler's address, once it is known.
    """

    def __init__(self, nanny: Any, scheduler: asyncio.Future[str]) -> None:
        self._nanny, self._scheduler = nanny, scheduler
        self._worker: asyncio.Task[Any] | None = None
        #: Set where the worker's process could not be started: its Nanny may wait for it for ever.
        self.failed = asyncio.Event()
        nanny.rpc.connect = self._connect

    async def _connect(self, _nowhere: str, **more: Any) -> Any:
        """Connect the Nanny, which listens by now; its worker's process starts meanwhile."""
        nanny = self._nanny
        del nanny.rpc.connect
        pipe = None if self._scheduler.done() else self._begin()
        address = await self._scheduler
        nanny.scheduler_addr, nanny.scheduler = address, nanny.rpc(address)
        if pipe is not None:
            self._pass_on(address, pipe)
        return await nanny.rpc.connect(address, **more)

    def _begin(self) -> Connection:
        reader, writer = multiprocessing.Pipe(duplex=False)
        self._nanny.worker_kwargs[OPTION] = reader
        self._worker = asyncio.create_task(self._nanny.instantiate())
        self._worker.add_done_callback(self._begun)
        return writer

    def _begun(self, _: asyncio.Task[Any]) -> None:
        if self.reason() is not None:
            self.failed.set()

    def _pass_on(self, address: str, pipe: Connection) -> None:
        """Let the worker know, and all that come after it on this GPU."""
        nanny = self._nanny
        nanny.worker_kwargs.pop(OPTION)
        if nanny.process is not None:
            nanny.process.worker_kwargs.pop(OPTION, None)
            nanny.process.worker_kwargs["scheduler_ip"] = address
        with pipe, contextlib.suppress(BrokenPipeError):  # the one that waited has died: Nanny starts another
            pipe.send_bytes(address.encode())

    def reason(self) -> BaseException | None:
        """Say why the worker's process did not start, where that is known; Dask says only that it did not."""
        known = self._worker is not None and self._worker.done() and not self._worker.cancelled()
        return self._worker.exception() if self._worker is not None and known else None


async def address_from(pipe: Connection) -> str:
    """Wait for the scheduler's address.

    Args:
        pipe: As the worker was given it.

    Raises:
        EOFError: The host is gone.
    """
    loop = asyncio.get_running_loop()
    said = asyncio.Event()
    loop.add_reader(pipe.fileno(), said.set)
    try:
        await said.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    with pipe:
        return pipe.recv_bytes().decode()
