"""This user's own pool on this machine: found, or started by the first who needs it, and stopped.

Rule 1: two callers at once get one pool: whoever starts or stops holds a file lock meanwhile.
Rule 2: a pool is what runs, not what files say: a process counts by its PID and start time together. What
        is missing is started again on the same folders.
Rule 3: its processes are sessions of their own and hold nothing of their starter; what they write goes to
        files that only their owner can read, and that do not grow for ever.
Rule 4: with no NVIDIA driver the GPUs are simulated, and that is said.

Not its business: what a pool does (`controller`, `node`); it only starts those programs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._find import write_private
from jupyter_gpupool._http import Address, Call, Connection, PoolError, Trouble, get
from jupyter_gpupool.progress import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds until all parts of a pool that is being started must answer; two nodes take about 5.
START_S = 90.0
#: Seconds that the processes of a pool have to leave by themselves, and then after SIGTERM.
STOP_S = 30.0
TERM_S = 5.0
#: Seconds to wait for agents that have lost the controller, before they are told to end.
HEAR_S = 10.0
#: The controller ends the pool after so many seconds without leases.
IDLE_EXIT_S = 3600
#: The machines of a simulated pool: GPUs by node.
SIMULATED = {"node-1": 4, "node-2": 4}
SOURCE = "the embedded pool of this machine"
#: Files that only mean something while the pool runs.
STALE = ("client.json", "processes.json")
#: The GPUs of nodes, as numbers or by their models.
Nodes = Mapping[str, int | Sequence[str]]


# -------------------------------------------------------------------------------------------------- its files


def directory() -> Path:
    """Say where the pool's files are: $GPUPOOL_DIR, else in Jupyter's runtime folder."""
    said = os.environ.get("GPUPOOL_DIR", "")
    if said:
        return Path(said).expanduser().absolute()
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir()) / "gpupool"


@contextlib.contextmanager
def _alone() -> Iterator[Path]:
    """Hold the lock of the folder: nobody else starts or stops this pool meanwhile."""
    folder = directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file; one that is missing or damaged says nothing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _write(path: Path, said: Mapping[str, Any]) -> None:
    write_private(path, json.dumps(said, indent=1))


def processes() -> dict[str, int]:
    """Return the pool's processes that run, by name."""
    said = _read(directory() / "processes.json")
    return {name: each["pid"] for name, each in said.items() if _started_at(each["pid"]) == each["started"]}


