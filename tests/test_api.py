"""The HTTP API: who may do what, what each answer is, and what happens when something is wrong.

Every answer in here is held against the API's own OpenAPI description (`controller_kit.check`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import socket
import ssl
from pathlib import Path

import distributed
import httpx
import pytest
from jsonschema import Draft202012Validator

from jupyter_gpupool.controller.api import ApiError, Limits
from jupyter_gpupool.controller.auth import security
from jupyter_gpupool.controller.limits import Limiter
from jupyter_gpupool.controller.routes import ROUTES, serve
from jupyter_gpupool.controller.store import StoreError
from jupyter_gpupool.core.model import (
    LeaseScaled,
    LeaseState,
    Reading,
    Reason,
    Verdict,
    VerdictChanged,
    encode,
)
from jupyter_gpupool.core.pool import HANDLERS
from tests.controller_kit import DESCRIPTION, Kit, check, dumped, running
from tests.pool_helpers import node
from tests.pool_processes import PoolProcesses


@pytest.fixture
def look_always(monkeypatch):
    """A look at the devices is good for that moment only."""
    monkeypatch.setattr("jupyter_gpupool.controller.routes_pool.FRESH_S", 0)
    monkeypatch.setattr("jupyter_gpupool.controller.routes_pool.REST", 0)


def says(response, status, reason, *words):
    """The answer is a problem of that name, and its sentences have these words."""
    assert response.status_code == status, response.text
    assert response.data["reason"] == reason
    for word in words:
        assert word in f"{response.data['detail']} {response.data['advice']}"


# --------------------------------------------------------------------------------- requests and leases


@pytest.mark.asyncio
async def test_a_request_becomes_a_lease_that_can_be_read_and_given_back(tmp_path):
    async with running(tmp_path) as kit:
        response = await kit.call("ann", "POST", "/v1/requests", {"gpus": 2, "name": "train"})
        assert response.status_code == 201
        lease = response.data
        assert response.headers["location"] == f"/v1/leases/{lease['id']}"
        assert (lease["name"], lease["user"], lease["state"], lease["gpus"]) == ("train", "ann", "active", 2)
        assert [each["device_name"] for each in lease["slices"]] == ["node-1/gpu0", "node-1/gpu1"]
        assert lease["ends_at"] - lease["granted_at"] == pytest.approx(24 * 3600, abs=1)
        read = await kit.call("ann", "GET", response.headers["location"])
        assert read.data == lease
        assert (await kit.call("ann", "GET", "/v1/leases")).data == {"leases": [lease], "next": None}
        assert (await kit.call("ann", "DELETE", response.headers["location"])).status_code == 204
        ended = (await kit.call("ann", "GET", response.headers["location"])).data
        assert (ended["state"], ended["why"], ended["slices"]) == ("ended", "released by its owner", [])
        assert (
            await kit.call("ann", "DELETE", response.headers["location"])
        ).status_code == 204  # again: fine


@pytest.mark.asyncio
async def test_one_that_must_wait_says_why_which_place_and_until_when_and_can_be_withdrawn(tmp_path):
    async with running(tmp_path) as kit:
        first = await kit.ask(gpus=8, time_limit="1h")
        waits = await kit.ask("ben", gpus=1)
        also = await kit.ask("ann", gpus=1)
        assert (waits["state"], waits["place"], also["place"]) == ("pending", 1, 2)
        assert waits["reasons"][0]["reason"] == "no_room"
        assert waits["why"] == waits["reasons"][0]["sentence"]
        assert waits["expected_start"] == pytest.approx(first["ends_at"], abs=1)
        queue = (await kit.call("ann", "GET", "/v1/queue")).data["queue"]
        assert [(each["place"], each["user"], each["id"]) for each in queue] == [
            (1, "ben", ""),
            (2, "ann", also["id"]),
        ]
        assert (await kit.call("ben", "DELETE", f"/v1/leases/{waits['id']}")).status_code == 204
        gone = (await kit.call("ben", "GET", f"/v1/leases/{waits['id']}")).data
        assert (gone["state"], gone["why"]) == ("ended", "withdrawn by its owner")


@pytest.mark.asyncio
async def test_a_dry_run_says_what_would_be_and_changes_nothing(tmp_path):
    async with running(tmp_path) as kit:
        seq = kit.store.last_seq
        would = await kit.call("ann", "POST", "/v1/requests?dry_run=true", {"gpus": 4})
        assert (would.status_code, would.data["starts_now"]) == (200, True)
        says(await kit.call("ann", "POST", "/v1/requests?dry_run=true", {"gpus": 9}), 400, "too_many_gpus")
        assert kit.store.last_seq == seq
        await kit.ask(gpus=8)
        would = await kit.call("ann", "POST", "/v1/requests?dry_run=true", {"gpus": 1})
        assert (would.data["starts_now"], would.data["place"]) == (False, 1)


@pytest.mark.asyncio
async def test_a_request_that_can_never_be_granted_says_why_and_what_there_is(tmp_path):
    async with running(tmp_path) as kit:

        async def ask(**body):
            return await kit.call("ann", "POST", "/v1/requests", body)

        says(await ask(gpus=9), 400, "too_many_gpus", "8")
        says(await ask(model="A100"), 400, "unknown_model", "A100", "H100-80GB")
        says(await ask(project="nowhere"), 400, "unknown_project", "nowhere", "default")
        says(await ask(vram="90GB"), 400, "too_much_memory", "80")
        says(await ask(time_limit="30d"), 400, "time_limit", "168 hours")
        says(await ask(gpus=0), 400, "bad_request", "more than none")
        says(await ask(gpus=1.5), 400, "bad_request", "whole ones only")
        says(await ask(gpu=1), 400, "bad_request", "Did you mean gpus?")
        await ask(name="mine")
        says(await ask(name="mine"), 409, "name_taken")
        both = await ask(gpus=0, vram="x")
        assert [each["field"] for each in both.data["errors"]] == ["gpus", "vram"]
        assert (await kit.call("ann", "GET", "/v1/pool")).data["leases"] == 1


@pytest.mark.asyncio
async def test_a_request_sent_again_with_its_key_makes_no_second_lease_even_after_a_restart(tmp_path):
    key = {"Idempotency-Key": "once"}
    async with running(tmp_path) as kit:
        answers = await asyncio.gather(*(kit.ask(gpus=1, headers=key) for _ in range(5)))
        assert len({each["id"] for each in answers}) == 1
        other = await kit.call("ann", "POST", "/v1/requests", {"gpus": 2}, headers=key)
        says(other, 409, "key_reused", "new key")
        assert (await kit.ask("ben", gpus=1, headers=key))["id"] != answers[0]["id"]
    async with running(tmp_path) as kit:
        assert (await kit.ask(gpus=1, headers=key))["id"] == answers[0]["id"]
        assert (await kit.call("ann", "GET", "/v1/pool")).data["leases"] == 2
        bad = await kit.call("ann", "POST", "/v1/requests", {}, headers={"Idempotency-Key": "x" * 201})
        says(bad, 400, "bad_request", "1 to 200")


@pytest.mark.asyncio
async def test_a_refused_request_does_not_use_its_key_up(tmp_path):
    key = {"Idempotency-Key": "k"}
    async with running(tmp_path) as kit:
        says(await kit.call("ann", "POST", "/v1/requests", {"gpus": 9}, headers=key), 400, "too_many_gpus")
        assert await kit.ask(gpus=1, headers=key)


@pytest.mark.asyncio
async def test_leases_come_in_pages_newest_first_and_can_be_chosen_by_state(tmp_path):
    async with running(tmp_path, node("node-1", 4)) as kit:
        made = [await kit.ask(gpus=1) for _ in range(6)]
        found, after = [], ""
        while after is not None:
            page = (await kit.call("ann", "GET", f"/v1/leases?limit=2{after}")).data
            assert len(page["leases"]) <= 2
            found += [each["id"] for each in page["leases"]]
            after = f"&after={page['next']}" if page["next"] else None
        assert sorted(found) == sorted(each["id"] for each in made)
        assert [each["name"] for each in made] == [f"lease-{n}" for n in range(1, 7)]
        waiting = (await kit.call("ann", "GET", "/v1/leases?state=pending")).data["leases"]
        assert [each["place"] for each in waiting] == [2, 1]


@pytest.mark.asyncio
async def test_a_lease_is_extended_kept_and_shared_one_thing_at_a_time(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1, time_limit="1h")
        path = f"/v1/leases/{lease['id']}"
        longer = (await kit.call("ann", "PATCH", path, {"extend": "30m"})).data
        assert longer["ends_at"] == pytest.approx(lease["ends_at"] + 1800, abs=0.01)
        says(await kit.call("ann", "PATCH", path, {"extend": "300d"}), 400, "time_limit")
        assert (await kit.call("ann", "PATCH", path, {"keep": True})).status_code == 200
        says(await kit.call("ann", "PATCH", path, {}), 400, "bad_request", "one thing at a time")
        if LeaseScaled not in HANDLERS:
            says(await kit.call("ann", "PATCH", path, {"gpus": 2}), 400, "bad_request", "cannot do that yet")
        await kit.call("ann", "DELETE", path)
        says(await kit.call("ann", "PATCH", path, {"extend": "30m"}), 409, "lease_over")
        says(await kit.call("ann", "PATCH", path, {"share": ["ben"]}), 409, "lease_over")


@pytest.mark.asyncio
async def test_who_a_lease_is_shared_with_can_use_it_but_not_change_it(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        path = f"/v1/leases/{lease['id']}"
        says(await kit.call("ben", "GET", f"{path}/connection"), 404, "unknown_lease")
        shared = await kit.call("ann", "PATCH", path, {"share": ["ben"]})
        assert shared.data["shared_with"] == ["ben"]
        assert shared.data["version"] != lease["version"], "whoever waits for news of it hears of that"
        mine = (await kit.call("ann", "GET", f"{path}/connection")).data
        assert (await kit.call("ben", "GET", f"{path}/connection")).data == mine
        assert mine["cert"].startswith("-----BEGIN CERTIFICATE")
        assert [each["id"] for each in (await kit.call("ben", "GET", "/v1/leases")).data["leases"]] == [
            lease["id"]
        ]
        says(await kit.call("ben", "DELETE", path), 403, "not_yours", "ann")
        for change in ({"share": ["ben", "eve"]}, {"share": []}):
            says(await kit.call("ben", "PATCH", f"{path}?restart=true", change), 403, "not_yours")


@pytest.mark.asyncio
async def test_who_has_its_keys_is_shut_out_of_a_lease_by_new_ones_and_told_so_first(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=2)
        path = f"/v1/leases/{lease['id']}"
        await kit.call("ann", "PATCH", path, {"share": ["ben", "eve"]})
        known = (await kit.call("ben", "GET", f"{path}/connection")).data
        no = await kit.call("ann", "PATCH", path, {"share": ["eve"]})
        says(no, 409, "needs_restart", "ben", "lost", "--restart")
        assert (await kit.call("ben", "GET", f"{path}/connection")).data == known, "nothing has changed"
        now = (await kit.call("ann", "PATCH", f"{path}?restart=true", {"share": ["eve"]})).data
        assert (now["shared_with"], now["state"], len(now["slices"])) == (["eve"], "active", 2)
        assert "ben" in now["notes"][-2], "after it, too, it is said"
        assert not {each["id"] for each in now["slices"]} & {each["id"] for each in lease["slices"]}
        says(await kit.call("ben", "GET", f"{path}/connection"), 404, "unknown_lease")
        fresh = (await kit.call("ann", "GET", f"{path}/connection")).data
        for part in ("ca", "cert", "key", "secret"):
            assert fresh[part] != known[part]
        assert kit.store.secret(lease["id"])["secret"] == fresh["secret"], "the old ones are not kept"


@pytest.mark.asyncio
async def test_who_never_had_its_keys_is_shut_out_of_a_lease_without_a_restart(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        path = f"/v1/leases/{lease['id']}"
        said = (await kit.call("ann", "PATCH", path, {"share": ["bnn", "ben"]})).data
        assert said["warning"].startswith("bnn: nobody"), said["warning"]
        assert "warning" not in (await kit.call("ann", "GET", path)).data
        now = (await kit.call("ann", "PATCH", path, {"share": ["ben"]})).data
        assert (now["shared_with"], "warning" in now) == (["ben"], False)
        assert [each["id"] for each in now["slices"]] == [each["id"] for each in lease["slices"]]


@pytest.mark.asyncio
async def test_a_restart_goes_with_who_may_use_a_lease_and_with_nothing_else(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        path = f"/v1/leases/{lease['id']}?restart"
        says(await kit.call("ann", "PATCH", f"{path}=true", {"keep": True}), 400, "bad_request", "share")
        says(await kit.call("ann", "PATCH", f"{path}=yes", {"share": []}), 400, "bad_request", "restart")
        says(await kit.call("adm", "PATCH", f"{path}=true", {"share": []}), 403, "not_yours")
        before = (await kit.call("ann", "GET", f"/v1/leases/{lease['id']}/connection")).data
        assert (await kit.call("ann", "PATCH", f"{path}=true", {"share": []})).status_code == 200
        after = (await kit.call("ann", "GET", f"/v1/leases/{lease['id']}/connection")).data
        assert before["key"] != after["key"], "whoever wants new keys gets them"


@pytest.mark.asyncio
async def test_how_to_reach_a_lease_is_told_once_it_runs_and_until_it_ends(tmp_path):
    async with running(tmp_path) as kit:
        kit.controller.obey = False
        lease = await kit.ask(gpus=1)
        path = f"/v1/leases/{lease['id']}"
        says(await kit.call("ann", "GET", f"{path}/connection"), 409, "not_ready", "starting")
        await kit.call("ann", "DELETE", path)
        says(await kit.call("ann", "GET", f"{path}/connection"), 409, "lease_over", "released")


# -------------------------------------------------------------------------------------------- waiting


@pytest.mark.asyncio
async def test_a_long_poll_answers_as_soon_as_the_lease_is_another_version(tmp_path):
    async with running(tmp_path) as kit:
        await kit.ask("ben", gpus=8)
        lease = await kit.ask(gpus=1)
        path = f"/v1/leases/{lease['id']}?version={lease['version']}"
        none = await kit.call("ann", "GET", f"{path}&wait=0.2")
        assert none.data["version"] == lease["version"]
        poll = asyncio.ensure_future(kit.call("ann", "GET", f"{path}&wait=30"))
        await asyncio.sleep(0.2)
        assert not poll.done()
        (full,) = (await kit.call("ben", "GET", "/v1/leases")).data["leases"]
        await kit.call("ben", "DELETE", f"/v1/leases/{full['id']}")
        answer = await asyncio.wait_for(poll, 25)
        assert answer.data["state"] in ("starting", "active")


@pytest.mark.asyncio
async def test_a_long_poll_tells_of_a_better_place_in_the_queue(tmp_path):
    async with running(tmp_path) as kit:
        await kit.ask("ben", gpus=8)
        first = await kit.ask(gpus=8)
        second = await kit.ask(gpus=8)
        path = f"/v1/leases/{second['id']}?wait=30&version={second['version']}"
        poll = asyncio.ensure_future(kit.call("ann", "GET", path))
        await asyncio.sleep(0.1)
        await kit.call("ann", "DELETE", f"/v1/leases/{first['id']}")
        assert (await asyncio.wait_for(poll, 25)).data["place"] == 1


@pytest.mark.asyncio
async def test_a_caller_who_goes_away_is_not_worked_for(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        before = {task for task in asyncio.all_tasks() if "lease(" in repr(task.get_coro())}
        path = f"/v1/leases/{lease['id']}?wait=60&version={lease['version']}"
        with pytest.raises(httpx.ReadTimeout):
            await kit.client.get(path, headers={"Authorization": f"Bearer {kit.tokens['ann']}"}, timeout=0.3)
        for _ in range(500):
            waiting = [
                task
                for task in asyncio.all_tasks() - before
                if getattr(task.get_coro(), "__name__", "") in ("lease", "notices")
            ]
            if not waiting:
                break
            await asyncio.sleep(0.02)
        assert waiting == []


@pytest.mark.asyncio
async def test_notices_are_told_in_their_order_to_their_person_and_none_is_lost(tmp_path):
    async with running(tmp_path) as kit:
        poll = asyncio.ensure_future(kit.call("ann", "GET", "/v1/notices?after=0&wait=30"))
        await asyncio.sleep(0.1)
        await kit.ask("ben", gpus=1)
        await asyncio.sleep(0.1)
        assert not poll.done()
        lease = await kit.ask(gpus=1)
        found, answer = [], (await asyncio.wait_for(poll, 25)).data
        while answer["notices"]:
            found += answer["notices"]
            answer = (await kit.call("ann", "GET", f"/v1/notices?after={answer['next']}&limit=1")).data
        assert [each["notice"] for each in found] == ["granted", "started"]
        assert {each["lease"] for each in found} == {lease["id"]}
        assert not answer["missed"]
        (notes,) = (await kit.call("ann", "GET", "/v1/leases")).data["leases"]
        assert notes["notes"] == [each["sentence"] for each in found]


@pytest.mark.asyncio
async def test_a_server_that_ends_hangs_up_on_those_who_wait(tmp_path):
    async with running(tmp_path) as kit:
        poll = asyncio.ensure_future(kit.call("ann", "GET", "/v1/notices?after=0&wait=30"))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(kit.api.close(), 20)
        with pytest.raises(httpx.HTTPError):
            await asyncio.wait_for(poll, 25)


# ------------------------------------------------------------------------------------------ who may what


#: Route -> statuses for: the owner, another person, one who may only look, an administrator, nobody.
ALLOWED = {
    "GET /v1/pool": (200, 200, 200, 200, 401),
    "GET /v1/devices": (200, 200, 200, 200, 401),
    "GET /v1/queue": (200, 200, 200, 200, 401),
    "GET /v1/projects": (200, 200, 200, 200, 401),
    "GET /v1/usage": (200, 200, 200, 200, 401),
    "GET /v1/history": (200, 200, 200, 200, 401),
    "GET /v1/reclaims": (200, 200, 200, 200, 401),
    "GET /v1/notices": (200, 200, 200, 200, 401),
    "GET /v1/leases": (200, 200, 200, 200, 401),
    "GET /v1/leases/LEASE": (200, 404, 404, 200, 401),
    "GET /v1/leases/LEASE/explain": (200, 404, 404, 200, 401),
    "GET /v1/leases/LEASE/logs": (200, 404, 404, 200, 401),
    "GET /v1/leases/LEASE/connection": (200, 404, 403, 403, 401),
    "POST /v1/leases/LEASE/attach": (409, 404, 403, 403, 401),  # no agent of the kit's is on a machine
    "PATCH /v1/leases/LEASE": (200, 404, 403, 403, 401),
    "DELETE /v1/leases/LEASE": (204, 404, 403, 204, 401),
    "POST /v1/requests": (201, 201, 403, 201, 401),
    "PUT /v1/projects": (403, 403, 403, 200, 401),
    "GET /v1/health/node-2": (400, 400, 400, 400, 401),  # verdicts are on devices
    "POST /v1/health/node-2": (403, 403, 403, 200, 401),
    "POST /v1/tokens": (201, 201, 403, 201, 401),
    "GET /v1/tokens": (200, 200, 200, 200, 401),
    "DELETE /v1/tokens/TOKEN": (404, 404, 403, 204, 401),
    "POST /v1/consolidate": (403, 403, 403, 400, 401),  # there is nothing that could be moved
    "POST /v1/stop": (403, 403, 403, 202, 401),
    "GET /v1/openapi.json": (200, 200, 200, 200, 200),
    "GET /v1/ca.pem": (200, 200, 200, 200, 200),
    "POST /v1/login": (401, 401, 401, 401, 401),
    "POST /v1/agents": (401, 401, 401, 401, 401),
    "DELETE /v1/agents/node-9": (403, 403, 403, 404, 401),  # there is no such node
}
BODIES = {
    "POST /v1/leases/LEASE/attach": {"pid": 1, "started": 1, "boot": "x"},
    "PATCH /v1/leases/LEASE": {"keep": True},
    "POST /v1/requests": {"gpus": 1},
    "PUT /v1/projects": {"projects": [{"name": "default"}]},
    "POST /v1/health/node-2": {"action": "uncordon"},
    "POST /v1/tokens": {},
    "POST /v1/stop": {},
    "POST /v1/login": {"token": "gpupool_x_y"},
    "POST /v1/agents": {"token": "gpupool_x_y", "name": "node-9"},
}


@pytest.mark.asyncio
async def test_every_route_is_in_the_table_of_who_may_what():
    rows = {f"{route.method} {route.path}" for route in ROUTES}
    named = {"{lease}": "LEASE", "{token}": "TOKEN", "{target+}": "node-2", "{node}": "node-9"}
    for template, name in named.items():
        rows = {row.replace(template, name) for row in rows}
    assert rows == set(ALLOWED)


@pytest.mark.asyncio
async def test_each_route_is_open_to_those_in_its_row_and_to_nobody_else(tmp_path):
    async with running(tmp_path) as kit:
        kit.controller.stop = lambda why, everything=False: None
        wrong = []
        for row, allowed in ALLOWED.items():
            method, path = row.split()
            for who, expected in zip(("ann", "ben", "eve", "adm", ""), allowed, strict=True):
                lease = (await kit.ask(gpus=0.1))["id"] if "LEASE" in path else ""
                ident = kit.controller.tokens.verify(kit.controller.tokens.create("cleo")).token
                at = path.replace("LEASE", lease).replace("TOKEN", ident)
                response = await kit.call(who, method, at, BODIES.get(row))
                if response.status_code != expected:
                    wrong.append((row, who, expected, response.status_code, response.text))
                if lease:
                    await kit.call("ann", "DELETE", f"/v1/leases/{lease}")
        assert wrong == []


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
        assert (await kit.call("ann", "DELETE", f"/v1/tokens/{row['id']}")).status_code == 204
        says(await kit.call(text, "GET", "/v1/pool"), 401, "wrong_token")
        says(await kit.call("ann", "DELETE", f"/v1/tokens/{row['id']}"), 404, "not_found")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "body",
    [{"scopes": ["admin"]}, {"user": "ben"}, {"kind": "agent"}, {"user": "ben", "kind": "login"}],
    ids=["for more", "for somebody else", "for an agent", "a line for somebody else"],
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


# ------------------------------------------------------------------------------------- the pool's state


@pytest.mark.asyncio
async def test_devices_show_what_is_on_them_and_how_they_are(tmp_path, look_always):
    async with running(tmp_path, node("node-1", 2)) as kit:
        lease = await kit.ask(gpus=0.25, name="small")
        uuid = lease["slices"][0]["device"]
        reading = Reading(device=uuid, now=1, utilisation=42, memory_used=7, power=1500)
        kit.controller.hearing._take_readings("node-1", {"readings": [encode(reading)]})
        now = kit.controller.clock.now()
        other = "GPU-node-1-1" if uuid.endswith("0") else "GPU-node-1-0"
        kit.controller.submit(
            VerdictChanged(now=now, device=other, verdict=Verdict.GONE, sentence="It fell off the bus.")
        )
        rows = {each["uuid"]: each for each in (await kit.call("ann", "GET", "/v1/devices")).data["devices"]}
        (part,) = rows[uuid]["parts"]
        assert (part["lease_name"], part["milli"], part["vram"]) == ("small", 250, 20 * 10**9)
        assert rows[uuid]["free_milli"] == 750
        assert rows[uuid]["reading"]["utilisation"] == 42
        assert rows[uuid]["reading"]["power"] == 1.5
        assert (rows[other]["free_milli"], rows[other]["flags"]) == (0, ["out"])
        assert rows[other]["verdict_sentence"] == "It fell off the bus."
        pool = (await kit.call("ann", "GET", "/v1/pool")).data
        assert (pool["gpus"], pool["gpus_free"], pool["largest_together"]) == (2, 0.75, 0)


@pytest.mark.asyncio
async def test_one_who_looks_at_devices_again_is_told_only_what_is_new(tmp_path, look_always):
    async with running(tmp_path) as kit:
        first = (await kit.call("ann", "GET", "/v1/devices")).data
        assert len(first["devices"]) == 8
        again = (await kit.call("ann", "GET", f"/v1/devices?since={first['sequence']}")).data
        assert (again["devices"], again["sequence"]) == ([], first["sequence"])
        await kit.ask("ben", gpus=2)
        news = (await kit.call("ann", "GET", f"/v1/devices?since={first['sequence']}")).data
        assert [each["free_milli"] for each in news["devices"]] == [0, 0]
        assert {part["user"] for each in news["devices"] for part in each["parts"]} == {"ben"}
        future = (await kit.call("ann", "GET", f"/v1/devices?since={news['sequence'] + 1000}")).data
        assert len(future["devices"]) == 8


@pytest.mark.asyncio
async def test_an_administrator_takes_devices_and_nodes_out_of_service_by_any_of_their_names(tmp_path):
    async with running(tmp_path) as kit:

        async def health(target, **body):
            return await kit.call("adm", "POST", f"/v1/health/{target}", body)

        async def free():
            return (await kit.call("ann", "GET", "/v1/pool")).data["gpus_free"]

        async def called(target, **body):
            return (await health(target, **body)).data["name"]

        assert await called("node-1/gpu0", action="cordon", why="new fan") == "node-1/gpu0"
        assert await called("gpu7", action="cordon") == "node-2/gpu3"  # counted over the nodes
        assert await called("GPU-node-2-0", action="drain") == "node-2/gpu0"
        assert await free() == 5
        assert (await health("node-1", action="cordon")).data == {"target": "node-1", "name": "node-1"}
        assert await free() == 2
        for target in ("node-1", "node-1/gpu0", "gpu7", "GPU-node-2-0"):
            assert (await health(target, action="uncordon")).status_code == 200
        assert await free() == 8
        await called("gpu1", action="retire", why="sold")
        await called("node-2", action="retire")
        rows = (await kit.call("ann", "GET", "/v1/devices")).data["devices"]
        assert [each["flags"] for each in rows] == [[], ["retired"], [], [], *(4 * [["retired"]])]
        assert {each["cordoned"] for each in rows} == {"", "retired: sold", "retired by adm"}
        nodes = (await kit.call("ann", "GET", "/v1/pool")).data["nodes"]
        assert [each["retired"] for each in nodes] == [False, True]
        await called("gpu1", action="undrain")
        await called("node-2", action="uncordon")
        assert await free() == 8
        says(await health("node-9", action="cordon"), 404, "not_found", "node-1, node-2")
        says(await health("node-1", action="drill"), 400, "bad_request", "for a device")
        says(await health("node-1", action="explode"), 400, "bad_request", "none of cordon")
        says(await health("node-1"), 400, "bad_request", "action is missing")
        says(await health("gpu0", action="drill"), 409, "not_ready")  # no agent is connected here


@pytest.mark.asyncio
async def test_projects_are_replaced_as_a_whole_and_what_does_not_add_up_is_refused(tmp_path):
    async with running(tmp_path) as kit:
        tree = [
            {"name": "lab", "quota": 6, "members": ["ann"]},
            {"name": "vision", "parent": "lab", "limit": 1},
        ]
        answer = await kit.call("adm", "PUT", "/v1/projects", {"projects": tree})
        assert [each["name"] for each in answer.data["projects"]] == ["lab", "vision"]
        lease = await kit.ask(gpus=1, project="vision")
        assert lease["project"] == "vision"
        over = await kit.call("ann", "POST", "/v1/requests", {"gpus": 2, "project": "vision"})
        says(over, 403, "over_limit", "limit of project vision is 1")
        says(await kit.call("ben", "POST", "/v1/requests", {"project": "lab"}), 403, "not_a_member")
        rows = (await kit.call("ann", "GET", "/v1/projects")).data["projects"]
        assert [each["held"] for each in rows] == [{"H100-80GB": 1.0}, {"H100-80GB": 1.0}]
        assert "members" not in rows[0]
        usage = (await kit.call("ann", "GET", "/v1/usage")).data["usage"]
        assert [(each["project"], each["user"], each["gpus"], each["leases"]) for each in usage] == [
            ("vision", "ann", 1.0, 1)
        ]
        tree[0]["quota"] = 9
        says(await kit.call("adm", "PUT", "/v1/projects", {"projects": tree}), 400, "quota_sum", "8")


@pytest.mark.asyncio
async def test_what_is_said_of_the_configuration_can_be_set_again_and_defaults_hold_at_once(tmp_path):
    async with running(tmp_path) as kit:
        now = (await kit.call("adm", "GET", "/v1/projects")).data
        assert now["defaults"]["grace"] == 120
        body = {"defaults": {**now["defaults"], "max_time": "3h", "time_limit": "2h"}}
        assert (await kit.call("adm", "PUT", "/v1/projects", body)).data["defaults"]["max_time"] == 3 * 3600
        assert (await kit.ask())["requested"]["time_limit"] == 2 * 3600
        tree = [{"name": "a", "limit": {"*": 4, "cpus": 40, "memory": "64GB"}, "users": []}]
        assert (await kit.call("adm", "PUT", "/v1/projects", {"projects": tree})).status_code == 200
        [row] = (await kit.call("adm", "GET", "/v1/projects")).data["projects"]
        assert row["limit"] == {"*": 4, "cpus": 40, "memory": 64 * 10**9}
        again = {"projects": [{name: row[name] for name in ("name", "limit", "quota", "members", "users")}]}
        assert (await kit.call("adm", "PUT", "/v1/projects", again)).data["projects"] == [row]
        over = await kit.call("ann", "POST", "/v1/requests", {"memory": "99GB"})
        says(over, 403, "over_limit", "The limit of project a is 64000000000 bytes of host memory")
        default = {"projects": [{"name": "default"}]}
        assert (await kit.call("adm", "PUT", "/v1/projects", default)).status_code == 200
        says(
            await kit.call("ann", "POST", "/v1/requests", {"time_limit": "4h"}),
            400,
            "time_limit",
            "3 allowed",
        )
        tree = {"projects": [{"name": "a", "users": [{"name": "ann", "quota": {"T4": 1}}]}]}
        says(
            await kit.call("adm", "PUT", "/v1/projects", tree),
            400,
            "quota_sum",
            "1 T4, above the 0 of the pool",
        )
        assert (await kit.call("adm", "GET", "/v1/projects")).data["projects"][0]["name"] == "default"


@pytest.mark.asyncio
async def test_the_queue_is_in_the_order_of_the_rules_whoever_looks_and_each_place_is_there_once(tmp_path):
    async with running(tmp_path) as kit:
        tree = {"projects": [{"name": "a", "quota": 4}, {"name": "b", "quota": 4}]}
        assert (await kit.call("adm", "PUT", "/v1/projects", tree)).status_code == 200
        await kit.ask("ann", gpus=8, project="a", interactive=True)
        asked = [("ann", "a"), ("ann", "a"), ("ben", "b"), ("ann", "a"), ("ben", "b")]
        for number, (who, project) in enumerate(asked):
            await kit.ask(who, gpus=8, project=project, name=f"w{number}")
        for who in ("ann", "ben", "adm"):
            rows = (await kit.call(who, "GET", "/v1/queue")).data["queue"]
            assert [(row["place"], row["user"]) for row in rows] == [
                (1, "ben"),
                (2, "ben"),
                (3, "ann"),
                (4, "ann"),
                (5, "ann"),
            ]
            for row in rows:
                if row["id"]:
                    lease = (await kit.call(who, "GET", f"/v1/leases/{row['id']}")).data
                    assert (lease["place"], lease["expected_start"]) == (row["place"], row["expected_start"])


@pytest.mark.asyncio
async def test_everybody_sees_how_they_stand_and_what_a_reclaim_went_by_but_no_names_of_others(tmp_path):
    async with running(tmp_path) as kit:
        kit.controller.obey = True
        tree = [{"name": "a", "quota": 4, "weight": 3}, {"name": "b", "quota": {"H100-80GB": 2}}]
        config = {"projects": tree, "defaults": {"min_run": 0, "grace": 0}}
        assert (await kit.call("adm", "PUT", "/v1/projects", config)).status_code == 200
        for number in range(4):
            await kit.ask("ann", gpus=2, project="a", name=f"big-{number}", preemptible=True)
        first = await kit.ask("ben", gpus=2, project="b", name="mine")
        assert first["state"] in ("pending", "starting", "active")
        projects = {
            each["name"]: each for each in (await kit.call("ann", "GET", "/v1/projects")).data["projects"]
        }
        a, b = projects["a"], projects["b"]
        assert (a["gpus"], a["guaranteed"], a["deserved"], a["borrowed"]) == (6, 4, 6, 2)
        assert (b["gpus"], b["guaranteed"], b["deserved"], b["borrowed"]) == (2, 2, 2, 0)
        usage = (await kit.call("eve", "GET", "/v1/usage")).data
        rows = {each["user"]: each for each in usage["usage"]}
        assert (rows["ann"]["leases"], rows["ann"]["waiting"], rows["ann"]["deserved"]) == (3, 1, 6)
        assert {(each["user"], each["model"], each["kind"]) for each in usage["accounts"]} == {
            ("ann", "H100-80GB", "whole"),
            ("ben", "H100-80GB", "whole"),
        }
        hours = {who: (await kit.call(who, "GET", "/v1/history")).data for who in ("ann", "eve")}
        assert sum(each["used"] for each in hours["ann"]["hours"]) > 0
        assert all(abs(each["time"] - hours["ann"]["now"]) < 7200 for each in hours["ann"]["hours"])
        assert (hours["eve"]["user"], hours["eve"]["hours"]) == ("eve", []), "everybody has their own only"
        for who, names in (("ann", ("", "big-3")), ("ben", ("mine", "")), ("adm", ("mine", "big-3"))):
            [record] = (await kit.call(who, "GET", "/v1/reclaims")).data["reclaims"]
            [victim] = record["victims"]
            assert (record["lease_name"], victim["lease_name"]) == names
            assert (record["user"], record["gpus"], record["deserved"], victim["whole"]) == (
                "ben",
                2,
                2,
                True,
            )
            assert record["over_after"][0] < record["over_before"][0]


# --------------------------------------------------------------------------------- what can go wrong


@pytest.mark.asyncio
async def test_what_is_not_on_the_disk_is_not_confirmed_and_has_not_happened(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        pages = kit.store._db.row("PRAGMA page_count")[0]
        kit.store._db.row(f"PRAGMA max_page_count = {pages + 1}")
        before = kit.controller.pool.snapshot()
        big = {"gpus": 1, "environment": {"variables": {"X": "y" * 200_000}}}
        response = await kit.call("ann", "POST", "/v1/requests", big, headers={"Idempotency-Key": "k"})
        says(response, 503, "store_failed", "full", "free some space")
        assert response.headers["retry-after"] == "5"
        assert kit.controller.pool.snapshot() == before
        assert (
            await kit.call("ann", "GET", f"/v1/leases/{lease['id']}")
        ).status_code == 200  # reading goes on
        kit.store._db.row("PRAGMA max_page_count = 1000000")
        assert await kit.ask(headers={"Idempotency-Key": "k"}, **big)


@pytest.mark.asyncio
async def test_what_was_confirmed_is_there_after_a_restart(tmp_path):
    async with running(tmp_path) as kit:
        leases = [
            await kit.ask(gpus=4, name="a"),
            await kit.ask("ben", gpus=4),
            await kit.ask(gpus=4, name="c"),
        ]
        await kit.call("ann", "PATCH", f"/v1/leases/{leases[0]['id']}", {"share": ["ben"]})
        before = kit.controller.pool.snapshot()
        keys = (await kit.call("ann", "GET", f"/v1/leases/{leases[0]['id']}/connection")).data
        tokens = dict(kit.tokens)
    kit = Kit(tmp_path)
    assert kit.controller.pool.snapshot() == before
    await kit.start()
    try:
        assert (await kit.call(tokens["ann"], "GET", f"/v1/leases/{leases[0]['id']}/connection")).data == keys
        assert (await kit.call(tokens["ben"], "GET", f"/v1/leases/{leases[0]['id']}/connection")).data == keys
        waits = (await kit.call("ann", "GET", f"/v1/leases/{leases[2]['id']}")).data
        assert (waits["state"], waits["place"]) == (LeaseState.PENDING, 1)
    finally:
        await kit.close()


@pytest.mark.asyncio
async def test_a_fault_of_ours_is_one_sentence_and_its_traceback_stays_in_the_log(
    tmp_path, monkeypatch, caplog
):
    async with running(tmp_path) as kit:

        def broken(_event, _once=None):
            raise RuntimeError("inner secret")

        monkeypatch.setattr(kit.controller, "submit", broken)
        response = await kit.call("ann", "POST", "/v1/requests", {"gpus": 1})
        says(response, 500, "broken", "its log has more")
        assert "inner secret" not in response.text
        assert "inner secret" in caplog.text


RAW = {
    "no JSON": (b"{", "application/json", 400, "bad_request"),
    "two of them": (b"{} {}", "application/json", 400, "bad_request"),
    "not a number": (b'{"gpus": NaN}', "application/json", 400, "bad_request"),
    "deep nonsense": (b"[" * 100_000, "application/json", 400, "bad_request"),
    "a huge number": (b'{"gpus": ' + b"9" * 5000 + b"}", "application/json", 400, "bad_request"),
    "not UTF-8": (b'{"name": "\xff"}', "application/json", 400, "bad_request"),
    "half a character": (
        b'{"environment": {"variables": {"A": "\\ud800"}}}',
        "application/json",
        400,
        "bad_request",
    ),
    "a form": (b"gpus=1", "application/x-www-form-urlencoded", 415, "not_json"),
    "too large": (b'{"x": "' + b"y" * 1_000_000 + b'"}', "application/json", 413, "too_large"),
    "a list": (b"[]", "application/json", 400, "bad_request"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("content", "kind", "status", "reason"), RAW.values(), ids=RAW)
async def test_a_body_that_is_no_good_gets_one_sentence(tmp_path, content, kind, status, reason):
    async with running(tmp_path) as kit:
        response = await kit.client.post(
            "/v1/requests",
            content=content,
            headers={"Authorization": f"Bearer {kit.tokens['ann']}", "Content-Type": kind},
        )
        assert (response.status_code, response.json()["reason"]) == (status, reason)
        assert (await kit.call("ann", "GET", "/v1/pool")).data["leases"] == 0


@pytest.mark.asyncio
async def test_addresses_methods_and_parameters_that_do_not_exist_are_answered_in_kind(tmp_path):
    async with running(tmp_path) as kit:
        says(await kit.call("ann", "GET", "/"), 404, "not_found", "/v1/openapi.json")
        says(await kit.call("ann", "GET", "/v1/leases/a/b/c"), 404, "not_found")
        wrong = await kit.call("ann", "PUT", "/v1/pool")
        says(wrong, 405, "no_such_method", "GET")
        assert wrong.headers["allow"] == "GET"
        for method in ("HEAD", "OPTIONS", "TRACE"):
            response = await kit.client.request(method, "/v1/pool")
            assert response.status_code == 405
        says(
            await kit.call("ann", "GET", "/v1/leases?stat=active"), 400, "bad_request", "Did you mean state?"
        )
        says(await kit.call("ann", "GET", "/v1/leases?all=yes"), 400, "bad_request", "neither true nor false")
        says(await kit.call("ann", "GET", "/v1/leases?all=true&all=true"), 400, "bad_request", "2 times")
        says(await kit.call("ann", "GET", "/v1/notices?after=-1"), 400, "bad_request", "after")
        says(await kit.call("ann", "GET", "/v1/pool?x=1"), 400, "bad_request", "It takes none")
        says(await kit.call("ann", "GET", "/v1/leases/%2e%2e%2f"), 404, "unknown_lease")


@pytest.mark.asyncio
async def test_no_other_site_may_call_and_no_browser_keeps_or_frames_an_answer(tmp_path):
    async with running(tmp_path) as kit:
        for path in ("/v1/pool", "/v1/openapi.json", "/nowhere"):
            response = await kit.call("ann", "GET", path, headers={"Origin": "https://evil.example"})
            assert not [name for name in response.headers if name.startswith("access-control")]
            assert response.headers["content-security-policy"].startswith("default-src 'none'")
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "server" not in response.headers
            assert "set-cookie" not in response.headers


@pytest.mark.asyncio
async def test_one_who_calls_too_often_is_told_when_to_come_back_and_others_are_not_held_up(tmp_path):
    limits = Limits(rate=0.01, burst=10, open_rate=0.01, open_burst=3)
    async with running(tmp_path, limits=limits) as kit:
        answers = [await kit.call("ann", "GET", "/v1/usage") for _ in range(12)]
        assert [each.status_code for each in answers] == [200] * 10 + [429] * 2
        says(answers[-1], 429, "too_many_requests", "Wait")
        assert 90 < int(answers[-1].headers["retry-after"]) <= 100
        assert (await kit.call("ben", "GET", "/v1/usage")).status_code == 200
        guesses = [await kit.call(f"gpupool_{n}_x", "GET", "/v1/usage") for n in range(5)]
        assert [each.status_code for each in guesses] == [401, 401, 401, 429, 429]


def test_a_limit_lets_a_burst_pass_then_its_rate_and_forgets_those_who_are_long_gone(monkeypatch):
    now = [0.0]
    limiter = Limiter(rate=2, burst=3, clock=lambda: now[0])
    assert [limiter.wait("ann") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limiter.wait("ben") == 0
    now[0] = 0.5
    assert [limiter.wait("ann"), limiter.wait("ann")] == [0, 0.5]
    now[0] = 100
    assert [limiter.wait("ann") for _ in range(4)] == [0, 0, 0, 0.5]
    monkeypatch.setattr("jupyter_gpupool.controller.limits.CALLERS", 2)
    limiter.wait("cleo")
    assert set(limiter._left) == {"ann", "cleo"}


@pytest.mark.asyncio
async def test_more_connections_than_there_may_be_are_hung_up_on(tmp_path):
    async with running(tmp_path, limits=Limits(connections=5)) as kit:
        kept = [await asyncio.open_connection("127.0.0.1", kit.api.port) for _ in range(5)]
        reader, writer = await asyncio.open_connection("127.0.0.1", kit.api.port)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        for each in [*(writer for _, writer in kept), writer]:
            each.close()
        for _ in range(500):
            try:
                response = await kit.call("ann", "GET", "/v1/pool")
                break
            except httpx.HTTPError:
                await asyncio.sleep(0.02)
        assert response.status_code == 200


@pytest.mark.asyncio
async def test_one_who_connects_and_says_nothing_is_hung_up_on(tmp_path):
    async with running(tmp_path, limits=Limits(idle=0.3)) as kit:
        silent, writer = await asyncio.open_connection("127.0.0.1", kit.api.port)
        assert await asyncio.wait_for(silent.read(), 20) == b""
        writer.close()
        with contextlib.suppress(OSError):  # on a busy machine it may be hung up on while it says hello
            reader, writer = await asyncio.open_connection("127.0.0.1", kit.api.port, ssl=kit.context)
            writer.write(b"POST /v1/login HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await asyncio.wait_for(reader.read(), 20)
        writer.close()


@pytest.mark.asyncio
async def test_headers_that_are_too_long_are_refused_and_the_server_goes_on(tmp_path):
    async with running(tmp_path) as kit:
        with pytest.raises(httpx.HTTPError):
            (await kit.client.get("/v1/pool", headers={"X-Long": "x" * 100_000})).raise_for_status()
        assert (await kit.call("ann", "GET", "/v1/pool")).status_code == 200


@pytest.mark.asyncio
async def test_without_tls_nobody_is_talked_to(tmp_path):
    async with running(tmp_path) as kit:
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(kit.api.url.replace("https", "http") + "/v1/ca.pem")
        stranger = ssl.create_default_context()
        async with httpx.AsyncClient(verify=stranger) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(kit.api.url + "/v1/ca.pem")


@pytest.mark.asyncio
async def test_a_port_in_use_is_one_sentence_and_never_another_port(tmp_path):
    async with running(tmp_path) as kit:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ApiError, match=rf"^Port {port} on 127.0.0.1 is in use: .* --port\.$"):
                serve(kit.controller, "127.0.0.1", port)
        with pytest.raises(ApiError, match=r"cannot listen on 192\.0\.2\.1"):
            serve(kit.controller, "192.0.2.1", 0)


# -------------------------------------------------------------------------------- its own description


@pytest.mark.asyncio
async def test_the_description_is_what_the_server_obeys(tmp_path):
    for schema in DESCRIPTION["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    text = json.dumps(DESCRIPTION)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in DESCRIPTION["components"]["schemas"]
    operations = {
        f"{method.upper()} {path}": each
        for path, methods in DESCRIPTION["paths"].items()
        for method, each in methods.items()
    }
    assert len(operations) == len(ROUTES)
    assert len({each["operationId"] for each in operations.values()}) == len(ROUTES)
    assert {name for name, each in operations.items() if not each["security"]} == {
        "GET /v1/openapi.json",
        "GET /v1/ca.pem",
        "POST /v1/login",
        "POST /v1/agents",
    }
    async with running(tmp_path) as kit:
        assert (await kit.call("", "GET", "/v1/openapi.json")).data == DESCRIPTION


def noise(chance):
    """Some JSON."""
    simple = [
        None,
        True,
        0,
        -1,
        1,
        0.5,
        1.5,
        10**30,
        "",
        "2",
        "20GB",
        "2h",
        "node-1",
        "a" * 300,
        "\0",
        "é",
        "*",
    ]
    kind = chance.randrange(8)
    if kind == 0:
        return [noise(chance) for _ in range(chance.randrange(3))]
    if kind == 1:
        return {str(noise(chance))[:20]: noise(chance) for _ in range(chance.randrange(3))}
    return chance.choice(simple)


@pytest.mark.asyncio
async def test_whatever_is_sent_the_answer_is_a_documented_one_and_never_a_failure(tmp_path):
    chance = random.Random(20_260_729)
    async with running(tmp_path, limits=Limits(rate=1e6, burst=1e6, open_rate=1e6, open_burst=1e6)) as kit:
        kit.controller.stop = lambda why, everything=False: None
        lease = await kit.ask(gpus=1)
        schemas = DESCRIPTION["components"]["schemas"]
        for _ in range(400):
            route = chance.choice(ROUTES)
            path = route.path.replace("{lease}", chance.choice([lease["id"], "x", "%00"]))
            path = path.replace("{token}", "x").replace("{target+}", chance.choice(["gpu0", "node-1", "x/y"]))
            known = list(schemas.get(route.body, {}).get("properties", {})) or ["x"]
            body = {chance.choice([*known, "x"]): noise(chance) for _ in range(chance.randrange(4))}
            query = {}
            if chance.random() < 0.3:
                name = chance.choice([*route.query, "x"])
                query[name] = str(noise(chance))[:50] if name != "wait" else "0.01"
            who = chance.choice(["ann", "adm", "adm", "eve", ""])
            response = await kit.call(who, route.method, path, body if route.body else None, params=query)
            assert response.status_code != 500, (route, body, query)
        kit.controller.pool.validate()


@pytest.mark.asyncio
async def test_a_reason_of_the_core_that_is_no_bad_request_has_its_status():
    from jupyter_gpupool.controller.problems import STATUS, Problem

    assert Problem(Reason.NOT_YOURS, "No.").status == 403
    assert Problem(Reason.UNKNOWN_MODEL, "No.").status == 400
    assert all(name in STATUS for name in (Reason.UNKNOWN_LEASE, Reason.LEASE_OVER, Reason.STORE_FAILED))
    assert issubclass(StoreError, Exception)


# -------------------------------------------------------------------- the real process, with real leases


class Live:
    """Calls of a real pool's API; each answer is held against the description."""

    def __init__(self, pool):
        self.client = httpx.Client(
            base_url=pool.address.url,
            verify=ssl.create_default_context(cadata=pool.address.ca),
            headers={"Authorization": f"Bearer {pool.address.token}"},
            timeout=40,
        )

    def __call__(self, method, path, body=None, **more):
        response = self.client.request(method, path, json=body, **more)
        response.data = check(method, path, response)
        return response

    def until(self, lease, *states):
        """Wait by long polls until the lease is in one of these states."""
        for _ in range(200):
            if lease["state"] in states:
                return lease
            lease = self("GET", f"/v1/leases/{lease['id']}?wait=20&version={lease['version']}").data
        raise AssertionError(lease)


