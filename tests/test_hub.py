"""A real JupyterHub with three people in two groups: it says who they are, and the pool believes only it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import distributed
import httpx
import psutil
import pytest
from tornado.httpserver import HTTPServer
from tornado.web import Application, RequestHandler

from jupyter_gpupool._find import find
from jupyter_gpupool.controller.api import Limits
from jupyter_gpupool.controller.auth import security
from jupyter_gpupool.controller.hub import Hub
from jupyter_gpupool.controller.problems import Problem
from jupyter_gpupool.driver import simulated
from tests.conftest import environment
from tests.controller_kit import running
from tests.pool_processes import PoolProcesses
from tests.test_adoption import SYSTEM_PYTHON, has_second_user, second_path
from tests.test_attack import People, shared_folder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio
ADMIN = "an-administrators-token-of-the-hub"
#: Newer ones need a newer Node than Debian's.
PROXY = "configurable-http-proxy@4"
PROJECTS = [
    {"name": "vision", "members": ["@vision"], "limit": {"*": 2}},
    {"name": "speech", "members": ["@speech"], "limit": {"*": 4}},
]


@pytest.fixture(scope="module")
def proxy(session_folder: Path) -> str:
    """The Hub's proxy, from npm where it is not installed."""
    found = shutil.which("configurable-http-proxy")
    if found:
        return found
    if not shutil.which("npm"):
        pytest.skip("JupyterHub's proxy is not installed, and there is no npm to get it with")
    folder = session_folder / "proxy"
    folder.mkdir()
    command = ["npm", "install", "--prefix", str(folder), "--no-fund", "--no-audit", PROXY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=folder)
    path = folder / "node_modules" / ".bin" / "configurable-http-proxy"
    if done.returncode or not path.exists():
        pytest.skip(f"JupyterHub's proxy could not be had from npm: {done.stderr.strip()[-200:]}")
    return str(path)


def _ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class RealHub:
    """A JupyterHub in a process of its own; its users' servers are, too."""

    def __init__(  # noqa: PLR0917 - what a Hub is made of
        self,
        folder: Path,
        proxy: str,
        ports: list[int],
        pool: str,
        ca: Path,
        names: dict[str, str],
        spawner: str,
    ) -> None:
        self.folder, self.proxy, self.ports = folder, proxy, ports
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.api_url = f"http://127.0.0.1:{ports[1]}/hub/api"
        folder.mkdir()
        (folder / "jupyterhub_config.py").write_text(
            f"""
from jupyter_gpupool.hub import configure
c.JupyterHub.bind_url = {self.url!r}
c.JupyterHub.hub_port = {ports[1]}
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
{spawner}
c.Spawner.args = ["--allow-root", "--ServerApp.jpserver_extensions={EXTENSIONS}"]
c.Spawner.env_keep = {KEEP!r}
c.Spawner.http_timeout = c.Spawner.start_timeout = 60
c.JupyterHub.load_groups = {{
    "vision": {{"users": {[names["ann"], names["ben"]]!r}}}, "speech": {{"users": {[names["cleo"]]!r}}}}}
c.Authenticator.admin_users = {{"root-of-hub"}}
c.JupyterHub.services.append({{"name": "test", "admin": True, "api_token": {ADMIN!r}}})
c.JupyterHub.load_roles.append({{"name": "test", "services": ["test"], "scopes": [
    "admin:users", "admin:servers", "tokens", "access:servers", "groups"]}})
configure(c, url={pool!r}, ca={str(ca)!r})
"""
        )

    def start(self) -> None:
        command = [sys.executable, "-m", "jupyterhub", "--config", str(self.folder / "jupyterhub_config.py")]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment(),
                start_new_session=True,
            )
        self.client = httpx.Client(
            base_url=self.api_url, headers={"Authorization": f"token {ADMIN}"}, timeout=60
        )
        self.until(lambda: self.client.get("/users").status_code == 200)

    def until(self, so, seconds=60) -> None:
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(httpx.HTTPError):
                if so():
                    return
            assert time.monotonic() < end, self.log()
            time.sleep(0.1)

    def serve(self, *users: str) -> None:
        """Make people known, and start their servers, all at once."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda user: self.client.post(f"/users/{user}"), users))
            list(threads.map(lambda user: self.client.post(f"/users/{user}/server"), users))
        for each in users:
            self.until(lambda u=each: self.runs(u))

    def runs(self, user: str) -> bool:
        return bool(self.client.get(f"/users/{user}").json()["servers"].get("", {}).get("ready"))

    def token(self, name: str, **more) -> str:
        answer = self.client.post(f"/users/{name}/tokens", json=more)
        assert answer.status_code == 201, answer.text
        return answer.json()["token"]

    def server(self, name: str, token: str) -> httpx.Client:
        """Call the pool's endpoints of a person's own server, through the Hub's proxy."""
        headers = {"Authorization": f"token {token}"}
        return httpx.Client(base_url=f"{self.url}/user/{name}/gpupool/", headers=headers, timeout=60)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


