"""The Dask dashboards of one's leases, through this server, for those who may open them.

A dashboard is a page of whoever can run code in the lease, so it is a stranger here.

Rule 1: the pool says whether this person may use the lease, each time; there is no other way in.
Rule 2: nothing of Jupyter goes in: of the browser's headers only a few harmless ones, and the lease's secret.
Rule 3: nothing comes out but content, in a sandbox: its scripts have an origin of their own, without cookies.
        As browsers send them none for anything that such a page loads, a ticket in the address opens it.
Rule 4: no ticket reaches a log of this server's or a `Referer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web  # type: ignore[attr-defined] # tornado names its modules in a list only
from tornado.httpclient import HTTPError, HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient
from tornado.websocket import WebSocketClosedError, WebSocketHandler, websocket_connect

from jupyter_gpupool._http import PoolError
from jupyter_gpupool.server import problems
from jupyter_gpupool.server.handlers import RESOURCE, path_of

if TYPE_CHECKING:
    from jupyter_gpupool.server.pool import ServerPool

#: The header by which a lease's dashboard knows who may see it.
SECRET_HEADER = "X-GPUPool-Lease-Secret"  # noqa: S105 - the header's name
SANDBOX = "sandbox allow-scripts"
#: Of what the browser says, what the dashboard hears.
INWARD = ("Accept", "If-None-Match", "If-Modified-Since", "User-Agent")
#: Of what the dashboard says, what the browser hears.
OUTWARD = ("Content-Type", "Etag", "Last-Modified")
#: Seconds for a page, and the largest message or page in bytes.
ANSWER_S = 60.0
LARGEST = 100_000_000
#: Pages that are being fetched at a time; more wait.
FETCHES = 64


class Dashboard(JupyterHandler):
    """What the handlers of dashboards have in common; no verb."""

    auth_resource = RESOURCE

    def initialize(self, pool: ServerPool) -> None:
        """Take in the server's pool."""
        self.pool = pool

    @property
    def content_security_policy(self) -> str:
        """Put whatever is answered here into a sandbox."""
        return SANDBOX

    def set_default_headers(self) -> None:
        """Let no address with a ticket leave the page."""
        super().set_default_headers()
        self.set_header("Content-Security-Policy", SANDBOX)
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "private, no-cache")

    def compute_etag(self) -> None:
        """Leave it to the dashboard."""

    async def connection(self, lease: str) -> dict[str, Any]:
        """Ask the pool how the lease's dashboard is reached, which only those are told who may use it.

        Raises:
            PoolError: They may not, or it does not run.
        """
        found: dict[str, Any] = await self.pool.looks.read(path_of("leases", lease, "connection"))
        if not found.get("dashboard"):
            raise problems.no(409, "not_ready", "This lease has no dashboard.", "Look at its logs.")
        return found

    def write_error(self, status_code: int, **more: Any) -> None:
        """Say what is wrong, in words, to a person."""
        error = (more.get("exc_info") or (None, None, None))[1]
        said = problems.of_pool(error) if isinstance(error, PoolError) else problems.of_status(status_code)
        self.set_status(said["status"])
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(said["message"])

    def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
        """Log what is wrong here; a no of the pool's is an answer."""
        if not isinstance(value, PoolError):
            super().log_exception(kind, value, trace)


class Entry(Dashboard):
    """The address that people and links use: it needs the login, and leads on to one with a ticket."""

    @web.authenticated
    @authorized(action="execute", resource=RESOURCE)
    async def get(self, lease: str, page: str | None = None) -> None:
        """Make a ticket, if the pool says that the person may use the lease."""
        await self.connection(lease)
        ticket = self.pool.tickets.make(lease, self.current_user)
        self.redirect(_address(self.base_url, lease, f"~{ticket}", page or "status", self.request.query))


def _address(base: str, lease: str, *parts: str) -> str:
    """Return the address of a part of a lease's dashboard; the last of `parts` is the query."""
    path = url_path_join(base, "gpupool/leases", quote(lease, safe=""), "dashboard", *map(quote, parts[:-1]))
    return f"{path}?{parts[-1]}" if parts[-1] else path


# ---------------------------------------------------------------------------------------------- with a ticket


class _Bearer:
    """Stands before the server's identity provider: who bears a ticket is the one whom it was made for."""

    def __init__(self, provider: Any, user: Any) -> None:
        self._provider = provider
        self._user = user

    def get_user(self, handler: Any) -> Any:
        return self._user or self._provider.get_user(handler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)


class Ticketed(Dashboard):
    """What is opened by a ticket; no verb."""

    bearer: Any = None

    async def prepare(self, **more: Any) -> None:
        """Look at the ticket, and then hide it: what is logged of this request is not to have it."""
        lease, ticket = self.path_args[:2]
        self.bearer = self.pool.tickets.user(ticket, lease)
        self.request.path = self.request.uri = _address(self.base_url, lease, "~", "")
        self.request.headers.pop("Referer", None)
        await super().prepare(**more)

    @property
    def identity_provider(self) -> Any:
        """The server's, with the bearer of the ticket before it."""
        return _Bearer(super().identity_provider, self.bearer)

    def get_login_url(self) -> str:
        """A page that nobody has logged in for cannot lead to the login: that is no place for a sandbox."""
        raise web.HTTPError(403)

    def inward(self, found: dict[str, Any], path: str, *, scheme: str = "http") -> dict[str, Any]:
        """Return what a request to the dashboard consists of, besides its headers."""
        url = urlsplit(found["dashboard"])
        secure = url.scheme == "https"
        query = f"?{self.request.query}" if self.request.query else ""
        where = f"{scheme}{'s' if secure else ''}://{url.netloc}/{quote(path)}{query}"
        return {"url": where, "ssl_options": trust(found["ca"]) if secure else None}


