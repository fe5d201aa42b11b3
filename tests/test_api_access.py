"""The HTTP API: who may do what, and the tokens and lines by which people and agents get in."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pwd

import pytest

from jupyter_gpupool.controller import routes_admin
from jupyter_gpupool.controller.accounts import Accounts
from jupyter_gpupool.controller.routes import ROUTES
from jupyter_gpupool.controller.store import StoreError
from tests.conftest import not_shown
from tests.controller_kit import dumped, running, says
from tests.pool_helpers import node

# ------------------------------------------------------------------------------------------ who may what


WHO = ("owner", "another", "who may only look", "administrator", "nobody")
PERSON = dict(zip(WHO, ("ann", "ben", "eve", "adm", ""), strict=True))
EVERYBODY, PEOPLE, ADMINISTRATORS = (200,) * 5, (200, 200, 200, 200, 401), (403, 403, 403, 200, 401)
#: Each route with what it answers to the owner of the lease or token that it is about, to another person, to
#: another one whose token is for looking only, to an administrator, and to nobody. Another's lease looks like
#: none. docs/security.md has this table too.
CELLS = {
    "GET /v1/openapi.json": EVERYBODY,
    "GET /v1/ca.pem": EVERYBODY,
    "GET /v1/pool": PEOPLE,
    "GET /v1/devices": PEOPLE,
    "GET /v1/queue": PEOPLE,
    "GET /v1/projects": PEOPLE,
    "GET /v1/usage": PEOPLE,
    "GET /v1/history": PEOPLE,
    "GET /v1/reclaims": PEOPLE,
    "GET /v1/notices": PEOPLE,
    "GET /v1/leases": PEOPLE,
    "GET /v1/tokens": PEOPLE,
    "GET /v1/health/{target+}": PEOPLE,
    "POST /v1/requests": (201, 201, 403, 201, 401),
    "GET /v1/leases/{lease}": (200, 404, 404, 200, 401),
    "GET /v1/leases/{lease}/explain": (200, 404, 404, 200, 401),
    "GET /v1/leases/{lease}/logs": (200, 404, 404, 200, 401),
    "GET /v1/leases/{lease}/connection": (200, 404, 403, 403, 401),
    "POST /v1/leases/{lease}/attach": (409, 404, 403, 403, 401),
    "PATCH /v1/leases/{lease}": (200, 404, 403, 403, 401),
    "DELETE /v1/leases/{lease}": (204, 404, 403, 204, 401),
    "DELETE /v1/tokens/{token}": (200, 404, 403, 200, 401),
    "POST /v1/tokens": (403, 403, 403, 201, 401),
    "PUT /v1/projects": ADMINISTRATORS,
    "POST /v1/consolidate": ADMINISTRATORS,
    "POST /v1/health/{target+}": ADMINISTRATORS,
    "DELETE /v1/agents/{node}": (403, 403, 403, 204, 401),
    "POST /v1/stop": (403, 403, 403, 202, 401),
    "POST /v1/login": (401,) * 5,
    "POST /v1/agents": (401,) * 5,
}
BODIES = {
    "POST /v1/requests": {"gpus": 1},
    "POST /v1/leases/{lease}/attach": {"pid": 1, "started": 1, "boot": "x"},
    "PATCH /v1/leases/{lease}": {"keep": True},
    "POST /v1/tokens": {"user": "somebody-else"},
    "PUT /v1/projects": {"defaults": {"grace": 60}},
    "POST /v1/consolidate": {"dry_run": True},
    "POST /v1/health/{target+}": {"action": "uncordon"},
    "POST /v1/stop": {},
    "POST /v1/login": {"token": "x"},
    "POST /v1/agents": {"token": "x", "name": "node-9"},
}


def test_the_documentation_shows_this_table():
    assert not not_shown("security", {f"`{name.replace('+', '')}`": cells for name, cells in CELLS.items()})


def test_every_route_is_in_the_table():
    assert set(CELLS) == {f"{route.method} {route.path}" for route in ROUTES}


@pytest.mark.asyncio
async def test_each_route_answers_each_of_them_as_the_table_says(tmp_path):
    async with running(tmp_path) as kit:
        kit.controller.stop = lambda why, everything=False: None
        found = {}
        for name in CELLS:
            found[name] = tuple([await _status(kit, name, PERSON[who]) for who in WHO])
        assert found == CELLS
        lease = await kit.ask("ann", gpus=1)
        for path, key in (("leases", "id"), ("tokens", "user")):
            seen = (await kit.call("ben", "GET", f"/v1/{path}")).data[path]
            assert not [each for each in seen if each[key] in (lease["id"], "ann")]


async def _status(kit, name, who):
    """What a person is answered, on a lease and a token of ann's that are made for this one call."""
    method, path = name.split()
    if "{lease}" in path:
        path = path.replace("{lease}", (await kit.ask("ann", gpus=1))["id"])
    if "{token}" in path:
        token = kit.controller.tokens.create("ann")
        path = path.replace("{token}", token.split("_")[1])
    path = path.replace("{target+}", "node-1/gpu0").replace("{node}", "node-2")
    status = (await kit.call(who, method, path, BODIES.get(name))).status_code
    if "{lease}" in name or name == "POST /v1/requests":
        for each in (await kit.call("adm", "GET", "/v1/leases?all=true")).data["leases"]:
            await kit.call("adm", "DELETE", f"/v1/leases/{each['id']}")
    return status


