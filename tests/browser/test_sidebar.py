"""A person's way through the sidebar, in a real JupyterLab with a real pool of simulated GPUs."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
from playwright.sync_api import expect

from jupyter_gpupool import embedded
from tests.browser.axe import violations
from tests.browser.lab import WAIT_MS, Lab, Sidebar, kernel_ready
from tests.conftest import wait_until
from tests.server_kit import AUTHORIZER

expect.set_options(timeout=WAIT_MS)
ROUND_TRIP = """
print("six times seven is", client.submit(lambda: 6 * 7).result(timeout=60))
"""
#: JupyterLab has written down what is open: it does so some time after each change.
SAVED = """
jupyterapp.serviceManager.workspaces.fetch('default').then(({data}) => {
  const said = data['layout-restorer:data'].left.widgetStates['jp-gpupool-sidebar'];
  return said && `${said.expansionStates}` === 'true,false,false,false,true,false';
})
"""
NOTEBOOK = {
    "cells": [],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    "nbformat": 4,
    "nbformat_minor": 5,
}


def request(sidebar: Sidebar, **fields: str) -> None:
    """Fill the form in and send it."""
    sidebar.root.get_by_role("button", name="Request GPUs").first.click()
    form = sidebar.root.locator("form")
    if "name" in fields:
        form.get_by_text("Options", exact=True).click()
    for name, text in fields.items():
        form.locator(f"#jp-gpupool-field-{name}").fill(text)
    expect(form).to_contain_text("Starts now.")
    form.get_by_role("button", name="Request").click()
    expect(form).to_be_hidden()


def free(sidebar: Sidebar, words: str) -> None:
    expect(sidebar.root.locator(".jp-gpupool-Free")).to_contain_text(words)


def cells(sidebar: Sidebar):
    return sidebar.page.locator(".jp-NotebookPanel:visible .jp-CodeCell")


def palette(sidebar: Sidebar, typed: str, shown: str) -> None:
    """Find a command in the palette, which closes whenever something else takes the focus."""
    modal = sidebar.page.locator("#modal-command-palette")
    for last in (False, False, True):
        sidebar.page.evaluate("void jupyterapp.commands.execute('apputils:activate-command-palette')")
        modal.locator(".lm-CommandPalette-input").fill(typed)
        try:
            found = modal.locator(".lm-CommandPalette-item", has_text=shown).first
            expect(found).to_be_visible(timeout=5000)
        except AssertionError:
            if last:
                raise
            continue
        sidebar.page.keyboard.press("Escape")
        return


def run_all(sidebar: Sidebar) -> None:
    """Run all cells until the last has begun; a kernel that is just up may lose some of them."""
    for _ in range(5):
        sidebar.page.evaluate("void jupyterapp.commands.execute('notebook:run-all-cells')")
        try:
            expect(cells(sidebar).last).to_contain_text(re.compile(r"\[(\d+|\*)\]"), timeout=5000)
        except AssertionError:
            continue
        return


def test_request_use_in_a_notebook_a_gpu_fails_release(sidebar: Sidebar, pool, lab: Lab):
    """From the form to tiles, a cell that runs on the lease, a GPU that fails, and back to a free pool."""
    page = sidebar.page
    free(sidebar, "8 of 8 GPUs free")
    request(sidebar, gpus="2", name="train")
    card = sidebar.lease("train")
    expect(card).to_contain_text("active")
    free(sidebar, "6 of 8 GPUs free")
    tile = sidebar.section("Pool").get_by_role("button", name=re.compile("gpu0.*you"))
    expect(tile.first).to_be_visible()

    card.get_by_role("button", name="Use in notebook").click()
    kernel_ready(page)
    expect(cells(sidebar).first).to_contain_text("Pool().lease(")
    page.evaluate("void jupyterapp.commands.execute('notebook:insert-cell-below')")
    expect(cells(sidebar)).to_have_count(2)
    text = ROUND_TRIP.strip()
    page.evaluate(f"void jupyterapp.commands.execute('notebook:replace-selection', {{text: {text!r}}})")
    run_all(sidebar)
    expect(cells(sidebar).nth(1)).to_contain_text("six times seven is 42")

    failed = pool.lease("train").slices[0].device
    name = next(each["name"] for each in pool.devices() if each["uuid"] == failed)
    embedded.machine().lose(failed, 79)
    expect(page.locator(".jp-Notification-List, .Toastify").first).to_contain_text(name.split("/")[1])
    ill = sidebar.section("Health").locator(".jp-gpupool-Ill", has_text=name)
    expect(ill).to_be_visible()
    ill.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(ill).to_contain_text("XID 79 (fallen off the bus): once, at")
    expect(ill).to_contain_text(re.compile(r"“(lost|xid gone)”, since"))
    expect(ill.get_by_role("region", name=f"Readings of {name}")).to_contain_text("Read at")
    expect(page.locator(f"[id='jp-gpupool-{failed}']")).to_contain_text("gone")
    expect(card).to_contain_text("active")
    wait_until(lambda: all(each.device != failed for each in pool.lease("train").slices))

    card.get_by_role("button", name="Release").click()
    page.get_by_role("dialog").get_by_role("button", name="Release").click()
    expect(card).to_have_count(0)
    free(sidebar, "7 of 8 GPUs free")


def _started(dask_worker):
    """Say, on a worker, how it was started."""
    said = os.environ["GREETING"], os.environ["EMPTY"]
    return (*said, "colorsys" in sys.modules, dask_worker.state.nthreads)


def test_the_form_says_what_would_come_of_it(sidebar: Sidebar, pool):
    """A no stands beside its field; what would wait is told its place; what waits can be asked why."""
    page = sidebar.page
    sidebar.command("jupyter-gpupool:request-gpus")
    form = sidebar.root.locator("form")
    form.locator("#jp-gpupool-field-gpus").fill("99")
    fault = form.locator("#jp-gpupool-field-gpus-fault")
    expect(fault).to_contain_text("99")
    expect(form.locator("#jp-gpupool-field-gpus")).to_have_attribute("aria-invalid", "true")
    expect(form.get_by_role("button", name="Request 99 GPUs")).to_be_disabled()
    form.locator("#jp-gpupool-field-gpus").fill("2")
    wrong = {
        "Options": {"min_gpus": ("9", "min_gpus=9 is more than gpus=2")},
        "Workers and their Python": {
            "variables": ("GREETING", "“GREETING” is not NAME=VALUE. Write one of them a line."),
            "options": ("rmm_pool_size=lots", "'lots' is not an amount of memory"),
        },
    }
    for fold, fields in wrong.items():
        form.get_by_text(fold, exact=True).click()
        for name, (typed, sentence) in fields.items():
            field = form.locator(f"#jp-gpupool-field-{name}")
            field.fill(typed)
            expect(form.locator(f"#jp-gpupool-field-{name}-fault")).to_contain_text(sentence)
            field.fill("")
    right = {
        "name": "said",
        "gpus": "2",
        "min_gpus": "1",
        "cpus": "0.5",
        "memory": "2GB",
        "pre_import": "colorsys",
        "variables": "GREETING=good day\nEMPTY=",
        "options": "threads_per_worker=3",
    }
    for name, typed in right.items():
        form.locator(f"#jp-gpupool-field-{name}").fill(typed)
    expect(form).to_contain_text("Starts now.")
    assert not violations(page, "#jp-gpupool-sidebar")
    form.get_by_role("button", name="Request 2 GPUs").click()
    expect(form).to_be_hidden()
    expect(sidebar.lease("said")).to_contain_text("active")
    with pool.lease("said") as lease:
        assert pool.call("GET", f"/v1/leases/{lease.id}")["requested"]["min_gpus"] == 1
        assert set(lease.client().run(_started).values()) == {("good day", "", True, 3)}
    sidebar.command("jupyter-gpupool:request-gpus")

    pool.request(gpus=8, name="all", time_limit="1h")
    form.locator("#jp-gpupool-field-gpus").fill("2")
    expect(form).to_contain_text("Place 1 in the queue, starts about")
    form.get_by_role("button", name="Request 2 GPUs").click()
    expect(form).to_be_hidden()
    waits = sidebar.root.locator(".jp-gpupool-Lease", has_text="waiting")
    expect(waits).to_contain_text("Place 1")
    queue = sidebar.only("Queue")
    expect(queue.locator("ol li")).to_contain_text("2 GPUs")
    queue.get_by_role("button", name="Why am I waiting?").click()
    expect(page.get_by_role("dialog")).to_contain_text(re.compile("GPU"))
    page.keyboard.press("Enter")
    waits = sidebar.only("My leases").locator(".jp-gpupool-Lease", has_text="waiting")
    waits.get_by_role("button", name="Withdraw").click()
    expect(waits).to_have_count(0)


def test_an_idle_lease_warns_and_is_kept(sidebar: Sidebar, pool):
    """The card says that it is idle, and Keep ends that."""
    pool.request(gpus=1, name="lazy", idle_timeout="6s")
    card = sidebar.lease("lazy")
    expect(card).to_contain_text("Idle for")
    card.get_by_role("button", name="Keep").click()
    expect(card.locator(".jp-gpupool-Lease-idle")).to_have_count(0)
    expect(card).to_contain_text("active")


def test_a_lease_of_another_person_can_be_seen_and_not_touched(page, pool, others, stranger, session_folder):
    """Who is no administrator sees that a GPU is used and by whom, and has no button for it."""
    said = embedded.find()
    ca = session_folder / "theirs.pem"
    ca.write_text(said.ca)
    token = pool.call("POST", "/v1/tokens", {"user": stranger, "scopes": ["read", "use"]})["token"]
    more = {"GPUPOOL_URL": pool.url, "GPUPOOL_TOKEN": token, "GPUPOOL_CA": str(ca)}
    mine = pool.request(gpus=1, name="mine")
    with Lab(session_folder / "their-lab", **more) as lab:
        sidebar = Sidebar(page, lab).open()
        sidebar.only("Pool")
        tile = page.locator(f"[id='jp-gpupool-{mine.slices[0].device}']")
        expect(tile).to_contain_text(pool.status().user["name"])
        expect(tile).not_to_contain_text("mine")
        expect(sidebar.only("My leases")).to_contain_text("You have no GPUs")
        expect(sidebar.only("Health")).not_to_contain_text("Everybody's leases")
        sidebar.command("jupyter-gpupool:release-lease", lease=mine.id)
        expect(page.locator(".Toastify")).to_contain_text("You have no lease")
        page.goto("about:blank")
    assert pool.lease("mine").state == "active"


def test_with_read_only_access_what_would_be_refused_is_off_and_says_why(page, pool, session_folder):
    """Where the server's authorizer allows only reading nothing else is even asked, and rights come back."""
    folder = session_folder / "read-only-lab"
    folder.mkdir()
    (folder / "allowed").write_text("read")
    pool.request(gpus=1, name="mine")
    with Lab(folder, AUTHORIZER % str(folder)) as lab:
        sidebar = Sidebar(page, lab).open()
        why = re.compile("read-only access")
        expect(sidebar.root.locator(".jp-SidePanel-header")).to_contain_text(why)
        ask = sidebar.root.get_by_role("button", name="Request GPUs").first
        expect(ask).to_be_disabled()
        expect(ask).to_have_attribute("title", why)
        card = sidebar.lease("mine")
        for name in ("Extend", "Share", "Release", "Dask dashboard"):
            expect(card.get_by_role("button", name=name)).to_be_disabled()
        for name in ("Use in notebook", "Logs"):
            expect(card.get_by_role("button", name=name)).to_be_enabled()
        assert not page.evaluate("jupyterapp.commands.isEnabled('jupyter-gpupool:release-lease')")
        assert page.evaluate("jupyterapp.commands.isEnabled('jupyter-gpupool:show-logs')")
        form = sidebar.only("Request GPUs")
        expect(form.locator(".jp-gpupool-Outlook")).to_contain_text(why)
        expect(form.get_by_role("button", name="Request 1 GPU")).to_be_disabled()
        health = sidebar.only("Health")
        expect(health.get_by_role("button", name="Cordon").first).to_be_disabled()
        assert not violations(page, "#jp-gpupool-sidebar")
        asked = [json.loads(line) for line in (folder / "asked").read_text().splitlines()]
        assert {method for method, *_ in asked} == {"GET"}

        (folder / "allowed").write_text("read write execute")
        sidebar.command("jupyter-gpupool:refresh-pool")
        expect(ask).to_be_enabled()
        assert page.evaluate("jupyterapp.commands.isEnabled('jupyter-gpupool:release-lease')")
        page.goto("about:blank")