def trust(ca: str) -> ssl.SSLContext:
    """Make the TLS settings for a lease's dashboard: its own certificate, whatever its host is called."""
    context = ssl.create_default_context(cadata=ca)
    context.check_hostname = False
    return context


class Page(Ticketed):
    """A page of a dashboard, or what belongs to one."""

    @web.authenticated
    @authorized(action="execute", resource=RESOURCE)
    async def get(self, lease: str, _ticket: str, path: str) -> None:
        """Fetch it."""
        await self._fetch("GET", lease, path)

    @web.authenticated
    @authorized(action="execute", resource=RESOURCE)
    async def head(self, lease: str, _ticket: str, path: str) -> None:
        """Fetch its headers."""
        await self._fetch("HEAD", lease, path)

    async def _fetch(self, method: str, lease: str, path: str) -> None:
        if self.bearer is None:  # a ticket of yesterday, of someone who is logged in
            self.redirect(_address(self.base_url, lease, path or "status", self.request.query))
            return
        found = await self.connection(lease)
        headers = {name: self.request.headers[name] for name in INWARD if name in self.request.headers}
        request = HTTPRequest(
            **self.inward(found, path),
            method=method,
            headers={**headers, SECRET_HEADER: found["secret"]},
            follow_redirects=False,
            request_timeout=ANSWER_S,
        )
        try:
            response = await _client(self.pool).fetch(request, raise_error=False)
        except (OSError, HTTPError) as error:  # refused, silent, or not HTTP
            sentence = "This lease's dashboard does not answer."
            raise problems.no(502, "not_ready", sentence, "Look at its logs.") from error
        self._hand_out(response, lease)

    def _hand_out(self, response: Any, lease: str) -> None:
        self.set_status(response.code, response.reason)
        for name in OUTWARD:
            if name in response.headers:
                self.set_header(name, response.headers[name])
        to = response.headers.get("Location", "")
        if to:
            away = urlsplit(to)
            within = away.path.removeprefix("/") if to.startswith("/") else to
            ticket = f"~{self.path_args[1]}"
            if away.netloc or away.scheme:  # it leads anywhere: not through us
                raise web.HTTPError(404)
            self.set_header("Location", _address(self.base_url, lease, ticket, within, away.query))
        self.finish(response.body if self.request.method == "GET" and response.code != 304 else None)


def _client(pool: ServerPool) -> SimpleAsyncHTTPClient:
    """Return the client that fetches pages; it lives as long as the server's loop."""
    if pool.fetcher is None:
        pool.fetcher = SimpleAsyncHTTPClient(
            force_instance=True, max_clients=FETCHES, max_body_size=LARGEST, max_buffer_size=LARGEST
        )
    return pool.fetcher


class Socket(WebSocketMixin, WebSocketHandler, Ticketed):
    """A websocket of a dashboard's page."""

    inner: Any = None
    _pump: Any = None

    def check_origin(self, origin: str | None = None) -> bool:  # noqa: ARG002 - Jupyter's signature
        """Let sandboxed pages in, whose origin is null: it is the ticket that opens this, never a cookie."""
        return True

    @ws_authenticated
    @authorized(action="execute", resource=RESOURCE)
    async def get(self, lease: str, _ticket: str, path: str) -> None:
        """Connect to the dashboard, then shake hands with the browser."""
        if self.bearer is None:
            raise web.HTTPError(403)
        found = await self.connection(lease)
        request = HTTPRequest(
            **self.inward(found, path, scheme="ws"), headers={SECRET_HEADER: found["secret"]}
        )
        offered = self.request.headers.get("Sec-WebSocket-Protocol", "")
        try:
            self.inner = await websocket_connect(
                request,
                subprotocols=[each.strip() for each in offered.split(",")] if offered else None,
                max_message_size=LARGEST,
            )
        except Exception as error:  # a refusal, a closed port, a broken certificate
            raise web.HTTPError(502) from error
        await super().get(lease, _ticket, path)

    def select_subprotocol(self, _: list[str]) -> str | None:
        """Speak what the dashboard has chosen."""
        return None if self.inner is None else self.inner.selected_subprotocol

    def open(self, *args: str) -> None:
        """Begin to hand on what the dashboard says."""
        super().open(*args)
        self._pump = asyncio.ensure_future(self._hand_on())

    async def _hand_on(self) -> None:
        inner = self.inner
        with contextlib.suppress(WebSocketClosedError):
            while (message := await inner.read_message()) is not None:
                await self.write_message(message, binary=isinstance(message, bytes))
        self.close()

    async def on_message(self, message: str | bytes) -> None:
        """Hand on what the browser says."""
        if self.inner is None:
            return
        try:
            await self.inner.write_message(message, binary=isinstance(message, bytes))
        except WebSocketClosedError:
            self.close()

    def on_connection_close(self) -> None:
        """Hang up on the dashboard when the browser does."""
        super().on_connection_close()
        self._hang_up()

    def on_close(self) -> None:
        """Hang up on the dashboard when the browser does."""
        super().on_close()
        self._hang_up()

    def _hang_up(self) -> None:
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.close()


_WITH_TICKET = r"/gpupool/leases/([^/]+)/dashboard/~([\w-]*)/"
ROUTES: tuple[tuple[str, type[Dashboard]], ...] = (
    (_WITH_TICKET + r"((?:.*/)?(?:ws|eventstream))", Socket),
    (_WITH_TICKET + r"(.*)", Page),
    (r"/gpupool/leases/([^/]+)/dashboard(?:/([^~].*)?)?", Entry),
)
