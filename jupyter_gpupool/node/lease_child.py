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
            and spec (its argument).
    """
    # By name: how a lease's processes behave is that room's business. The forkserver has loaded it already.
    process = importlib.import_module("jupyter_gpupool.lease.process")
    process.enter(order["mark"], order["log"], order["environ"])
    os.umask(order["umask"])
    if order["folder"]:
        os.chdir(order["folder"])
        sys.path.insert(0, order["folder"])
    module, _, function = order["target"].partition(":")
    getattr(importlib.import_module(module), function)(order["spec"])


def nothing() -> None:
    """Do nothing, in a process that shows that the forkserver is ready."""