EXTENSIONS = {"jupyter_gpupool": True, **dict.fromkeys(("jupyterlab", "jupyter_lsp", "notebook"), False)}
KEEP = ["PATH", "TESTS_OF_GPUPOOL", "LANG"]


#: Servers that run as the Hub does.
AS_THE_HUB = """
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = {home!r} + "/{{username}}"
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser"]
"""
#: Servers that run as the OS users of their people's names.
AS_THEMSELVES = """
c.JupyterHub.spawner_class = "localprocess"
c.Spawner.cmd = [{python!r}, "-m", "jupyterhub.singleuser"]
c.Spawner.environment = {{"PYTHONPATH": {path!r}}}
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_three_people_in_two_groups_of_a_hub(tmp_path, proxy, monkeypatch):
    """Root's agents run leases, and root's Hub servers, as OS users that are made for this test.

    Without root the pool has trust_users set: its agents are stood in for, and nobody becomes another user.
    """
    pytest.importorskip("jupyterhub", reason="JupyterHub is not installed: pip install jupyterhub")
    if has_second_user():
        monkeypatch.setenv("PYTHONPATH", second_path())
        await asyncio.to_thread(_with_os_users, proxy)
    else:
        await _with_trust(tmp_path, proxy)


async def _with_trust(folder, proxy):
    names, ports = {name: name for name in ("ann", "ben", "cleo")}, _ports(3)
    (folder / "pool").mkdir()
    async with running(folder / "pool") as kit:
        kit.api.hub = Hub(f"http://127.0.0.1:{ports[1]}/hub/api", fresh_s=0.5)
        ca = folder / "ca.pem"
        ca.write_text(kit.controller.authority.ca_pem)
        await kit.call("adm", "PUT", "/v1/projects", {"projects": PROJECTS})
        spawner = AS_THE_HUB.format(home=str(folder / "home"), python=sys.executable)
        hub = RealHub(folder / "hub", proxy, ports, kit.api.url, ca, names, spawner)
        await asyncio.to_thread(_tell, hub, Story(hub, names, {"gpus": 1}, kit.api.url, ca))


def _with_os_users(proxy):
    """Cleo's leases run as the OS user whom the map says: another one than her server's."""
    ports, small = _ports(3), {"gpus": 1, "cpus": 0.1, "memory": "500MB"}
    with (
        shared_folder() as folder,
        People(folder, "ann", "ben", "cleo", "team") as names,
        PoolProcesses(folder, {"node-1": 8}) as pool,
    ):
        simulated.create(pool.simulated, pool.nodes, replace=True, shared=True)
        (folder / "users.yaml").write_text(f"{names['cleo']}: {names['team']}\n")
        api = f"http://127.0.0.1:{ports[1]}/hub/api"
        pool.start_controller("--hub-api-url", api, "--user-map", str(folder / "users.yaml"))
        pool.start_agent("node-1")
        pool.wait_for_nodes({"node-1"})
        pool.call("PUT", "/v1/projects", {"projects": PROJECTS})
        ca = folder / "ca.pem"
        ca.write_text(pool.said["ca"])
        spawner = AS_THEMSELVES.format(python=str(SYSTEM_PYTHON), path=second_path())
        hub = RealHub(folder / "hub", proxy, ports, pool.said["url"], ca, names, spawner)
        asked = {**small, "environment": {"python": str(SYSTEM_PYTHON)}}
        runs_as = {"ann": names["ann"], "ben": names["ben"], "cleo": names["team"]}
        _tell(hub, Story(hub, names, asked, pool.said["url"], ca, runs_as))


def _tell(hub, story):
    try:
        hub.start()
        story.tell()
    finally:
        hub.stop()


class Story:
    """What three people of a Hub see of the pool, and what they do not."""

    def __init__(  # noqa: PLR0917 - what it is about
        self,
        hub: RealHub,
        names: dict[str, str],
        asked: dict,
        pool: str,
        ca: Path,
        runs_as: dict | None = None,
    ) -> None:
        self.hub, self.names, self.asked, self.runs_as = hub, names, asked, runs_as or {}
        self.direct = httpx.Client(
            base_url=pool, verify=ssl.create_default_context(cafile=ca), timeout=30, trust_env=False
        )

    def tell(self) -> None:
        people = {name: self.names[name] for name in ("ann", "ben", "cleo")}
        self.hub.serve(*people.values())
        self.tokens = {name: self.hub.token(user) for name, user in people.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.direct)
            self.servers = {
                name: stack.enter_context(self.hub.server(user, self.tokens[name]))
                for name, user in people.items()
            }
            self.each_sees_the_pool_as_who_they_are_at_the_hub()
            self.each_sees_their_own_leases_only_in_the_project_of_their_group()
            self.leases_run_as_the_os_users_of_their_people()
            self.the_groups_limit_holds_for_all_in_it_and_its_project_is_not_for_others()
            self.what_is_not_for_the_pool_opens_nothing_there()
            self.revoking_at_the_hub_ends_access_to_the_pool()
            self.no_token_is_in_a_log_or_an_address()

    def each_sees_the_pool_as_who_they_are_at_the_hub(self) -> None:
        for name, server in self.servers.items():
            self.hub.until(lambda server=server: server.get("pool").json()["state"] == "connected")
            said = server.get("pool").json()["pool"]
            user = said["user"]
            assert (user["name"], user["admin"], said["gpus"]) == (self.names[name], False, 8)

    def each_sees_their_own_leases_only_in_the_project_of_their_group(self) -> None:
        made = self.made = {}
        for name, server in self.servers.items():
            answer = server.post("requests", json=self.asked)
            assert answer.status_code == 201, answer.text
            made[name] = answer.json()
        assert [made[name]["project"] for name in ("ann", "ben", "cleo")] == ["vision", "vision", "speech"]
        for name, server in self.servers.items():
            assert [each["id"] for each in server.get("leases").json()["leases"]] == [made[name]["id"]]
            for other in made.values():
                mine = other["user"] == self.names[name]
                assert server.get(f"leases/{other['id']}").status_code == (200 if mine else 404)
                if not mine:
                    assert server.delete(f"leases/{other['id']}").status_code == 404

    def leases_run_as_the_os_users_of_their_people(self) -> None:
        for name, user in self.runs_as.items():
            ident, server = self.made[name]["id"], self.servers[name]
            self.hub.until(lambda s=server, i=ident: s.get(f"leases/{i}").json()["state"] == "active")
            keys = self.get(f"/v1/leases/{ident}/connection", self.tokens[name]).json()
            with distributed.Client(keys["address"], security=security(keys), timeout=30) as client:
                assert client.submit(os.getuid).result(30) == pwd.getpwnam(user).pw_uid
            all_ = [each.info for each in psutil.process_iter(["cmdline", "uids"])]
            theirs = [each for each in all_ if "jupyterhub.singleuser" in (each["cmdline"] or ())]
            assert pwd.getpwnam(self.names[name]).pw_uid in {each["uids"].real for each in theirs}

    def the_groups_limit_holds_for_all_in_it_and_its_project_is_not_for_others(self) -> None:
        full = self.servers["ann"].post("requests", json={**self.asked, "gpus": 2})
        waits = full.json()
        assert full.status_code in (201, 403), full.text
        assert waits.get("state", waits.get("reason")) in ("pending", "over_limit")
        foreign = self.servers["cleo"].post("requests", json={**self.asked, "project": "vision"})
        assert (foreign.status_code, foreign.json()["reason"]) == (403, "not_a_member")

    def what_is_not_for_the_pool_opens_nothing_there(self) -> None:
        """Another's server is closed by the Hub itself."""
        ann = self.names["ann"]
        with self.hub.server(ann, self.tokens["ben"]) as theirs:
            assert theirs.get("pool").status_code in (302, 403)
        narrow = self.hub.token(ann, scopes=[f"access:servers!user={ann}"])
        assert [self.status(each) for each in (self.tokens["ben"], narrow)] == [200, 401]

    def revoking_at_the_hub_ends_access_to_the_pool(self) -> None:
        assert self.hub.client.delete(f"/users/{self.names['ben']}").status_code in (202, 204)
        self.hub.until(lambda: self.status(self.tokens["ben"]) == 401)
        self.hub.until(lambda: self.servers["ben"].get("pool").status_code != 200)

    def no_token_is_in_a_log_or_an_address(self) -> None:
        written = [*self.hub.folder.parent.rglob("*log")]
        logs = "".join(path.read_text(errors="replace") for path in written if path.is_file())
        assert self.hub.folder / "log" in written
        assert ADMIN not in logs
        assert not [name for name, token in self.tokens.items() if token in logs]

    def get(self, path: str, token: str) -> httpx.Response:
        return self.direct.get(path, headers={"Authorization": f"Bearer {token}"})

    def status(self, token: str) -> int:
        return self.get("/v1/pool", token).status_code


