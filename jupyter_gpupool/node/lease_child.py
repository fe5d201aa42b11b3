"""The first thing that runs in a process that the launcher's forkserver has forked for a lease."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def run(order: dict[str, Any]) -> None:
    """Become the ordered process.

    Args:
        order: mark, environ, log (path), umask, folder (working directory or ""), target ("module:function")
        and spec
            (its argument).
    """
    _write_to(order["log"])
    # By name: how a lease's processes behave is that room's business, and it is loaded in the forkserver
    # already.
    importlib.import_module("jupyter_gpupool.lease.process").enter(order["mark"], order["environ"])
    os.umask(order["umask"])
    if order["folder"]:
        os.chdir(order["folder"])
        sys.path.insert(0, order["folder"])
    module, _, function = order["target"].partition(":")
    getattr(importlib.import_module(module), function)(order["spec"])


def nothing() -> None:
    """Do nothing, in a process that shows that the forkserver is ready."""


def _write_to(log: str) -> None:
    """Send what the process says to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
