"""What the pool's long-running processes do alike: their log, their end, one of them a folder.

Used by `controller`, `node` and whoever starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import logging.handlers
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import TextIOWrapper

#: Bytes of a log file, and how many older ones are kept.
LOG_SIZE, LOG_FILES = 5_000_000, 2
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: Dask's own words about each connection are of no use to a person.
QUIET = (
    "distributed.core",
    "distributed.scheduler",
    "distributed.worker",
    "distributed.batched",
    "distributed.comm",
)


class PrivateLog(logging.handlers.RotatingFileHandler):
    """A log that is turned over, and whose every file only its owner can read."""

    def _open(self) -> TextIOWrapper:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        file = open(self.baseFilename, self.mode, encoding="utf-8", opener=private)  # noqa: SIM115 - `close` does
        return cast("TextIOWrapper", file)


def log_to(path: str) -> None:
    """Log to a file that is turned over when it is large, or to standard error where `path` is empty."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path:
        handler = PrivateLog(path, maxBytes=LOG_SIZE, backupCount=LOG_FILES)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    distributed = logging.getLogger("distributed")
    distributed.handlers.clear()
    distributed.propagate = True
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    # each heartbeat that an absent controller does not answer would be a page of traceback
    logging.getLogger("distributed.worker").setLevel(logging.CRITICAL)


def give_memory_back() -> None:
    """Give memory that is free back to the system, where the C library has a word for it.

    The text of a snapshot is some megabytes for a moment; without this they stay with the process for good.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` when the process is asked to end; to be called in the event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


#: While the controller's folder has a file of this name, its pool does not end for want of leases.
STAY = "stay"


def claim(folder: Path, what: str) -> int:
    """Make a folder for this user's eyes only, and claim it for one process of a kind.

    Returns:
        The lock's file descriptor, to be kept open.

    Raises:
        OSError: It is another user's, cannot be made, or another process has it; the text says which.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: name a folder of your own.")
    folder.chmod(0o700)
    handle = os.open(folder / f"{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
        os.close(handle)
        raise BlockingIOError(
            f"{folder} is in use by another {what}, process {holder}: stop it, or name another folder."
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


#: Seconds between two looks at whether a process's folder is still there.
LOOK = 5.0


async def until_deleted(folder: Path, what: str, handle: int) -> None:
    """Return when the folder that this process has claimed is deleted: nobody could find the process then.

    Args:
        folder: The claimed folder.
        what: The kind of process that it is claimed for.
        handle: What `claim` returned.
    """
    missed = 0
    while missed < 2:  # twice in a row: a look may come while a folder is being moved back
        await asyncio.sleep(LOOK)
        missed = missed + 1 if is_deleted(folder, what, handle) else 0


def is_deleted(folder: Path, what: str, handle: int) -> bool:
    """Whether the folder that this process has claimed is not there now; the arguments are as above."""
    try:
        return (folder / f"{what}.lock").stat().st_ino != os.fstat(handle).st_ino
    except FileNotFoundError:
        return True
    except OSError:  # a file system that does not answer has deleted nothing
        return False


def free_port() -> int:
    """Choose a port that is free and stays so: none that the system gives to outgoing connections.

    While a controller is down, its agents try to reach it, and the system could give its port to one of them.
    """
    first = 32768
    with contextlib.suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for port in random.sample(range(max(1024, first - 10_000), max(2048, first)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    return 0


def give_up(sentence: object) -> NoReturn:
    """End the process because it cannot start: one sentence on standard error, exit status 1."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(1)
