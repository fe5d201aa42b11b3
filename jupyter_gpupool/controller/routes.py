"""All routes of the API, and how it is served."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import routes_admin, routes_leases, routes_pool
from jupyter_gpupool.controller.api import Api, Limits
from jupyter_gpupool.controller.openapi import describe
from jupyter_gpupool.controller.router import Answer, Call, Route

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.controller.hub import Hub


async def openapi(_: Call) -> Answer:
    """Hand out this API's description."""
    return Answer(_description())


@functools.cache
def _description() -> dict[str, Any]:
    return describe(ROUTES)


ROUTES: tuple[Route, ...] = (
    Route(
        method="GET",
        path="/v1/openapi.json",
        handler=openapi,
        about="This description.",
        scope="",
        answers={200: "Description"},
    ),
    *routes_pool.ROUTES,
    *routes_leases.ROUTES,
    *routes_admin.ROUTES,
)


def serve(
    controller: ControllerFace,
    host: str,
    port: int,
    *,
    names: Iterable[str] = (),
    name: str = "",
    limits: Limits | None = None,
    hub: Hub | None = None,
) -> Api:
    """Serve the API in the running event loop.

    Args:
        controller: What is behind it.
        host: The address to listen on.
        port: The port; 0: any that is free.
        names: More host names and addresses by which people may reach it, for the certificate.
        name: The one that stands in its URL; default: `host`.
        limits: How much one caller may ask for.
        hub: The JupyterHub whose people are the pool's too.

    Raises:
        ApiError: The port is in use, or may not be used.
    """
    known = [each for each in (host, name, *names) if each and each not in ("0.0.0.0", "::")]  # noqa: S104 - compared
    api = Api(controller, ROUTES, controller.authority.server_context(known), limits, hub)
    api.listen(host, port, name=name)
    return api
