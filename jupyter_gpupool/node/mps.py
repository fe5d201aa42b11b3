"""NVIDIA's Multi-Process Service as a limit of shares: only among one owner's leases.

Rule 1: it is used where its daemon runs, for shares only, and for one owner on a node at a time: the daemon
        serves one OS user at a time, and a fatal fault of one client ends all of them.
Rule 2: every other worker is kept away from the daemon, which it would else find by itself.
Rule 3: a daemon is believed only in a folder of root's or of the agent's own user: the default one is below
        /tmp, where anybody could put up pipes that other people's processes would then talk to.

From NVIDIA's manual of MPS: the daemon's pipe directory, its control pipe and the file with its PID, and the
limits that a client's environment states for itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import MIB, WHOLE
from jupyter_gpupool.node.guard import started_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_gpupool.core.model import Slice

_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
#: A name under which there is never a daemon: CUDA then goes without.
_NOWHERE = "/nonexistent/gpupool-no-mps"
#: What the server's process is called; it computes for its clients and is nobody from outside.
SERVER = "nvidia-cuda-mps-server"


def daemon(environ: Mapping[str, str] | None = None) -> str:
    """Answer with the pipe directory of the daemon that runs on this node; "": none does.

    Args:
        environ: The agent's environment.
    """
    folder = Path((os.environ if environ is None else environ).get(_DIRECTORY) or "/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's default
    try:
        trusted = folder.stat().st_uid in (0, os.geteuid())
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
    except (OSError, ValueError):
        return ""
    return str(folder) if trusted and (folder / "control").exists() and started_at(pid) else ""


def limits(part: Slice, folder: str) -> dict[str, str]:
    """Answer with the variables by which MPS limits a share's memory and compute.

    Args:
        part: The share; its process sees one GPU, which is therefore number 0.
        folder: As `daemon` answers.
    """
    return {
        _DIRECTORY: folder,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={part.vram // MIB}M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, part.milli * 100 // WHOLE)),
    }


def away() -> dict[str, str]:
    """Answer with the variables that keep a process away from a daemon."""
    return {_DIRECTORY: _NOWHERE}