def test_a_lease_is_extended_shared_looked_into_and_counted(sidebar: Sidebar, pool, stranger: str, others):
    """Extend, Share, Logs and the Dask dashboard of a card; afterwards the history has what it used.

    Who has its keys is shut out again by a restart, which is said and asked for first.
    """
    page = sidebar.page
    lease = pool.request(gpus=2, name="train", time_limit="1h")
    card = sidebar.lease("train")
    expect(card).to_contain_text(re.compile(r"(59|60) min left|1 h left"))
    card.get_by_role("button", name="Extend").click()
    page.get_by_role("dialog").locator("input").fill("2h")
    page.keyboard.press("Enter")
    expect(card).to_contain_text(re.compile(r"2 h 5\d min left|3 h left"))
    assert lease.refresh().ends_at - lease.granted_at > 10_000

    card.get_by_role("button", name="Share").click()
    expect(page.get_by_role("dialog")).to_contain_text("They run code as you")
    page.get_by_role("dialog").locator("input").fill(stranger)
    page.keyboard.press("Enter")
    expect(card).to_contain_text(f"Shared with {stranger}")
    assert pool.call("GET", f"/v1/leases/{lease.id}")["shared_with"] == [stranger]

    keys = others.get(f"/v1/leases/{lease.id}/connection")
    for answer, shared in (("Cancel", [stranger]), ("Restart", [])):
        card.get_by_role("button", name="Share").click()
        page.get_by_role("dialog").locator("input").fill("")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("what they compute and hold is lost")
        page.get_by_role("dialog").get_by_role("button", name=answer).click()
        expect(card.get_by_text("Shared with")).to_have_count(len(shared))
        assert pool.call("GET", f"/v1/leases/{lease.id}")["shared_with"] == shared
    lease.refresh().wait(60)
    assert pool.get(f"/v1/leases/{lease.id}/connection")["key"] != keys["key"]
    expect(card.get_by_role("button", name="Dask dashboard")).to_be_enabled()

    card.get_by_role("button", name="Logs").click()
    logs = page.locator(".jp-gpupool-Logs")
    expect(logs.get_by_role("heading", name="scheduler")).to_be_visible()
    expect(logs.locator("pre").first).to_contain_text("Scheduler at")

    card.get_by_role("button", name="Dask dashboard").click()
    expect(page.get_by_role("tab", name="Dask: train")).to_be_visible()
    frame = page.frame_locator("iframe[title='Dask dashboard of train']")
    frame.get_by_role("link", name="Workers").click()
    expect(frame.get_by_text("tcp").or_(frame.get_by_text("tls")).first).to_be_visible()

    lease.release(wait=30)
    expect(card).to_have_count(0)
    panel = sidebar.only("History")
    expect(panel).to_contain_text("What took most")
    used = sum(each["used"] for each in pool.call("GET", "/v1/history")["hours"]) / 3600
    said = re.search(r"([\d.]+) GPU hours in 14 days, ([\d.]+) of them idle", panel.inner_text())
    assert said
    assert abs(float(said[1]) - used) <= max(0.011, 0.051 * used)
    assert float(said[2]) <= float(said[1])


