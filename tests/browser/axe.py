"""axe-core on a part of the page."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

#: JupyterLab's body clips all that it has, so that axe takes its text for invisible, and finds no contrast.
VISIBLE = ".jp-ThemedContainer { overflow: visible !important; }"


def violations(page: Page, selector: str) -> list[str]:
    """Return what axe-core finds wrong within a selector."""
    if not page.evaluate("typeof window.axe === 'object'"):
        page.add_style_tag(content=VISIBLE)
        page.add_script_tag(path=str(files("axe_playwright_python") / "axe.min.js"))
    found = page.evaluate("selector => axe.run(selector)", selector)
    return [
        f"{each['id']}: {node['html']} {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]
