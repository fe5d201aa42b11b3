"""How soon a killed controller is back, with all its leases, its agents connected and its API answering.

The controller is the real process, killed by SIGKILL and started anew, with its journal, TLS and API. The
agents stand in: they are connected as real ones are, present what they have, and do as they are told at once,
but have neither GPUs nor processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dask
import httpx
import psutil

from jupyter_gpupool import wire
from jupyter_gpupool.core.model import encode
from jupyter_gpupool.node.connection import Connection
from jupyter_gpupool.node.membership import join
from tests.pool_helpers import node

#: Nodes that stand in; the leases are dealt out among them.
NODES = 8
#: Seconds that anything may take.
LONGEST = 900.0


class StandIn:
    """An agent's connection, with a list of what would run."""

    def __init__(self, folder: Path, line: str, name: str, gpus: int) -> None:
        self.node = node(name, gpus, cpus=1_000_000, host=2**45)
        self.slices: set[str] = set()
        self.leases: set[str] = set()
        (folder / name).mkdir()
        member = join(folder / name, line, name)
        self.connection = Connection(
            member, folder / name, name, joined=self.joined, connected=lambda: None, obey=self.obey
        )

    def joined(self) -> wire.Message:
        """Present what there is."""
        said = {"report": "joined", "node": encode(self.node), "head": self.node.name == "node-0"}
        return {**said, "adopted": sorted(self.slices), "leases": sorted(self.leases)}

    def obey(self, orders: list[wire.Message]) -> None:
        """Say that it is done."""
        put = self.connection.outbox.put
        for order in orders:
            lease = order.get("lease")
            if order["order"] == "start_scheduler":
                self.leases.add(lease)
                put({"report": "scheduler_started", "lease": lease, "address": f"tls://{lease}:1"})
            elif order["order"] == "start_worker":
                self.slices.add(order["slice"]["id"])
                put({"report": "slice_started", "slice": order["slice"]["id"]})


class Restarted:
    """A controller that can be killed and started, and how it is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "controller"
        self.start()

    def start(self) -> None:
        """Start it, and return at once."""
        self.started = time.monotonic()
        command = [sys.executable, "-m", "jupyter_gpupool.controller", "--dir", str(self.folder)]
        self.process = subprocess.Popen([*command, "--log", str(self.folder) + ".log"])

    async def up(self) -> None:
        """Wait until it says that it serves, and know how to call it."""
        path = self.folder / "pool.json"
        while not path.exists() or (said := json.loads(path.read_text()))["pid"] != self.process.pid:
            assert self.process.poll() is None
            await asyncio.sleep(0.005)
        token = json.loads((self.folder / "admin.json").read_text())["token"]
        self.client = httpx.AsyncClient(
            base_url=said["url"],
            verify=ssl.create_default_context(cadata=said["ca"]),
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        )

    async def get(self, path: str) -> Any:
        """Ask for something."""
        answer = await self.client.get(path)
        answer.raise_for_status()
        return answer.json()

    async def post(self, path: str, body: Any) -> Any:
        """Ask for something to be made."""
        answer = await self.client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()


async def count_active(pool: Restarted) -> int:
    """How many leases the API lists as active."""
    found, after = 0, ""
    while True:
        page = await pool.get(f"/v1/leases?state=active&limit=500{after}")
        found += len(page["leases"])
        if not page["next"]:
            return found
        after = f"&after={page['next']}"


async def ready(pool: Restarted, agents: list[StandIn], leases: int) -> None:
    """Wait until all agents are connected, their nodes up, and all leases active."""
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        nodes = (await pool.get("/v1/pool"))["nodes"]
        there = all(each.connection.connected for each in agents)
        up = sum(each["state"] == "up" for each in nodes) == len(agents)
        if there and up and await count_active(pool) == leases:
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("the pool does not become ready")


async def measure(folder: Path, leases: int) -> dict[str, Any]:
    """Fill a pool with leases, kill its controller, and time its return."""
    pool = Restarted(folder)
    await pool.up()
    agents = []
    for number in range(NODES):
        line = (await pool.post("/v1/tokens", {"kind": "agent"}))["line"]
        name, gpus = f"node-{number}", -(-leases // NODES)
        agents.append(await asyncio.to_thread(StandIn, folder, line, name, gpus))
    tasks = [asyncio.create_task(each.connection.run()) for each in agents]
    await ready(pool, agents, 0)
    for number in range(leases):
        body = {"gpus": 1, "name": f"lease-{number}", "cpus": 0.1, "memory": "100MB", "time_limit": "10h"}
        await pool.post("/v1/requests", body)
    await ready(pool, agents, leases)
    await pool.client.aclose()
    times = []
    for _ in range(3):
        pool.process.kill()
        pool.process.wait()
        pool.start()
        await pool.up()
        answers = time.monotonic() - pool.started
        await ready(pool, agents, leases)
        took = time.monotonic() - pool.started
        used = psutil.Process(pool.process.pid).cpu_times()
        times.append((took, answers, used.user + used.system))
        await pool.client.aclose()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pool.process.kill()
    pool.process.wait()
    best, answers, cpu = min(times)
    return {
        "leases": leases,
        "ready_s": round(best, 3),
        "ready_all_s": [round(each, 3) for each, _, _ in times],
        "answers_s": round(answers, 3),
        "cpu_s": round(cpu, 3),
        "agents": f"{NODES}, without processes",
    }


def main() -> None:
    """Run the bench; the last line is its result as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.restart")
    parser.add_argument("--leases", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="100 leases")
    options = parser.parse_args()
    dask.config.set(wire.SETTINGS)
    wire.close_comms()
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), 100 if options.quick else options.leases))))


if __name__ == "__main__":
    main()
