"""The API's description in OpenAPI 3.1, made of the same rows that the server obeys."""

from __future__ import annotations

import re
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.problems import CONTENT_TYPE
from jupyter_gpupool.controller.schemas import SCHEMAS, ref

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.controller.router import Route

#: Media types of answers that are not JSON, by the name of their schema.
MEDIA = {"Certificate": "application/x-pem-file"}
#: Problems that every call can end in.
ALWAYS = (400, 429, 500, 503)
#: Further ones of calls that need a token, and of calls with a body.
WITH_TOKEN = (401, 403)
WITH_BODY = (413, 415)


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI description of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\+\}", "}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jupyter-gpupool",
            "version": version("jupyter-gpupool"),
            "description": "A pool of GPUs, shared from notebooks. Errors are application/problem+json.",
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def operation(route: Route) -> dict[str, Any]:
    """Return the description of one route."""
    found: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.about,
        "parameters": [*_in_path(route), *_in_query(route), *_in_headers(route)],
        "responses": {str(status): _answer(status, name) for status, name in route.answers.items()},
        "security": [{"token": []}] if route.scope else [],
    }
    if route.scope:
        found["x-scope"] = route.scope
    if route.body:
        found["requestBody"] = {"content": {"application/json": {"schema": ref(route.body)}}}
    for status in statuses(route):
        found["responses"][str(status)] = _answer(status, "Problem", CONTENT_TYPE)
    return found


def statuses(route: Route) -> list[int]:
    """Return the statuses of the problems that a call of this route can end in."""
    more = (WITH_TOKEN if route.scope else ()) + (WITH_BODY if route.body else ())
    return sorted({*ALWAYS, *more, *route.problems})


def _answer(status: int, schema: str, media: str = "application/json") -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if schema:
        described["content"] = {MEDIA.get(schema, media): {"schema": ref(schema)}}
    if status == HTTPStatus.CREATED:
        described["headers"] = {"Location": {"schema": {"type": "string"}}}
    return described


def _in_path(route: Route) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)\+?\}", route.path)
    schema = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]


def _in_query(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "description": each.about, "schema": each.schema}
        for name, each in route.query.items()
    ]


def _in_headers(route: Route) -> list[dict[str, Any]]:
    if not route.once:
        return []
    about = "What is sent again with the same key within a day makes no second lease, and extends none twice."
    schema = {"type": "string", "minLength": 1, "maxLength": 200}
    return [{"name": "Idempotency-Key", "in": "header", "description": about, "schema": schema}]