def test_notebook_7_has_it_too(page, pool, lab: Lab):
    """There is no launcher, status bar or strip of icons there; the sidebar, its commands and notices are."""
    pytest.importorskip("notebook")
    errors: list[str] = []
    page.on("console", lambda said: said.type == "error" and errors.append(said.text))
    pool.request(gpus=1, name="mine")
    sidebar = Sidebar(page, lab).open("tree")
    expect(sidebar.lease("mine")).to_contain_text("active")
    lab.call("PUT", "api/contents/seven.ipynb", {"type": "notebook", "content": NOTEBOOK})
    sidebar = Sidebar(page, lab).open("notebooks/seven.ipynb")
    kernel_ready(page)
    toolbar = page.locator(".jp-NotebookPanel-toolbar")
    expect(toolbar.get_by_role("button", name="Request GPUs")).to_be_visible()
    sidebar.lease("mine").get_by_role("button", name="Use in notebook").click()
    expect(cells(sidebar).last).to_contain_text("Pool().lease(")
    assert not [each for each in errors if "gpupool" in each]


def test_fair_shares_are_those_that_the_terminal_says(sidebar: Sidebar, pool):
    """Quota, what one has, deserves and has borrowed; why one waits, and when it starts."""
    before = pool.configuration()
    pool.set_projects([{"name": "lab", "quota": 2, "limit": 4}, {"name": "rest", "quota": 3}])
    try:
        pool.request(gpus=4, name="most", project="lab", time_limit="1h")
        pool.request(name="late", project="lab", wait=False)
        panel = sidebar.only("Queue and fair share")
        rows = panel.locator(".jp-gpupool-Share")
        lab = "has 4, quota 2, limit 4, deserved 4, borrowed 2"
        expect(rows.nth(0)).to_contain_text(lab)
        expect(rows.nth(1)).to_contain_text("has 4, no quota, deserved 4")
        expect(rows.nth(2)).to_contain_text("has 0, quota 3, deserved 0")
        [said] = [each for each in pool.projects() if each["name"] == "lab"]
        assert (said["gpus"], said["guaranteed"], said["deserved"], said["borrowed"]) == (4, 2, 4, 2)
        panel.get_by_role("button", name="Why am I waiting?").click()
        dialog = sidebar.page.locator(".jp-Dialog")
        why = pool.lease("late").explain()
        for sentence in why.sentences:
            expect(dialog).to_contain_text(sentence)
        expect(dialog).to_contain_text("Expected to start about")
        expect(dialog).to_contain_text(why.reasons[0]["advice"])
        dialog.get_by_role("button", name="OK").click()
    finally:
        for lease in pool.leases():
            lease.release(wait=30)
        pool.set_projects(**before)


