"""Cases that schemathesis makes of a description: made, called, and held against it.

A case is called as one of several people, with and without ids that exist. What comes back must be a
documented answer and no failure of the server: status, media type, headers and JSON are as described.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import random
from typing import TYPE_CHECKING, Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, strategies
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as of_openapi

from tests.controller_kit import DESCRIPTION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

load_all_checks()
CHECKS = [
    not_a_server_error,
    of_openapi.status_code_conformance,
    of_openapi.content_type_conformance,
    of_openapi.response_headers_conformance,
    of_openapi.response_schema_conformance,
]
#: A status from here on is a failure of the server, and documented or not there is none in these runs.
FAILURE = 500


class Cases:
    """Makes and calls the cases of one description.

    Args:
        description: In OpenAPI.
        base: Address that its paths are below.
        people: The headers of each of those who call.
        known: What there is for a path's parameter, chosen more often than what schemathesis makes up.
        verify: Path of the authority of the server's certificate, or False where there is none.
    """

    def __init__(
        self,
        description: dict[str, Any],
        base: str,
        people: Mapping[str, dict[str, str]],
        known: Callable[[str], list[str]],
        verify: str | bool = False,
    ) -> None:
        self.schema = schemathesis.openapi.from_dict(copy.deepcopy(description))
        self.base = base
        self.people = dict(people)
        self.known = known
        self.session = requests.Session()
        self.session.trust_env = False
        self.verify = verify
        #: (method, path, status) -> how often.
        self.seen: collections.Counter[tuple[str, str, int]] = collections.Counter()

    def run(self, each: int, seed: int) -> None:
        """Call every operation `each` times with what fits its description, and with what does not."""
        for result in self.schema.get_all_operations():
            operation = result.ok()
            self._run(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), each, seed)
            with contextlib.suppress(Unsatisfiable):  # what takes nothing cannot be called wrongly
                self._run(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), each, seed)

    def _run(self, made: Any, each: int, seed: int) -> None:
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=each,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(made, strategies.integers(0, 2**32))
        def call(case: Any, chance: int) -> None:
            self._call(case, random.Random(chance))

        call()

    def _call(self, case: Any, chance: random.Random) -> None:
        who = chance.choice([*self.people])
        for name in case.path_parameters or ():
            known = self.known(name)
            elsewhere = case.path_parameters[name] in ("", ".", "..")  # these are other addresses
            if elsewhere or chance.random() < 0.7:
                case.path_parameters[name] = chance.choice(known)
        if "wait" in (case.query or {}):  # what is right is right for any number, and nobody has a minute
            case.query["wait"] = chance.choice(["0.01", "0", "x", ""])
        headers = {name: value for name, value in (case.headers or {}).items() if name != "Authorization"}
        case.headers = headers
        response = case.call(
            base_url=self.base, session=self.session, headers=self.people[who], timeout=30, verify=self.verify
        )
        self.seen[case.operation.method.upper(), case.operation.path, response.status_code] += 1
        assert response.status_code < FAILURE, (response.status_code, response.text, case.as_curl_command())
        case.validate_response(response, checks=CHECKS)

    @property
    def count(self) -> int:
        """How many cases have been called."""
        return sum(self.seen.values())

    def close(self) -> None:
        self.session.close()


# ----------------------------------------------------------------------------------- the Jupyter server's

PROBLEM = {
    "type": "object",
    "required": ["type", "title", "status", "reason", "detail", "sentence", "advice", "field", "message"],
    "properties": {"status": {"type": "integer"}, "errors": {"type": "array", "items": {"type": "object"}}},
}
SERVER_POOL = {
    "type": "object",
    "required": ["state", "reason", "sentence", "advice", "can_start", "may", "pool"],
    "properties": {
        "state": {"enum": ["looking", "starting", "connected", "lost"]},
        "pool": {"anyOf": [{"$ref": "#/components/schemas/Pool"}, {"type": "null"}]},
    },
    "additionalProperties": False,
}
#: The endpoints of docs/server.md: verb, path, and the verb and path of the pool's API that they pass on.
PASSED_ON = (
    ("get", "/queue", "/v1/queue"),
    ("get", "/projects", "/v1/projects"),
    ("put", "/projects", "/v1/projects"),
    ("get", "/usage", "/v1/usage"),
    ("get", "/history", "/v1/history"),
    ("get", "/leases", "/v1/leases"),
    ("get", "/leases/{lease}", "/v1/leases/{lease}"),
    ("patch", "/leases/{lease}", "/v1/leases/{lease}"),
    ("delete", "/leases/{lease}", "/v1/leases/{lease}"),
    ("get", "/leases/{lease}/explain", "/v1/leases/{lease}/explain"),
    ("get", "/leases/{lease}/logs", "/v1/leases/{lease}/logs"),
    ("post", "/requests", "/v1/requests"),
    ("post", "/health/{target}", "/v1/health/{target}"),
    ("get", "/notices", "/v1/notices"),
    ("get", "/devices", "/v1/devices"),
)


def server_description() -> dict[str, Any]:
    """Return the description of the Jupyter server's endpoints: the pool's, passed on, and its own two."""
    found = copy.deepcopy(DESCRIPTION)
    problem = {"content": {"application/problem+json": {"schema": PROBLEM}}, "description": "A no."}
    paths: dict[str, dict[str, Any]] = {}
    for verb, path, pools in PASSED_ON:
        operation = copy.deepcopy(found["paths"][pools][verb])
        good = {status: each for status, each in operation["responses"].items() if int(status) < 400}
        bad = {str(status): problem for status in (400, 403, 404, 409, 413, 429, 503)}
        paths.setdefault(path, {})[verb] = {**operation, "responses": {**good, **bad}, "security": []}
    delta = found["components"]["schemas"]["Devices"]
    delta["properties"]["full"] = {"type": "boolean"}
    answer = {"description": "How it stands.", "content": {"application/json": {"schema": SERVER_POOL}}}
    body = {"type": "object", "properties": {"action": {"enum": ["retry"]}}, "required": ["action"]}
    paths["/pool"] = {
        "get": {"operationId": "pool_state", "responses": {"200": answer}},
        "post": {
            "operationId": "pool_action",
            "requestBody": {"content": {"application/json": {"schema": body}}},
            "responses": {"202": answer, "400": problem},
        },
    }
    return {**found, "paths": paths}
