"""A lease's dashboard in a real browser: it works in its sandbox, and reaches nothing of Jupyter's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.server_kit import TOKEN, JupyterServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

REACHES = """
() => fetch('/user/a%40b/api/contents', {credentials: 'include'}).then(r => r.status, e => e.name)
"""


@pytest.fixture
def server(shared_pool, tmp_path):
    with JupyterServer(tmp_path) as server:
        yield server


def test_a_dashboard_draws_and_is_a_stranger_to_jupyter(page: Page, server, pool):
    said = []
    page.on("console", lambda message: said.append(message.text))
    with pool.request(gpus=1) as lease:
        page.goto(f"{server.url}api/status?token={TOKEN}")  # logs the browser in: from now on it has a cookie
        page.goto(f"{server.url}gpupool/leases/{lease.id}/dashboard/status")
        page.wait_for_function("window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
        assert any("Websocket connection 0 is now open" in each for each in said)
        assert page.evaluate("window.origin") == "null"
        with pytest.raises(Exception, match="SecurityError"):
            page.evaluate("document.cookie")
        assert page.evaluate(REACHES) == "TypeError"
        page.goto(page.url.replace("/status", "/workers"))
        page.wait_for_function("window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
