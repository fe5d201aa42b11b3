"""A real JupyterLab in a process of its own, and the sidebar in it as a person uses it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import httpx

from jupyter_gpupool.service import free_port
from tests.conftest import environment, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Locator, Page

TOKEN = "a-login-token"
#: Milliseconds that anything in the page may take.
WAIT_MS = 30_000
READY = "window.jupyterapp && window.jupyterapp.restored.then(() => true)"
#: The notebook that is open has a kernel that listens; what its toolbar shows before means nothing.
KERNEL_READY = """
window.jupyterapp && jupyterapp.restored.then(() => {
  const w = jupyterapp.shell.currentWidget;
  return !!(w && w.sessionContext)
    && w.sessionContext.ready.then(() => w.sessionContext.session?.kernel?.status === 'idle');
})
"""
QUIET = {
    "notification": {"fetchNews": "false", "checkForUpdates": False},
}


def kernel_ready(page: Page) -> None:
    """Wait until the kernel of the open notebook listens; Playwright's own wait is over with any answer."""
    wait_until(lambda: page.evaluate(KERNEL_READY))


class Lab:
    """A JupyterLab server; `with` ends it.

    Args:
        folder: For its files.
        config: Of its configuration file.
        more: Variables of its environment.
    """

    def __init__(self, folder: Path, config: str = "", **more: str) -> None:
        self.folder = folder
        self.config = config
        self.more = more
        for each in ("work", "settings", "workspaces", "runtime", "config", "home"):
            (folder / each).mkdir(parents=True, exist_ok=True)
        for name, said in QUIET.items():
            path = folder / "settings" / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(said))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and wait until it answers."""
        (self.folder / "config" / "jupyter_server_config.py").write_text(self.config)
        options = (
            "--no-browser",
            "--ip=127.0.0.1",
            f"--port={self.port}",
            "--allow-root",
            "--expose-app-in-browser",
            "--JupyterNotebookApp.expose_app_in_browser=True",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={self.folder / 'work'}",
            f"--IdentityProvider.token={TOKEN}",
            f"--LabApp.user_settings_dir={self.folder / 'settings'}",
            f"--LabApp.workspaces_dir={self.folder / 'workspaces'}",
            "--GPUPoolServer.retry_seconds=0.5",
        )
        own = {
            "JUPYTER_CONFIG_DIR": str(self.folder / "config"),
            "JUPYTER_RUNTIME_DIR": str(self.folder / "runtime"),
            "HOME": str(self.folder / "home"),
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(**{**own, **self.more}),
            )
        end = time.monotonic() + 60
        while True:
            assert self.process.poll() is None, self.log()
            try:
                self.call("GET", "api/status")
            except (httpx.HTTPError, AssertionError):
                assert time.monotonic() < end, self.log()
                time.sleep(0.1)
            else:
                return

    def stop(self) -> None:
        """End it, with its kernels, and wait until it is gone: its port is used again."""
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait(10)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the server as its owner."""
        headers = {"Authorization": f"token {TOKEN}"}
        answer = httpx.request(method, self.url + path, json=body, headers=headers, timeout=30)
        assert answer.status_code < 400, (method, path, answer.text)
        return answer.json() if answer.content else None


class Sidebar:
    """The sidebar in a page.

    Args:
        page: The browser's page.
        lab: The server.
    """

    def __init__(self, page: Page, lab: Lab) -> None:
        self.page = page
        self.lab = lab
        self.root = page.locator("#jp-gpupool-sidebar")

    def open(self, path: str = "lab?reset") -> Sidebar:
        """Load JupyterLab and open the sidebar."""
        self.load(path)
        self.command("jupyter-gpupool:open-pool")
        self.root.wait_for(timeout=WAIT_MS)
        self.root.get_by_text("GPUs free").wait_for(timeout=WAIT_MS)
        return self

    def load(self, path: str) -> None:
        """Load JupyterLab and wait until it is as it was left."""
        joint = "&" if "?" in path else "?"
        self.page.goto(f"{self.lab.url}{path}{joint}token={TOKEN}")
        self.page.wait_for_function(READY, timeout=WAIT_MS)

    def command(self, name: str, **args: Any) -> None:
        """Run a command without waiting for its end: it may ask a question."""
        self.page.evaluate(f"void jupyterapp.commands.execute({name!r}, {json.dumps(args)})")

    def head(self, name: str) -> Locator:
        """Return the heading of a section."""
        return self.root.locator(".jp-AccordionPanel-title", has_text=name).first

    def section(self, name: str) -> Locator:
        """Return a section by its heading, opened."""
        head = self.head(name)
        if head.get_attribute("aria-expanded") != "true":
            head.click()
        return self.root.locator(f"[id='{head.get_attribute('aria-controls')}']")

    def only(self, name: str) -> Locator:
        """Return a section, opened, with all others closed."""
        for head in self.root.locator(".jp-AccordionPanel-title").all():
            if head.get_attribute("aria-expanded") == "true" and name not in head.inner_text():
                head.click()
        return self.section(name)

    def lease(self, name: str) -> Locator:
        """Return the card of a lease of mine."""
        return self.section("My leases").get_by_role("listitem", name=f"Lease {name},")

    def theme(self, name: str) -> None:
        """Change the theme and wait for it."""
        self.page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: {name!r}}})")
        self.page.wait_for_function(f"document.body.dataset.jpThemeName === {name!r}", timeout=WAIT_MS)
