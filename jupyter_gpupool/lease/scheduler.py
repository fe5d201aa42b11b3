"""The scheduler process of one lease: Dask's own scheduler on the lease's own TLS keys, with `LeasePlugin`.

It is started by its owner's launcher and runs the owner's code, so what it says is a claim. It talks to the
agent of its node over one socket and outlives that agent.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hmac
import ipaddress
import logging
import os
import signal
import socket
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import dask
from distributed import Scheduler
from distributed.scheduler import DEFAULT_EXTENSIONS
from tornado.web import ErrorHandler

from jupyter_gpupool.lease.actors import holder
from jupyter_gpupool.lease.gauges import list_page
from jupyter_gpupool.lease.link import Link
from jupyter_gpupool.lease.plugin import LeasePlugin
from jupyter_gpupool.lease.settings import SETTINGS, security
from jupyter_gpupool.lease.shuffles import LeaseShuffles

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: The header that carries a lease's secret to its dashboard.
SECRET_HEADER = "X-GPUPool-Lease-Secret"  # noqa: S105 (the header's name)
#: Seconds between SIGTERM and the end: the agent's order with the reason comes at the same time.
_WORD_S = 0.05
#: How often to try anew when somebody else was quicker to take a port.
_TRIES = 5


class LeaseScheduler(Scheduler):
    """Dask's scheduler with a dashboard that answers only to who knows the lease's secret."""

    def __init__(self, *, secret: str, dashboard_tls: ssl.SSLContext | None, **options: Any) -> None:
        self._dashboard_tls = dashboard_tls
        #: Calls that are passed on for clients, by worker.
        self.proxied: collections.Counter[str] = collections.Counter()
        known = {**DEFAULT_EXTENSIONS, "shuffle": LeaseShuffles}
        if not dask.config.get("distributed.scheduler.work-stealing"):
            known.pop("stealing", None)
        super().__init__(extensions=known, **options)
        # Routes and `prepare` would miss Bokeh's pages and websockets, which are applications of their own.
        guard_http(self.http_application, secret, self._open_dashboard)
        self._prefix = options.get("http_prefix", "/")

    def _open_dashboard(self) -> None:
        """Make Bokeh's pages for the first who asks: they are half of what a scheduler's start takes."""
        try:
            from distributed.dashboard.scheduler import connect

            list_page(self)
        except ImportError:
            logger.warning("there is no dashboard: bokeh is not installed in this environment")
        else:
            connect(self.http_application, self.http_server, self, prefix=self._prefix)

    @property
    def pool(self) -> LeasePlugin:
        """The pool's plugin."""
        return cast("LeasePlugin", self.plugins[LeasePlugin.name])

    async def remove_worker(
        self, address: str, *, stimulus_id: str, expected: bool = False, close: bool = True
    ) -> Any:
        """Remove a worker; one that died is held against nobody before it is known why."""
        worker = self.workers.get(self.coerce_address(address))
        tasks = [] if worker is None else list(worker.processing)
        answer = await super().remove_worker(address, stimulus_id=stimulus_id, expected=True, close=close)
        if worker is not None and not expected:
            self.pool.deaths.note(worker, tasks)
        return answer

    def update_data(self, *, who_has: Any, nbytes: Any, client: str | None = None) -> None:
        """Take in data from outside, which cannot be computed again."""
        super().update_data(who_has=who_has, nbytes=nbytes, client=client)
        self.pool.holdings.note(who_has)

    async def proxy(self, msg: dict[str, Any], worker: str, serializers: Any = None) -> Any:
        """Pass a call on to a worker; one to an actor goes where that is now."""
        task = self.tasks.get(msg.get("actor"))
        home = holder(task) if task is not None and task.actor else None
        worker = home.address if home else worker
        self.proxied[worker] += 1
        try:
            return await super().proxy(msg, worker, serializers)
        finally:
            self.proxied[worker] -= 1

    def start_http_server(
        self, routes: Any, dashboard_address: Any, default_port: int = 0, ssl_options: Any = None
    ) -> None:
        """Serve the dashboard, over HTTPS where others can reach it."""
        super().start_http_server(
            routes, dashboard_address, default_port, ssl_options=ssl_options or self._dashboard_tls
        )


