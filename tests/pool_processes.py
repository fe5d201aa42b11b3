"""A pool of real processes on simulated nodes: the controller, its agents, and whoever talks to them."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import httpx
import psutil

from jupyter_gpupool.driver import simulated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Seconds that anything may take here.
WAIT = 30.0


def wait_for(true: Callable[[], Any], what: str, seconds: float = WAIT) -> Any:
    """Wait until something is so, and return it."""
    end = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class PoolProcesses:
    """One pool; `with` ends all of it and makes sure that nothing is left."""

    def __init__(self, folder: Path, nodes: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.nodes = nodes or {"node-1": 4, "node-2": 4}
        self.simulated = folder / "simulated"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        simulated.create(self.simulated, self.nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.call("POST", "/v1/stop", {"everything": True})
            for name in self.running:
                self.running[name].wait(20)
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait(WAIT)
        wait_for(lambda: not self.left(), f"nothing of it is left; {self.left()}")

    def left(self) -> list[str]:
        """The processes that are on this pool's simulated machines."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("GPUPOOL_SIMULATED") == str(self.simulated):
                    found.append(f"{process.pid} {process.cmdline()}")
        return found

    # ------------------------------------------------------------------------------------------- processes

    def start(self) -> PoolProcesses:
        """Start all of it and wait until the nodes are there."""
        self.start_controller()
        for name in self.nodes:
            self.start_agent(name)
        self.wait_for_nodes(set(self.nodes))
        return self

    def start_controller(self, *more: str) -> None:
        """Start the controller and wait until the agents are connected: "up" is only what it remembers."""
        before = self._connections()
        self._run("controller", "jupyter_gpupool.controller", more)
        self.wait_for_controller()
        wait_for(lambda: all(self._connections()[name] > before[name] for name in before), "agents are back")

    def _connections(self) -> dict[str, int]:
        running = [
            name for name, each in self.running.items() if name != "controller" and each.poll() is None
        ]
        return {name: self.log(name).count("connected to the controller") for name in running}

    def wait_for_controller(self) -> None:
        wait_for(
            lambda: self._alive("controller") and self.said.get("pid") == self.pid("controller"), "a pool"
        )

    def start_agent(self, name: str, *more: str) -> None:
        options = ["--name", name, *(["--head"] if name == next(iter(self.nodes)) else []), *more]
        if not (self.folder / name / "agent.json").exists():
            line = self.call("POST", "/v1/tokens", {"kind": "agent"})["line"]
            options += ["--join", line]
        self._run(name, "jupyter_gpupool.node", options, simulated.environment(self.simulated, name))

    def _run(self, name: str, module: str, options: Any, environ: dict[str, str] | None = None) -> None:
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        how = "-c" if " " in module else "-m"
        command = [sys.executable, how, module, "--dir", str(folder), "--log", str(folder / "log"), *options]
        with (folder / "err").open("ab") as errors:
            self.running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={**os.environ, **(environ or {})},
            )

    def _alive(self, name: str) -> bool:
        status = self.running[name].poll()
        assert status is None, f"{name} has ended with {status}: {self.log(name)[-2000:]}"
        return True

    def pid(self, name: str) -> int:
        return self.running[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.running[name].send_signal(number)
        self.running[name].wait(WAIT)

    def tables(self) -> list[tuple[str, dict[str, Any]]]:
        """What the agents have on their lists of lease processes: the agent's mark, and the entry."""
        paths = [self.folder / name / "leases" / "leases.json" for name in self.nodes]
        tables = [json.loads(path.read_text()) for path in paths if path.exists()]
        return [(table["agent"], entry) for table in tables for entry in table["entries"]]

    def log(self, name: str) -> str:
        parts = [self.folder / name / each for each in ("err", "log")]
        return "".join(each.read_text(errors="replace") for each in parts if each.exists())

    # --------------------------------------------------------------------------------------------- talking

    @property
    def said(self) -> dict[str, Any]:
        """What the controller wrote of where it is."""
        try:
            return json.loads((self.folder / "controller" / "pool.json").read_text())
        except (OSError, ValueError):
            return {}

    def admin_token(self) -> str:
        """The token of the administrator who started the pool."""
        found: str = json.loads((self.folder / "controller" / "admin.json").read_text())["token"]
        return found

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """Call the API as the administrator who started the pool."""
        token, said = self.admin_token(), self.said
        context = ssl.create_default_context(cadata=said["ca"])
        headers = {"Authorization": f"Bearer {token}", **more}
        answer = httpx.request(
            method, said["url"] + path, json=body, headers=headers, verify=context, timeout=WAIT
        )
        assert answer.status_code < 400, (method, path, answer.text)
        return answer.json() if answer.content else None

    def node_states(self) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.call("GET", "/v1/pool")["nodes"]}

    def wait_for_nodes(self, names: set[str], state: str = "up") -> None:
        wait_for(
            lambda: names <= {name for name, is_ in self.node_states().items() if is_ == state},
            f"{names} {state}",
        )

    def request(self, **what: Any) -> str:
        body = {"gpus": 1, "time_limit": "1h", "cpus": 0.1, "memory": "500MB", **what}
        return str(self.call("POST", "/v1/requests", body)["id"])

    def lease(self, ident: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/v1/leases/{ident}")
        return found

    def wait_for_lease(self, ident: str, state: str) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            lease = self.lease(ident)
            assert lease["state"] == state or lease["state"] != "ended", lease["why"]
            return lease if lease["state"] == state else None

        found: dict[str, Any] = wait_for(there, f"{ident} {state}")
        return found


def user() -> str:
    return getpass.getuser()
