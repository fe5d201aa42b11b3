"""The HTTP API when something is wrong: with what is sent, with the disk, with the network, with us."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import httpx
import pytest

from jupyter_gpupool.controller.api import ApiError, Limits
from jupyter_gpupool.controller.limits import Limiter
from jupyter_gpupool.controller.routes import serve
from jupyter_gpupool.core.model import (
    LeaseState,
)
from tests.controller_kit import Kit, running, says

# --------------------------------------------------------------------------------- what can go wrong


@pytest.mark.asyncio
async def test_what_is_not_on_the_disk_is_not_confirmed_and_has_not_happened(tmp_path):
    async with running(tmp_path) as kit:
        lease = await kit.ask(gpus=1)
        pages = kit.store._db.row("PRAGMA page_count")[0]
        kit.store._db.row(f"PRAGMA max_page_count = {pages + 1}")
        before = kit.controller.pool.snapshot()
        big = {"gpus": 1, "environment": {"variables": {"X": "y" * 200_000}}}
        response = await kit.call("ann", "POST", "/v1/requests", big, headers={"Idempotency-Key": "k"})
        says(response, 503, "store_failed", "full", "free some space")
        assert response.headers["retry-after"] == "5"
        assert kit.controller.pool.snapshot() == before
        assert (
            await kit.call("ann", "GET", f"/v1/leases/{lease['id']}")
        ).status_code == 200  # reading goes on
        kit.store._db.row("PRAGMA max_page_count = 1000000")
        assert await kit.ask(headers={"Idempotency-Key": "k"}, **big)


@pytest.mark.asyncio
async def test_what_was_confirmed_is_there_after_a_restart(tmp_path):
    async with running(tmp_path) as kit:
        leases = [
            await kit.ask(gpus=4, name="a"),
            await kit.ask("ben", gpus=4),
            await kit.ask(gpus=4, name="c"),
        ]
        await kit.call("ann", "PATCH", f"/v1/leases/{leases[0]['id']}", {"share": ["ben"]})
        before = kit.controller.pool.snapshot()
        keys = (await kit.call("ann", "GET", f"/v1/leases/{leases[0]['id']}/connection")).data
        tokens = dict(kit.tokens)
    kit = Kit(tmp_path)
    assert kit.controller.pool.snapshot() == before
    await kit.start()
    try:
        assert (await kit.call(tokens["ann"], "GET", f"/v1/leases/{leases[0]['id']}/connection")).data == keys
        assert (await kit.call(tokens["ben"], "GET", f"/v1/leases/{leases[0]['id']}/connection")).data == keys
        waits = (await kit.call("ann", "GET", f"/v1/leases/{leases[2]['id']}")).data
        assert (waits["state"], waits["place"]) == (LeaseState.PENDING, 1)
    finally:
        await kit.close()


@pytest.mark.asyncio
async def test_a_fault_of_ours_is_one_sentence_and_its_traceback_stays_in_the_log(
    tmp_path, monkeypatch, caplog
):
    async with running(tmp_path) as kit:

        def broken(_event, _once=None):
            raise RuntimeError("inner secret")

        monkeypatch.setattr(kit.controller, "submit", broken)
        response = await kit.call("ann", "POST", "/v1/requests", {"gpus": 1})
        says(response, 500, "broken", "its log has more")
        assert "inner secret" not in response.text
        assert "inner secret" in caplog.text


RAW = {
    "no JSON": (b"{", "application/json", 400, "bad_request"),
    "two of them": (b"{} {}", "application/json", 400, "bad_request"),
    "not a number": (b'{"gpus": NaN}', "application/json", 400, "bad_request"),
    "deep nonsense": (b"[" * 100_000, "application/json", 400, "bad_request"),
    "a huge number": (b'{"gpus": ' + b"9" * 5000 + b"}", "application/json", 400, "bad_request"),
    "not UTF-8": (b'{"name": "\xff"}', "application/json", 400, "bad_request"),
    "half a character": (
        b'{"environment": {"variables": {"A": "\\ud800"}}}',
        "application/json",
        400,
        "bad_request",
    ),
    "a form": (b"gpus=1", "application/x-www-form-urlencoded", 415, "not_json"),
    "too large": (b'{"x": "' + b"y" * 1_000_000 + b'"}', "application/json", 413, "too_large"),
    "a list": (b"[]", "application/json", 400, "bad_request"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize(("content", "kind", "status", "reason"), RAW.values(), ids=RAW)
async def test_a_body_that_is_no_good_gets_one_sentence(tmp_path, content, kind, status, reason):
    async with running(tmp_path) as kit:
        response = await kit.client.post(
            "/v1/requests",
            content=content,
            headers={"Authorization": f"Bearer {kit.tokens['ann']}", "Content-Type": kind},
        )
        assert (response.status_code, response.json()["reason"]) == (status, reason)
        assert (await kit.call("ann", "GET", "/v1/pool")).data["leases"] == 0


@pytest.mark.asyncio
async def test_addresses_methods_and_parameters_that_do_not_exist_are_answered_in_kind(tmp_path):
    async with running(tmp_path) as kit:
        says(await kit.call("ann", "GET", "/"), 404, "not_found", "/v1/openapi.json")
        says(await kit.call("ann", "GET", "/v1/leases/a/b/c"), 404, "not_found")
        wrong = await kit.call("ann", "PUT", "/v1/pool")
        says(wrong, 405, "no_such_method", "GET")
        assert wrong.headers["allow"] == "GET"
        for method in ("HEAD", "OPTIONS", "TRACE"):
            response = await kit.client.request(method, "/v1/pool")
            assert response.status_code == 405
        says(
            await kit.call("ann", "GET", "/v1/leases?stat=active"), 400, "bad_request", "Did you mean state?"
        )
        says(await kit.call("ann", "GET", "/v1/leases?all=yes"), 400, "bad_request", "neither true nor false")
        says(await kit.call("ann", "GET", "/v1/leases?all=true&all=true"), 400, "bad_request", "2 times")
        says(await kit.call("ann", "GET", "/v1/notices?after=-1"), 400, "bad_request", "after")
        says(await kit.call("ann", "GET", "/v1/pool?x=1"), 400, "bad_request", "It takes none")
        says(await kit.call("ann", "GET", "/v1/leases/%2e%2e%2f"), 404, "unknown_lease")


@pytest.mark.asyncio
async def test_no_other_site_may_call_and_no_browser_keeps_or_frames_an_answer(tmp_path):
    async with running(tmp_path) as kit:
        for path in ("/v1/pool", "/v1/openapi.json", "/nowhere"):
            response = await kit.call("ann", "GET", path, headers={"Origin": "https://evil.example"})
            assert not [name for name in response.headers if name.startswith("access-control")]
            assert response.headers["content-security-policy"].startswith("default-src 'none'")
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "server" not in response.headers
            assert "set-cookie" not in response.headers


@pytest.mark.asyncio
async def test_one_who_calls_too_often_is_told_when_to_come_back_and_others_are_not_held_up(tmp_path):
    limits = Limits(rate=0.01, burst=10, open_rate=0.01, open_burst=3)
    async with running(tmp_path, limits=limits) as kit:
        answers = [await kit.call("ann", "GET", "/v1/usage") for _ in range(12)]
        assert [each.status_code for each in answers] == [200] * 10 + [429] * 2
        says(answers[-1], 429, "too_many_requests", "Wait")
        assert 90 < int(answers[-1].headers["retry-after"]) <= 100
        assert (await kit.call("ben", "GET", "/v1/usage")).status_code == 200
        guesses = [await kit.call(f"gpupool_{n}_x", "GET", "/v1/usage") for n in range(5)]
        assert [each.status_code for each in guesses] == [401, 401, 401, 429, 429]


def test_a_limit_lets_a_burst_pass_then_its_rate_and_forgets_those_who_are_long_gone(monkeypatch):
    now = [0.0]
    limiter = Limiter(rate=2, burst=3, clock=lambda: now[0])
    assert [limiter.wait("ann") for _ in range(4)] == [0, 0, 0, 0.5]
    assert limiter.wait("ben") == 0
    now[0] = 0.5
    assert [limiter.wait("ann"), limiter.wait("ann")] == [0, 0.5]
    now[0] = 100
    assert [limiter.wait("ann") for _ in range(4)] == [0, 0, 0, 0.5]
    monkeypatch.setattr("jupyter_gpupool.controller.limits.CALLERS", 2)
    limiter.wait("cleo")
    assert set(limiter._left) == {"ann", "cleo"}


@pytest.mark.asyncio
async def test_more_connections_than_there_may_be_are_hung_up_on(tmp_path):
    async with running(tmp_path, limits=Limits(connections=5)) as kit:
        kept = [await asyncio.open_connection("127.0.0.1", kit.api.port) for _ in range(5)]
        reader, writer = await asyncio.open_connection("127.0.0.1", kit.api.port)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        for each in [*(writer for _, writer in kept), writer]:
            each.close()
        for _ in range(500):
            try:
                response = await kit.call("ann", "GET", "/v1/pool")
                break
            except httpx.HTTPError:
                await asyncio.sleep(0.02)
        assert response.status_code == 200


@pytest.mark.asyncio
async def test_one_who_connects_and_says_nothing_is_hung_up_on(tmp_path):
    async with running(tmp_path, limits=Limits(idle=0.3)) as kit:
        silent, writer = await asyncio.open_connection("127.0.0.1", kit.api.port)
        assert await asyncio.wait_for(silent.read(), 20) == b""
        writer.close()
        with contextlib.suppress(OSError):  # on a busy machine it may be hung up on while it says hello
            reader, writer = await asyncio.open_connection("127.0.0.1", kit.api.port, ssl=kit.context)
            writer.write(b"POST /v1/login HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            await asyncio.wait_for(reader.read(), 20)
        writer.close()


@pytest.mark.asyncio
async def test_headers_that_are_too_long_are_refused_and_the_server_goes_on(tmp_path):
    async with running(tmp_path) as kit:
        with pytest.raises(httpx.HTTPError):
            (await kit.client.get("/v1/pool", headers={"X-Long": "x" * 100_000})).raise_for_status()
        assert (await kit.call("ann", "GET", "/v1/pool")).status_code == 200


@pytest.mark.asyncio
async def test_without_tls_nobody_is_talked_to(tmp_path):
    async with running(tmp_path) as kit:
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(kit.api.url.replace("https", "http") + "/v1/ca.pem")
        stranger = ssl.create_default_context()
        async with httpx.AsyncClient(verify=stranger) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(kit.api.url + "/v1/ca.pem")


@pytest.mark.asyncio
async def test_a_port_in_use_is_one_sentence_and_never_another_port(tmp_path):
    async with running(tmp_path) as kit:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ApiError, match=rf"^Port {port} on 127.0.0.1 is in use: .* --port\.$"):
                serve(kit.controller, "127.0.0.1", port)
        with pytest.raises(ApiError, match=r"cannot listen on 192\.0\.2\.1"):
            serve(kit.controller, "192.0.2.1", 0)
