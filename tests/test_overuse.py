"""What nodes say of shares reaches those whom it concerns, and nobody can say it of others' slices."""

from __future__ import annotations

import pytest

from tests.controller_kit import running

WARNED = "free some, or its worker is paused and then started anew."
ENDED = "process 4711 was ended, and its worker starts anew."
ASTRAY = "process 12 was ended."


async def a_share(kit, who="ann"):
    lease = await kit.ask(who, vram="20GB", name=f"{who}s")
    return lease["id"], f"{lease['id']}/0"


async def told(kit, who):
    notices = (await kit.call(who, "GET", "/v1/notices")).data["notices"]
    return [each["sentence"] for each in notices if each["notice"] == "overuse"]


@pytest.mark.asyncio
async def test_the_owner_of_what_takes_too_much_is_told_with_the_numbers_and_nobody_else(tmp_path):
    async with running(tmp_path) as kit:
        lease, part = await a_share(kit)
        over = {"report": "over_share", "slice": part, "lease": lease, "share": 20 * 10**9, "pid": 4711}
        hear = kit.controller.hearing._take
        for step in ("warned", "paused", "ended", "nonsense"):
            hear("node-1", {**over, "step": step, "used": 24_100_000_000})
        hear("node-1", {"report": "stray", "lease": lease, "device": "GPU-node-1-3", "pid": 12})
        assert await told(kit, "ann") == [
            f"anns has 24.1 GB of node-1/gpu0, its share is 20 GB: {WARNED}",
            f"anns had 24.1 GB of node-1/gpu0, its share is 20 GB: {ENDED}",
            f"anns computed on node-1/gpu3, of which it has nothing: {ASTRAY}",
        ]
        assert await told(kit, "ben") == []


@pytest.mark.asyncio
async def test_a_lease_says_which_layers_hold_and_a_new_one_is_news(tmp_path):
    async with running(tmp_path) as kit:
        lease, part = await a_share(kit)
        before = (await kit.call("ann", "GET", f"/v1/leases/{lease}")).data
        assert before["slices"][0]["limits"] == []
        news = (await kit.call("ann", "GET", "/v1/notices")).data["leases"]
        layers = {"guard": "on", "torch": "ready", "rmm": "half", "magic": "on"}
        kit.controller.hearing._take("node-1", {"report": "layers", "slice": part, "layers": layers})
        after = (await kit.call("ann", "GET", f"/v1/leases/{lease}")).data
        found = [(each["layer"], each["state"]) for each in after["slices"][0]["limits"]]
        assert found == [("torch", "ready"), ("guard", "on")], "what nobody knows is dropped"
        assert "as soon as it is imported" in after["slices"][0]["limits"][0]["sentence"]
        assert after["version"] != before["version"]
        assert (await kit.call("ann", "GET", "/v1/notices")).data["leases"] != news


@pytest.mark.asyncio
async def test_a_node_speaks_for_its_own_slices_and_devices_only(tmp_path):
    async with running(tmp_path) as kit:
        lease, part = await a_share(kit)
        said = (
            {"report": "over_share", "step": "ended", "used": 5, "share": 1, "pid": 1},
            {"report": "layers", "layers": {"mig": "on"}},
            {"report": "layers", "layers": 5, "slice": "nobody/0"},
            {"report": "stray", "device": "GPU-node-1-0", "pid": 1},
            {"report": "stray", "device": "nowhere", "pid": "x", "lease": 7},
        )
        for report in said:
            take = kit.controller.hearing._others[report["report"]]
            with pytest.raises(ValueError, match="not for node-2 to say"):
                take("node-2", {"slice": part, "lease": lease, **report})
        assert await told(kit, "ann") == []
        assert not kit.controller.layers(part)
