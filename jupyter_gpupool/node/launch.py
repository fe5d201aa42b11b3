"""How a lease's processes are started: a warm launcher for each user and Python environment.

A launcher runs as its user, with an environment of its own from an allow-list, and owns a forkserver that has
loaded what a lease needs. The line to it is a socket pair, of which nobody else can have an end: there is no
path that another user could find, take or make too long, and a launcher sees at once that its agent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_gpupool.node.guard import MARK, WIDTH, send, started_at, user_of

logger = logging.getLogger(__name__)

#: Variables of the agent that a lease's processes may have; names that end with "*" are beginnings. Nothing
#: else passes: an agent's environment may hold its service's secrets.
ALLOWED = (
    "PATH",
    "LANG",
    "LC_*",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_DEVICE_ORDER",
    "CUDA_MPS_*",
    "NVIDIA_*",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "SSL_CERT_*",
)
#: Thread counts must be there before numpy is loaded, so before the forkserver starts; malloc gives memory
#: back early. They are Dask's own `pre-spawn-environ`.
THREADS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "PYTHONHASHSEED": "6640",
}
#: Bits of a file's mode that what a lease writes never gets.
UMASK = 0o077
#: Seconds after which a launcher that nobody uses ends; one with a request's own variables serves few.
UNUSED, UNUSED_VARIABLES = 3600.0, 120.0
#: Seconds until an interpreter that was only preferred, and could not start a process, is tried again.
UNFIT = 600.0
#: Seconds that a forkserver may take to load, and a process to start.
WARM, START = 120.0, 30.0

#: Bytes that are read of what a launcher said last: its user's code may have written any number.
_WORDS = 4096

#: Beginning of the name of a launcher's folder.
_PREFIX = "l-"
_CODE = "from jupyter_gpupool.node.lease_launcher import main; main()"


class LaunchError(Exception):
    """A process could not be started; the sentence says why and what to do."""


@dataclass(frozen=True)
class Account:
    """As whom a process runs. `switch` is false where that is who the agent is already."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    switch: bool


def find_account(user: str, *, switches: bool) -> Account:
    """Find the OS user that a lease's processes run as.

    Args:
        user: The lease's owner.
        switches: The agent starts processes as other users; otherwise everything runs as the agent's own.

    Raises:
        LaunchError: There is no such user on this machine.
    """
    if not switches:
        uid = os.geteuid()
        with contextlib.suppress(KeyError):  # a UID without an entry, as in containers
            user = pwd.getpwuid(uid).pw_name
        home = os.path.expanduser("~")  # noqa: PTH111 - works for a UID without an entry, as in containers
        return Account(user, uid, os.getegid(), tuple(os.getgroups()), home, switch=False)
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise LaunchError(
            f"{user} is no user of {socket.gethostname()}; create the account there or map the name to one"
        ) from None
    if entry.pw_uid == 0 and user != "root":
        raise LaunchError(f"{user} is root on {socket.gethostname()}; map the name to another OS user")
    groups = os.getgrouplist(user, entry.pw_gid)
    return Account(
        user, entry.pw_uid, entry.pw_gid, tuple(groups), entry.pw_dir, switch=entry.pw_uid != os.geteuid()
    )


def allowed_environment(
    given: dict[str, str], account: Account, more: dict[str, str] | None = None
) -> dict[str, str]:
    """Choose the environment of a launcher and of all that it starts.

    Args:
        given: The agent's own environment.
        account: As whom it runs.
        more: What is set on top, by the pool (simulated machines) and by the request.

    >>> me = Account("ana", 1000, 1000, (), "/home/ana", switch=False)
    >>> allowed_environment({"PATH": "/bin", "SECRET": "x"}, me)["PATH"]
    '/bin'
    """
    chosen = {
        name: value
        for name, value in given.items()
        if any(name == rule or (rule.endswith("*") and name.startswith(rule[:-1])) for rule in ALLOWED)
    }
    own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    return {**chosen, **THREADS, **own, **(more or {})}