def guard_http(application: Any, secret: str, first: Callable[[], None]) -> None:
    """Refuse every HTTP request, websockets included, that lacks the secret.

    Args:
        application: A tornado application.
        secret: What the header must say; empty: everything is refused.
        first: Called once, before the first request that is let in.
    """
    inner = application.find_handler
    opened = False

    def find_handler(request: Any, **kwargs: Any) -> Any:
        given = request.headers.get(SECRET_HEADER, "")
        if secret and hmac.compare_digest(given.encode(), secret.encode()):
            nonlocal opened
            if not opened:
                opened = True
                first()
            return inner(request, **kwargs)
        return application.get_handler_delegate(request, ErrorHandler, {"status_code": 403})

    application.find_handler = find_handler


def main(spec: dict[str, Any]) -> None:
    """Serve one lease until it is ended.

    Args:
        spec: As `node.lease_specs.scheduler_spec` writes it.
    """
    dask.config.set(SETTINGS)
    asyncio.run(_serve(spec))


async def _serve(spec: dict[str, Any]) -> None:
    plugin = LeasePlugin(int(spec.get("idle_timeout") or 0))
    link = Link(spec["socket"], plugin.state, plugin.obey, alone=plugin.end, alone_s=spec["alone"])
    try:
        scheduler = await _start(spec, plugin)
    except Exception as error:
        logger.exception("the lease's scheduler did not start")
        plugin.failed(f"{type(error).__name__}: {error}")
        link.start()
        await asyncio.sleep(1)  # long enough to be heard by an agent that is there
        await link.close()
        raise SystemExit(1) from error
    plugin.attach(link)
    link.start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(_WORD_S, plugin.end_at_once))
    try:
        await scheduler.finished()
    finally:
        await link.close()


async def _start(spec: dict[str, Any], plugin: LeasePlugin) -> LeaseScheduler:
    options, host = spec["options"], spec["address"]
    keys = security(spec["credentials"])
    shown = not ipaddress.ip_address(host).is_loopback
    tls = dashboard_context(spec["credentials"], spec["directory"]) if shown and spec["credentials"] else None
    for attempt in range(_TRIES):
        first, second = free_ports(host, spec["ports"], 2)
        scheduler = LeaseScheduler(
            secret=spec["secret"],
            dashboard_tls=tls,
            host=host,
            port=first,
            protocol=options.get("protocol") or ("tls" if spec["credentials"] else "tcp"),
            dashboard_address=f"{host}:{second}",
            dashboard=False,  # it is made for the first who opens it
            http_prefix=options.get("dashboard_prefix", "/"),
            security=keys,
            plugins=[plugin],
            local_directory=spec["directory"],
        )
        try:
            await scheduler
        except RuntimeError as error:
            # Somebody else was quicker to take the port.
            if attempt == _TRIES - 1 or not spec["ports"] or not isinstance(error.__cause__, OSError):
                raise
        else:
            scheme = "https" if tls else "http"
            plugin.serves(scheduler.address, f"{scheme}://{host}:{scheduler.http_server.port}")
            return scheduler
    raise AssertionError("unreachable")


def free_ports(host: str, ports: list[int] | None, count: int) -> list[int]:
    """Choose ports that are free now, from a range where there is one; 0 lets the system choose.

    Args:
        host: The address to listen on.
        ports: First and last port of the range, or None.
        count: How many.

    Raises:
        OSError: Too few ports of the range are free.
    """
    if not ports:
        return [0] * count
    first, last = ports
    found: list[int] = []
    size = last - first + 1
    # Schedulers that start at the same time begin their search at different places.
    for step in range(size):
        port = first + (os.getpid() + step) % size
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                found.append(port)
        if len(found) == count:
            return found
    raise OSError(
        f"too few ports from {first} to {last} are free on {host}; give the pool a wider range of ports"
    )


def dashboard_context(credentials: dict[str, str], directory: str) -> ssl.SSLContext:
    """Make the HTTPS side of the dashboard from the lease's own certificate.

    Args:
        credentials: PEM texts under "cert" and "key".
        directory: Where the two files may stand while they are read.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        cert, key = Path(folder, "cert"), Path(folder, "key")
        cert.write_text(credentials["cert"])
        key.touch(0o600)
        key.write_text(credentials["key"])
        context.load_cert_chain(cert, key)
    return context
