"""How the HTTP API holds up: servers that wait for news, people who request, read and release.

The controller is a process of its own with its journal, TLS and API; its agents have no processes and obey at
once. `--connected` servers hold a connection each and poll for notices; `--rate` requests a second are made,
each read back and released again. Every notice must reach every server of its person.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: People; servers and requests are dealt out among them.
PEOPLE = 100
NODES, GPUS = 25, 8
#: Connections that requests, reads and releases share.
WORKERS = 16
#: Seconds for which a server lets its question for news be held, as the Jupyter server extension does.
HELD_S = 25
#: Seconds that the last notices have to arrive.
TAIL_S = 10.0


async def serve(folder: Path) -> None:
    """Be the controller, until standard input ends."""
    from jupyter_gpupool.controller.api import Limits
    from tests import controller_kit
    from tests.pool_helpers import node

    names = {f"user{n}": ("read", "use") for n in range(PEOPLE)}
    controller_kit.PEOPLE.update(names)
    kit = controller_kit.Kit(folder, limits=Limits(rate=1e6, burst=1e6))
    await kit.start(*(node(f"node-{n}", GPUS) for n in range(NODES)))
    tokens = [kit.tokens[name] for name in names]
    said = {"port": kit.api.port, "ca": kit.controller.authority.ca_pem, "tokens": tokens}
    print(json.dumps(said), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await kit.close()


class Connection:
    """One connection that is kept; as little as HTTP needs, so that the client is not what is measured."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        self._port = port
        self._context = context
        self._streams: Any = None

    async def call(
        self, method: str, path: str, token: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Make a call and return the answer's status and JSON."""
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context)
        reader, writer = self._streams
        content = json.dumps(body).encode() if body is not None else b""
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: pool\r\nAuthorization: Bearer {token}\r\n"
            f"{more}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(
            int(line[15:]) for line in [*head, "content-length:0"] if line.lower()[:15] == "content-length:"
        )
        data = await reader.readexactly(length)
        return int(head[0].split()[1]), json.loads(data) if data else None

    def close(self) -> None:
        """Hang up."""
        if self._streams:
            self._streams[1].close()


@dataclass
class Load:
    """What is done to the API, and what was seen."""

    port: int
    tokens: list[str]
    context: ssl.SSLContext
    reads: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    errors: int = 0
    #: By person: how many notices there must be.
    expected: dict[int, int] = field(default_factory=dict)
    #: By server: how many came.
    seen: dict[int, int] = field(default_factory=dict)

    async def listen(self, server: int) -> None:
        """Be a server that waits for its person's news."""
        connection, after = Connection(self.port, self.context), 0
        token = self.tokens[server % PEOPLE]
        try:
            while True:
                path = f"/v1/notices?after={after}&wait={HELD_S}&limit=500"
                status, answer = await connection.call("GET", path, token)
                self.errors += status != 200
                after = answer["next"]
                self.seen[server] = self.seen.get(server, 0) + len(answer["notices"])
        finally:
            connection.close()

    async def timed(self, times: list[float], connection: Connection, *what: Any) -> Any:
        """Make a call and note how long it took."""
        start = time.perf_counter()
        status, answer = await connection.call(*what)
        times.append(time.perf_counter() - start)
        self.errors += status >= 400
        return answer

    async def person(self, number: int, free: asyncio.Queue[Connection]) -> None:
        """Request a GPU, read the lease, the devices and the pool, release."""
        who = number % PEOPLE
        token, connection = self.tokens[who], await free.get()
        try:
            lease = await self.timed(self.requests, connection, "POST", "/v1/requests", token, {"gpus": 1})
            self.expected[who] = self.expected.get(who, 0) + 3  # granted, started, ended
            path = ("/v1/devices", "/v1/pool", "/v1/leases")[number % 3]
            await self.timed(self.reads, connection, "GET", path, token)
            await self.timed(self.reads, connection, "GET", f"/v1/leases/{lease['id']}", token)
            await self.timed([], connection, "DELETE", f"/v1/leases/{lease['id']}", token)
        finally:
            free.put_nowait(connection)

    async def run(self, connected: int, rate: float, seconds: float) -> dict[str, Any]:
        """Put the load on, and return the result."""
        listeners = [asyncio.ensure_future(self.listen(n)) for n in range(connected)]
        await asyncio.sleep(2)
        free: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(WORKERS):
            free.put_nowait(Connection(self.port, self.context))
        start, jobs = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
            jobs.append(asyncio.ensure_future(self.person(number, free)))
        await asyncio.gather(*jobs)
        took = time.perf_counter() - start
        events = sum(self.expected.get(n % PEOPLE, 0) for n in range(connected))
        end = time.perf_counter() + TAIL_S
        while sum(self.seen.values()) < events and time.perf_counter() < end:  # noqa: ASYNC110 - many count
            await asyncio.sleep(0.1)
        for each in listeners:
            each.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        while not free.empty():
            free.get_nowait().close()
        return {
            "seconds": round(took, 1),
            "requests": len(self.requests),
            "read_p99_ms": p99(self.reads),
            "request_p99_ms": p99(self.requests),
            "events": events,
            "events_lost": events - sum(self.seen.values()),
            "errors": self.errors,
        }


def p99(times: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return round(1000 * sorted(times)[int(0.99 * len(times))], 1)


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connected", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--quick", action="store_true", help="five seconds")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.api_load", "--serve", folder]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as server:
            said = json.loads(server.stdout.readline())  # type: ignore[union-attr] - it is a pipe
            load = Load(said["port"], said["tokens"], ssl.create_default_context(cadata=said["ca"]))
            load.context.check_hostname = True
            seconds = 5 if options.quick else options.seconds
            print(json.dumps(asyncio.run(load.run(options.connected, options.rate, seconds))))
            server.stdin.close()  # type: ignore[union-attr] - it is a pipe


if __name__ == "__main__":
    main()
