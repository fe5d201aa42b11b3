"""A lease and a pool as live widgets in a notebook of a real JupyterLab."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import nbformat
import pytest
from playwright.sync_api import expect

from tests.browser.axe import violations
from tests.browser.lab import READY, TOKEN, WAIT_MS, Lab, Sidebar, kernel_ready
from tests.browser.test_images import IMAGES
from tests.browser.test_sidebar import run_all

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from jupyter_gpupool import Pool

expect.set_options(timeout=WAIT_MS)
pytestmark = pytest.mark.timeout(300)  # on a busy machine a pool, a JupyterLab and a kernel take their time
CELLS = (
    "%load_ext jupyter_gpupool\nfrom jupyter_gpupool import Pool\npool = Pool()",
    "lease = %gpupool request --gpus 1 --max-gpus 2 --name shown --time 2h\nlease",
    "pool",
)


@pytest.fixture
def notebook(page: Page, lab: Lab, pool: Pool) -> Sidebar:
    """A notebook with a lease and a pool, open and run."""
    name = "widgets.ipynb"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in CELLS])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, lab.folder / "work" / name)
    page.goto(f"{lab.url}lab/tree/{name}?reset&token={TOKEN}")
    page.wait_for_function(READY, timeout=WAIT_MS)
    kernel_ready(page)
    opened = Sidebar(page, lab)
    run_all(opened)
    yield opened
    for each in lab.call("GET", "api/sessions"):
        lab.call("DELETE", f"api/sessions/{each['id']}")


def output(page: Page, number: int):
    return page.locator(".jp-NotebookPanel:visible .jp-CodeCell").nth(number).locator(".jp-OutputArea")


def test_a_lease_and_a_pool_are_live_and_leave_html_when_the_kernel_is_gone(notebook: Sidebar, pool: Pool):
    page = notebook.page
    lease = output(page, 1).locator(".gpupool-lease")
    expect(lease).to_contain_text("2 of 2 workers; tasks: 0 running")
    expect(lease).to_contain_text(re.compile(r"1 h 59 min|2 h left"))
    expect(lease.get_by_role("progressbar")).to_have_count(4)

    client = pool.lease("shown").client()
    kept = client.map(abs, range(7))
    client.gather(kept)
    expect(lease).to_contain_text("7 in memory")
    lease.get_by_role("button", name="Extend by").click()
    expect(lease.get_by_role("status")).to_have_text("shown has 1h more.")
    expect(lease).to_contain_text(re.compile(r"2 h 59 min|3 h left"))
    lease.get_by_role("spinbutton", name="GPUs at most").fill("1")
    lease.get_by_role("button", name="Scale to").click()
    expect(lease).to_contain_text("1 of 1 worker;")
    expect(lease).to_contain_text("7 in memory")

    whole = output(page, 2).locator(".gpupool")
    expect(whole.get_by_role("list", name="Devices").get_by_role("listitem")).to_have_count(8)
    whole.get_by_text("Request GPUs").click()
    form = whole.locator("form")
    form.get_by_label("GPUs", exact=True).fill("99")
    expect(form.get_by_role("status")).to_contain_text("there are at most 8")
    form.get_by_label("GPUs", exact=True).fill("2")
    expect(form.get_by_role("status")).to_contain_text("It would start now")
    form.get_by_label("name").fill("asked")
    form.get_by_role("button", name="Request").click()
    expect(form.get_by_role("status")).to_contain_text('pool.lease("asked")')
    asked = whole.get_by_label("Lease asked, active")
    expect(asked).to_contain_text("2 GPUs")

    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        page.wait_for_timeout(500)
        found = violations(page, ".gpupool")
        assert not found, (theme, found)
        if os.environ.get("KEEP_IMAGES"):
            for number, name in ((1, "lease"), (2, "pool")):
                picture = IMAGES / f"widget-{name}-{theme.lower()}.png"
                output(page, number).locator(".gpupool").screenshot(path=str(picture))
    notebook.theme("JupyterLab Light")

    asked.get_by_role("button", name="Release").click()
    asked.get_by_role("button", name="Release: its tasks end").click()
    expect(asked).to_have_count(0)

    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    for each in notebook.lab.call("GET", "api/sessions"):
        notebook.lab.call("DELETE", f"api/sessions/{each['id']}")
    page.goto(f"{notebook.lab.url}lab/tree/widgets.ipynb?reset&token={TOKEN}")
    page.wait_for_function(READY, timeout=WAIT_MS)
    expect(output(page, 1)).to_contain_text(re.compile(r"Lease shown: [12] GPU"))  # as it was displayed
    expect(output(page, 1).locator("table")).to_have_count(1)
    expect(output(page, 2)).to_contain_text("8 GPUs (8 ")
    expect(page.locator("body")).not_to_contain_text("model not found")
