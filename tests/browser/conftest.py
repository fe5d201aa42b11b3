"""What the browser tests share: Chromium, a JupyterLab, and an embedded pool of simulated GPUs.

Playwright's sync API and pytest-asyncio cannot share a process, so this is a run of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import sync_playwright

from tests.browser.lab import WAIT_MS, Lab, Sidebar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, BrowserContext, Page

    from jupyter_gpupool import Pool

#: Where to keep what the last test has seen at its end; for who looks for a mistake.
SHOTS = os.environ.get("BROWSER_SHOTS", "")
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Find a Chromium; where there is none and we may, install Debian's."""
    found = next(filter(None, map(shutil.which, NAMES)), "")
    if not found and os.getuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "chromium"]):
            subprocess.run(command, check=False, capture_output=True, timeout=900)
        found = next(filter(None, map(shutil.which, NAMES)), "")
    if not found:
        message = "there is no Chromium here, and it could not be installed: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab(shared_pool: Pool, session_folder: Path) -> Iterator[Lab]:
    """A JupyterLab of who has started the embedded pool."""
    with Lab(session_folder / "lab") as lab:
        yield lab


@pytest.fixture(scope="session")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser of one person: what it has read of JupyterLab once it reads no more."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page whose errors fail the test."""
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(f"{error} {error.stack}"))
    yield page
    if SHOTS:
        page.screenshot(path=SHOTS)
    page.close()
    assert not [each for each in errors if not _theirs(each)], errors


def _theirs(error: str) -> bool:
    """Say whether an error is not ours: JupyterLab's parts whose server is away, Notebook 7's settings."""
    return "Failed to fetch" in error or ("notebook_core" in error and "jupyter-gpupool" not in error)


@pytest.fixture
def sidebar(page: Page, lab: Lab, pool: Pool) -> Sidebar:
    """The sidebar, open, on a pool with nothing in use."""
    return Sidebar(page, lab).open()


@pytest.fixture(scope="session")
def stranger(shared_pool: Pool) -> str:
    """The name of another person whom the pool serves."""
    if os.getuid() != 0:
        message = "agents that are not root serve one person only"
        pytest.skip(message)
    return "nobody"


@pytest.fixture
def others(shared_pool: Pool, stranger: str) -> Iterator[Pool]:
    """The pool as that other person has it, who is no administrator."""
    with login(shared_pool, stranger) as theirs:
        yield theirs


def login(pool: Pool, user: str) -> Pool:
    """Return the pool as another person has it."""
    from jupyter_gpupool import Pool, embedded

    said = pool.call("POST", "/v1/tokens", {"user": user, "scopes": ["read", "use"]})
    return Pool(url=pool.url, token=said["token"], ca=embedded.find().ca, start=False)
