"""The Jupyter server extension: a real server before a real pool of simulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import jupyter_gpupool
from jupyter_gpupool import embedded
from tests.conftest import all_notices, environment, wait_until
from tests.server_kit import JupyterServer

PACKAGE = Path(jupyter_gpupool.__file__).parent
#: Every endpoint with each of its verbs, and which action of the resource it needs.
ENDPOINTS = [
    ("GET", "pool", "read"),
    ("POST", "pool", "execute"),
    ("GET", "devices", "read"),
    ("GET", "leases", "read"),
    ("POST", "requests", "write"),
    ("POST", "requests?dry_run=true", "write"),
    ("GET", "leases/0123456789", "read"),
    ("PATCH", "leases/0123456789", "write"),
    ("DELETE", "leases/0123456789", "write"),
    ("GET", "leases/0123456789/explain", "read"),
    ("GET", "leases/0123456789/logs", "read"),
    ("GET", "queue", "read"),
    ("GET", "projects", "read"),
    ("PUT", "projects", "write"),
    ("GET", "usage", "read"),
    ("GET", "history", "read"),
    ("GET", "health/node-1/gpu0", "read"),
    ("POST", "health/node-1/gpu0", "write"),
    ("GET", "notices", "read"),
    ("GET", "leases/0123456789/dashboard/status", "execute"),
]
IDS = [f"{method} {path}" for method, path, _ in ENDPOINTS]


@pytest.fixture(scope="module")
def running(shared_pool, tmp_path_factory):
    with JupyterServer(tmp_path_factory.mktemp("server")) as server:
        wait_until(lambda: server.get("pool")["state"] == "connected")
        yield server


@pytest.fixture
def server(running, pool):
    """The module's server before the session's pool, which is put in order after each test."""
    return running


@pytest.fixture
def allowed(running):
    """Sets what the server's authorizer lets people do."""
    path = running.folder / "allowed"
    yield lambda *actions: path.write_text(" ".join(actions))
    path.write_text("read write execute")


def make(server, **what):
    body = {"gpus": 1, "time_limit": "1h", **what}
    lease = server.call("POST", "requests", body, status=201)
    wait_until(lambda: server.get(f"leases/{lease['id']}")["state"] == "active")
    return lease["id"]


def test_what_is_asked_for_here_runs_as_a_notebook_of_this_server_would(server, shared_pool):
    """In its folder, so that modules beside the notebooks can be imported, unless another one is named."""
    make(server, name="beside")
    make(server, name="elsewhere", environment={"working_directory": "/"})
    folders = {
        name: set(shared_pool.lease(name).client().run(os.getcwd).values())
        for name in ("beside", "elsewhere")
    }
    assert folders == {"beside": {str(server.folder)}, "elsewhere": {"/"}}


# ------------------------------------------------------------------------------------------------- the pool


def test_it_says_what_the_pool_is_and_who_one_is_to_it(server):
    said = server.get("pool")
    assert said["state"] == "connected"
    assert said["pool"]["gpus"] == 8
    assert said["pool"]["simulated"]
    assert said["pool"]["user"]["admin"]
    assert said["may"] == {"read": True, "write": True, "execute": True}


def test_devices_are_told_whole_and_then_as_far_as_they_are_new(server):
    first = server.get("devices")
    assert first["full"]
    assert len(first["devices"]) == 8
    lease = make(server)
    time.sleep(0.3)
    news = server.get("devices", since=first["sequence"])
    assert not news["full"]
    mine = [each for each in news["devices"] if each["parts"]]
    assert [each["parts"][0]["lease"] for each in mine] == [lease]
    assert server.get("devices", since=1)["full"], "a number of another server's"


def test_a_lease_from_its_request_to_its_end(server):
    trial = server.call("POST", "requests?dry_run=true", {"gpus": 1})
    assert trial["starts_now"]
    response = server.client.post("requests", json={"gpus": 1, "time_limit": "1h", "name": "mine"})
    assert response.status_code == 201
    lease = response.json()["id"]
    assert response.headers["Location"] == f"/user/a%40b/gpupool/leases/{lease}"
    wait_until(lambda: server.get(f"leases/{lease}")["state"] == "active")
    assert server.get("leases")["leases"][0]["id"] == lease
    before = server.get(f"leases/{lease}")["ends_at"]
    assert server.call("PATCH", f"leases/{lease}", {"extend": "1h"})["ends_at"] > before + 3500
    assert server.get(f"leases/{lease}/explain")["sentences"]
    assert "scheduler" in [each["name"] for each in server.get(f"leases/{lease}/logs")["logs"]]
    assert server.get("usage")["usage"][0]["leases"] == 1
    assert server.get("projects")["projects"]
    assert server.call("DELETE", f"leases/{lease}", status=204) is None
    wait_until(lambda: server.get(f"leases/{lease}")["state"] == "ended")


