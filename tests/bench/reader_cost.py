"""What the reader costs: the CPU time of its process, with a node of GPUs that each have a process.

The driver is the simulated one, written in Python, so the figure has its cost in it: with the real one a call
is a few microseconds. Polls come at the product's own interval of 15 s. Where a GPU is shared, its shares are
looked at every 2 s: what that costs for one GPU, and where all are shared, is measured after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import psutil

from jupyter_gpupool.driver import simulated
from jupyter_gpupool.node.reader import Reader
from jupyter_gpupool.node.share_guard import LOOK

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Reading

HOLD = "from jupyter_gpupool.driver import simulated; simulated.malloc(10**9); print(flush=True); input()"


def cpu(process: psutil.Process) -> float:
    """Seconds of CPU time that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


def holders(environ: dict[str, str], devices: list[str]) -> list[subprocess.Popen[bytes]]:
    """One process on each device."""
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdin=pipe,
            stdout=pipe,
            env=environ | {"CUDA_VISIBLE_DEVICES": device},
        )
        for device in devices
    ]
    for each in started:
        each.stdout.readline()
    return started


async def measure(environ: dict[str, str], seconds: float) -> dict[str, Any]:
    """Run a reader and return its cost from after its start on."""
    readings: list[Reading] = []
    reader = Reader(environ, node="node-1", on_readings=readings.extend)
    devices = await reader.start()
    await asyncio.sleep(2)
    process, me = psutil.Process(reader._process.pid), psutil.Process()
    at, used, mine, before = time.monotonic(), cpu(process), cpu(me), len(readings)
    await asyncio.sleep(seconds)
    passed = time.monotonic() - at
    result = {
        "gpus": len(devices),
        "seconds": round(passed, 1),
        "core_percent": round(100 * (cpu(process) - used) / passed, 3),
        "agent_core_percent": round(100 * (cpu(me) - mine) / passed, 3),
        "readings": len(readings) - before,
        "processes": sum(len(each.processes) for each in readings[-len(devices) :]),
        "one_shared_core_percent": await shared(reader, process, [devices[0].uuid], seconds / 3),
        "all_shared_core_percent": await shared(reader, process, [], seconds / 3),
        "rss_mb": round(process.memory_info().rss / 2**20, 1),
    }
    await reader.close()
    return result


async def shared(reader: Reader, process: psutil.Process, devices: list[str], seconds: float) -> float:
    """The cost while the shares on these devices (none: on all) are looked at, as the agent does."""
    at, used = time.monotonic(), cpu(process)
    while time.monotonic() - at < seconds:
        await asyncio.sleep(LOOK)
        await reader.poll(devices)
    return round(100 * (cpu(process) - used) / (time.monotonic() - at), 3)


def main() -> None:
    """Print the figures as the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two polls instead of six")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        simulated.create(folder, {"node-1": arguments.gpus})
        environ = os.environ | simulated.environment(folder, "node-1")
        started = holders(environ, simulated.Machine(folder).devices())
        try:
            result = asyncio.run(measure(environ, 31 if arguments.quick else 91))
        finally:
            for each in started:
                each.communicate(b"\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
