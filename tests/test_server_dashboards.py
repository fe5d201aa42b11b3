"""Dashboards through the Jupyter server: real ones, of real leases, and who may open them."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
import websocket

from jupyter_gpupool.lease import scheduler
from jupyter_gpupool.server import dashboards
from jupyter_gpupool.server.tickets import Tickets
from tests.conftest import wait_until
from tests.controller_kit import running as controller
from tests.server_kit import JupyterServer


@pytest.fixture(scope="module")
def server(shared_pool, tmp_path_factory):
    with JupyterServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def lease(shared_pool, server):
    """A lease whose dashboard repeats what it hears under /echo, and misbehaves otherwise."""
    with shared_pool.request(gpus=1) as lease:
        with lease.client() as client:
            client.run_on_scheduler(_add_pages)
        yield lease


def _add_pages(dask_scheduler):
    from tornado.web import RequestHandler

    class Echo(RequestHandler):
        def get(self):
            self.set_cookie("theirs", "1")
            self.set_header("Content-Security-Policy", "default-src *")
            self.set_header("Access-Control-Allow-Origin", "*")
            self.finish(dict(self.request.headers))

    class Away(RequestHandler):
        def get(self):
            self.redirect(self.get_query_argument("to"))

    class Ears(websocket_handler()):
        def open(self):
            self.write_message(dict(self.request.headers))

        def on_message(self, message):
            self.write_message(message, binary=isinstance(message, bytes))

    pages = [("/echo", Echo), ("/away", Away), ("/ears/ws", Ears)]
    dask_scheduler.http_application.add_handlers(".*", pages)


def websocket_handler():
    from tornado.websocket import WebSocketHandler

    return WebSocketHandler


@pytest.fixture(scope="module")
def opened(server, lease):
    """The address with a ticket, as a browser comes to it, for a client that has not logged in."""
    entry = server.client.get(f"leases/{lease.id}/dashboard/status")
    assert entry.status_code == 302
    assert "~" in entry.headers["Location"]
    return httpx.URL(server.url).join(entry.headers["Location"])


@pytest.fixture
def stranger():
    """A page in a sandbox: it sends no cookie and no token."""
    with httpx.Client(timeout=30) as client:
        yield client


def test_the_status_page_comes_with_all_that_belongs_to_it(server, lease, opened, stranger):
    page = stranger.get(opened)
    assert page.status_code == 200
    assert "Dask Diagnostic UI" in page.text
    parts = re.findall(r'(?:src|href)="((?!http|javascript|#)[^"]+)"', page.text)
    assert len(parts) > 30
    for part in parts:
        if part.startswith(("static", "workers", "profile")):
            assert stranger.get(opened.join(part)).status_code == 200, part


def test_what_comes_out_is_in_a_sandbox_and_has_no_headers_of_its_own(opened, stranger):
    for path in ("status", "echo", "nothing"):
        headers = stranger.get(opened.join(path)).headers
        assert headers["Content-Security-Policy"] == "sandbox allow-scripts", path
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Set-Cookie" not in headers
        assert headers.get("Access-Control-Allow-Origin", "") == ""


def test_nothing_of_jupyter_goes_in(server, opened):
    cookies = {"username-127-0-0-1": "secret", "_xsrf": "secret"}
    headers = {"Authorization": "token secret", "X-Forwarded-For": "secret", "Referer": "http://secret/"}
    with httpx.Client(headers=headers, cookies=cookies) as client:
        heard = client.get(opened.join("echo")).json()
    assert "secret" not in [value for name, value in heard.items() if name != dashboards.SECRET_HEADER]
    assert dashboards.SECRET_HEADER.lower() in {name.lower() for name in heard}
    assert set(heard) - {dashboards.SECRET_HEADER.title()} <= {
        *("Accept", "User-Agent", "Host", "Connection", "Accept-Encoding"),
        *("X-Gpupool-Lease-Secret",),
    }


def test_the_websocket_of_the_page_connects_and_speaks_bokeh(opened, stranger):
    page = stranger.get(opened).text
    token = re.search(r'"token":"([^"]+)"', page)[1]
    address = str(opened).replace("http:", "ws:") + "/ws"
    talk = websocket.create_connection(address, timeout=30, subprotocols=["bokeh", token], origin="null")
    try:
        assert talk.subprotocol == "bokeh"
        assert json.loads(talk.recv())["msgtype"] == "ACK"
    finally:
        talk.close()


def test_a_websocket_hands_on_texts_and_bytes_and_no_cookie(opened):
    address = str(opened.join("ears/ws")).replace("http:", "ws:")
    talk = websocket.create_connection(address, timeout=30, cookie="a=secret", origin="https://evil.example")
    try:
        assert "secret" not in json.loads(talk.recv()).values()
        talk.send("text")
        assert talk.recv() == "text"
        talk.send_binary(b"\x00\xff" * 100_000)
        assert talk.recv() == b"\x00\xff" * 100_000
    finally:
        talk.close()


def test_a_redirect_stays_within_the_dashboard(opened, stranger):
    inner = stranger.get(opened.join("away?to=/status?x=1")).headers["Location"]
    assert inner == f"{opened.raw_path.decode()}?x=1"
    for to in ("https://evil.example/", "//evil.example/", "javascript:alert(1)"):
        answer = stranger.get(opened.join("away").copy_merge_params({"to": to}))
        assert answer.status_code == 404, to
        assert "Location" not in answer.headers


def test_without_a_login_or_with_a_wrong_ticket_nothing_is_opened(server, lease, opened, stranger):
    entry = stranger.get(f"{server.url}gpupool/leases/{lease.id}/dashboard/status")
    assert entry.headers["Location"].startswith("/user/a%40b/login?next=")
    wrong = str(opened).replace("~", "~x")
    assert stranger.get(wrong).status_code == 403
    other = str(opened).replace(lease.id, "0123456789")
    assert stranger.get(other).status_code == 403, "a ticket is for one lease"
    for address in (wrong, other):
        with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
            websocket.create_connection(address.replace("http:", "ws:") + "/ws", timeout=30)


def test_a_cookie_alone_opens_no_websocket_for_pages_from_elsewhere(server, opened):
    headers = [f"Authorization: {server.client.headers['Authorization']}"]
    wrong = str(opened).replace("http:", "ws:").replace("~", "~x") + "/ws"
    with pytest.raises(websocket.WebSocketBadStatusException, match="403"):
        websocket.create_connection(wrong, timeout=30, header=headers, origin="https://evil.example")


def test_an_address_of_yesterday_leads_who_is_logged_in_to_a_new_one(server, opened):
    answer = server.client.get(str(opened).replace("~", "~x"))
    assert answer.status_code == 302
    assert answer.headers["Location"].endswith("/dashboard/status")
    assert "~" not in answer.headers["Location"]


def test_a_ticket_and_the_lease_secret_are_in_no_log(server, lease, opened, stranger):
    secret = stranger.get(opened.join("echo")).json()["X-Gpupool-Lease-Secret"]
    stranger.get(opened.join("nothing"), headers={"Referer": str(opened)})
    ticket = opened.path.partition("~")[2].partition("/")[0]
    log = server.log()
    assert "dashboard" in log
    assert ticket not in log
    assert secret not in log


def test_the_secret_never_reaches_the_browser(server, lease, opened, stranger):
    secret = stranger.get(opened.join("echo")).json()["X-Gpupool-Lease-Secret"]
    for path in (f"leases/{lease.id}", "leases", "devices", "pool", f"leases/{lease.id}/logs"):
        assert secret not in server.client.get(path).text
    assert secret not in stranger.get(opened).text


def test_a_dashboard_ends_with_its_lease(server, shared_pool, stranger):
    with shared_pool.request(gpus=1) as lease:
        entry = server.client.get(f"leases/{lease.id}/dashboard")
        address = httpx.URL(server.url).join(entry.headers["Location"])
        assert stranger.get(address).status_code == 200
    wait_until(lambda: stranger.get(address).status_code == 409)
    assert "has ended" in stranger.get(address).text


def test_a_dashboard_that_does_not_answer_is_said_so(server, shared_pool, stranger):
    with shared_pool.request(gpus=1) as lease:
        entry = server.client.get(f"leases/{lease.id}/dashboard")
        address = httpx.URL(server.url).join(entry.headers["Location"])
        with lease.client() as client:
            client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.stop())
        answer = stranger.get(address)
        assert (answer.status_code, answer.text[:40]) == (502, "This lease's dashboard does not answer. ")
        with pytest.raises(websocket.WebSocketBadStatusException, match="502"):
            websocket.create_connection(str(address).replace("http:", "ws:") + "/ws", timeout=30)


def test_the_header_is_the_one_that_leases_know():
    assert dashboards.SECRET_HEADER == scheduler.SECRET_HEADER


def test_a_ticket_opens_one_lease_for_a_while(monkeypatch):
    tickets = Tickets(60)
    name = tickets.make("lease", "ann")
    assert tickets.user(name, "lease") == "ann"
    assert tickets.user(name, "other") is None
    assert tickets.user("", "lease") is None
    assert Tickets(-1).user(Tickets(-1).make("lease", "ann"), "lease") is None
    old = Tickets(-1)
    assert old.user(old.make("lease", "ann"), "lease") is None


@pytest.mark.asyncio
async def test_another_persons_lease_looks_like_none(tmp_path):
    """The server is ben's; the lease is ann's, until she shares it."""
    async with controller(tmp_path) as kit:
        lease = (await kit.ask("ann", gpus=1))["id"]
        (tmp_path / "token").write_text(kit.tokens["ben"])
        (tmp_path / "ca.pem").write_text(kit.controller.authority.ca_pem)
        folder = tmp_path / "server"
        folder.mkdir()
        server = JupyterServer(
            folder,
            f"c.GPUPoolServer.url = {kit.api.url!r}",
            f"c.GPUPoolServer.token_file = {str(tmp_path / 'token')!r}",
            f"c.GPUPoolServer.ca_file = {str(tmp_path / 'ca.pem')!r}",
        )

        def look(expected):
            for method, part in (
                *(("GET", ""), ("GET", "/explain"), ("GET", "/logs"), ("PATCH", ""), ("DELETE", "")),
                ("GET", "/dashboard/status"),
            ):
                body = {"keep": True} if method == "PATCH" else None
                answer = server.client.request(method, f"leases/{lease}{part}", json=body)
                assert answer.status_code == expected[part or method], (method, part, answer.text)

        await asyncio.to_thread(server.__enter__)
        try:
            keys = ("GET", "PATCH", "DELETE", "/explain", "/logs", "/dashboard/status")
            await asyncio.to_thread(look, dict.fromkeys(keys, 404))
            await kit.call("ann", "PATCH", f"/v1/leases/{lease}", {"share": ["ben"]})
            shared = {"GET": 200, "/explain": 200, "/logs": 200, "PATCH": 403, "DELETE": 403}
            # Its agents have no processes here, so that there is no dashboard either: but ben is told so.
            await asyncio.to_thread(look, {**shared, "/dashboard/status": 409})
            assert kit.tokens["ben"] not in server.log()
        finally:
            await asyncio.to_thread(server.__exit__)
