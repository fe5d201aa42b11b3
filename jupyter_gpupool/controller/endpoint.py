"""One call of the HTTP API: checked by its route's row, handled, answered.

Rule 1: everything that a route's row says is checked here, once, before its handler runs (see `router`).
Rule 2: a caller who goes away is not worked for: what waits for them is cancelled.
Rule 3: no token, secret, header or body reaches a log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tornado.web import HTTPError, RequestHandler, stream_request_body

from jupyter_gpupool.controller.accounts import is_root
from jupyter_gpupool.controller.problems import CONTENT_TYPE, Problem, Trouble
from jupyter_gpupool.controller.router import Answer, Call, Route, read_query
from jupyter_gpupool.controller.store import StoreError
from jupyter_gpupool.core.model import Reason

if TYPE_CHECKING:
    from jupyter_gpupool.controller.api import Api
    from jupyter_gpupool.controller.auth import Person
    from jupyter_gpupool.controller.limits import Limiter

logger = logging.getLogger(__name__)

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def log(handler: RequestHandler) -> None:
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
            person = await self._person(route)
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

    async def _person(self, route: Route) -> Person | None:
        """Find out who is asking, and whether they may."""
        peer = str(self.request.remote_ip)
        if not route.scope:
            _count(self.api.addresses, peer)
            return None
        scheme, _, token = self.request.headers.get("Authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        person, hub = self.api.controller.tokens.verify(token), self.api.hub
        if person is None and not (hub and hub.knows(token)):
            _count(self.api.addresses, peer)  # first: nobody is to make the pool ask the Hub without end
        if person is None and hub:
            person = _no_root(await hub.verify(token))
        if person is None:
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
            found = json.loads(self._body or b"{}", parse_constant=_no_constant)
            json.dumps(found, ensure_ascii=False).encode()  # half a character cannot be told to an agent
        except (ValueError, RecursionError) as error:
            sentence = "The body cannot be read as JSON."
            raise Problem(Reason.BAD_REQUEST, sentence, "Send one JSON object.") from error
        return found

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


def _no_root(person: Person | None) -> Person | None:
    """Refuse the name of the OS's root to a JupyterHub: whoever may give names there is not root here.

    Raises:
        Problem: It is that name.
    """
    if person is not None and is_root(person.user):
        sentence = f"{person.user} of the JupyterHub is nobody in this pool: it is the name of root."
        raise Problem(Trouble.NOT_ALLOWED, sentence, "Log in to the Hub under another name.")
    return person


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
