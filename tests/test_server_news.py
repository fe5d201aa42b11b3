"""How the Jupyter server finds its pool, asks it once for many, and tells its news: over the real API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from yaml import safe_load

from jupyter_gpupool import AsyncPool
from jupyter_gpupool._http import Call, PoolError, Trouble
from jupyter_gpupool.controller import routes_leases
from jupyter_gpupool.controller.routes import serve
from jupyter_gpupool.core.model import Notice
from jupyter_gpupool.server import app
from jupyter_gpupool.server.link import State, Where
from jupyter_gpupool.server.pool import ServerPool
from tests.controller_kit import running

pytestmark = pytest.mark.asyncio
READ = Call(method="GET", path="/v1/pool", repeatable=False)
SCHEMAS = {name: safe_load((app.SCHEMAS / f"{name}.yaml").read_text()) for name in app.NEWS}


class Server:
    """A server's pool, with what it puts on the bus."""

    def __init__(self, kit, who="ann", **where):
        self.told = []
        token = kit.folder / f"{who}.token"
        token.write_text(kit.tokens[who] + "\n")
        ca = kit.folder / "pinned.pem"
        ca.write_text(kit.controller.authority.ca_pem)
        said = {"url": kit.api.url, "token_file": str(token), "ca_file": str(ca), **where}
        self.pool = ServerPool(Where(**said), self.emit, fresh_s=0.25, poll_s=2.0, retry_s=0.3, ticket_s=60.0)

    def emit(self, name, data):
        Draft202012Validator(SCHEMAS[name]).validate(dict(data))
        self.told.append((name, dict(data)))

    def notices(self):
        return [data for name, data in self.told if name == "notice"]

    def leases(self):
        return [(data["lease"], data["state"]) for name, data in self.told if name == "lease"]

    async def until(self, so, seconds=20):
        async with asyncio.timeout(seconds):
            while not so():  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.02)

    async def listening(self):
        """Wait until news are asked for."""
        self.pool.start()
        await self.until(lambda: self.pool.news._after is not None)


@contextlib.asynccontextmanager
async def server(kit, *arguments, **where):
    found = Server(kit, *arguments, **where)
    try:
        yield found
    finally:
        await found.pool.close()


@contextlib.contextmanager
def counted(kit):
    """Counts the calls that arrive at the pool's API, by path."""
    calls = []
    handlers = {}
    for rule in kit.api._server.request_callback.wildcard_router.rules:
        rows = rule.target_kwargs.get("rows", {})
        for method, route in list(rows.items()):
            handlers[id(rows), method] = rows, method, route

            async def handler(call, inner=route.handler, path=route.path):
                calls.append(path)
                return await inner(call)

            from dataclasses import replace

            rows[method] = replace(route, handler=handler)
    try:
        yield calls
    finally:
        for rows, method, route in handlers.values():
            rows[method] = route


# ------------------------------------------------------------------------------------------ one for many tabs