def _started_at(pid: int) -> int:
    """Return when a process was started, in clock ticks since the boot; 0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


# ------------------------------------------------------------------------------------------------ find, start


def find() -> Address:
    """Find the pool that runs.

    Raises:
        PoolError: None does.
    """
    said = _read(directory() / "client.json")
    if not said or "controller" not in processes():
        raise PoolError(
            Trouble.NOT_STARTED, "No pool runs on this machine.", "Start one with `jupyter gpupool start`."
        )
    return Address(url=said["url"], token=said["token"], ca=said["ca"], source=SOURCE)


def start(
    *,
    listen: Mapping[str, Any] | None = None,
    nodes: Nodes | None = None,
    idle_exit: int = IDLE_EXIT_S,
) -> Address:
    """Find the pool of this user on this machine, or start what is missing of it.

    Args:
        listen: Options of the controller's (host, port, comm_port, name); default: as before.
        nodes: Simulate these nodes, with their numbers or models of GPUs, even where there are real ones.
        idle_exit: The pool ends after so many seconds without leases; 0: never.

    Raises:
        PoolError: It could not be started; the sentence is that of the process that failed.
    """
    with contextlib.suppress(PoolError):
        found = find()
        if set(_read(directory() / "processes.json")) == set(processes()):
            return found
    with _alone() as folder, Waiting("Starting a pool on this machine"):
        return _Start(folder, idle_exit).pool(listen or {}, nodes)


class _Start:
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
        plan = _read(self.folder / "plan.json") if nodes is None or self.alive else {}
        if not plan:
            plan = {"nodes": nodes or simulated_nodes(), "host": socket.gethostname().partition(".")[0]}
            _write(self.folder / "plan.json", plan)
        if not plan["nodes"]:
            return {plan["host"]: {}}
        from jupyter_gpupool.driver import simulated

        path = self.folder / "simulated"
        others = path.exists() and simulated.Machine(path).nodes() != list(plan["nodes"])
        try:
            simulated.create(path, plan["nodes"], replace=others)
        except ValueError as error:
            raise PoolError(Trouble.BAD_CONFIG, f"No such machine can be simulated: {error}.") from error
        return {name: simulated.environment(path, name) for name in plan["nodes"]}

    def _controller(self, listen: Mapping[str, Any]) -> Address:
        folder = self.folder / "controller"
        if "controller" not in self.alive:
            (folder / "pool.json").unlink(missing_ok=True)
            said = {
                **_read(self.folder / "listen.json"),
                **{key: value for key, value in listen.items() if value},
            }
            _write(self.folder / "listen.json", said)
            options = [
                word for key, value in said.items() for word in (f"--{key.replace('_', '-')}", str(value))
            ]
            self._run("controller", "jupyter_gpupool.controller", folder, options, {})
        self._wait(lambda: bool(_read(folder / "pool.json") and _read(folder / "admin.json")))
        pool, admin = _read(folder / "pool.json"), _read(folder / "admin.json")
        _write(self.folder / "client.json", {"url": pool["url"], "ca": pool["ca"], **admin})
        return find()

    def _agent(self, connection: Connection, name: str, variables: dict[str, str], *, head: bool) -> None:
        if name in self.alive:
            return
        folder = self.folder / name
        options = ["--name", name, *(["--head"] if head else [])]
        if _read(folder / "agent.json").get("ca") != connection.address.ca:
            options += ["--join", line(connection, "agent")]
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
            child = _Detached(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
                env={**environment, **variables},
                start_new_session=True,
            )
        _children.append(child)
        self.started[name] = child
        said = {
            **_read(self.folder / "processes.json"),
            name: {"pid": child.pid, "started": _started_at(child.pid)},
        }
        _write(self.folder / "processes.json", said)

    def _errors(self, name: str) -> Path:
        return self.logs / f"{name}.err"

    def _wait_for_agents(self, connection: Connection, names: set[str]) -> None:
        self._wait(lambda: names <= connected(connection))
        pool = connection.send(get("/v1/pool", "nodes"))
        if not pool["gpus"]:
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
            _end(child.pid)
            child.wait()
        if not self.alive:
            for name in STALE:
                (self.folder / name).unlink(missing_ok=True)


class _Detached(subprocess.Popen[bytes]):
    """A process that outlives us: that it still runs when we forget it is no mistake."""

    def __del__(self, *_: object) -> None:
        """Let go of it without a warning."""


#: Processes that this one has started, so that they can be reaped when they end.
_children: list[_Detached] = []


def simulated_nodes() -> dict[str, int]:
    """Return the nodes to simulate: none where the NVIDIA driver has GPUs."""
    from jupyter_gpupool.driver import nvml

    return {} if not nvml.reason_unavailable() else dict(SIMULATED)


def connected(connection: Connection) -> set[str]:
    """Return the nodes whose agents hear what the controller tells them."""
    nodes = connection.send(get("/v1/pool", "nodes"))["nodes"]
    return {each["name"] for each in nodes if each["connected"]}


def line(connection: Connection, kind: str, **more: Any) -> str:
    """Make a line by which an agent joins or a person logs in (`kind`: "agent" or "login")."""
    body = {"kind": kind, **more}
    call = Call(method="POST", path="/v1/tokens", body=body, expects="line", repeatable=False)
    return str(connection.send(call)["line"])


def machine() -> Any:
    """Return the simulated machines of the pool here, to be broken and repaired.

    Raises:
        PoolError: There is no pool, or its GPUs are real.
    """
    path = directory() / "simulated"
    if not processes() or not path.exists():
        raise PoolError(
            Trouble.NOT_SIMULATED,
            "No pool of simulated GPUs runs here.",
            "Start one with `jupyter gpupool start`.",
        )
    from jupyter_gpupool.driver import simulated

    return simulated.Machine(path)


# ------------------------------------------------------------------------------------------------------- stop


def stop() -> bool:
    """End the pool with all its leases, and return when nothing of it runs; say whether there was one.

    Raises:
        PoolError: A process does not end, even by SIGKILL.
    """
    if not processes():
        return False
    with _alone() as folder, Waiting("Ending the pool on this machine"):
        if "controller" not in processes():  # what it knows of leases is needed to end them
            with contextlib.suppress(PoolError):
                _Start(folder, 0).pool({}, None)
        with contextlib.suppress(PoolError), contextlib.closing(Connection(find())) as connection:
            agents = set(processes()) - {"controller"}
            _wait(lambda: agents <= connected(connection), HEAR_S)
            body = {"everything": True, "why": "the pool is stopped"}
            connection.send(Call(method="POST", path="/v1/stop", body=body, repeatable=False))
            _wait(lambda: not processes(), STOP_S)
        for name, pid in processes().items():
            if not _end(pid):
                raise PoolError(
                    Trouble.TIMED_OUT, f"The pool's {name} (process {pid}) does not end.", "Kill it."
                )
        for name in STALE:
            (folder / name).unlink(missing_ok=True)
        _children[:] = [child for child in _children if child.poll() is None]
    return True


def _wait(so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not so() and time.monotonic() < end:
        time.sleep(0.05)


def _end(pid: int) -> bool:
    """End a process by SIGTERM, then by SIGKILL; say whether it is gone."""
    started = _started_at(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + TERM_S
        while started and _started_at(pid) == started and time.monotonic() < end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(0.1)
    return not started or _started_at(pid) != started
