"""The pool's HTTP API: a server of its own in the controller's event loop, over TLS.

Rule 1: it listens where it is told to or not at all; never on another port.
Rule 2: everything that a route's row says is checked here, once, before its handler runs (see `router`).
Rule 3: a caller who goes away is not worked for: what waits for them is cancelled.
Rule 4: no token, secret, header or body reaches a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import re
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tornado.httpserver import HTTPServer
from tornado.web import Application, HTTPError, RequestHandler, stream_request_body

from jupyter_gpupool.controller.limits import Limiter
from jupyter_gpupool.controller.problems import CONTENT_TYPE, Problem, Trouble
from jupyter_gpupool.controller.router import Answer, Call, Route, read_query
from jupyter_gpupool.controller.store import StoreError
from jupyter_gpupool.controller.waiters import Waiters
from jupyter_gpupool.core.model import Reason

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from jupyter_gpupool.controller.auth import Person
    from jupyter_gpupool.controller.face import ControllerFace

logger = logging.getLogger(__name__)

#: Connections that may wait to be taken in.
BACKLOG = 512
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


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
    #: The same of one address, for what needs no token and for wrong tokens.
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
    """

    def __init__(
        self,
        controller: ControllerFace,
        routes: Iterable[Route],
        context: ssl.SSLContext,
        limits: Limits | None = None,
    ) -> None:
        self.controller = controller
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
            log_function=_log,
        )
        self._server = _Server(
            application,
            ssl_options=context,
            max_header_size=self.limits.headers,
            max_body_size=self.limits.body,
            idle_connection_timeout=self.limits.idle,
            body_timeout=self.limits.idle,
        )
        self._server.most = self.limits.connections

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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.close_all_connections(), timeout=5)


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


def _log(handler: RequestHandler) -> None:
    """Write one line a call: no query, no header, no body."""
    status = handler.get_status()
    level = logging.WARNING if status >= HTTPStatus.INTERNAL_SERVER_ERROR else logging.DEBUG
    request = handler.request
    logger.log(level, "%s %s %d %.1f ms", request.method, request.path, status, 1000 * request.request_time())


