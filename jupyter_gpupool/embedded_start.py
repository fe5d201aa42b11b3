"""Starting the embedded pool: which processes it has, and waiting until all of them are there.

Rule 1: what runs already is left alone; what is missing is started on its folder, where it finds its past.
Rule 2: a start that fails ends what it has started, and says what the process that failed said last.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._http import Address, Connection, PoolError, Trouble, get
from jupyter_gpupool.embedded import (
    STALE,
    Nodes,
    children,
    connected,
    end,
    find,
    line,
    processes,
    read,
    started_at,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

#: Seconds until all parts of a pool that is being started must answer; two nodes take about 5.
START_S = 90.0
#: The machines of a simulated pool: GPUs by node.
SIMULATED = {"node-1": 4, "node-2": 4}
#: Files of how the pool was started, for its next start.
KEPT = ("plan.json", "listen.json")


class Start:
    """Starts what is missing of the pool in a folder; the lock is held.

    Args:
        folder: The pool's folder.
        idle_exit: The controller ends the pool after so many seconds without leases; 0: never.
    """

    def __init__(self, folder: Path, idle_exit: int) -> None:
        self.folder = folder
        self.idle_exit = idle_exit
        self.logs = folder / "logs"
        self.logs.mkdir(mode=0o700, exist_ok=True)
        self.end = time.monotonic() + START_S
        self.alive = processes()
        self.before = {name: read(folder / name) for name in KEPT}
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        if not self.alive:
            for name in STALE:
                (folder / name).unlink(missing_ok=True)

    def pool(self, listen: Mapping[str, Any], nodes: Nodes | None) -> Address:
        """Start the controller, then the agents, and wait until all of them are there."""
        try:
            machines = self._machines(nodes)
            address = self._controller(listen)
            with contextlib.closing(Connection(address)) as connection:
                for name, variables in machines.items():
                    self._agent(connection, name, variables, head=name == next(iter(machines)))
                self._wait_for_agents(connection, set(machines))
        except BaseException:
            self._take_back()
            raise
        return address

    def _machines(self, nodes: Nodes | None) -> dict[str, dict[str, str]]:
        """Return the nodes' names, each with the variables that put its agent onto it."""
        plan = read(self.folder / "plan.json") if nodes is None or self.alive else {}
        if not plan:
            plan = {
                "nodes": simulated_nodes() if nodes is None else nodes,
                "host": socket.gethostname().partition(".")[0],
            }
            write(self.folder / "plan.json", plan)
        if not plan["nodes"]:
            return {plan["host"]: {}}
        from jupyter_gpupool.driver import simulated

        path = self.folder / "simulated"
        others = (path / "state.json").exists() and simulated.Machine(path).nodes() != list(plan["nodes"])
        try:
            simulated.create(path, plan["nodes"], replace=others, shared=os.geteuid() == 0)
        except ValueError as error:
            raise PoolError(Trouble.BAD_CONFIG, f"No such machine can be simulated: {error}.") from error
        return {name: simulated.environment(path, name) for name in plan["nodes"]}

    def _controller(self, listen: Mapping[str, Any]) -> Address:
        folder = self.folder / "controller"
        if "controller" not in self.alive:
            (folder / "pool.json").unlink(missing_ok=True)
            from jupyter_gpupool.service import free_port

            said = {"port": free_port(), "comm_port": free_port(), **read(self.folder / "listen.json")}
            if listen.get("host"):  # the name that goes with another address is another one
                said.pop("name", None)
            said |= {key: value for key, value in listen.items() if value}
            options = [_written(key, value) for key, value in said.items()]
            self._run("controller", "jupyter_gpupool.controller", folder, options, {})
            self._wait(lambda: bool(read(folder / "pool.json") and read(folder / "admin.json")))
            write(self.folder / "listen.json", said)
        pool, admin = read(folder / "pool.json"), read(folder / "admin.json")
        write(self.folder / "client.json", {"url": pool["url"], "ca": pool["ca"], **admin})
        return find()

    def _agent(self, connection: Connection, name: str, variables: dict[str, str], *, head: bool) -> None:
        if name in self.alive:
            return
        folder = self.folder / name
        options = ["--name", name, *(["--head"] if head else [])]
        if read(folder / "agent.json").get("ca") != connection.address.ca:
            variables = {**variables, "GPUPOOL_JOIN": line(connection, "agent")}
        host = read(self.folder / "controller" / "pool.json")["comm"].split("//")[-1].rpartition(":")[0]
        if not host.startswith("127."):  # then leases must be reached from other machines too
            options += ["--address", host.strip("[]")]
        self._run(name, "jupyter_gpupool.node", folder, options, variables)

    def _run(
        self, name: str, module: str, folder: Path, options: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        """Start a process of the pool, in a session of its own."""
        log = str(self.logs / f"{name}.log")
        command = [sys.executable, "-m", module, "--dir", str(folder), "--log", log, *options]
        if name == "controller":
            command += ["--idle-exit", str(self.idle_exit)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPUPOOL_")}
        with self._errors(name).open("wb") as errors:
            self._errors(name).chmod(0o600)
            child = Detached(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
                env={**environment, **variables},
                start_new_session=True,
            )
        children.append(child)
        self.started[name] = child
        said = {
            **read(self.folder / "processes.json"),
            name: {"pid": child.pid, "started": started_at(child.pid)},
        }
        write(self.folder / "processes.json", said)

    def _errors(self, name: str) -> Path:
        return self.logs / f"{name}.err"

    def _wait_for_agents(self, connection: Connection, names: set[str]) -> None:
        self._wait(lambda: names <= connected(connection))
        pool = connection.send(get("/v1/pool", "nodes"))
        if not pool["gpus"] and any(read(self.folder / "plan.json")["nodes"].values() or [1]):
            told = connection.send(get("/v1/notices", "notices"))["notices"]
            why = told[-1]["sentence"] if told else "the NVIDIA driver lists none"
            raise PoolError(Trouble.NOT_STARTED, f"The pool on this machine has no GPU: {why}")

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until something is so, or a process that is needed for it has ended.

        Raises:
            PoolError: It has, or it takes too long.
        """
        while not ready():
            for name, child in self.started.items():
                if child.poll() is not None:
                    raise PoolError(
                        Trouble.NOT_STARTED, f"The pool's {name} did not start: {self._last_words(name)}"
                    )
            if time.monotonic() > self.end:
                raise PoolError(
                    Trouble.NOT_STARTED,
                    f"The pool on this machine did not start within {START_S:.0f} s.",
                    f"{self.logs} has what its processes wrote.",
                )
            time.sleep(0.05)

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = self._errors(name).read_text(encoding="utf-8", errors="replace").split("\n")
            said = [each for each in lines if each.strip()]
            if said:
                return said[-1]
        return f"{self.logs} has what it wrote."

    def _take_back(self) -> None:
        """End what this start has started: a pool that is there in part is of no use."""
        for child in reversed(self.started.values()):
            end(child.pid)
            child.wait()
        if not self.alive:
            for name in STALE:
                (self.folder / name).unlink(missing_ok=True)
            for name, said in self.before.items():  # what could not be started is not tried again
                write(self.folder / name, said) if said else (self.folder / name).unlink(missing_ok=True)


def _written(key: str, value: Any) -> str:
    flag = f"--{key.replace('_', '-')}"
    return flag if value is True else f"{flag}={value}"


class Detached(subprocess.Popen[bytes]):
    """A process that outlives us: that it still runs when we forget it is no mistake."""

    def __del__(self, *_: object) -> None:
        """Let go of it without a warning."""


def simulated_nodes() -> dict[str, int]:
    """Return the nodes to simulate: none where the NVIDIA driver has GPUs."""
    from jupyter_gpupool.driver import nvml

    return {} if not nvml.reason_unavailable() else dict(SIMULATED)