def test_a_lost_server_is_told_and_all_is_read_again(sidebar: Sidebar, pool, lab: Lab):
    """With the server away the panel says so; back, it shows what has happened meanwhile.

    A page that is loaded anew has the same sections open as before.
    """
    expect(sidebar.head("Health"), "all sections fit").to_be_in_viewport(ratio=1)
    sidebar.section("History")
    sidebar.head("Pool").click()
    wait_until(lambda: sidebar.page.evaluate(SAVED))
    sidebar.load("lab")
    for name, is_open in (("My leases", "true"), ("Pool", "false"), ("History", "true"), ("Health", "false")):
        expect(sidebar.head(name)).to_have_attribute("aria-expanded", is_open)

    lab.stop()
    expect(sidebar.root.locator(".jp-gpupool-Fault").first).to_be_visible()
    pool.request(gpus=3, name="meanwhile")
    lab.start()
    sidebar.command("jupyter-gpupool:refresh-pool")
    expect(sidebar.lease("meanwhile")).to_contain_text("active", timeout=90_000)
    free(sidebar, "5 of 8 GPUs free")


def test_what_is_hidden_reads_nothing(sidebar: Sidebar, pool):
    """Readings are asked for while a panel shows them, and not any more when it is closed."""
    asked: list[str] = []
    sidebar.page.on("request", lambda request: asked.append(request.url))
    with sidebar.page.expect_request(re.compile("gpupool/devices")):
        pass
    sidebar.page.evaluate("jupyterapp.shell.collapseLeft()")
    sidebar.page.wait_for_timeout(500)
    asked.clear()
    sidebar.page.wait_for_timeout(2500)  # readings are read every two seconds
    assert not [url for url in asked if "gpupool/devices" in url or "gpupool/queue" in url]