async def test_however_many_tabs_ask_the_pool_is_asked_once(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        await mine.pool.link.send(READ)
        with counted(kit) as calls:
            looks = [mine.pool.looks.read("/v1/leases") for _ in range(50)]
            devices = [mine.pool.devices.answer() for _ in range(50)]
            answers = await asyncio.gather(*looks, *devices)
            await mine.pool.devices.answer(answers[-1]["sequence"])
        assert sorted(calls) == ["/v1/devices", "/v1/leases"]


async def test_after_a_change_no_older_answer_is_given(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        before = await mine.pool.looks.read("/v1/leases")
        await kit.ask("ann", gpus=1)
        mine.pool.forget()
        after = await mine.pool.looks.read("/v1/leases")
        assert len(after["leases"]) == len(before["leases"]) + 1


async def test_each_tab_gets_what_is_new_since_its_own_last_answer(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        early = await mine.pool.devices.answer()
        numbers = [early["sequence"]]
        for _ in range(3):
            await kit.ask("ann", gpus=1)
            mine.pool.forget()
            numbers.append((await mine.pool.devices.answer(numbers[-1]))["sequence"])
        for passed, number in enumerate(numbers):
            news = await mine.pool.devices.answer(number)
            assert len(news["devices"]) == 3 - passed
            assert not news["full"]
        assert len((await mine.pool.devices.answer(numbers[-1] + 1))["devices"]) == 8, "no number of its own"


async def test_a_tab_that_goes_away_takes_nothing_from_the_others(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        first = asyncio.ensure_future(mine.pool.looks.read("/v1/pool"))
        second = asyncio.ensure_future(mine.pool.looks.read("/v1/pool"))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)["gpus"] == 8


# -------------------------------------------------------------------------------------------------- no pool


async def test_that_there_is_no_pool_is_a_state_with_a_reason(tmp_path):
    async with running(tmp_path) as kit, server(kit, url="https://127.0.0.1:9") as mine:
        mine.pool.start()
        await mine.until(lambda: mine.pool.link.state is State.LOST)
        said = await mine.pool.stand()
        assert (said["state"], said["reason"], said["pool"]) == ("lost", "unreachable", None)
        assert said["sentence"].startswith("No pool answers at https://127.0.0.1:9")
        assert not said["can_start"]
        assert [data["state"] for name, data in mine.told if name == "pool"] == ["lost"]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"token_file": "/nowhere/token"}, Trouble.BAD_CONFIG),
        ({"ca_file": "/nowhere/ca.pem"}, Trouble.BAD_CONFIG),
        ({"url": "http://head:1"}, Trouble.BAD_CONFIG),
        ({"token_file": __file__}, Trouble.WRONG_TOKEN),
    ],
    ids=["no such token file", "no such certificate", "not https", "no good token"],
)
async def test_what_is_wrong_with_the_settings_is_said(tmp_path, where, reason):
    if where.get("token_file") == __file__:
        wrong = tmp_path / "wrong.token"
        wrong.write_text("gpupool_0_0")
        where = {"token_file": str(wrong)}
    async with running(tmp_path) as kit, server(kit, **where) as mine:
        for _ in range(2):  # looked up, then from memory
            with pytest.raises(PoolError) as no:
                await mine.pool.link.send(READ)
            assert no.value.reason == reason
        assert mine.pool.link.state is State.LOST


