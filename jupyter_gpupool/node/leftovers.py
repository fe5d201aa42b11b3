"""Ends what an agent that is gone for good has left running: the processes that its list of leases names.

`python -m jupyter_gpupool.node.leftovers DIR…` (the folders of agents) prints how many there were. An agent
that runs, or is to be started again, does this itself and better.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from jupyter_gpupool.node import guard


async def end(folder: Path) -> int:
    """End the processes of an agent's leases and remove their files; return how many there were.

    Args:
        folder: The agent's own folder.
    """
    data = _read(folder / "leases" / "leases.json")
    if data.get("boot") != guard.boot_id() or not data.get("agent"):
        return 0
    there = guard.look()
    entries = data.get("entries", ())
    known = (f"{data['agent']}:{each['key']}" for each in entries if each.get("key"))
    marks = list({*guard.marked(f"{data['agent']}:", there), *known})
    roots = {(each["pid"], each["started"]) for each in entries if each.get("pid")}
    if not guard.find(marks, roots, there):
        guard.remove_semaphores(marks)
        return 0
    ended = await guard.end(marks, roots)
    if data.get("run"):
        shutil.rmtree(data["run"], ignore_errors=True)
    return len(ended)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def main() -> None:
    """End the leftovers of the agents whose folders are named."""
    print(sum(asyncio.run(end(Path(each))) for each in sys.argv[1:]))  # noqa: T201 - a program's answer


if __name__ == "__main__":
    main()