@pytest.mark.asyncio
async def test_what_is_anothers_looks_like_what_is_not_there(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1, name="secret-plan")
        for path in ("", "/explain", "/logs", "/connection"):
            real = await kit.call("ben", "GET", f"/v1/leases/{lease['id']}{path}")
            none = await kit.call("ben", "GET", f"/v1/leases/{'0' * 10}{path}")
            assert real.text.replace(lease["id"], "0" * 10) == none.text
        for path in ("/v1/devices", "/v1/queue", "/v1/leases?all=true", "/v1/notices", "/v1/usage"):
            text = (await kit.call("ben", "GET", path)).text
            assert "secret-plan" not in text
            assert lease["id"] not in text


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer x", "Basic TOKEN", "TOKEN", "Bearer gpupool_000000000000_AAAA"],
)
async def test_without_a_good_token_there_is_one_answer(tmp_path, header):
    async with running(tmp_path) as kit:
        headers = {} if header is None else {"Authorization": header.replace("TOKEN", kit.tokens["ann"])}
        response = await kit.call("", "GET", "/v1/pool", headers=headers)
        says(response, 401, "wrong_token", "jupyter gpupool login LINE")
        assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.asyncio
async def test_where_agents_cannot_switch_users_a_second_person_is_refused_and_told(tmp_path):
    async with running(tmp_path, trust_users=False) as kit:
        kit.store.put("owner", "ann")
        assert (await kit.call("ben", "GET", "/v1/pool")).data["one_user"] == "ann"
        response = await kit.call("ben", "POST", "/v1/requests", {"gpus": 1})
        says(response, 403, "one_user_only", "serves ann only", "trust_users")
        lease = await kit.ask(gpus=1)
        response = await kit.call("ann", "PATCH", f"/v1/leases/{lease['id']}", {"share": ["ben"]})
        says(response, 403, "one_user_only")


# --------------------------------------------------------------------------------------- tokens, lines


@pytest.mark.asyncio
async def test_a_token_is_made_used_listed_and_revoked_and_is_then_worth_nothing(tmp_path):
    async with running(tmp_path) as kit:
        made = await kit.call(
            "ann", "POST", "/v1/tokens", {"scopes": ["read"], "label": "phone", "expires_in": "1h"}
        )
        text = made.data["token"]
        assert (await kit.call(text, "GET", "/v1/pool")).data["user"] == {
            "name": "ann",
            "admin": False,
            "scopes": ["read"],
        }
        rows = (await kit.call("ann", "GET", "/v1/tokens")).data["tokens"]
        (row,) = [each for each in rows if each["label"] == "phone"]
        assert {each["user"] for each in rows} == {"ann"}
        assert (await kit.call("ann", "DELETE", f"/v1/tokens/{row['id']}")).status_code == 200
        says(await kit.call(text, "GET", "/v1/pool"), 401, "wrong_token")
        says(await kit.call("ann", "DELETE", f"/v1/tokens/{row['id']}"), 404, "not_found")


