"""The HTTP API on the pool: devices, projects, the queue and how everybody stands."""

from __future__ import annotations

import pytest

from jupyter_gpupool.core.model import (
    Reading,
    Verdict,
    VerdictChanged,
    encode,
)
from tests.controller_kit import running, says
from tests.pool_helpers import node


@pytest.fixture
def look_always(monkeypatch):
    """A look at the devices is good for that moment only."""
    monkeypatch.setattr("jupyter_gpupool.controller.routes_pool.FRESH_S", 0)
    monkeypatch.setattr("jupyter_gpupool.controller.routes_pool.REST", 0)


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
        said = {"target": "node-1", "name": "node-1", "cordoned": "cordoned by adm"}
        assert (await health("node-1", action="cordon")).data == said
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
