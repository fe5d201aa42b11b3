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
from tests.browser.conftest import login
from tests.conftest import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

    from tests.browser.lab import Sidebar

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROJECTS = [{"name": "vision", "quota": 2}, {"name": "language", "quota": 4, "limit": 6}]
#: Each section: its heading, its name, and what is to be seen in it before it is looked at.
SECTIONS = (
    ("My leases", "leases", r"41 %"),
    ("Request GPUs", "request", r"Starts now\.|Place \d+ in the queue"),
    ("Pool", "pool", r"97 %"),
    ("Queue", "queue", r"vision[\s\S]*quota 2[\s\S]*language"),
    ("History", "history", r"(?<![\d.])\d{2,} GPU hours in 14 days"),
    ("Health", "health", r"gone"),
)
#: What is opened in a section, and what it then shows.
OPENED = {
    "health": (".jp-gpupool-Ill details:not([open]) > summary", ".jp-gpupool-Readings"),
    "pool": (".jp-gpupool-Tile", ".jp-gpupool-Details"),
}


@pytest.fixture
def busy(pool, stranger):
    """Two projects; leases of one person, two who wait, work that runs, and a GPU that is lost."""
    machine = embedded.machine()
    devices = [each["uuid"] for each in pool.devices()]
    before = pool.configuration()
    pool.set_projects(PROJECTS)
    pool.request(gpus=2, name="training", project="vision", time_limit="8h")
    pool.request(vram="20GB", name="small", project="vision", time_limit="1h")
    pool.request(vram="40GB", name="notebook", project="vision", time_limit="14m")
    pool.request(gpus=6, name="sweep", project="vision", wait=False)
    with login(pool, "maria") as other:  # her request only waits: no OS account is needed
        other.request(gpus=6, name="translation", project="language", wait=False)
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


def test_every_panel_is_fit_for_everybody(sidebar: Sidebar, busy):
    """axe-core finds no violation in either theme; with $KEEP_IMAGES the documentation gets the pictures."""
    page = sidebar.page
    page.route("**/gpupool/history*", made_up)
    page.set_viewport_size({"width": 1280, "height": 1040})
    for theme in ("light", "dark"):
        sidebar.theme(f"JupyterLab {theme.title()}")
        for title, name, seen in SECTIONS:
            panel = sidebar.only(title)
            expect(panel).to_contain_text(re.compile(seen), timeout=20_000)  # readings come every 15 s
            if name in OPENED:
                opens, shows = OPENED[name]
                for each in panel.locator(opens).all()[:1]:
                    each.click()
                expect(panel.locator(shows).first).to_be_visible()
            keep(sidebar.root, f"{name}-{theme}.png")
            found = violations(page, "#jp-gpupool-sidebar")
            assert not found, (theme, name, found)
        sidebar.only("Pool").get_by_role("button", name="Close details").click()
        sidebar.section("My leases")
        keep(page, f"sidebar-{theme}.png")
    sidebar.theme("JupyterLab Light")


def keep(what: Locator | Page, name: str) -> None:
    """Take a picture when nothing moves any more, and keep it where that is asked for."""
    picture = what.screenshot(animations="disabled")
    assert len(picture) > 5000
    if os.environ.get("KEEP_IMAGES"):
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / name).write_bytes(picture)
