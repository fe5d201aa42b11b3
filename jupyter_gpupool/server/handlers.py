"""The endpoints below `/gpupool/`: each asks the pool one thing and passes its answer on.

Rule 1: each verb of each class is decorated on its own, with its own action: `authorized` remembers the first
        that it is called with, so that a verb shared through a base class would be checked as another's.
Rule 2: parameters and bodies are passed on as they are: what is right, the pool says. A request gets the wish
        that its workers run as this server does, whose kernels are those that will use it.
Rule 3: reading is no activity: a server that nobody works on is culled, whatever its open tabs poll.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web  # type: ignore[attr-defined] # tornado names its modules in a list only

from jupyter_gpupool._environment import with_wishes
from jupyter_gpupool._http import Call, PoolError
from jupyter_gpupool.core.model import Reason
from jupyter_gpupool.server import problems

if TYPE_CHECKING:
    from jupyter_gpupool.server.pool import ServerPool

RESOURCE = "gpupool"
ACTIONS = ("read", "write", "execute")
#: A long poll is held for at most so many seconds.
LONGEST_S = 30.0


class PoolHandler(APIHandler):
    """What the endpoints have in common; no verb."""

    auth_resource = RESOURCE

    def initialize(self, pool: ServerPool) -> None:
        """Take in what they all talk to."""
        self.pool = pool

    @property
    def _track_activity(self) -> bool:
        return bool(self.request.method != "GET")

    @_track_activity.setter
    def _track_activity(self, _: bool) -> None:
        """Jupyter's own handlers set it on the class; here it follows from the method."""

    async def prepare(self) -> None:
        """Let the pool's news come as soon as somebody wants to know anything."""
        await super().prepare()
        self.pool.start()

    def query(self, *names: str) -> dict[str, str]:
        """Return those of the query's parameters that are given."""
        return {name: self.get_query_argument(name) for name in names if self.get_query_argument(name, None)}

    def body(self) -> dict[str, Any]:
        """Return the body's JSON object.

        Raises:
            HTTPError: It is none.
        """
        try:
            said = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise web.HTTPError(
                400, "The body is not a JSON object.", reason="The body is not a JSON object."
            )
        return said

    async def look(self, path: str, params: dict[str, str] | None = None) -> None:
        """Answer with what the pool has at a path, together with whoever asks for the same."""
        await self.answer(await self.pool.looks.read(path, params))

    async def change(self, method: str, path: str, body: dict[str, Any] | None = None, **params: str) -> Any:
        """Change something in the pool; looks that began before it are worth nothing then."""
        call = Call(method=method, path=path, body=body, params=params, repeatable=False)
        try:
            return await self.pool.link.send(call)
        finally:
            self.pool.forget()

    async def answer(self, data: Any, status: int = HTTPStatus.OK) -> None:
        """Answer with JSON."""
        self.set_status(status)
        self.set_header("Cache-Control", "no-store")
        await self.finish(json.dumps(data, separators=(",", ":")))

    def write_error(self, status_code: int, **more: Any) -> None:
        """Say what is wrong as problem+json."""
        error = (more.get("exc_info") or (None, None, None))[1]
        if isinstance(error, PoolError):
            said = problems.of_pool(error)
        else:
            said = problems.of_status(status_code, getattr(error, "reason", None) or "")
        self.set_status(said["status"])
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(said), set_content_type=problems.CONTENT_TYPE)

    def _log(self) -> None:
        """Write the usual line, but not for each poll of each tab while there is no pool."""
        if self.get_status() != HTTPStatus.SERVICE_UNAVAILABLE:
            super()._log()

    def log_exception(self, kind: Any, value: Any, trace: Any) -> None:
        """Log what is wrong here; a no of the pool's is an answer."""
        if not isinstance(value, PoolError):
            super().log_exception(kind, value, trace)


def path_of(*parts: str) -> str:
    """Return a path of the pool's API, of parts that may come from a browser.

    Raises:
        PoolError: A part is "..", which would lead to another of the pool's paths.
    """
    if {".", ".."} & set(parts):
        raise problems.no(404, "not_found", "The pool has nothing of that name.")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


# -------------------------------------------------------------------------------------------------- the pool


class PoolState(PoolHandler):
    """How this server stands with its pool, and the pool itself."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """Say so, also where there is no pool."""
        await self._say()

    @web.authenticated
    @authorized(action="execute", resource=RESOURCE)
    async def post(self) -> None:
        """Look for the pool now, or start one on this machine."""
        action = self.body().get("action")
        if action not in ("start", "retry"):
            raise problems.no(
                400, Reason.BAD_REQUEST, "The action is start or retry.", "Say one of them.", "action"
            )
        self.pool.try_now(start=action == "start")
        await self._say(HTTPStatus.ACCEPTED)

    async def _say(self, status: int = HTTPStatus.OK) -> None:
        said = await self.pool.stand()
        may = {
            action: await ensure_async(
                self.authorizer.is_authorized(self, self.current_user, action, RESOURCE)
            )
            for action in ACTIONS
        }
        await self.answer({**said, "may": may}, status)


class DevicesNow(PoolHandler):
    """Devices with what is on them and how they are."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List them; with `since`, those that are another than then."""
        since = self.get_query_argument("since", "0")
        await self.answer(await self.pool.devices.answer(int(since) if since.isdecimal() else 0))


