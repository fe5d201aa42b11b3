"""The HTTP API: requests and leases, waiting for news, its own description, and a real pool.

Every answer in here is held against the API's own OpenAPI description (`controller_kit.check`).
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import ssl
from pathlib import Path

import distributed
import httpx
import pytest
from jsonschema import Draft202012Validator

from jupyter_gpupool.controller.api import Limits
from jupyter_gpupool.controller.auth import security
from jupyter_gpupool.controller.routes import ROUTES
from jupyter_gpupool.controller.store import StoreError
from jupyter_gpupool.core.model import (
    LeaseScaled,
    Reason,
)
from jupyter_gpupool.core.pool import HANDLERS
from tests.controller_kit import DESCRIPTION, check, running, says
from tests.pool_helpers import node
from tests.pool_processes import PoolProcesses

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
async def test_an_extension_that_is_sent_again_with_its_key_is_made_once(tmp_path):
    key = {"Idempotency-Key": "k"}
    async with running(tmp_path) as kit:
        first, other = await kit.ask(time_limit="1h"), await kit.ask(time_limit="1h")
        path = f"/v1/leases/{first['id']}"
        says(await kit.call("ann", "PATCH", path, {"extend": "300d"}, headers=key), 400, "time_limit")
        longer = (await kit.call("ann", "PATCH", path, {"extend": "30m"}, headers=key)).data
        again = (await kit.call("ann", "PATCH", path, {"extend": "30m"}, headers=key)).data
        assert again["ends_at"] == longer["ends_at"]
        for where, by in ((path, "1h"), (f"/v1/leases/{other['id']}", "30m")):
            says(await kit.call("ann", "PATCH", where, {"extend": by}, headers=key), 409, "key_reused")
        assert (await kit.call("ann", "PATCH", path, {"extend": "30m"})).data["ends_at"] > longer["ends_at"]


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
        says(await kit.call("adm", "PATCH", f"{path}=true", {"share": ["adm"]}), 403, "not_yours")
        before = (await kit.call("ann", "GET", f"/v1/leases/{lease['id']}/connection")).data
        assert (await kit.call("ann", "PATCH", f"{path}=true", {"share": []})).status_code == 200
        after = (await kit.call("ann", "GET", f"/v1/leases/{lease['id']}/connection")).data
        assert before["key"] != after["key"], "whoever wants new keys gets them"
        await kit.call("ann", "PATCH", f"/v1/leases/{lease['id']}", {"share": ["ben"]})
        shut = (await kit.call("adm", "PATCH", f"{path}=true", {"share": []})).data
        assert shut["shared_with"] == [], "an administrator shuts people out, and lets nobody in"


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


def _share(kit, _lease):
    return kit.call("ann", "PATCH", f"/v1/leases/{_lease['id']}", {"share": ["ben"]})


async def _limit(kit, lease):
    [part] = lease["slices"]
    layers = {"rmm": "on"}
    kit.controller.hearing.overuse.take_layers(part["node"], {"slice": part["id"], "layers": layers})


async def _overuse(kit, lease):
    [part] = lease["slices"]
    report = {"report": "over_share", "slice": part["id"], "step": "warned", "used": 2, "share": 1}
    kit.controller.hearing.overuse.take_over(part["node"], report)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param(_share, "shared_with", id="with whom it is shared"),
        pytest.param(_limit, "slices", id="its limits"),
        pytest.param(_overuse, "notes", id="a note"),
    ],
)
@pytest.mark.asyncio
async def test_a_long_poll_tells_also_of_what_is_none_of_the_pool_s(tmp_path, change, field):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        path = f"/v1/leases/{lease['id']}"
        lease = (await kit.call("ann", "GET", path)).data
        poll = asyncio.ensure_future(kit.call("ann", "GET", f"{path}?wait=30&version={lease['version']}"))
        await asyncio.sleep(0.1)
        assert not poll.done()
        await change(kit, lease)
        answer = (await asyncio.wait_for(poll, 15)).data
        assert answer[field] != lease[field]
        assert answer["version"] != lease["version"]


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
async def test_why_says_what_a_lease_has_now_and_dates_what_was_said_before(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1, max_gpus=3, name="el")
        path = f"/v1/leases/{lease['id']}"
        assert (await kit.call("ann", "PATCH", path, {"gpus": 2})).status_code == 200
        first, has, *lately = (await kit.call("ann", "GET", f"{path}/explain")).data["sentences"]
        names = ", ".join(each["device_name"] for each in (await kit.call("ann", "GET", path)).data["slices"])
        assert (first, has) == ("el is active.", f"It has 2 GPUs now, on {names}.")
        assert lately
        assert all(re.match(r"\d+ s ago: el (has 1 GPU on|is|grows by)", each) for each in lately)


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