def test_it_is_where_people_look(sidebar: Sidebar, pool):
    """Launcher, menus, palette, notebook toolbar and status bar lead to the form and the pool."""
    page = sidebar.page
    palette(sidebar, "release a lease", "Release a lease")
    pool.request(gpus=2, name="mine")
    expect(page.locator(".jp-gpupool-Status")).to_contain_text("2 mine, 6 free")
    page.locator(".jp-LauncherCard", has_text="Request GPUs").click()
    expect(sidebar.root.locator("form")).to_be_visible()
    page.evaluate("void jupyterapp.commands.execute('notebook:create-new', {kernelName: 'python3'})")
    kernel_ready(page)
    button = page.locator(".jp-NotebookPanel-toolbar").get_by_role("button", name="Request GPUs")
    expect(button).to_be_visible()


def test_administrators_take_devices_out_and_back(sidebar: Sidebar, pool):
    """Cordon asks why, everybody can read it on the tile, and the device comes back."""
    page = sidebar.page
    health = sidebar.only("Health")
    health.get_by_text("Take a GPU out of service").click()
    health.get_by_role("group", name="Orders for node-1/gpu2").get_by_role("button", name="Cordon").click()
    page.get_by_role("dialog").locator("input").fill("new fan")
    page.keyboard.press("Enter")
    ill = health.locator(".jp-gpupool-Ill", has_text="node-1/gpu2")
    expect(ill).to_contain_text("new fan")
    tile = sidebar.only("Pool").get_by_role("button", name=re.compile("gpu2.*new fan"))
    expect(tile).to_be_visible()
    health = sidebar.only("Health")
    ill.get_by_role("button", name="Back into service").click()
    expect(ill).to_have_count(0)
    health.get_by_role("group", name="Orders for node-1/gpu2").get_by_role("button", name="Retire").click()
    page.get_by_role("dialog").locator("input").fill("sold")
    page.keyboard.press("Enter")
    expect(ill).to_contain_text("retired: sold")
    ill.get_by_text("What this rests on").click()
    expect(ill).to_contain_text("Takes no new work")
    ill.get_by_role("button", name="Back into service").click()
    expect(ill).to_have_count(0)


