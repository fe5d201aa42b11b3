"""The pool's HTTP API: a server of its own in the controller's event loop, over TLS.

Rule 1: it listens where it is told to or not at all; never on another port.
Rule 2: what a flood of callers can take is bounded: connections, bodies, headers, silence, calls a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import resource
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tornado.httpserver import HTTPServer
from tornado.web import Application

from jupyter_gpupool.controller.endpoint import Endpoint, log
from jupyter_gpupool.controller.limits import Limiter
from jupyter_gpupool.controller.waiters import Waiters

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.controller.hub import Hub
    from jupyter_gpupool.controller.router import Route

#: Connections that may wait to be taken in.
BACKLOG = 512


class ApiError(Exception):
    """The API cannot be served; one sentence that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one caller may ask for."""

    #: Bytes of a body, and of all headers together.
    body: int = 1_000_000
    headers: int = 32_768
    #: Calls a second of one person, and how many at once after a pause.
    rate: float = 100.0
    burst: float = 1000.0
    #: The same of one address, for what needs no token and for tokens that are not known.
    open_rate: float = 5.0
    open_burst: float = 50.0
    #: Seconds that a connection may be idle or keep its headers or body waiting.
    idle: float = 75.0
    #: Connections at a time.
    connections: int = 4000


class Api:
    """The HTTP API of one controller.

    Args:
        controller: What is behind it.
        routes: The tables' rows.
        context: The TLS settings.
        limits: How much one caller may ask for.
        hub: The JupyterHub whose people are the pool's too.
    """

    def __init__(
        self,
        controller: ControllerFace,
        routes: Iterable[Route],
        context: ssl.SSLContext,
        limits: Limits | None = None,
        hub: Hub | None = None,
    ) -> None:
        self.controller = controller
        self.hub = hub
        self.limits = limits or Limits()
        self.people = Limiter(self.limits.rate, self.limits.burst)
        self.addresses = Limiter(self.limits.open_rate, self.limits.open_burst)
        self.url = ""
        self.port = 0
        self.memory: dict[str, Any] = {}
        self.waiters = Waiters(controller)
        application = Application(
            [(pattern(path), Endpoint, {"api": self, "rows": rows}) for path, rows in by_path(routes)],
            default_handler_class=Endpoint,
            default_handler_args={"api": self, "rows": {}},
            log_function=log,
        )
        self._server = _Server(
            application,
            ssl_options=context,
            max_header_size=self.limits.headers,
            max_body_size=self.limits.body,
            idle_connection_timeout=self.limits.idle,
            body_timeout=self.limits.idle,
        )
        self._server.most = min(self.limits.connections, files(2 * self.limits.connections) // 2)

    def listen(self, host: str, port: int, *, name: str = "") -> None:
        """Start to serve.

        Args:
            host: The address to listen on.
            port: The port; 0: any that is free.
            name: The name by which people reach it; default: the address.

        Raises:
            ApiError: The port is in use, or may not be used.
        """
        try:
            listening = _bind(host, port)
        except OSError as error:
            raise ApiError(_cannot_listen(host, port, error)) from error
        self.port = listening.getsockname()[1]
        shown = name or host
        self.url = f"https://{f'[{shown}]' if ':' in shown else shown}:{self.port}"
        self._server.add_socket(listening)

    async def close(self) -> None:
        """Stop to serve; whoever waits for an answer is hung up on."""
        self._server.stop()
        self.waiters.close()
        if self.hub:
            self.hub.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.close_all_connections(), timeout=5)


def files(wanted: int) -> int:
    """Let this process open so many files, if it may; return how many it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


def _bind(host: str, port: int) -> socket.socket:
    """Listen on an address; unlike tornado's own function, leave nothing open where that fails."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use: end what uses it, or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} may not be used by this user: choose one above 1023 with --port."
    return f"The API cannot listen on {host}, port {port}: {error.strerror or error}. Choose another --host."


def pattern(path: str) -> str:
    """Return the regular expression of a route's path.

    >>> pattern("/v1/leases/{lease}")
    '/v1/leases/(?P<lease>[^/]+)'
    """
    return re.sub(r"\{(\w+)(\+?)\}", lambda m: f"(?P<{m[1]}>{'.+' if m[2] else '[^/]+'})", path)


def by_path(routes: Iterable[Route]) -> list[tuple[str, dict[str, Route]]]:
    """Group routes by their path, and those by method."""
    found: dict[str, dict[str, Route]] = {}
    for route in routes:
        found.setdefault(route.path, {})[route.method] = route
    return list(found.items())


class _Server(HTTPServer):
    """An HTTP server with an upper bound of connections, so that a flood leaves files for the journal."""

    most = 0

    def handle_stream(self, stream: Any, address: Any) -> None:
        """Serve a new connection, or hang up."""
        if len(self._connections) >= self.most:
            stream.close()
        else:
            super().handle_stream(stream, address)