# --------------------------------------------------------------------------- what the Hub says, and what not

SCOPE = "access:services!service=gpupool"
ANN = {"kind": "user", "name": "ann", "admin": False, "groups": ["vision"], "scopes": [SCOPE]}


@contextlib.asynccontextmanager
async def answering(answers):
    """Something that answers as a Hub does, by the token; yields a `Hub` that asks it, and what it heard."""
    asked = []

    class User(RequestHandler):
        def get(self):
            token = self.request.headers["Authorization"].removeprefix("token ")
            asked.append(token)
            status, said = answers.get(token, (403, {"status": 403}))
            self.set_status(status)
            self.finish(json.dumps(said))

    server = HTTPServer(Application([("/hub/api/user", User)]))
    [port] = _ports(1)
    server.listen(port, "127.0.0.1")
    hub = Hub(f"http://127.0.0.1:{port}/hub/api/", fresh_s=0.2)
    try:
        yield hub, asked
    finally:
        hub.close()
        server.stop()
        await server.close_all_connections()


@pytest.mark.parametrize(
    ("said", "scopes"),
    [
        pytest.param(ANN, {"read", "use"}, id="a person"),
        pytest.param({**ANN, "admin": True}, {"read", "use", "admin"}, id="an administrator"),
        pytest.param({**ANN, "scopes": ["access:services"]}, {"read", "use"}, id="a token for all services"),
        pytest.param({**ANN, "scopes": ["access:services!service=other"]}, None, id="for another service"),
        pytest.param({**ANN, "scopes": ["self", "access:servers"]}, None, id="for no service"),
        pytest.param({**ANN, "kind": "service"}, None, id="a service is no person"),
        pytest.param({**ANN, "name": "*"}, None, id="a name that means everybody"),
        pytest.param({}, None, id="nothing"),
    ],
)
async def test_a_token_of_the_hub_stands_for_its_person_if_it_is_for_this_pool(said, scopes):
    async with answering({"tok": (200, said)}) as (hub, _):
        person = await hub.verify("tok")
    assert (None if person is None else set(person.scopes)) == scopes
    if person is not None:
        assert (person.user, person.groups, person.admin) == ("ann", ("vision",), "admin" in scopes)


