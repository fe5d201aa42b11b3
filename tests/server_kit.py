"""A real Jupyter server with the extension, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import httpx
import websocket

from jupyter_gpupool.service import free_port
from tests.conftest import environment

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "a-login-token"
#: As behind a JupyterHub, with a name that has to be quoted.
BASE = "/user/a%40b/"
#: An authorizer that writes down what it is asked, and lets do what a file beside it says.
AUTHORIZER = """
import json, pathlib
from jupyter_server.auth import Authorizer

class Recorder(Authorizer):
    folder = pathlib.Path(%r)
    def is_authorized(self, handler, user, action, resource):
        if resource != "gpupool":
            return True
        with (self.folder / "asked").open("a") as file:
            file.write(json.dumps([handler.request.method, action, resource]) + "\\n")
        return action in (self.folder / "allowed").read_text().split()

c.ServerApp.authorizer_class = Recorder
"""


class JupyterServer:
    """A Jupyter server; `with` ends it.

    Args:
        folder: For its files.
        config: Lines of its configuration file.
    """

    def __init__(self, folder: Path, *config: str) -> None:
        self.folder = folder
        (folder / "allowed").write_text("read write execute")
        (folder / "asked").touch()
        others = ("jupyterlab", "jupyter_lsp", "jupyter_server_terminals", "notebook", "notebook_shim")
        extensions = {"jupyter_gpupool": True, **dict.fromkeys(others, False)}
        lines = (
            f"c.ServerApp.jpserver_extensions = {extensions!r}",
            f"c.IdentityProvider.token = {TOKEN!r}",
            "c.ServerApp.allow_unauthenticated_access = False",
            "c.ServerApp.allow_root = True",
            "c.ServerApp.open_browser = False",
            "c.ServerApp.port_retries = 0",
            f"c.ServerApp.base_url = {BASE!r}",
            f"c.ServerApp.root_dir = {str(folder)!r}",
            "c.GPUPoolServer.retry_seconds = 0.5",
            AUTHORIZER % str(folder),
            *config,
        )
        (folder / "config.py").write_text("\n".join(lines))
        self.port = free_port()  # not one that an outgoing connection of another test may get meanwhile
        self.url = f"http://127.0.0.1:{self.port}{BASE}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "jupyter_server", "--config", str(self.folder / "config.py")]
        own = {"JUPYTER_DATA_DIR": str(self.folder), "JUPYTER_RUNTIME_DIR": str(self.folder / "runtime")}
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--debug"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(**own),
                cwd=self.folder,
            )
        self.client = httpx.Client(
            base_url=self.url + "gpupool/", headers={"Authorization": f"token {TOKEN}"}, timeout=60
        )
        self._wait()
        return self

    def _wait(self) -> None:
        end = time.monotonic() + 60
        while True:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(httpx.HTTPError):
                self.client.get("pool")
                return
            assert time.monotonic() < end, self.log()
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def call(self, method: str, path: str, body: Any = None, *, status: int = 200, **more: Any) -> Any:
        """Call an endpoint; its answer's JSON."""
        response = self.client.request(method, path, json=body, **more)
        assert response.status_code == status, (method, path, response.status_code, response.text)
        return response.json() if response.content else None

    def get(self, path: str, **params: Any) -> Any:
        return self.call("GET", path, params=params)

    def nobody(self) -> httpx.Client:
        """A client that has not logged in."""
        return httpx.Client(base_url=self.client.base_url, timeout=20)

    @contextlib.contextmanager
    def events(self) -> Any:
        """Listen to the event bus; yields a function that waits for the next event of ours."""
        address = self.url.replace("http:", "ws:") + "api/events/subscribe"
        ears = websocket.create_connection(address, timeout=30, header=[f"Authorization: token {TOKEN}"])

        def following() -> tuple[str, dict[str, Any]]:
            while True:
                event = json.loads(ears.recv())
                name = event.pop("schema_id")
                if "jupyter-gpupool" in name:
                    own = {key: value for key, value in event.items() if not key.startswith("__")}
                    return name.split("/")[-2], own

        try:
            yield following
        finally:
            ears.close()
