"""This user's own pool on this machine: found, or started by the first who needs it, and stopped.

Rule 1: two callers at once get one pool: whoever starts or stops holds a file lock meanwhile.
Rule 2: a pool is what runs, not what files say: a process counts by its PID and start time together. What
        is missing is started again on the same folders.
Rule 3: its processes are sessions of their own and hold nothing of their starter; what they write goes to
        files that only their owner can read, and that do not grow for ever.
Rule 4: who has stopped it does not find it started again by a look: only by a request, or by `start`.
Rule 5: with no NVIDIA driver the GPUs are simulated, and that is said.

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
from urllib.parse import urlsplit

from jupyter_gpupool._find import write_private
from jupyter_gpupool._http import START, Address, Call, Connection, PoolError, Trouble, get
from jupyter_gpupool.progress import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Seconds that the processes of a pool have to leave by themselves, and then after SIGTERM.
STOP_S = 30.0
TERM_S = 5.0
#: Seconds that a controller which does not answer may take until it is seen gone.
DYING_S = 2.0
#: Seconds to wait for agents that have lost the controller, before they are told to end.
HEAR_S = 10.0
#: The controller ends the pool after so many seconds without leases.
IDLE_EXIT_S = 3600
SOURCE = "the embedded pool of this machine"
#: Files that only mean something while the pool runs.
STALE = ("client.json", "processes.json")
#: When it was stopped on purpose, until it is started again.
STOPPED = "stopped.json"
#: The GPUs of nodes, as numbers or by their models.
Nodes = Mapping[str, int | Sequence[str]]
#: Processes that this one has started, so that they can be reaped when they end.
children: list[subprocess.Popen[bytes]] = []


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
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Leases of other users must get through to simulated machines; to all else only the owner has access.
        folder.chmod(0o711 if os.geteuid() == 0 else 0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        sentence = f"The pool's folder {folder} cannot be used ({error.strerror})."
        advice = "Set $GPUPOOL_DIR to a folder of your own."
        raise PoolError(Trouble.NOT_STARTED, sentence, advice) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file; one that is missing or damaged says nothing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def write(path: Path, said: Mapping[str, Any]) -> None:
    """Write a JSON file that only its owner can read."""
    write_private(path, json.dumps(said, indent=1))


def processes() -> dict[str, int]:
    """Return the pool's processes that run, by name."""
    said = read(directory() / "processes.json")
    return {name: each["pid"] for name, each in said.items() if started_at(each["pid"]) == each["started"]}


def started_at(pid: int) -> int:
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
    said = read(directory() / "client.json")
    if not said or "controller" not in processes():
        raise PoolError(Trouble.NOT_STARTED, stopped() or "No pool runs on this machine.", START)
    return Address(url=said["url"], token=said["token"], ca=said["ca"], source=SOURCE, over=stopped)