def token_id(kit, who):
    return kit.controller.tokens.verify(kit.tokens[who]).token


@pytest.mark.asyncio
async def test_who_revokes_a_token_is_told_whose_keys_its_person_has_and_can_have_them_made_anew(tmp_path):
    async with running(tmp_path) as kit:
        anns, bens = await kit.ask("ann", gpus=1, name="hers"), await kit.ask("ben", gpus=1, name="his")
        await kit.call("ann", "PATCH", f"/v1/leases/{anns['id']}", {"share": ["ben"]})
        two = [{"id": each["id"], "name": each["name"], "user": each["user"]} for each in (anns, bens)]
        extra = [kit.controller.tokens.create("ben") for _ in range(2)]
        idents = [kit.controller.tokens.verify(each).token for each in extra]
        none = (await kit.call("ben", "DELETE", f"/v1/tokens/{idents[0]}")).data
        assert none == {"restarted": [], "kept": []}, "he has fetched no keys yet"
        before = [(await kit.call("ben", "GET", f"/v1/leases/{each['id']}/connection")).data for each in two]
        told = (await kit.call("ben", "DELETE", f"/v1/tokens/{idents[1]}?restart=true")).data
        assert told == {"restarted": two[1:], "kept": two[:1]}, "another's lease is not his to restart"
        told = (await kit.call("adm", "DELETE", f"/v1/tokens/{token_id(kit, 'ben')}?restart=true")).data
        assert told == {"restarted": two[:1], "kept": []}
        says(await kit.call("ben", "GET", "/v1/leases"), 401, "wrong_token")
        mine = (await kit.call("ann", "GET", f"/v1/leases/{anns['id']}/connection")).data
        assert mine["key"] != before[0]["key"]
        assert kit.store.secret(bens["id"])["key"] != before[1]["key"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body",
    [
        {"scopes": ["admin"]},
        {"user": "ben"},
        {"kind": "agent"},
        {"user": "ben", "kind": "login"},
        {"groups": ["vision"]},
        {"kind": "login", "groups": ["vision"]},
    ],
    ids=["for more", "for another", "for an agent", "another's line", "of another group", "a line of one"],
)
async def test_a_token_cannot_make_one_that_is_more_than_itself(tmp_path, body):
    async with running(tmp_path) as kit:
        says(await kit.call("ann", "POST", "/v1/tokens", body), 403, "not_allowed")
        short = (await kit.call("ann", "POST", "/v1/tokens", {"expires_in": "1h"})).data["token"]
        says(await kit.call(short, "POST", "/v1/tokens", {}), 403, "not_allowed", "longer")


@pytest.mark.asyncio
async def test_a_login_line_lets_its_person_in_once(tmp_path):
    async with running(tmp_path) as kit:
        made = (await kit.call("adm", "POST", "/v1/tokens", {"kind": "login", "user": "cleo"})).data
        assert made["line"].startswith("gpupool:")
        says(await kit.call(made["token"], "GET", "/v1/pool"), 401, "wrong_token")
        into = await kit.call("", "POST", "/v1/login", {"token": made["token"]})
        assert into.data["user"] == "cleo"
        assert (await kit.call(into.data["token"], "GET", "/v1/pool")).data["user"]["name"] == "cleo"
        says(
            await kit.call("", "POST", "/v1/login", {"token": made["token"]}),
            401,
            "wrong_token",
            "works once",
        )


@pytest.mark.asyncio
async def test_with_a_token_go_the_lines_that_could_have_been_made_with_it(tmp_path):
    async with running(tmp_path) as kit:
        says(
            await kit.call("ben", "POST", "/v1/tokens", {"kind": "login", "expires_in": "2 days"}),
            400,
            "bad_request",
            "a day at most",
        )
        made = (await kit.call("ben", "POST", "/v1/tokens", {"kind": "login"})).data
        others = (await kit.call("ann", "POST", "/v1/tokens", {"kind": "login"})).data
        await kit.call("adm", "DELETE", f"/v1/tokens/{token_id(kit, 'ben')}")
        says(await kit.call("", "POST", "/v1/login", {"token": made["token"]}), 401, "wrong_token")
        assert (await kit.call("", "POST", "/v1/login", {"token": others["token"]})).data["user"] == "ann"