def test_a_long_poll_answers_when_the_lease_is_another(server):
    lease = make(server)
    version = server.get(f"leases/{lease}")["version"]
    started = time.monotonic()
    server.client.patch(f"leases/{lease}", json={"extend": "1h"})
    assert server.get(f"leases/{lease}", wait=20, version=version)["version"] != version
    assert time.monotonic() - started < 15


def test_a_repeated_request_with_the_same_key_makes_one_lease(server):
    headers = {"Idempotency-Key": "as said once"}
    body = {"gpus": 1, "name": "once"}
    both = [server.call("POST", "requests", body, status=201, headers=headers) for _ in range(2)]
    assert both[0]["id"] == both[1]["id"]


def test_who_waits_is_listed(server):
    make(server, gpus=8)
    server.call("POST", "requests", {"gpus": 1, "name": "later"}, status=201)
    waits = server.get("queue")["queue"]
    assert [(each["place"], each["name"]) for each in waits] == [(1, "later")]


def test_a_device_is_taken_out_of_service_and_back(server):
    why = {"action": "cordon", "why": "fans are being cleaned"}
    assert server.call("POST", "health/gpu0", why)["name"] == "node-1/gpu0"
    assert server.get("health/node-1/gpu0")["cordoned"] == "fans are being cleaned"
    device = server.get("devices")["devices"][0]
    assert (device["name"], device["cordoned"]) == ("node-1/gpu0", "fans are being cleaned")
    server.call("POST", "health/node-1/gpu0", {"action": "uncordon"})
    assert not server.get("devices")["devices"][0]["cordoned"]


