"""What a machine has for leases besides its GPUs: the CPUs and memory that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def cpus(root: Path = CGROUP) -> int:
    """Return the CPUs that this process may use, in thousandths of a core."""
    try:
        found = len(os.sched_getaffinity(0)) * 1000
    except AttributeError:  # not Linux
        found = (os.cpu_count() or 1) * 1000
    words = _read(root / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        found = min(found, int(words[0]) * 1000 // int(words[1]))
    return max(found, 1)


def memory(root: Path = CGROUP) -> int:
    """Return the memory that this process may use, in bytes."""
    found = int(psutil.virtual_memory().total)
    limit = _read(root / "memory.max").strip()
    return min(found, int(limit)) if limit.isdigit() else found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