@pytest.mark.asyncio
async def test_a_revocation_that_fails_half_way_can_be_said_again(tmp_path, monkeypatch):
    async with running(tmp_path) as kit:
        ident = token_id(kit, "ben")

        def full(*_):
            raise StoreError("The disk is full.")

        monkeypatch.setattr(routes_admin, "_held", full)
        says(await kit.call("ben", "DELETE", f"/v1/tokens/{ident}"), 503, "store_failed")
        monkeypatch.undo()
        assert (await kit.call("ben", "DELETE", f"/v1/tokens/{ident}")).data == {"restarted": [], "kept": []}


@pytest.mark.asyncio
async def test_where_agents_switch_users_it_is_said_whose_leases_could_not_run(tmp_path):
    async with running(tmp_path, dataclasses.replace(node(), switches_users=True)) as kit:

        async def warned(user):
            made = await kit.call("adm", "POST", "/v1/tokens", {"kind": "login", "user": user})
            return made.data.get("warning", "")

        assert await warned(pwd.getpwuid(os.getuid()).pw_name) == ""
        assert (await warned("no-such-user")).startswith("There is no OS user no-such-user")
        kit.controller.accounts = Accounts({"no-such-user": "nobody"})
        assert await warned("no-such-user") == ""
    (tmp_path / "other").mkdir()
    async with running(tmp_path / "other") as kit:
        made = await kit.call("adm", "POST", "/v1/tokens", {"kind": "login", "user": "no-such-user"})
        assert "warning" not in made.data, "there all leases run as the agents do"


@pytest.mark.asyncio
async def test_a_join_line_gives_one_agent_its_certificate(tmp_path):
    async with running(tmp_path) as kit:
        made = (await kit.call("adm", "POST", "/v1/tokens", {"kind": "agent"})).data
        body = {"token": made["token"], "name": "node/9"}
        says(await kit.call("", "POST", "/v1/agents", body), 400, "bad_request", "name of a node")
        joined = await kit.call("", "POST", "/v1/agents", {**body, "name": "node-9"})
        assert joined.data["comm"] == kit.controller.address
        assert joined.data["ca"] == kit.controller.authority.ca_pem
        says(await kit.call("", "POST", "/v1/agents", {**body, "name": "node-9"}), 401, "wrong_token")
        says(await kit.call("", "POST", "/v1/login", {"token": made["token"]}), 401, "wrong_token")
        # it has not come yet, and may be a thief
        assert (await kit.call("adm", "DELETE", "/v1/agents/node-9")).status_code == 204
        assert not kit.controller.certificates.some("node-9")
        says(await kit.call("adm", "DELETE", "/v1/agents/node-9"), 404, "not_found")


@pytest.mark.asyncio
async def test_no_token_secret_or_key_reaches_a_log_or_a_dump(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, logger="jupyter_gpupool")
    caplog.set_level(logging.DEBUG, logger="tornado")
    async with running(tmp_path) as kit:
        variables = {"MY_SECRET": "swordfish-9000"}
        lease = await kit.ask(gpus=1, environment={"variables": variables})
        hidden = (await kit.call("ann", "GET", f"/v1/leases/{lease['id']}/connection")).data
        login = (await kit.call("adm", "POST", "/v1/tokens", {"kind": "login"})).data["token"]
        await kit.call("", "POST", "/v1/login", {"token": login})
        await kit.call("gpupool_wrong_token", "GET", "/v1/pool")
        secrets = [
            *kit.tokens.values(),
            hidden["secret"],
            hidden["key"],
            login,
            "gpupool_wrong_token",
            "swordfish-9000",
        ]
        for secret in secrets:
            assert secret not in caplog.text
            assert json.dumps(secret)[1:-1] not in dumped(kit)