# --------------------------------------------------------------------------------------------- how it says no


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "requests", {"gpus": 99}, (400, "too_many_gpus", "gpus")),
        ("POST", "requests", {"gpu": 1}, (400, "bad_request", "gpu")),
        ("POST", "requests", [1], (400, "bad_request", "")),
        ("GET", "leases/nosuchlease", None, (404, "unknown_lease", "")),
        ("DELETE", "leases/nosuchlease", None, (404, "unknown_lease", "")),
        ("GET", "leases?state=asleep", None, (400, "bad_request", "state")),
        ("GET", "leases/..%2f..%2fv1%2ftokens", None, (404, "unknown_lease", "")),
        ("POST", "health/gpu99", {"action": "cordon"}, (404, "not_found", "")),
        ("GET", "health/node-1", None, (400, "bad_request", "")),
        ("GET", "health/%2e%2e/tokens", None, (404, "not_found", "")),
        ("POST", "health/%2e%2e/stop", {}, (404, "not_found", "")),
        ("DELETE", "leases/%2e%2e", None, (404, "not_found", "")),
        ("GET", "leases/%2e%2e/logs", None, (404, "not_found", "")),
        ("POST", "pool", {"action": "stop"}, (400, "bad_request", "action")),
        ("PUT", "leases", {}, (405, "no_such_method", "")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_no_comes_with_its_name_a_sentence_and_the_field(server, method, path, body, expected):
    response = server.client.request(method, path, json=body)
    said = response.json()
    assert (response.status_code, said["reason"], said["field"]) == expected, said
    assert response.headers["Content-Type"] == "application/problem+json"
    assert said["sentence"] == said["detail"]
    assert said["sentence"][-1] in ".?!"
    assert said["message"].startswith(said["sentence"])


def test_all_that_is_wrong_is_said_at_once(server):
    said = server.call("POST", "requests", {"gpus": -1, "vram": "much"}, status=400)
    assert {each["field"] for each in said["errors"]} == {"gpus", "vram"}


# -------------------------------------------------------------------------------------------- who may do what


@pytest.mark.parametrize(("method", "path", "action"), ENDPOINTS, ids=IDS)
def test_without_a_login_nothing_is_answered(running, method, path, action):
    with running.nobody() as client:
        response = client.request(method, path, json={})
    if "dashboard" in path:
        assert response.status_code == 302, "a page leads to the login"
        assert response.headers["Location"].startswith("/user/a%40b/login?next=")
    else:
        assert response.status_code == 403


@pytest.mark.parametrize(("method", "path", "action"), ENDPOINTS, ids=IDS)
def test_each_verb_asks_the_authorizer_for_its_own_action(running, allowed, method, path, action):
    allowed("nothing")
    asked = running.folder / "asked"
    asked.write_text("")
    response = running.client.request(method, path, json={})
    assert response.status_code == 403
    assert [json.loads(line) for line in asked.read_text().splitlines()] == [[method, action, "gpupool"]]


def test_who_may_only_read_looks_and_takes_nothing(server, allowed):
    allowed("read")
    assert server.get("pool")["may"] == {"read": True, "write": False, "execute": False}
    assert server.get("devices")["devices"]
    said = server.call("POST", "requests", {"gpus": 1}, status=403)
    assert said["reason"] == "forbidden"
    assert server.get("leases")["leases"] == [] or all(
        each["state"] == "ended" for each in server.get("leases")["leases"]
    )


def test_the_table_of_endpoints_is_whole():
    from jupyter_gpupool.server.dashboards import Entry
    from jupyter_gpupool.server.handlers import ROUTES

    verbs = ("get", "post", "put", "patch", "delete")
    there = sum(name in vars(handler) for _, handler in [*ROUTES, ("", Entry)] for name in verbs)
    assert there == len({(method, path.partition("?")[0]) for method, path, _ in ENDPOINTS})


CHECK = """
import warnings
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import JupyterServerAuthWarning
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always", JupyterServerAuthWarning)
    app = ServerApp(allow_unauthenticated_access=False, allow_root=True, open_browser=False, port=0)
    app.config.ServerApp.jpserver_extensions = {"jupyter_gpupool": True, "jupyterlab": False}
    app.update_config(app.config)
    app.initialize(argv=[])
print("loaded", len(app.web_app.settings["jupyter_gpupool"].handlers) > 10)
print("warnings", [str(each.message) for each in found if "gpupool" in str(each.message)])
import sys
print("heavy", sorted({"httpx", "distributed", "dask", "numpy", "pandas", "bokeh"} & set(sys.modules)))
"""


def test_the_official_check_of_handlers_finds_nothing_and_loading_it_loads_nothing_heavy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment(JUPYTER_DATA_DIR=str(tmp_path)),
    )
    assert done.stdout.splitlines()[-3:] == ["loaded True", "warnings []", "heavy []"], done.stderr


def test_polling_is_no_activity_and_changing_is(server):
    def active() -> str:
        response = server.client.get(server.url + "api/status")
        return response.json()["last_activity"]

    before = active()
    for path in ("pool", "devices", "leases", "queue", "usage", "projects", "notices"):
        server.get(path)
    assert active() == before
    server.call("POST", "requests?dry_run=true", {"gpus": 1})
    assert active() > before


def test_installing_the_package_enables_it():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    data = project["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    source = next(key for key, to in data.items() if to == "etc/jupyter/jupyter_server_config.d")
    said = json.loads((PACKAGE.parent / source / "jupyter_gpupool.json").read_text())
    assert said == {"ServerApp": {"jpserver_extensions": {"jupyter_gpupool": True}}}


def test_the_pools_token_is_in_no_answer_and_in_no_log(server):
    token = embedded.find().token
    answers = [server.client.request(method, path).text for method, path, _ in ENDPOINTS if method == "GET"]
    assert not [text for text in answers if token in text]
    assert token not in server.log()


# ------------------------------------------------------------------------------------------ news, on the bus


def test_the_life_of_a_lease_comes_by_the_event_bus(server):
    with server.events() as following:
        lease = make(server)
        seen = []

        def until(mark):
            while mark not in seen:
                name, data = following()
                assert name in ("notice", "lease", "pool"), "no readings are on the bus"
                if data.get("lease") == lease:  # others may still be ending
                    seen.append((name, data.get("notice", data.get("state"))))

        until(("notice", "started"))
        until(("lease", "active"))
        server.client.delete(f"leases/{lease}")
        until(("lease", "ended"))
    told = all_notices(lambda after: server.get("notices", after=after))
    assert {"started", "ended"} <= {each["notice"] for each in told if each["lease"] == lease}
