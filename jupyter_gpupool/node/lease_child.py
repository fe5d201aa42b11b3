"""The first thing that runs in a process that the launcher's forkserver has forked for a lease."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


#: The exit status of a process whose order cannot be carried out here as it was given.
UNUSABLE = os.EX_CONFIG


def run(order: dict[str, Any]) -> None:
    """Become the ordered process.

    Args:
        order: mark, environ, log (path), umask, folder (working directory or ""), preferred_folder (the
            same, where it is there), target ("module:function"), spec (its argument), semaphores (how the
            names of those begin; an older agent does not say).

    Raises:
        SystemExit: There is no such folder; `UNUSABLE`, and its last words are a sentence for the owner.
    """
    # By name: how a lease's processes behave is that room's business. The forkserver has loaded it already.
    process = importlib.import_module("jupyter_gpupool.lease.process")
    process.enter(order["mark"], order["log"], order["environ"])
    process.name_semaphores(order.get("semaphores", ""))
    os.umask(order["umask"])
    _enter_folder(order)
    module, _, function = order["target"].partition(":")
    getattr(importlib.import_module(module), function)(order["spec"])


def wait(pipe: Connection) -> None:
    """Wait for an order, and carry it out; without one the process ends with its launcher.

    Args:
        pipe: Brings the order, as JSON.
    """
    importlib.import_module("jupyter_gpupool.lease.process").spare()
    try:
        order = json.loads(pipe.recv_bytes())
    except EOFError:
        return
    pipe.close()
    run(order)


def _enter_folder(order: dict[str, Any]) -> None:
    """Work where the person said, or where they are; what they have there can be imported."""
    folder = order["folder"] or order["preferred_folder"]
    if not folder:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        if order["folder"]:
            print(  # noqa: T201 - the process's log
                f"the working directory {folder} cannot be used on {socket.gethostname()} "
                f"({error.strerror}): name one that this node has and its user may enter, or none",
                file=sys.stderr,
                flush=True,
            )
            raise SystemExit(UNUSABLE) from None
        here = os.getcwd()  # noqa: PTH109 - a text is written
        print(f"{folder} cannot be used here ({error.strerror}); working in {here}.", file=sys.stderr)  # noqa: T201 - the process's log
    else:
        sys.path.insert(0, folder)


def nothing() -> None:
    """Do nothing, in a process that shows that the forkserver is ready."""