@dataclass
class _Launcher:
    key: tuple[Any, ...]
    popen: subprocess.Popen[bytes]
    folder: Path
    writer: asyncio.StreamWriter
    ready: asyncio.Future[int]
    used: float
    waiting: dict[int, asyncio.Future[int]] = field(default_factory=dict)
    #: Orders for whose process nobody waits any more.
    given_up: set[int] = field(default_factory=set)
    #: By PID: what becomes of its processes.
    exits: dict[int, asyncio.Future[int | None]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Launchers:
    """The launchers of one agent."""

    def __init__(
        self,
        folder: Path,
        *,
        switches: bool,
        environ: dict[str, str],
    ) -> None:
        #: Where each launcher gets a folder of its own for its forkserver's socket; the path must be short.
        self._folder = folder
        self._switches = switches
        #: Variables on top of the allowed ones: the simulated machine, where there is one.
        self._environ = environ
        #: By PID: the exit statuses of processes that have been started here, as soon as they are told.
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self._launchers: dict[tuple[Any, ...], _Launcher] = {}
        self._starting: dict[tuple[Any, ...], asyncio.Lock] = {}
        self._numbers = itertools.count(1)
        #: By user and interpreter: until when it is not tried again, as it could not start a process.
        self._unfit: dict[tuple[int, str], float] = {}
        #: Folders of launchers that live, or are being started.
        self._made: set[Path] = set()

    async def warm(
        self, account: Account, *, python: str = "", variables: dict[str, str] | None = None
    ) -> int:
        """Have a launcher ready, and answer with its forkserver's PID.

        Args:
            account: As whom.
            python: The interpreter of the environment; empty: the agent's own.
            variables: Environment variables of the request's own; they need a launcher of their own.

        Raises:
            LaunchError: It could not be started; its own words are in the sentence.
        """
        launcher = await self._find(account, python, variables or {})
        return await _ready(launcher)

    async def start(
        self,
        account: Account,
        order: dict[str, Any],
        *,
        python: str = "",
        variables: dict[str, str] | None = None,
    ) -> int:
        """Start one process and answer with its PID.

        Args:
            account: As whom.
            order: What `lease_child.run` takes.
            python: As for `warm`.
            variables: As for `warm`.

        Raises:
            LaunchError: It could not be started.
        """
        launcher = await self._find(account, python, variables or {})
        await _ready(launcher)
        launcher.used = time.monotonic()
        number = next(self._numbers)
        answer = launcher.waiting[number] = asyncio.get_running_loop().create_future()
        launcher.writer.write(json.dumps({**order, "number": number}).encode() + b"\n")
        try:
            return await asyncio.wait_for(answer, START)
        except TimeoutError:
            raise LaunchError(f"the launcher of {account.name} did not answer within {START:.0f} s") from None
        finally:
            launcher.waiting.pop(number, None)
            if answer.cancelled():
                launcher.given_up.add(number)

    async def start_in(
        self,
        account: Account,
        order: dict[str, Any],
        *,
        python: str = "",
        preferred: str = "",
        variables: dict[str, str] | None = None,
    ) -> int:
        """Start one process in the interpreter that is preferred, where this node has it and it will do.

        Args:
            account: As whom.
            order: What `lease_child.run` takes.
            python: As for `warm`; then nothing is preferred.
            preferred: The interpreter in which whoever asks runs; empty: none.
            variables: As for `warm`.

        Raises:
            LaunchError: It could not be started.
        """
        wished = (account.uid, preferred)
        if not python and self._has(preferred) and time.monotonic() > self._unfit.get(wished, 0.0):
            try:
                return await self.start(account, order, python=preferred, variables=variables)
            except LaunchError as error:
                # A virtual environment without this package, say: not worth another try for a while.
                self._unfit[wished] = time.monotonic() + UNFIT
                logger.warning("the agent's own Python is used in place of %s: %s", preferred, error)
        return await self.start(account, order, python=python, variables=variables)

    def _has(self, python: str) -> bool:
        """Whether an interpreter is here and another one than the agent's own."""
        return bool(python) and python != sys.executable and os.access(python, os.X_OK)

    async def exit_status(self, pid: int, seconds: float) -> int | None:
        """Answer with the exit status of a process that has ended; None where nobody tells it.

        Args:
            pid: As `start` has answered.
            seconds: How long its launcher has to tell it; a former agent's tells nothing.
        """
        told = self._exits.pop(pid, None)
        if told is None:
            return None
        await asyncio.wait([told], timeout=seconds)
        return told.result() if told.done() else None

    def forkservers(self) -> list[int]:
        """PIDs of the forkservers that are up, those of former agents included."""
        files = self._folder.glob(f"{_PREFIX}*.pid")
        return [int(file.read_text().split()[0]) for file in files if _is_alive(file)]

    async def end_unused(self, now: float) -> None:
        """End the launchers that nobody has used for an hour; what they started lives on.

        Args:
            now: Seconds of the monotonic clock.
        """
        for launcher in list(self._launchers.values()):
            _, _, variables = launcher.key
            if now - launcher.used > (UNUSED_VARIABLES if variables else UNUSED):
                await self._end(launcher)
        self.sweep()

    def sweep(self) -> None:
        """Remove what is left of launchers whose forkservers have ended, a former agent's included."""
        for folder in self._folder.glob(f"{_PREFIX}*/"):
            if folder not in self._made and not _is_alive(folder.with_suffix(".pid")):
                shutil.rmtree(folder, ignore_errors=True)
                for suffix in (".pid", ".err"):
                    folder.with_suffix(suffix).unlink(missing_ok=True)

    async def close(self) -> None:
        """End all launchers; what they started lives on."""
        for launcher in list(self._launchers.values()):
            await self._end(launcher)

    async def _find(self, account: Account, python: str, variables: dict[str, str]) -> _Launcher:
        key = (account.uid, python, tuple(sorted(variables.items())))
        async with self._starting.setdefault(key, asyncio.Lock()):
            if key not in self._launchers:
                self._launchers[key] = await self._launch(key, account, python, variables)
            return self._launchers[key]

    async def _launch(
        self, key: tuple[Any, ...], account: Account, python: str, variables: dict[str, str]
    ) -> _Launcher:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder))
        self._made.add(folder)
        more = {**self._environ, **variables, MARK: "." * WIDTH}
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                if account.switch:
                    os.chown(folder, account.uid, account.gid, follow_symlinks=False)
                popen = _popen(account, python, theirs.fileno(), folder, more)
            except BaseException:
                ours.close()
                self._made.discard(folder)
                shutil.rmtree(folder, ignore_errors=True)
                raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        launcher = _Launcher(key, popen, folder, writer, ready, time.monotonic())
        launcher.task = asyncio.create_task(self._listen(launcher, reader))
        return launcher

    async def _listen(self, launcher: _Launcher, reader: asyncio.StreamReader) -> None:
        """Hear a launcher out, and forget it when it is gone."""
        try:
            while line := await reader.readline():
                self._hear(launcher, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # It may be an interpreter of its user's own: what it says is a claim.
            logger.warning("a launcher said what cannot be so, and is ended: %r", error)
            launcher.popen.kill()
        if self._launchers.get(launcher.key) is launcher:
            del self._launchers[launcher.key]
        launcher.writer.close()
        await asyncio.to_thread(_reap, launcher.popen)
        self._made.discard(launcher.folder)
        for told in launcher.exits.values():
            told.set_result(None)
        why = LaunchError(_why_ended(launcher))
        for answer in (launcher.ready, *launcher.waiting.values()):
            if not answer.done():
                answer.set_exception(why)
                answer.exception()  # nobody need be waiting for it

    def _hear(self, launcher: _Launcher, message: dict[str, Any]) -> None:
        if message.get("ready"):
            server = _claimed(launcher, message["forkserver"])
            launcher.folder.with_suffix(".pid").write_text(f"{server} {started_at(server)}")
            if launcher.ready.done():  # the first one has died
                launcher.ready = asyncio.get_running_loop().create_future()
            launcher.ready.set_result(server)
        elif "exited" in message:
            if (told := launcher.exits.pop(message["exited"], None)) is not None:
                told.set_result(int(message["code"]))
        elif message.get("started") in launcher.given_up:
            _end_late(launcher, message)
        else:
            answer = launcher.waiting.get(message.get("started", message.get("failed", 0)))
            if answer is None or answer.done():
                return
            if "failed" in message:
                answer.set_exception(LaunchError(f"no process could be forked: {message['why']}"))
            else:
                pid = _claimed(launcher, message["pid"])
                # Here, not where it is waited for: one that ends at once is told of in the same breath.
                self._exits[pid] = launcher.exits[pid] = asyncio.get_running_loop().create_future()
                answer.set_result(pid)

    async def _end(self, launcher: _Launcher) -> None:
        self._launchers.pop(launcher.key, None)
        self._starting.pop(launcher.key, None)
        launcher.writer.close()
        if launcher.task is not None:
            await launcher.task


def _popen(
    account: Account, python: str, line: int, folder: Path, more: dict[str, str]
) -> subprocess.Popen[bytes]:
    identity: dict[str, Any] = {}
    if account.switch:
        identity = {"user": account.uid, "group": account.gid, "extra_groups": list(account.groups)}
    try:
        # Beside the folder: that is its user's, who could put anything there under this name.
        with folder.with_suffix(".err").open("wb") as stderr:
            return subprocess.Popen(
                [python or sys.executable, "-P", "-c", _CODE, str(line), str(folder)],
                env=allowed_environment(dict(os.environ), account, more),
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                cwd=account.home if os.access(account.home, os.X_OK) else "/",
                umask=UMASK,
                pass_fds=[line],
                start_new_session=True,
                **identity,
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"{python or sys.executable} could not be started as {account.name} "
            f"({getattr(error, 'strerror', None) or error}): "
            "check that the interpreter exists and that this user may run it"
        ) from error


def _claimed(launcher: _Launcher, pid: object) -> int:
    """Take a PID that a launcher names, as it will be signalled: a process of its own user, or none any more.

    Raises:
        ValueError: It is somebody else's.
    """
    uid, *_ = launcher.key
    if not isinstance(pid, int) or pid < 0 or user_of(pid) not in (uid, -1):
        raise ValueError(f"process {pid!r:.40} is none of UID {uid}")
    return pid


def _end_late(launcher: _Launcher, message: dict[str, Any]) -> None:
    """End a process that came after its order was given up: another one may stand in its place by now."""
    pid = _claimed(launcher, message["pid"])
    launcher.given_up.discard(message["started"])
    logger.warning("process %d was started too late; it is ended", pid)
    send((pid, started_at(pid)), signal.SIGKILL)


def _reap(popen: subprocess.Popen[bytes]) -> None:
    try:
        popen.wait(5)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


async def _ready(launcher: _Launcher) -> int:
    try:
        return await asyncio.wait_for(asyncio.shield(launcher.ready), WARM)
    except TimeoutError:
        raise LaunchError(f"a Python environment was not loaded within {WARM:.0f} s") from None


def _is_alive(file: Path) -> bool:
    """Whether the process lives that this file names by PID and start time."""
    try:
        pid, started = map(int, file.read_text().split())
    except (OSError, ValueError):
        return False
    return started_at(pid) == started


def _why_ended(launcher: _Launcher) -> str:
    _, python, _ = launcher.key
    with launcher.folder.with_suffix(".err").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _WORDS))
        lines = file.read(_WORDS).decode(errors="replace").strip("\0 \n").splitlines()[-3:]
    said = " | ".join(lines) or f"it ended with status {launcher.popen.returncode} and said nothing"
    if not python or launcher.ready.done():
        return f"the launcher has ended: {said}"
    return (
        f"{python} cannot run a lease's processes ({said}); "
        "give environment.python a Python interpreter in which jupyter-gpupool is installed"
    )
