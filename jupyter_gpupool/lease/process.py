"""How a process of a lease can be told from all others, for as long as it or anything that it starts lives.

A process of a lease leads a session of its own, so that it outlives its agent, and carries a mark in its
environment. Forked children inherit the mark with the memory, started programs with the environment, daemons
that have left session and parent as well. The agent finds them all by it (`node.guard`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from multiprocessing import process
from pathlib import Path

logger = logging.getLogger(__name__)

#: The variable that carries the mark. The launcher's environment has it from the start, filled up to `WIDTH`:
#: what /proc shows of a forked process is the memory of the program's start, so the mark is written over it
#: in place.
MARK = "GPUPOOL_MARK"
WIDTH = 200
#: `prctl(PR_SET_CHILD_SUBREAPER, 1)`: orphans below this process become its children instead of init's.
_SUBREAPER = 36

#: The mark of a process that is nobody's yet.
SPARE = "spare"


def padded(mark: str) -> str:
    """Fill a mark up to the width that all marks have.

    Raises:
        ValueError: The mark is too long.
    """
    if len(mark.encode()) > WIDTH:
        raise ValueError(f"the mark {mark!r} is longer than {WIDTH} bytes; use a shorter lease id")
    return mark.ljust(WIDTH, ".")


def enter(mark: str, log: str, environ: dict[str, str]) -> None:
    """Make this freshly forked process one of a lease's.

    Args:
        mark: Whose it is.
        log: Path of the file that takes what it says.
        environ: Variables for it and for what it starts.
    """
    _write_to(log)
    _say_when()
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()
    os.environ.update(environ)
    os.environ[MARK] = padded(mark)
    if not _overwrite(padded(mark)):
        logger.debug("the mark could not be written into the environment that /proc shows")
    take_in_orphans()


def name_semaphores(prefix: str) -> None:
    """Let what this process, and all that it forks by `multiprocessing`, makes of semaphores begin so.

    Dask makes six for each worker, and a process that is killed removes none. By their names the agent can.

    Args:
        prefix: As `node.guard.semaphores` answers; empty: names as Python gives them.
    """
    config = getattr(process.current_process(), "_config", {})
    if prefix and "semprefix" in config:  # private to `multiprocessing`; without it they have its own names
        config["semprefix"] = prefix


def spare() -> None:
    """Mark this process as one that waits to become a lease's, so that nobody takes it for what one left."""
    _overwrite(padded(SPARE))


def take_in_orphans() -> None:
    """Become the parent of what is orphaned below this process; where that cannot be, init takes it in."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _write_to(log: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(log, flags, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _say_when() -> None:
    """Let the pool's own words stand in the log as Dask's do."""
    own = logging.getLogger("jupyter_gpupool")
    if not own.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
        own.addHandler(handler)
        own.setLevel(logging.INFO)
        own.propagate = False


def _overwrite(mark: str) -> bool:
    """Write the mark over the one that this process was started with."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])  # env_start and env_end, fields 50 and 51 of proc(5)
    except (OSError, IndexError, ValueError):
        return False
    if not 0 < start < end:
        return False
    name = MARK.encode() + b"="
    at = ctypes.string_at(start, end - start).find(name)
    if at < 0 or start + at + len(name) + WIDTH > end:
        return False
    ctypes.memmove(start + at + len(name), mark.encode(), WIDTH)
    return True
