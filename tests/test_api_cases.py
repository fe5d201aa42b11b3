"""The HTTP API and the Jupyter server's endpoints under schemathesis: no failure, no undocumented answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed: pip install 'jupyter-gpupool[test]'"
)

from jupyter_gpupool.controller.api import Limits
from tests.api_cases import Cases, server_description
from tests.conftest import wait_until
from tests.controller_kit import DESCRIPTION, PEOPLE, Kit
from tests.pool_helpers import node
from tests.server_kit import TOKEN, JupyterServer

SEED = 20_260_801
UNLIMITED = Limits(rate=1e6, burst=1e6, open_rate=1e6, open_burst=1e6)


class Loop:
    """An event loop in a thread of its own: what calls the API may block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextlib.contextmanager
def live_controller(folder):
    """A controller behind its real API; its agents are stood in for, so that leases cost nothing."""
    loop = Loop()
    try:
        kit = Kit(folder, limits=UNLIMITED)
        loop(kit.start(node("node-1"), node("node-2")))
        kit.controller.stop = lambda why, everything=False: None  # POST /v1/stop is a case like others
        try:
            (folder / "ca.pem").write_text(kit.controller.authority.ca_pem)
            for name in ("first", "second"):
                loop(kit.ask(gpus=1, name=name))
            yield kit, loop
        finally:
            loop(kit.close())
    finally:
        loop.close()


def known(kit):
    """What there is for the parameters of paths."""

    def choose(name):
        if name == "lease":
            return [*list(kit.controller.pool.leases)[:20], "none"]
        return {"target": ["node-1", "node-1/gpu0", "gpu3"], "token": ["none"], "node": ["node-2"]}[name]

    return choose


def explore(folder, each):
    """Call everything; return how many cases that were and which operations answered with which statuses."""
    with live_controller(folder) as (kit, loop):
        people = {name: {"Authorization": f"Bearer {kit.tokens[name]}"} for name in PEOPLE}
        people |= {"an administrator": people["adm"], "nobody": {}}
        of_pool = Cases(DESCRIPTION, kit.api.url, people, known(kit), str(folder / "ca.pem"))
        of_pool.run(each, SEED)
        of_pool.close()

        async def check():
            kit.controller.pool.validate()

        loop(check())
        of_server = _through_jupyter(folder, kit, each)
        loop(check())
        return of_pool, of_server


def _through_jupyter(folder, kit, each):
    (folder / "token").write_text(kit.tokens["adm"])
    (folder / "jupyter").mkdir()
    where = {"url": kit.api.url, "token_file": str(folder / "token"), "ca_file": str(folder / "ca.pem")}
    config = [f"c.GPUPoolServer.{name} = {value!r}" for name, value in where.items()]
    with JupyterServer(folder / "jupyter", *config) as server:
        wait_until(lambda: server.get("pool")["state"] == "connected")
        people = {"logged in": {"Authorization": f"token {TOKEN}"}}
        cases = Cases(server_description(), server.url + "gpupool", people, known(kit))
        cases.run(each, SEED)
        cases.close()
    return cases


def assert_explored(least, *many):
    assert sum(each.count for each in many) >= least
    for cases in many:
        operations = {(method, path) for method, path, _ in cases.seen}
        described = {
            (method.upper(), path)
            for path, methods in cases.schema.raw_schema["paths"].items()
            for method in methods
        }
        assert operations == described
        good = {(method, path) for method, path, status in cases.seen if status < 400}
        assert len(good) > 0.5 * len(described), "many are called in a way that is right"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tenth_of_the_cases(tmp_path):
    assert_explored(500, *explore(tmp_path, 6))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_all_cases(tmp_path):
    assert_explored(5000, *explore(tmp_path, 60))
