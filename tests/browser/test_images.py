"""Each panel in both themes, of a pool that is in use: fit for everybody, and with pictures for docs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from jupyter_gpupool import embedded
from tests.browser.axe import violations
from tests.conftest import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Route

    from tests.browser.lab import Sidebar

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROJECTS = [{"name": "vision", "quota": 2}, {"name": "language", "quota": 4, "limit": 6}]
SECTIONS = {
    "My leases": "leases",
    "Request GPUs": "request",
    "Pool": "pool",
    "Queue": "queue",
    "History": "history",
    "Health": "health",
}


@pytest.fixture
def busy(pool, others):
    """Two projects; leases of one person, two who wait, work that runs, and a GPU that is lost."""
    machine = embedded.machine()
    devices = [each["uuid"] for each in pool.devices()]
    before = pool.configuration()
    pool.set_projects(PROJECTS)
    pool.request(gpus=2, name="training", project="vision", time_limit="8h")
    pool.request(vram="20GB", name="small", project="vision", time_limit="1h")
    pool.request(vram="40GB", name="notebook", project="vision", time_limit="14m")
    pool.request(gpus=6, name="sweep", project="vision", wait=False)
    others.request(gpus=6, name="theirs", project="language", wait=False)
    for device, use in zip(devices, (97, 88, 41, 63, 0, 0, 12, 0), strict=True):
        machine.set(device, "utilisation", use)
    machine.lose(devices[7], 79)
    wait_until(lambda: any(each["verdict"] == "gone" for each in pool.devices()))
    yield
    for device in devices:
        machine.restore(device)
    for lease in pool.leases():
        lease.release(wait=30)
    pool.set_projects(**before)


def made_up(route: Route) -> None:
    """Answer as a ledger of two weeks would: no test has that long."""
    now = time.time()
    hours = [
        {
            "time": now - 3600 * back,
            "used": 3600.0 * (back % 5),
            "idle": 900.0 * (back % 4 if back % 5 else 0),
        }
        for back in range(24 * 13, 0, -1)
        if (back // 24) % 7 not in (2, 3) and back % 24 < 9
    ]
    route.fulfill(json={"user": "you", "now": now, "hours": hours})


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_every_panel_is_fit_for_everybody(sidebar: Sidebar, busy, theme: str):
    """axe-core finds no violation; with $KEEP_IMAGES the documentation gets the pictures."""
    page = sidebar.page
    page.route("**/gpupool/history*", made_up)
    page.set_viewport_size({"width": 1280, "height": 1040})
    sidebar.theme(f"JupyterLab {theme}")
    expect(sidebar.root).to_contain_text(re.compile("GPUs free"))
    for title, name in SECTIONS.items():
        sidebar.only(title)
        page.wait_for_timeout(1200)
        if name == "request":
            expect(sidebar.root.locator(".jp-gpupool-Outlook")).to_contain_text(
                re.compile(r"Starts now\.|Place \d+ in the queue")
            )
        if name == "leases":
            expect(sidebar.lease("notebook")).to_contain_text("41 %")
        if name == "history":
            expect(sidebar.root).to_contain_text(re.compile(r"(?<![\d.])\d{2,} GPU hours in 14 days"))
        if name == "health":
            sidebar.root.locator(".jp-gpupool-Ill summary").first.click()
            expect(sidebar.root.locator(".jp-gpupool-Readings")).to_be_visible()
        if name == "pool":
            expect(sidebar.root.locator(".jp-gpupool-Tile").first).to_contain_text("97 %")
            sidebar.root.locator(".jp-gpupool-Tile").first.click()
            page.wait_for_timeout(200)
        shot(sidebar, f"{name}-{theme.lower()}.png")
        found = violations(page, "#jp-gpupool-sidebar")
        assert not found, (name, found)
    if os.environ.get("KEEP_IMAGES"):
        sidebar.only("Pool").get_by_role("button", name="Close details").click()
        sidebar.section("My leases")
        page.wait_for_timeout(1500)
        page.screenshot(path=str(IMAGES / f"sidebar-{theme.lower()}.png"))


def shot(sidebar: Sidebar, name: str) -> None:
    """Take a picture of the sidebar, and keep it where that is asked for."""
    picture = sidebar.root.screenshot()
    assert len(picture) > 5000
    if os.environ.get("KEEP_IMAGES"):
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / name).write_bytes(picture)