@pytest.fixture
def live(pool):
    found = Live(pool)
    yield found
    found.client.close()


def test_a_real_lease_goes_through_its_life_and_every_answer_is_as_described(live):
    made = live("POST", "/v1/requests", {"gpus": 1, "name": "alive", "time_limit": "10m"})
    assert made.status_code == 201
    lease = live.until(made.data, "active")
    path = f"/v1/leases/{lease['id']}"
    assert lease["progress"] == {"scheduler": True, "workers": 1, "of": 1}
    assert lease["simulated"]
    connection = live("GET", f"{path}/connection").data
    with distributed.Client(connection["address"], security=security(connection), timeout=20) as client:
        assert client.submit(lambda: 6 * 7).result(20) == 42
    assert {each["name"] for each in live("GET", f"{path}/logs").data["logs"]}
    for each in ("pool", "leases", "queue", "projects", "usage", "notices", "tokens"):
        assert live("GET", f"/v1/{each}").status_code == 200
    rows = {each["uuid"]: each for each in live("GET", "/v1/devices").data["devices"]}
    (part,) = rows[lease["slices"][0]["device"]]["parts"]
    assert (part["lease_name"], part["milli"]) == ("alive", 1000)
    assert live("DELETE", path).status_code == 204
    ended = live.until(live("GET", path).data, "ended")
    assert ended["why"] == "released by its owner"
    assert ended["notes"][-1].startswith("alive has ended")