async def test_root_of_a_hub_is_nobody_in_the_pool(tmp_path):
    people = {"tok": (200, {**ANN, "name": "root", "admin": True}), "anns": (200, ANN)}
    async with answering(people) as (hub, _), running(tmp_path) as kit:
        kit.api.hub = hub
        answer = await kit.call("tok", "GET", "/v1/pool")
        assert (answer.status_code, answer.data["reason"]) == (403, "not_allowed")
        assert "the name of root" in answer.data["detail"]
        assert (await kit.call("anns", "GET", "/v1/pool")).status_code == 200


@pytest.mark.parametrize("unknown", [(403, {}), (500, {})], ids=["it says no", "it does not say"])
async def test_nobody_without_a_token_has_the_pool_ask_the_hub_without_end(tmp_path, unknown):
    people = {"tok": (200, ANN), **{f"x{n}": unknown for n in range(9)}}
    limits = Limits(open_rate=0.001, open_burst=4)
    async with answering(people) as (hub, asked), running(tmp_path, limits=limits) as kit:
        kit.api.hub = hub
        assert (await kit.call("tok", "GET", "/v1/pool")).status_code == 200
        codes = [(await kit.call(f"x{n}", "GET", "/v1/pool")).status_code for n in range(9)]
        assert codes[3:] == [429] * 6
        assert len(asked) == 4
        await asyncio.sleep(0.3)  # what the Hub has said is not good any more
        assert (await kit.call("tok", "GET", "/v1/pool")).status_code == 200, "who was known is asked about"


