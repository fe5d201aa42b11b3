"""The API under many at once, and under those who misbehave: the real API, agents without processes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest

from jupyter_gpupool.controller import api
from jupyter_gpupool.controller.api import Limits
from jupyter_gpupool.core.model import LeaseState
from tests import controller_kit
from tests.bench.api_load import Connection
from tests.controller_kit import running
from tests.pool_helpers import node

pytestmark = pytest.mark.asyncio

USERS, LEASES = 100, 500


async def answers(kit) -> None:
    """The controller answers somebody else."""
    answer = await kit.client.get("/v1/pool", headers={"Authorization": f"Bearer {kit.tokens['eve']}"})
    assert answer.status_code == 200


async def test_five_hundred_leases_of_a_hundred_users_come_and_go_at_once(tmp_path, monkeypatch):
    people = {f"user{n}": ("read", "use") for n in range(USERS)}
    monkeypatch.setattr(controller_kit, "PEOPLE", {**controller_kit.PEOPLE, **people})
    nodes = [node(f"node-{n}", 8) for n in range(25)]
    async with running(tmp_path, *nodes) as kit:

        async def come_and_go(user: int) -> list[str]:
            """Request, request again as if no answer had come, and give back; over and over."""
            token, idents = kit.tokens[f"user{user}"], []
            connection = Connection(kit.api.port, kit.context)
            for number in range(LEASES // USERS):
                body = {"gpus": 1 + number % 3, "name": f"n{number}", "cpus": 0.1, "memory": "1GB"}
                for _ in range(1 if number else 2):
                    once = {"Idempotency-Key": f"k{number}"}
                    status, lease = await connection.call("POST", "/v1/requests", token, body, once)
                    assert status == 201, lease
                    idents.append(lease["id"])
                assert (await connection.call("DELETE", f"/v1/leases/{lease['id']}", token))[0] == 204
            connection.close()
            return idents

        found = await asyncio.gather(*(come_and_go(user) for user in range(USERS)), answers(kit))
        pool = kit.controller.pool
        pool.validate()
        assert len({ident for idents in found[:-1] for ident in idents}) == LEASES == len(pool.leases)
        assert {each.state for each in pool.leases.values()} == {LeaseState.ENDED}
        assert (await kit.call("adm", "GET", "/v1/pool")).data["gpus_free"] == 200


async def test_a_client_that_never_reads_keeps_nobody_waiting(tmp_path):
    """It asks for more and more that it does not take; what it is owed is not piled up without bound."""
    async with running(tmp_path) as kit:
        reader, writer = await asyncio.open_connection("127.0.0.1", kit.api.port, ssl=kit.context)
        reader._transport.pause_reading()
        asking = b"GET /v1/openapi.json HTTP/1.1\r\nHost: pool\r\n\r\n"
        for _ in range(2000):
            writer.write(asking)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.drain(), 1)
        for _ in range(5):
            await answers(kit)
        held = [each.stream._write_buffer for each in kit.api._server._connections]
        assert sum(len(each) for each in held) < 10_000_000
        writer.transport.abort()


async def test_a_thousand_connections_of_one_client_keep_nobody_out(tmp_path):
    api.files(4000)  # this process holds both ends
    async with running(tmp_path, limits=Limits(connections=1500)) as kit:
        open_ = [await asyncio.open_connection("127.0.0.1", kit.api.port) for _ in range(1000)]
        await answers(kit)
        assert (await kit.ask("ann", gpus=1))["state"] == "active"
        for _, writer in open_:
            writer.transport.abort()
        await answers(kit)


async def test_who_shakes_no_hand_is_hung_up_on(tmp_path):
    """A connection that does not even begin with TLS is not kept for ever."""
    async with running(tmp_path, limits=Limits(idle=0.3)) as kit:
        reader, writer = await asyncio.open_connection("127.0.0.1", kit.api.port)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert await reader.read() == b""
        writer.close()
        await answers(kit)