def stopped() -> str:
    """Say that somebody has stopped the pool here, and when; "" where nobody has, or it runs again."""
    said = read(directory() / STOPPED)
    if "at" not in said:
        return ""
    when = time.strftime("%d %B at %H:%M", time.localtime(said["at"]))
    leases = "; its leases go on" if said.get("keep_leases") else ", with all its leases"
    return f"The pool on this machine was stopped on {when}{leases}."


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
        idle_exit: The pool ends after so many seconds without leases; 0: never, even if somebody else has
            started it already.

    Raises:
        PoolError: It could not be started; the sentence is that of the process that failed.
    """
    found = _whole()
    if found is None:
        with _alone() as folder, Waiting("Starting a pool on this machine"):
            from jupyter_gpupool.embedded_start import Start

            _wait(lambda: "controller" not in processes() or _answers(find()), DYING_S)
            found = Start(folder, idle_exit).pool(listen or {}, nodes)
    (directory() / STOPPED).unlink(missing_ok=True)
    if not idle_exit:
        _stay(directory()).touch(0o600)
    return found


def _stay(folder: Path) -> Path:
    from jupyter_gpupool.service import STAY

    return folder / "controller" / STAY


def _whole() -> Address | None:
    """Find the pool if nothing of it is missing."""
    with contextlib.suppress(PoolError):
        found = find()
        if set(read(directory() / "processes.json")) == set(processes()) and _answers(found):
            return found
    return None


def _answers(address: Address) -> bool:
    """Whether somebody listens there: a process that was killed is seen for a moment longer."""
    url = urlsplit(address.url)
    try:
        socket.create_connection((url.hostname or "", url.port or 0), 1).close()
    except OSError:
        return False
    return True


def may_start(listen: Mapping[str, Any], nodes: Nodes | None) -> None:
    """See that a pool that runs already is as it is wanted.

    Raises:
        PoolError: It listens elsewhere, or has other nodes; that can be changed only while it does not run.
    """
    if "controller" not in processes():
        return
    said = read(directory() / "listen.json")
    other = [name for name, value in listen.items() if value and value != said.get(name)]
    if nodes is not None and dict(nodes) != read(directory() / "plan.json").get("nodes"):
        other.append("simulate" if any(nodes.values()) else "no-gpus")
    if other:
        options = ", ".join(f"--{each.replace('_', '-')}" for each in other)
        raise PoolError(
            Trouble.BAD_CONFIG,
            f"The pool on this machine runs already, without that {options}.",
            "Stop it with `jupyter gpupool stop`, then start it so.",
        )


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


def stop(*, keep_leases: bool = False) -> bool:
    """End the pool with all its leases, and return when nothing of it runs; say whether there was one.

    Args:
        keep_leases: End controller and agents only; the next start takes back the leases, which go on.

    Raises:
        PoolError: A process does not end, even by SIGKILL.
    """
    if not processes() and (keep_leases or not _end_leftovers(directory())):
        return False
    with _alone() as folder, Waiting("Ending the pool on this machine"):
        if not keep_leases:
            _end_leases(folder)
        write(folder / STOPPED, {"at": time.time(), "keep_leases": keep_leases})
        _end_processes(folder)
        if not keep_leases:
            _end_leftovers(folder)
    return True


def _end_leftovers(folder: Path) -> bool:
    """End what agents that were killed have left of leases; say whether there was something."""
    nodes = [str(path.parent.parent) for path in folder.glob("*/leases/leases.json")]
    if not nodes:
        return False
    command = [sys.executable, "-m", "jupyter_gpupool.node.leftovers", *nodes]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, timeout=STOP_S, check=True, cwd="/")
        return int(said.stdout) > 0
    return False


def _end_leases(folder: Path) -> None:
    """Let the controller end all leases, the agents and itself."""
    if (
        processes().keys() != read(folder / "processes.json").keys()
    ):  # each is needed to end its part of leases
        from jupyter_gpupool.embedded_start import Start

        with contextlib.suppress(PoolError):
            Start(folder, 0).pool({}, None)
    with contextlib.suppress(PoolError), contextlib.closing(Connection(find())) as connection:
        agents = set(processes()) - {"controller"}
        _wait(lambda: agents <= connected(connection), HEAR_S)
        body = {"everything": True, "why": "the pool is stopped"}
        connection.send(Call(method="POST", path="/v1/stop", body=body, repeatable=False))
        _wait(lambda: not processes(), STOP_S)


def _end_processes(folder: Path) -> None:
    for name, pid in processes().items():
        if not end(pid):
            raise PoolError(Trouble.TIMED_OUT, f"The pool's {name} (process {pid}) does not end.", "Kill it.")
    for path in (*(folder / name for name in STALE), _stay(folder)):
        path.unlink(missing_ok=True)
    children[:] = [child for child in children if child.poll() is None]


def _wait(so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not so() and time.monotonic() < end:
        time.sleep(0.05)


def end(pid: int) -> bool:
    """End a process by SIGTERM, then by SIGKILL; say whether it is gone."""
    started = started_at(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + TERM_S
        while started and started_at(pid) == started and time.monotonic() < end:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(0.1)
    return not started or started_at(pid) != started