def test_by_keyboard_alone(sidebar: Sidebar, pool):
    """Tab, arrows, Space and Enter request GPUs, look at a tile and release again."""
    page = sidebar.page
    # JupyterLab gives the focus to its launcher some time after it has said that it is ready.
    page.wait_for_function("document.activeElement.closest('.jp-Launcher') !== null")
    sidebar.root.get_by_role("button", name="Request GPUs").first.focus()
    page.keyboard.press("Enter")
    field = page.locator("#jp-gpupool-field-gpus")
    expect(field).to_be_focused()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("3")
    expect(sidebar.root.locator("form")).to_contain_text("Starts now.")
    page.keyboard.press("Enter")
    expect(sidebar.root.locator(".jp-gpupool-Lease")).to_contain_text("3 GPUs")
    expect(sidebar.root.get_by_role("heading", name="My leases")).to_be_focused()
    tiles = sidebar.root.locator(".jp-gpupool-Tile")
    tiles.first.focus()
    page.keyboard.press("ArrowDown")
    expect(tiles.nth(1)).to_be_focused()
    expect(sidebar.root.locator(".jp-gpupool-Details")).to_contain_text("node-1/gpu1")
    page.keyboard.press("End")
    expect(sidebar.root.locator(".jp-gpupool-Details")).to_contain_text("node-2/gpu3")
    card = sidebar.root.locator(".jp-gpupool-Lease")
    expect(card).to_contain_text("active")
    card.get_by_role("button", name="Release").focus()
    page.keyboard.press("Space")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Enter")
    expect(card).to_have_count(0)
