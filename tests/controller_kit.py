"""A controller in this process, its HTTP API over real TLS, and agents without processes that obey."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from typing import TYPE_CHECKING, Any

import httpx
from jsonschema import Draft202012Validator

from jupyter_gpupool.controller.auth import Authority
from jupyter_gpupool.controller.machine import Controller
from jupyter_gpupool.controller.openapi import describe
from jupyter_gpupool.controller.routes import ROUTES, serve
from jupyter_gpupool.controller.store import Store
from jupyter_gpupool.core.model import (
    AddSlice,
    DrainSlice,
    EndLease,
    LeaseFreed,
    LeaseStarted,
    NodeJoined,
    SliceDrained,
    SliceFreed,
    SliceStarted,
    StartLease,
    StopSlice,
)
from tests.pool_helpers import node

if TYPE_CHECKING:
    from pathlib import Path

DESCRIPTION = describe(ROUTES)
#: Who is who in these tests, and what their tokens are for.
PEOPLE = {
    "ann": ("read", "use"),
    "ben": ("read", "use"),
    "eve": ("read",),
    "adm": ("read", "use", "admin"),
}


def check(method: str, path: str, response: httpx.Response) -> Any:
    """Hold an answer against the API's own description, and return its JSON."""
    operation = operation_of(method, path.partition("?")[0])
    kind = response.headers.get("content-type", "").partition(";")[0]
    if operation is None:
        assert response.status_code in (404, 405), response.text
        schema = {"$ref": "#/components/schemas/Problem"}
    else:
        assert str(response.status_code) in operation["responses"], (method, path, response.status_code)
        content = operation["responses"][str(response.status_code)].get("content")
        if content is None:
            assert not response.content
            return None
        assert kind in content, (kind, list(content))
        schema = content[kind]["schema"]
    if not kind.endswith("json"):
        return response.text
    data = response.json()
    Draft202012Validator({**schema, "components": DESCRIPTION["components"]}).validate(data)
    assert response.headers["cache-control"] == "no-store"
    if response.status_code >= 400:
        assert data["status"] == response.status_code
        assert data["detail"]
        assert data["detail"][-1] in ".?!", data
    return data


def says(response, status, reason, *words):
    """The answer is a problem of that name, and its sentences have these words."""
    assert response.status_code == status, response.text
    assert response.data["reason"] == reason
    for word in words:
        assert word in f"{response.data['detail']} {response.data['advice']}"


def operation_of(method: str, path: str) -> dict[str, Any] | None:
    for template, methods in DESCRIPTION["paths"].items():
        pattern = re.sub(r"\{target\}", ".+", re.sub(r"\{(?!target)\w+\}", "[^/]+", template))
        if re.fullmatch(pattern, path):
            return methods.get(method.lower())
    return None


class Obedient(Controller):
    """A controller whose agents are stood in for: they have no processes, and do as they are told at once."""

    obey = True

    def submit(self, event, once=None, heard=None):
        out = super().submit(event, once, heard)
        for order in out if self.obey else ():
            self._obey(order)
        return out

    def _obey(self, order):
        now = self.clock.now()
        match order:
            case StartLease():
                self.submit(LeaseStarted(now=now, lease=order.lease, address=f"tls://{order.lease}:1"))
                for each in order.slices:
                    self.submit(SliceStarted(now=now, slice=each.id))
            case AddSlice():
                self.submit(SliceStarted(now=now, slice=order.slice.id))
            case DrainSlice():
                self.submit(SliceDrained(now=now, slice=order.slice))
            case StopSlice():
                self.submit(SliceFreed(now=now, slice=order.slice))
            case EndLease():
                self.submit(LeaseFreed(now=now, lease=order.lease))

    def _note_silence(self):
        """Nodes without agents are not silent here."""


class Kit:
    """The controller, its API and a client for each person."""

    def __init__(self, folder: Path, *, trust_users: bool = True, limits: Any = None) -> None:
        self.folder = folder
        self.store = Store(folder / "journal.sqlite")
        self.controller = Obedient(self.store, Authority(folder), trust_users=trust_users)
        self.limits = limits
        self.tokens: dict[str, str] = {}

    async def start(self, *nodes: Any) -> None:
        await self.controller.start("127.0.0.1", 0)
        self.api = serve(self.controller, "127.0.0.1", 0, limits=self.limits)
        self.context = ssl.create_default_context(cadata=self.controller.authority.ca_pem)
        for name, scopes in PEOPLE.items():
            self.tokens[name] = self.controller.tokens.create(name, scopes)
        self.client = httpx.AsyncClient(base_url=self.api.url, verify=self.context, timeout=20)
        for each in nodes:
            self.controller.submit(NodeJoined(now=self.controller.clock.now(), node=each))

    async def call(self, who: str, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Make a call as somebody ("" is nobody); hold the answer against the description; return it."""
        headers = {**more.pop("headers", {})}
        if who:
            headers["Authorization"] = f"Bearer {self.tokens.get(who, who)}"
        response = await self.client.request(method, path, json=body, headers=headers, **more)
        response.data = check(method, path, response)
        return response

    async def ask(self, who: str = "ann", status: int = 201, headers: Any = None, **body: Any) -> Any:
        """Request a lease; the answer's JSON."""
        response = await self.call(who, "POST", "/v1/requests", body, headers=headers or {})
        assert response.status_code == status, response.text
        return response.data

    async def close(self) -> None:
        await self.client.aclose()
        await self.api.close()
        await self.controller.close()


@contextlib.asynccontextmanager
async def running(folder: Path, *nodes: Any, **options: Any) -> Any:
    """A kit that runs; two nodes of four GPUs each unless told otherwise."""
    kit = Kit(folder, **options)
    await kit.start(*(nodes or (node("node-1"), node("node-2"))))
    try:
        yield kit
    finally:
        await kit.close()


def dumped(kit: Kit) -> str:
    """All that a dump of the store shows."""
    return json.dumps(list(kit.store.dump()))