async def test_while_it_is_lost_tabs_are_answered_from_memory_until_it_is_worth_a_try(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        mine.pool.link._retry_s = 60
        url, port = kit.api.url, kit.api.port
        await kit.api.close()
        for _ in range(8):
            with pytest.raises(PoolError):
                await mine.pool.link.send(READ)
            mine.pool.link._next_try = 0.0
        mine.pool.link._next_try = float("inf")
        kit.api = serve(kit.controller, "127.0.0.1", port)
        assert kit.api.url == url
        with pytest.raises(PoolError):
            await mine.pool.link.send(READ)
        mine.pool.try_now(start=False)
        await mine.pool.link.send(READ)
        assert mine.pool.link.state is State.CONNECTED


# ----------------------------------------------------------------------------------------------------- news


async def test_what_was_said_before_the_server_ran_is_not_said_again(tmp_path):
    async with running(tmp_path) as kit:
        await kit.ask("ann", gpus=1)
        async with server(kit) as mine:
            await mine.listening()
            await kit.ask("ann", gpus=2)
            await mine.until(lambda: len(mine.leases()) and mine.notices())
            assert len({data["lease"] for data in mine.notices()}) == 1


async def test_one_hears_of_ones_own_leases_and_of_no_others(tmp_path):
    async with running(tmp_path) as kit, server(kit, "ann") as ann, server(kit, "ben") as ben:
        await ann.listening()
        await ben.listening()
        lease = (await kit.ask("ann", gpus=1))["id"]
        await ann.until(lambda: (lease, "active") in ann.leases())
        await kit.call("ann", "DELETE", f"/v1/leases/{lease}")
        await ann.until(lambda: (lease, "ended") in ann.leases())
        assert (ben.leases(), ben.notices()) == ([], [])


async def test_a_lease_that_lives_is_found_behind_however_many_newer_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(routes_leases, "PAGE", 2)
    async with running(tmp_path) as kit:
        for number in range(5):
            await _submit(kit, f"L{number}")
        ca = tmp_path / "ca.pem"
        ca.write_text(kit.controller.authority.ca_pem)
        async with (
            server(kit) as mine,
            AsyncPool(kit.api.url, kit.tokens["ann"], str(ca)) as pool,
        ):
            await mine.listening()
            assert set(mine.pool.news._leases) == {f"L{number}" for number in range(5)}
            assert sorted(each.id for each in await pool.leases()) == [f"L{number}" for number in range(5)]
            assert (await pool.lease("L0")).id == "L0"


async def test_after_a_gap_each_notice_comes_once_and_in_order(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        await mine.listening()
        await kit.ask("ann", gpus=1, name="before")
        await mine.until(mine.leases)
        port = kit.api.port
        await kit.api.close()
        for number in range(5):  # while nobody can be heard
            await _submit(kit, f"during-{number}")
        await mine.until(lambda: ("pool", "lost") in [(name, data.get("state")) for name, data in mine.told])
        kit.api = serve(kit.controller, "127.0.0.1", port)
        await kit.ask("ann", gpus=1, name="after")
        all_of_it = (await kit.call("ann", "GET", "/v1/notices?after=0")).data["notices"]
        await mine.until(lambda: len(mine.notices()) >= len(all_of_it))
        await asyncio.sleep(0.3)
        assert mine.notices() == all_of_it
        states = [data["state"] for name, data in mine.told if name == "pool"]
        assert states == ["connected", "lost", "connected"]


async def _submit(kit, name):
    """Grant a lease while the API is closed."""
    from jupyter_gpupool.core.model import RequestSubmitted
    from tests.pool_helpers import request

    now = kit.controller.clock.now()
    kit.controller.submit(RequestSubmitted(now=now, request=request(name, user="ann", arrived=now)))
    await asyncio.sleep(0)


async def test_a_pool_whose_numbers_begin_anew_is_said_to_have_been_missed(tmp_path):
    async with running(tmp_path) as kit, server(kit) as mine:
        await mine.listening()
        mine.pool.news._after = 10**9
        await mine.until(lambda: any(data.get("missed") for name, data in mine.told if name == "pool"))
        await kit.ask("ann", gpus=1)
        await mine.until(mine.notices)


async def test_closing_leaves_no_task_and_no_connection(tmp_path):
    async with running(tmp_path) as kit:
        async with server(kit) as mine:
            await mine.listening()
        assert not [task for task in asyncio.all_tasks() if "News" in repr(task.get_coro())]
        assert mine.pool.link._connection is None


# ----------------------------------------------------------------------------------------------- the schemas


@pytest.mark.parametrize("name", app.NEWS)
async def test_a_schema_is_our_own_and_known_to_the_event_bus(name):
    from jupyter_events import EventLogger

    logger = EventLogger()
    path = Path(app.SCHEMAS / f"{name}.yaml")
    logger.register_event_schema(path)
    assert app.SCHEMA_ID.format(name) in logger.schemas
    assert SCHEMAS[name]["$id"] == app.SCHEMA_ID.format(name)
    assert isinstance(SCHEMAS[name]["version"], str)


async def test_the_documentation_names_every_notice():
    text = (Path(__file__).parent.parent / "docs" / "server.md").read_text()
    missing = [str(each) for each in Notice if str(each) not in text]
    assert not missing
    assert json.dumps(app.SCHEMA_ID.format("notice"))[1:-1] in text


async def test_who_asks_for_a_start_while_the_server_still_looks_for_a_pool_need_not_ask_again(monkeypatch):
    """To look takes seconds on a busy machine; what is asked for meanwhile is done next, and at once."""
    looking, go_on, tries = threading.Event(), threading.Event(), []

    def find(_where, *, start):
        tries.append(start)
        looking.set()
        assert go_on.wait(20)
        raise PoolError(Trouble.NOT_STARTED, "There is none.")

    monkeypatch.setattr(Where, "find", find)
    pool = ServerPool(Where(), lambda *_: None, fresh_s=0.25, poll_s=2.0, retry_s=3600.0, ticket_s=60.0)
    monkeypatch.setattr("jupyter_gpupool.server.link.FIRST_RETRY_S", 3600.0)
    pool.start()
    try:
        assert await asyncio.to_thread(looking.wait, 20)
        pool.link.try_now(start=True)
        go_on.set()
        async with asyncio.timeout(20):
            while len(tries) < 2 or pool.link.state is not State.LOST:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
    finally:
        await pool.close()
    assert tries == [False, True]