async def test_what_is_no_token_of_the_hub_is_not_told_to_it():
    async with answering({}) as (hub, asked):
        for text in ("", "gpupool_0123_secret", "two\nlines", "ä"):
            assert await hub.verify(text) is None
        assert asked == []
        assert await hub.verify("unknown") is None


async def test_many_calls_are_one_question_and_revoking_ends_access_soon():
    answers = {"tok": (200, ANN)}
    async with answering(answers) as (hub, asked):
        people = await asyncio.gather(*(hub.verify("tok") for _ in range(20)))
        assert {each.user for each in people} == {"ann"}
        assert asked == ["tok"]
        del answers["tok"]
        await asyncio.sleep(0.3)
        assert await hub.verify("tok") is None
        assert b"tok" not in repr(list(hub._known)).encode()


@pytest.mark.parametrize(
    "answer", [(500, {}), (302, {}), (200, [])], ids=["broken", "elsewhere", "no person"]
)
async def test_a_hub_that_does_not_say_is_neither_yes_nor_no(answer):
    async with answering({"tok": answer}) as (hub, asked):
        for _ in range(2):
            with pytest.raises(Problem, match="cannot ask the JupyterHub"):
                await hub.verify("tok")
        assert len(asked) == 2, "it is asked again"


async def test_a_hub_that_is_not_there_is_neither_yes_nor_no():
    [port] = _ports(1)
    hub = Hub(f"http://127.0.0.1:{port}/hub/api")
    with pytest.raises(Problem, match="cannot ask the JupyterHub"):
        await hub.verify("tok")
    hub.close()


async def test_a_process_of_the_hubs_finds_the_pool_and_gives_its_own_token_only_there(monkeypatch):
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "hub-token")
    monkeypatch.setenv("GPUPOOL_URL", "https://head:1")
    assert find(None, None, None, start=False).token == ""
    monkeypatch.setenv("GPUPOOL_HUB", "1")
    assert find(None, None, None, start=False).token == "hub-token"
    assert find("https://other:1", None, None, start=False).token == ""