@stream_request_body
class Endpoint(RequestHandler):
    """All routes of one path."""

    SUPPORTED_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")

    def initialize(self, api: Api, rows: dict[str, Route]) -> None:
        """Take in what the path's rows say."""
        self.api = api
        self.rows = rows
        self._body = bytearray()
        self._task: asyncio.Task[Answer] | None = None

    def set_default_headers(self) -> None:
        """Say nothing about the server, and let no browser keep or frame an answer."""
        self.clear_header("Server")
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Turn away what is too large before any of it is read."""
        length = self.request.headers.get("Content-Length", "0")
        if length.isdigit() and int(length) > self.api.limits.body:
            self.set_header("Connection", "close")
            sentence = f"The body has {length} bytes; {self.api.limits.body} are the most."
            self._refuse(Problem(Trouble.TOO_LARGE, sentence, "Send less."))

    def data_received(self, chunk: bytes) -> None:
        """Take in a part of the body."""
        self._body += chunk

    async def _serve(self, **path: str) -> None:
        """Answer a call of any method."""
        try:
            route = self._route()
            person = self._person(route)
            call = self._call(route, person, path)
            self._task = asyncio.ensure_future(route.handler(call))
            self._answer(await self._bounded(route, call))
        except Problem as problem:
            self._refuse(problem)
        except StoreError as error:
            self._refuse(Problem(Reason.STORE_FAILED, str(error), headers={"Retry-After": "5"}))
        except asyncio.CancelledError:
            if not self._task or not self._task.cancelled():
                raise  # the controller ends; otherwise the caller has gone away

    get = post = put = patch = delete = _serve

    def on_connection_close(self) -> None:
        """Give up what the caller does not wait for any more."""
        if self._task:
            self._task.cancel()

    def _route(self) -> Route:
        method = str(self.request.method)
        if not self.rows:
            raise Problem(
                Trouble.NOT_FOUND,
                "There is nothing at this address.",
                "/v1/openapi.json lists what there is.",
            )
        if method not in self.rows:
            allowed = ", ".join(sorted(self.rows))
            sentence = f"{method} cannot be used here."
            raise Problem(
                Trouble.NO_SUCH_METHOD, sentence, f"There is: {allowed}.", headers={"Allow": allowed}
            )
        return self.rows[method]

    def _person(self, route: Route) -> Person | None:
        """Find out who is asking, and whether they may."""
        peer = str(self.request.remote_ip)
        if not route.scope:
            _count(self.api.addresses, peer)
            return None
        scheme, _, token = self.request.headers.get("Authorization", "").partition(" ")
        person = self.api.controller.tokens.verify(token.strip()) if scheme.lower() == "bearer" else None
        if person is None:
            _count(self.api.addresses, peer)
            raise Problem(
                Trouble.WRONG_TOKEN,
                "The pool does not know this token." if token else "The pool answers only those it knows.",
                "Log in with `jupyter gpupool login LINE`, or send Authorization: Bearer TOKEN.",
                headers={"WWW-Authenticate": 'Bearer realm="gpupool"'},
            )
        _count(self.api.people, person.user)
        if not person.may(route.scope):
            raise Problem(
                Trouble.NOT_ALLOWED,
                f"This token may not do that: it lacks the scope {route.scope!r}.",
                "Ask an administrator of the pool, or use a token with that scope.",
            )
        return person

    def _call(self, route: Route, person: Person | None, path: dict[str, str]) -> Call:
        return Call(
            controller=self.api.controller,
            person=person,
            peer=str(self.request.remote_ip),
            path={name: _segment(value) for name, value in path.items()},
            query=read_query(route, self._query()),
            body=self._json() if route.body else None,
            headers={name.lower(): value for name, value in self.request.headers.items()},
            url=self.api.url,
            memory=self.api.memory,
            waiters=self.api.waiters,
        )

    def _query(self) -> dict[str, list[str]]:
        found = self.request.query_arguments
        return {
            name: [value.decode("utf-8", "replace") for value in values] for name, values in found.items()
        }

    def _json(self) -> Any:
        kind = self.request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Problem(Trouble.NOT_JSON, "The body is not JSON.", "Send Content-Type: application/json.")
        try:
            return json.loads(self._body or b"{}", parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            sentence = "The body cannot be read as JSON."
            raise Problem(Reason.BAD_REQUEST, sentence, "Send one JSON object.") from error

    async def _bounded(self, route: Route, call: Call) -> Answer:
        assert self._task
        seconds = route.seconds + float(call.query.get("wait", 0.0))
        try:
            return await asyncio.wait_for(self._task, seconds)
        except TimeoutError:
            sentence = f"The pool did not get that done within {seconds:.0f} s."
            raise Problem(Trouble.TIMED_OUT, sentence, "Try again.", headers={"Retry-After": "5"}) from None

    def _answer(self, answer: Answer) -> None:
        self.set_status(answer.status)
        for name, value in answer.headers.items():
            self.set_header(name, value)
        if answer.status == HTTPStatus.NO_CONTENT:
            self.finish()
        elif isinstance(answer.data, str):
            self.finish(answer.data)
        else:
            self._write(answer.data, "application/json")

    def _refuse(self, problem: Problem) -> None:
        self.set_status(problem.status)
        for name, value in problem.headers.items():
            self.set_header(name, value)
        self._write(problem.body(), CONTENT_TYPE)

    def _write(self, data: Any, kind: str) -> None:
        self.set_header("Content-Type", kind)
        self.finish(json.dumps(data, separators=(",", ":"), allow_nan=False))

    def write_error(self, status_code: int, **_: Any) -> None:
        """Answer what tornado refuses, and what went wrong within; the log has the traceback."""
        if status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = ", ".join(sorted(self.rows)) or "GET"
            self.set_header("Allow", allowed)
            self._refuse(Problem(Trouble.NO_SUCH_METHOD, "There is no such method.", f"There is: {allowed}."))
        elif status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            self._refuse(
                Problem(Reason.BAD_REQUEST, "This is not a good HTTP request.", "Use a pool's client.")
            )
            self.set_status(status_code)
        else:
            sentence = "Something went wrong within the pool's controller; its log has more."
            self._refuse(Problem(Trouble.BROKEN, sentence, "Try again, and tell the pool's administrator."))

    def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
        """Log what is our fault, and nothing else."""
        if not isinstance(value, HTTPError):
            request = self.request
            logger.error("%s %s failed", request.method, request.path, exc_info=(kind, value, trace))


def _count(limiter: Limiter, caller: str) -> None:
    seconds = limiter.wait(caller)
    if seconds:
        raise Problem(
            Trouble.TOO_MANY_REQUESTS,
            "You call the pool too often.",
            f"Wait {seconds:.1f} s.",
            headers={"Retry-After": str(math.ceil(seconds))},
        )


def _segment(value: str) -> str:
    """Return a part of a path as it was meant."""
    return unquote(value, errors="replace") if "%" in value else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