class Queue(PoolHandler):
    """Who waits."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List them, the next one first."""
        await self.look("/v1/queue", self.query("limit"))


class Projects(PoolHandler):
    """Projects with their quotas."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List them with what they have."""
        await self.look("/v1/projects")

    @web.authenticated
    @authorized(action="write", resource=RESOURCE)
    async def put(self) -> None:
        """Put a new tree of projects in place of the present one."""
        await self.answer(await self.change("PUT", "/v1/projects", self.body()))


class Usage(PoolHandler):
    """Who has used how much."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List it."""
        await self.look("/v1/usage")


class History(PoolHandler):
    """What the person has used."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List it by the hour."""
        await self.look("/v1/history")


class Notices(PoolHandler):
    """What the person is told."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List what came after a number."""
        await self.look("/v1/notices", self.query("after", "limit"))


class Health(PoolHandler):
    """A device's verdict; a device or node in and out of service."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self, target: str) -> None:
        """Say what the verdict rests on."""
        await self.look(path_of("health", *target.split("/")))

    @web.authenticated
    @authorized(action="write", resource=RESOURCE)
    async def post(self, target: str) -> None:
        """Do what is said with it."""
        await self.answer(await self.change("POST", path_of("health", *target.split("/")), self.body()))


# ---------------------------------------------------------------------------------------------------- leases


class Leases(PoolHandler):
    """Leases and waiting requests."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self) -> None:
        """List one's own, or with `all` whatever one may see."""
        await self.look("/v1/leases", self.query("all", "state", "limit", "after"))


class Requests(PoolHandler):
    """Asking for a lease."""

    @web.authenticated
    @authorized(action="write", resource=RESOURCE)
    async def post(self) -> None:
        """Ask for one, or with `dry_run` learn what would come of it."""
        dry, key = self.query("dry_run"), self.request.headers.get("Idempotency-Key", "")
        call = Call(
            method="POST",
            path="/v1/requests",
            body=with_wishes(self.body()),
            params=dry,
            headers={"Idempotency-Key": key} if key else {},
            repeatable=bool(key),
        )
        made = await self.pool.link.send(call)
        if "id" not in made:  # a dry run
            await self.answer(made)
            return
        self.pool.forget()
        self.set_header("Location", url_path_join(self.base_url, "gpupool", "leases", made["id"]))
        await self.answer(made, HTTPStatus.CREATED)


class OneLease(PoolHandler):
    """One lease."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self, lease: str) -> None:
        """Show it; with `wait` and `version`, as soon as it is another than that."""
        params = self.query("version", "wait")
        try:
            wait = min(LONGEST_S, max(0.0, float(params.get("wait", "0"))))
        except ValueError:
            wait = 0.0  # the pool says what is wrong with it
        else:
            params |= {"wait": f"{wait:.3f}"} if wait else {}
        await self.answer(await self.pool.looks.read(path_of("leases", lease), params, wait=wait))

    @web.authenticated
    @authorized(action="write", resource=RESOURCE)
    async def patch(self, lease: str) -> None:
        """Change one thing of it."""
        path = path_of("leases", lease)
        await self.answer(await self.change("PATCH", path, self.body(), **self.query("restart")))

    @web.authenticated
    @authorized(action="write", resource=RESOURCE)
    async def delete(self, lease: str) -> None:
        """Give it back, or withdraw the request."""
        await self.change("DELETE", path_of("leases", lease))
        self.set_status(HTTPStatus.NO_CONTENT)
        await self.finish()


class Explain(PoolHandler):
    """Why a lease is where it is."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self, lease: str) -> None:
        """Say why."""
        await self.look(path_of("leases", lease, "explain"))


class Logs(PoolHandler):
    """What a lease's processes wrote."""

    @web.authenticated
    @authorized(action="read", resource=RESOURCE)
    async def get(self, lease: str) -> None:
        """Show it."""
        await self.look(path_of("leases", lease, "logs"))


_LEASE = r"/gpupool/leases/([^/]+)"
ROUTES: tuple[tuple[str, type[PoolHandler]], ...] = (
    (r"/gpupool/pool", PoolState),
    (r"/gpupool/devices", DevicesNow),
    (r"/gpupool/queue", Queue),
    (r"/gpupool/projects", Projects),
    (r"/gpupool/usage", Usage),
    (r"/gpupool/history", History),
    (r"/gpupool/notices", Notices),
    (r"/gpupool/health/(.+)", Health),
    (r"/gpupool/requests", Requests),
    (r"/gpupool/leases", Leases),
    (_LEASE, OneLease),
    (_LEASE + "/explain", Explain),
    (_LEASE + "/logs", Logs),
)