def test_a_real_pool_refuses_what_it_can_never_grant_in_the_same_words(live):
    for body, status, word in (
        ({"gpus": 9}, 400, "8"),
        ({"model": "A100"}, 400, "H100-80GB"),
        ({"gpus": 0}, 400, "more than none"),
        ({"gpus": 1.5}, 400, "gpus=1 or gpus=2"),
    ):
        response = live("POST", "/v1/requests", body)
        assert response.status_code == status
        assert word in response.data["detail"] + response.data["advice"]
    assert live.client.get("/v1/pool", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_the_routes_in_the_documentation_are_those_that_there_are():
    page = Path(__file__).parent.parent / "docs" / "http-api.md"
    rows = re.findall(r"^\| `(\w+) (\S+)` \| (\w*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(rows) == sorted((each.method, each.path.replace("+}", "}"), each.scope) for each in ROUTES)


def test_a_request_whose_answer_was_lost_in_a_kill_is_there_once_at_the_same_address(tmp_path):
    with PoolProcesses(tmp_path) as processes:
        processes.start_controller()
        url, key = processes.said["url"], {"Idempotency-Key": "k"}
        body = {"gpus": 1, "name": "kept"}
        first = processes.call("POST", "/v1/requests", body, **key)
        assert first["reasons"][0]["reason"] == "no_nodes"
        processes.kill("controller")
        processes.start_controller()
        assert processes.said["url"] == url
        again = processes.call("POST", "/v1/requests", body, **key)
        assert (again["id"], again["name"]) == (first["id"], "kept")
        assert [each["id"] for each in processes.call("GET", "/v1/leases")["leases"]] == [first["id"]]
