"""The agent's connection to the controller: a Dask worker that runs nothing, made anew whenever it breaks.

Rule 1: the connection is the agent's alone. Its port listens on loopback only and answers no operation.
Rule 2: orders are taken from the controller's own certificate and nobody else's, be it of the same authority.
Rule 3: after a break it is tried again at short intervals, for as long as it takes; a bare TLS connection is
        tried first, as Dask's own connecting waits ever longer between its tries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from distributed import Worker
from distributed.comm import parse_host_port

from jupyter_gpupool import wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jupyter_gpupool.node.membership import Membership

logger = logging.getLogger(__name__)

#: Seconds between two tries to reach a controller that is away: at first, and later.
RETRY_SOON, RETRY_LATE = 0.1, 1.0
#: Seconds that one try may take.
PROBE = 3.0
#: For how many tries it is "at first".
SOON = 300
#: Seconds after which reports that have not been acknowledged are sent again.
RESEND = 5.0
#: Seconds to wait after a refusal.
REFUSED = 5.0


class PoolWorker(Worker):
    """A Dask worker for the connection only: it takes no plugin, and its address is a name, not a place."""

    #: The node's address, by which the controller tells workers apart.
    node_address = "127.0.0.1"

    def start_http_server(self, *_arguments: Any, **_more: Any) -> None:
        """Serve no HTTP: there is nothing to see here."""

    async def plugin_add(self, plugin: Any, name: str | None = None, **_more: Any) -> Any:  # noqa: ARG002 - Dask's signature
        """Refuse: Dask sends plugins pickled."""
        return {"status": "error", "message": "an agent takes no plugins"}

    async def _register_with_scheduler(self) -> None:
        self.contact_address = f"tls://{self.node_address}:{self.port}"
        await super()._register_with_scheduler()


class Connection:
    """Keeps the agent connected.

    Args:
        member: Where the controller is, and the node's certificate.
        folder: For Dask's scratch files.
        boot: Of this life of the agent.
        joined: Makes the report with which the agent presents itself.
        connected: Called when the agent has presented itself on a new connection.
        obey: Takes the orders, in their order; never raises.
        address: The node's address, by which the controller tells workers apart.
    """

    def __init__(
        self,
        member: Membership,
        folder: Path,
        boot: str,
        *,
        joined: Callable[[], wire.Message],
        connected: Callable[[], None],
        obey: Callable[[list[wire.Message]], None],
        address: str = "127.0.0.1",
    ) -> None:
        self._member = member
        self._folder = folder
        self._joined = joined
        self._connected = connected
        self._address = address
        self._obey = obey
        self._worker: PoolWorker | None = None
        self._lives = 0
        self._refused = False
        self.outbox = wire.Outbox(boot, self._send)

    async def run(self) -> None:
        """Connect, again and again, until cancelled."""
        resend = asyncio.create_task(self._resend())
        try:
            while True:
                await self._reachable()
                await self._once()
                await asyncio.sleep(REFUSED if self._refused else RETRY_SOON)
        finally:
            resend.cancel()

    @property
    def connected(self) -> bool:
        """Whether the controller hears what is sent now."""
        return self._worker is not None

    def present(self) -> None:
        """Present the agent again, as something about the node has changed."""
        self.outbox.tell(self._joined())

    async def _reachable(self) -> None:
        """Wait until the controller listens at its address."""
        host, port = parse_host_port(self._member.comm.split("://", 1)[-1])
        context, tries = None, 0
        while True:
            try:
                context = context or self._context()
                async with asyncio.timeout(PROBE):
                    _, writer = await asyncio.open_connection(host, port, ssl=context)
                writer.close()
            except OSError:
                tries += 1
                await asyncio.sleep(RETRY_SOON if tries < SOON else RETRY_LATE)
            else:
                return

    def _context(self) -> Any:
        """Make the TLS context; Dask writes the certificate into a file for it, which a full disk refuses."""
        return wire.security(**self._member.credentials()).get_connection_args("worker")["ssl_context"]

    async def _once(self) -> None:
        """Connect once and stay until the connection breaks."""
        self._refused, worker = False, None
        try:
            worker = self._make()  # it writes into the agent's folder: a full disk is a failed try
            await worker
            if not _is_controller(worker.batched_stream.comm):
                self._refused = True
                logger.error(
                    "%s is not the controller of this pool; its orders are not taken.", self._member.comm
                )
                return
            self._worker = worker
            logger.info("connected to the controller at %s", self._member.comm)
            self.outbox.resend()
            self.present()
            self._connected()
            await worker.finished()
        except Exception as error:  # noqa: BLE001 - Dask raises anything; the next try follows
            why = error.__cause__ or error
            self._refused = isinstance(why, ValueError)  # an answer that says no, and will say it again
            logger.warning("the connection to %s failed: %s", self._member.comm, why)
        finally:
            self._worker = None
            with contextlib.suppress(Exception):
                if worker is not None:
                    await worker.close(timeout=1, executor_wait=False, reason="agent-connection-over")

    def _make(self) -> PoolWorker:
        self._lives += 1
        worker = PoolWorker(
            self._member.comm,
            name=f"{self._member.name}|{self.outbox.boot}|{self._lives}|{wire.PROTOCOL}",
            host="tls://127.0.0.1",
            protocol="tls",
            security=wire.security(**self._member.credentials()),
            nthreads=1,
            memory_limit=0,
            heartbeat_interval=f"{wire.HEARTBEAT}s",
            local_directory=str(self._folder),
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            extensions={},
            metrics={},
            startup_information={},
        )
        worker.node_address = self._address
        wire.shut(worker, "agent", {wire.OP: self._on_orders, wire.ACK: self._on_ack})
        wire.quieten(worker)
        return worker

    def _on_orders(self, orders: Any = (), **_more: Any) -> None:
        worker = self._worker
        if worker is None or not _is_controller(worker.batched_stream.comm):
            return
        wanted = [each for each in orders if isinstance(each, dict)]
        self._refused = any(each.get("order") == "refused" for each in wanted)
        self._obey(wanted)

    def _on_ack(self, seq: Any = 0, **_more: Any) -> None:
        if isinstance(seq, int):
            self.outbox.acknowledge(seq)

    def _send(self, reports: list[wire.Message]) -> None:
        if self._worker is not None:
            with contextlib.suppress(OSError):  # broken: they are sent again on the next connection
                self._worker.batched_send({"op": wire.OP, "reports": reports})

    async def _resend(self) -> None:
        """Send again what the controller could not take when it came, its disk being full, for one."""
        while True:
            waiting = self.outbox.first
            await asyncio.sleep(RESEND)
            if waiting and waiting == self.outbox.first:
                self.outbox.resend()


def _is_controller(comm: Any) -> bool:
    return comm is not None and wire.peer_name(comm) == wire.CONTROLLER
