"""How a script talks to a pool: what is said, what comes back, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import http.server
import importlib
import inspect
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jupyter_gpupool import AsyncPool, GPUPoolCluster, Pool, PoolError, _steps, display, tables
from jupyter_gpupool._find import configuration, find
from jupyter_gpupool._http import PATIENCE_S, Address, Call, Connection, Trouble
from jupyter_gpupool.client import from_here
from jupyter_gpupool.controller.authority import Authority
from tests.conftest import wait_until

# ------------------------------------------------------------------------ what is said (nothing is sent here)

PENDING = {
    "id": "r1",
    "name": "n",
    "state": "pending",
    "version": 1,
    "why": "no room",
    "gpus": 1,
    "slices": [],
}
ACTIVE = {**PENDING, "state": "active", "version": 2}


def say(steps, *answers):
    """Drive steps with these answers, exceptions thrown in; return the calls, and the result or error."""
    calls, answers = [], list(answers)
    try:
        call = next(steps)
        while True:
            calls.append(call)
            answer = answers.pop(0)
            raised = isinstance(answer, BaseException)
            call = steps.throw(answer) if raised else steps.send(answer)
    except StopIteration as done:
        return calls, done.value
    except BaseException as error:  # noqa: BLE001 - Ctrl-C is among what is tried
        return calls, error


def said(calls):
    return [f"{call.method} {call.path}" for call in calls]


def a_request(**more):
    return _steps.request({"gpus": 1}, **{"wait": True, "timeout": None, "on_wait": lambda _: None, **more})


REFUSED = PoolError("too_many_gpus", "No.")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([ACTIVE], ["POST /v1/requests"], id="granted at once: nothing more is said"),
        pytest.param(
            [PENDING, ACTIVE], ["POST /v1/requests", "GET /v1/leases/r1"], id="granted after a wait"
        ),
        pytest.param([REFUSED], ["POST /v1/requests"], id="refused: there is nothing to withdraw"),
        pytest.param(
            [PENDING, KeyboardInterrupt(), None],
            ["POST /v1/requests", "GET /v1/leases/r1", "DELETE /v1/leases/r1"],
            id="Ctrl-C while it waits withdraws",
        ),
        pytest.param(
            [PENDING, asyncio.CancelledError(), None],
            ["POST /v1/requests", "GET /v1/leases/r1", "DELETE /v1/leases/r1"],
            id="cancellation while it waits withdraws",
        ),
        pytest.param(
            [KeyboardInterrupt(), PENDING, None],
            ["POST /v1/requests", "POST /v1/requests", "DELETE /v1/leases/r1"],
            id="Ctrl-C before the answer: asked again by the same key, then withdrawn",
        ),
        pytest.param(
            [KeyboardInterrupt(), REFUSED],
            ["POST /v1/requests", "POST /v1/requests"],
            id="Ctrl-C before the answer, which would have been a refusal",
        ),
        pytest.param(
            [PENDING, PoolError(Trouble.UNREACHABLE, "gone"), None],
            ["POST /v1/requests", "GET /v1/leases/r1", "DELETE /v1/leases/r1"],
            id="the pool is lost while it waits: it is withdrawn if that is possible",
        ),
        pytest.param(
            [PENDING, {**PENDING, "state": "ended", "why": "the start failed"}],
            ["POST /v1/requests", "GET /v1/leases/r1"],
            id="it ended while it started: there is nothing to withdraw",
        ),
        pytest.param(
            [PENDING, {**PENDING, "state": "draining", "why": "the start failed"}],
            ["POST /v1/requests", "GET /v1/leases/r1"],
            id="it is ending before it could be used: there is nothing to withdraw",
        ),
    ],
)
def test_a_wait_that_ends_without_a_grant_withdraws_the_request(answers, expected):
    calls, outcome = say(a_request(), *answers)
    assert said(calls) == expected
    if isinstance(answers[-1], dict) and answers[-1]["state"] == "active":
        assert outcome == ACTIVE
    else:
        assert isinstance(outcome, BaseException)


def test_a_request_that_is_said_twice_has_the_same_key():
    calls, _ = say(a_request(), KeyboardInterrupt(), PENDING, None)
    assert calls[0] == calls[1]
    assert calls[0].headers["Idempotency-Key"]


def test_an_error_in_on_wait_withdraws_too():
    def broken(_):
        raise ZeroDivisionError

    calls, outcome = say(a_request(on_wait=broken), PENDING, None)
    assert said(calls) == ["POST /v1/requests", "DELETE /v1/leases/r1"]
    assert isinstance(outcome, ZeroDivisionError)


def test_a_time_out_says_why_it_waited():
    calls, outcome = say(a_request(timeout=1e-9), PENDING, None)
    assert said(calls)[-1] == "DELETE /v1/leases/r1"
    assert outcome.reason == Trouble.TIMED_OUT
    assert "no room" in str(outcome)


@pytest.mark.parametrize("timeout", [-3, 0, "soon", "5m", float("nan"), True, [1]])
def test_a_time_out_that_is_none_is_refused_before_anything_is_asked_for(timeout):
    calls, outcome = say(a_request(timeout=timeout))
    assert calls == []
    assert str(outcome) == (
        f"timeout={timeout!r} is not a number of seconds above zero. Give one, such as 300."
    )


@pytest.mark.parametrize("token", ["two\nlines", "tökén"])
def test_a_token_that_could_not_even_be_sent_is_said_to_be_none(token):
    with pytest.raises(PoolError, match="says is not a token"):
        Pool("https://127.0.0.1:9", token)


def test_what_is_none_is_not_asked_for():
    calls, _ = say(
        _steps.request({"gpus": 1, "name": None}, wait=False, timeout=None, on_wait=print), PENDING
    )
    assert calls[0].body == {"gpus": 1}


# ------------------------------------------------------------------------------------------- with a real pool


def test_a_granted_request_is_a_dask_cluster_on_the_gpus_asked_for(pool):
    with pool.request(gpus=2, name="two") as lease:
        client = lease.client()
        assert client.submit(sum, [20, 22]).result(timeout=30) == 42
        assert len(client.scheduler_info()["workers"]) == 2
        visible = client.run(lambda: __import__("os").environ["CUDA_VISIBLE_DEVICES"])
        assert {text.split(",")[0] for text in visible.values()} == {each.device for each in lease.slices}
        assert lease.client() is client, "asked for again it is the same client"
        assert "2 GPUs (2 \N{MULTIPLICATION SIGN} H100-80GB on node-" in repr(lease)
        assert "simulated" in repr(lease)
        assert "<table>" in lease._repr_html_()
    assert client.status == "closed"
    assert pool.lease("two").state in ("draining", "ended")


def test_a_lease_says_what_its_processes_wrote(pool):
    lease = pool.request(gpus=1)
    lease.client().run(lambda: __import__("sys").stderr.write("hello from a task\n"))
    wait_until(lambda: "hello from a task" in repr(lease.logs()))
    assert "scheduler" in lease.logs()


def test_a_request_that_finds_no_free_gpu_waits_and_says_why_and_where(pool):
    pool.request(gpus=8, name="all")
    waiting = pool.request(gpus=1, name="next", wait=False)
    assert waiting.state == "pending"
    assert waiting.place == 1
    assert "place 1 in the queue" in repr(waiting)
    assert pool.explain("next").sentences
    assert [row["name"] for row in pool.queue()] == ["next"]
    waiting.release()
    assert waiting.refresh().state == "ended"


def test_a_waiting_request_is_granted_when_something_is_released(pool):
    first = pool.request(gpus=8, name="all")
    told = []
    releasing = threading.Thread(target=lambda: (wait_until(lambda: told), first.release()))
    releasing.start()
    second = pool.request(gpus=1, on_wait=told.append, timeout=60)
    releasing.join()
    assert second.state == "active"
    assert told[0].state == "pending"
    assert first.refresh().state in ("draining", "ended")


def test_a_request_that_times_out_is_withdrawn(pool):
    pool.request(gpus=8)
    with pytest.raises(PoolError, match=r"within 0\.5 s and is withdrawn: ") as no:
        pool.request(gpus=1, name="late", timeout=0.5)
    assert no.value.reason == Trouble.TIMED_OUT
    assert "late" not in [lease.name for lease in pool.leases()]


def test_leases_are_found_by_name_and_by_id_and_alone_without_either(pool):
    with pytest.raises(PoolError, match="You have no lease"):
        pool.lease()
    lease = pool.request(gpus=1, name="only", wait=False)
    assert pool.lease().id == pool.lease("only").id == pool.lease(lease.id).id == lease.id
    pool.request(gpus=1, name="other", wait=False)
    with pytest.raises(PoolError, match="Say which: "):
        pool.lease()
    with pytest.raises(PoolError, match=r"You have no lease 'onyl'\. You have: ") as no:
        pool.lease("onyl")
    assert no.value.reason == "unknown_lease"


def test_a_lease_can_be_extended_and_kept(pool):
    lease = pool.request(gpus=1, time_limit="1h")
    before = lease.ends_at
    assert lease.extend("30m").ends_at == pytest.approx(before + 1800, abs=2)
    assert lease.keep().state == "active"


def test_a_trial_says_what_would_be_without_asking(pool):
    assert pool.trial(gpus=2).starts_now
    with pool.request(gpus=8, time_limit="1h"):
        would = pool.trial(gpus=2)
        assert not would.starts_now
        assert would.place == 1
        assert "wait and start in" in repr(would)
    assert [lease.gpus for lease in pool.leases()] in ([], [8]), "only the lease that is being released"


def test_the_client_of_a_lease_that_has_ended_is_refused_in_words(pool):
    lease = pool.request(gpus=1, name="over")
    lease.release(wait=30)
    with pytest.raises(PoolError, match="over has ended") as no:
        lease.client()
    assert no.value.reason in (Trouble.LEASE_OVER, "lease_over")


def test_status_and_devices_can_be_read_by_people_and_by_programs(pool):
    status = pool.status()
    assert (status.gpus, status.simulated) == (8, True)
    assert "8 GPUs" in repr(status)
    assert "simulated" in repr(status)
    devices = pool.devices()
    assert len(devices) == 8
    assert "node-2/gpu3" in repr(devices)
    assert "<table>" in devices._repr_html_()
    assert "simulated" in pool._repr_html_()


def test_everything_can_be_awaited(pool):
    async def work():
        async with AsyncPool(start=False) as apool:
            assert (await apool.status()).gpus == 8
            async with await apool.request(gpus=1, name="awaited") as lease:
                client = await lease.client()
                assert await client.submit(sum, [1, 2]) == 3
                assert [each.name for each in await apool.leases()] == ["awaited"]
                assert "scheduler" in await lease.logs()
            assert lease.state != "active", "it knows that it was given back"
            assert client.status == "closed"

    asyncio.run(work())


def test_cancelling_an_awaited_request_withdraws_it(pool):
    async def work():
        async with AsyncPool(start=False) as apool:
            await apool.request(gpus=8)
            waiting = asyncio.ensure_future(apool.request(gpus=1, name="cancelled"))
            while "cancelled" not in [each.name for each in await apool.leases()]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the pool is another process
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert "cancelled" not in [each.name for each in await apool.leases()]

    asyncio.run(work())


def test_a_cluster_is_a_lease_that_dask_knows_how_to_use(pool):
    from distributed import Client

    with GPUPoolCluster(pool, gpus=1, name="cluster") as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3
        assert "GPUPoolCluster" in repr(cluster)
        assert [lease.name for lease in pool.leases()] == ["cluster"]
    assert pool.lease("cluster").state in ("draining", "ended")


def test_a_cluster_is_a_factory_for_dask_labextension(pool):
    """Made, scaled, described and closed as its cluster manager does, from two words of configuration."""

    async def managed():
        factory = getattr(importlib.import_module("jupyter_gpupool"), "GPUPoolCluster")  # noqa: B009 - as there
        cluster = await factory(gpus=1, max_gpus=2, name="managed", timeout=60, asynchronous=True)
        try:
            scaled = cluster.scale(1)
            if inspect.isawaitable(scaled):
                await scaled
            info = cluster.scheduler_info
            return {
                "address": cluster.scheduler_address,
                "link": cluster.dashboard_link or "",
                "workers": len(info["workers"]),
                "memory": sum(each["memory_limit"] for each in info["workers"].values()),
                "cores": sum(each["nthreads"] for each in info["workers"].values()),
            }
        finally:
            await cluster.close()

    found = asyncio.run(managed())
    assert found["address"].startswith("tls://")
    assert 1 <= found["workers"] <= 2
    assert found["cores"] == found["workers"]
    assert found["memory"] > 0
    assert pool.lease("managed").state in ("draining", "ended")


def test_a_cluster_on_a_lease_that_is_there_leaves_it_there(pool):
    lease = pool.request(gpus=1, name="mine")
    with GPUPoolCluster(pool, lease=lease) as cluster:
        assert cluster.name == "mine"
    assert lease.refresh().state == "active"


# ------------------------------------------------------------------------------------------ what can go wrong


class Other(http.server.BaseHTTPRequestHandler):
    """Something that is no pool."""

    answer = (200, "text/html", b"<h1>It works!</h1>")

    def do_GET(self):
        status, kind, body = self.answer
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the server's name for it

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(tmp_path):
    """Serve something else, with TLS or without; gives its address, and the authority that vouches for it."""
    servers, authority = [], Authority(tmp_path / "authority")

    def started(answer=Other.answer, *, tls=True):
        handler = type("Handler", (Other,), {"answer": answer})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        if tls:
            server.socket = authority.server_context().wrap_socket(server.socket, server_side=True)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"https://127.0.0.1:{server.server_port}", authority.ca_pem

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "tls"),
    [
        pytest.param((200, "text/html", b"<h1>It works!</h1>"), True, id="a web page"),
        pytest.param((200, "text/html", b"<h1>It works!</h1>"), False, id="a web page without TLS"),
        pytest.param((404, "application/json", b'{"error": "not found"}'), True, id="another service's 404"),
        pytest.param((200, "application/json", b'{"hello": "world"}'), True, id="another service's 200"),
        pytest.param((200, "application/json", b"[1, 2]"), True, id="a list where an object should be"),
        pytest.param((200, "application/json", b"{broken"), True, id="JSON that is none"),
        pytest.param((302, "text/html", b""), True, id="a redirection"),
    ],
)
def test_an_address_that_answers_with_something_else_is_said_to_be_no_pool(serve, answer, tls):
    url, ca = serve(answer, tls=tls)
    with Pool(url, "token", ca) as pool, pytest.raises(PoolError) as no:
        pool.status()
    assert no.value.reason == Trouble.NOT_A_POOL
    assert str(no.value).startswith(
        f"Something else than a GPU pool answers at {url}. Correct the address in "
    )


def test_a_server_whose_certificate_is_not_the_pools_is_never_told_the_token(serve, shared_pool):
    url, _ = serve((200, "application/json", b'{"gpus": 8}'))
    with Pool(url, "token", shared_pool.address.ca) as pool, pytest.raises(PoolError) as no:
        pool.status()
    assert no.value.reason == Trouble.WRONG_CERTIFICATE
    assert "jupyter gpupool login LINE" in no.value.advice


def test_where_nothing_answers_it_says_how_to_start_a_pool():
    with Pool("https://127.0.0.1:9", "token") as pool, pytest.raises(PoolError) as no:
        pool.status()
    assert no.value.reason == Trouble.UNREACHABLE
    assert str(no.value).startswith("No pool answers at https://127.0.0.1:9 (")
    assert "jupyter gpupool start" in no.value.advice


def test_a_pool_that_has_answered_before_is_tried_again_for_a_while(shared_pool, monkeypatch):
    connection = Connection(shared_pool.address)
    monkeypatch.setattr("jupyter_gpupool._http.PATIENCE_S", 0.5)
    assert PATIENCE_S > 5
    connection.send(Call(method="GET", path="/v1/pool"))
    connection.close()
    connection.address = replace(connection.address, url="https://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(PoolError):
        connection.send(Call(method="GET", path="/v1/pool"))
    assert time.monotonic() - begun > 0.5


def test_a_wrong_token_is_said_to_be_one(shared_pool):
    address = shared_pool.address
    with Pool(address.url, "gpupool_wrong_token", address.ca) as pool, pytest.raises(PoolError) as no:
        pool.status()
    assert no.value.reason == Trouble.WRONG_TOKEN
    assert str(no.value) == (
        f"The pool at {address.url} does not accept the token from the arguments of Pool(). "
        "Ask its administrator for a line and run `jupyter gpupool login LINE`."
    )


@pytest.mark.parametrize(
    "url",
    [
        *("head-node:8790", "http://head-node", "ftp://x", "https://", "nonsense", " ", 3),
        *("https://[::1", "https://node:x", "https://node:99999", "https://ann:secret@node"),
    ],
)
def test_an_address_that_is_none_is_said_to_be_none(url):
    with pytest.raises(PoolError, match="is not the address of a pool") as no:
        Pool(url, "token")
    assert no.value.reason == Trouble.BAD_CONFIG


# -------------------------------------------------------------------------------------------- how it is found


@pytest.fixture
def config_file(monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    return configuration()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("url: [", "line 1: "),
        ("- a\n- b\n", "it must be lines such as"),
        ("url: https://x\ntokn: y\n", "it says 'tokn', but only url, token, ca can be said"),
        ("token: y\n", "the line with `url:` is missing"),
        ("url: 12\n", "it must be lines such as"),
        ("url: \x00", "unacceptable character"),
    ],
)
def test_a_broken_configuration_file_is_named_with_what_is_wrong_with_it(config_file, text, why):
    config_file.write_text(text)
    with pytest.raises(PoolError) as no:
        Pool()
    assert no.value.reason == Trouble.BAD_CONFIG
    assert str(no.value).startswith(f"The configuration file {config_file} is broken ({why}")
    assert "\n" not in str(no.value)


def test_an_unreadable_configuration_file_is_not_passed_over(config_file):
    config_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PoolError, match="is broken"):
        Pool()


def test_a_missing_certificate_is_named(monkeypatch):
    monkeypatch.setenv("GPUPOOL_URL", "https://127.0.0.1:1")
    monkeypatch.setenv("GPUPOOL_CA", "/no/such/ca.pem")
    with pytest.raises(PoolError, match=r"The certificate '/no/such/ca.pem' cannot be read \(No such file"):
        Pool()


def test_arguments_come_before_the_environment_and_that_before_the_file(config_file, monkeypatch):
    config_file.write_text("url: https://file:1\ntoken: t\n")
    assert find(None, None, None, start=False) == Address(
        url="https://file:1", token="t", source=str(config_file)
    )
    monkeypatch.setenv("GPUPOOL_URL", "https://variable:1/")
    assert find(None, None, None, start=False).url == "https://variable:1"
    assert find("https://argument:1", None, None, start=False).url == "https://argument:1"


def test_an_empty_configuration_file_says_nothing(config_file, own_folder):
    config_file.write_text("# nothing here\n")
    with pytest.raises(PoolError, match=r"No pool runs on this machine\. Start one with"):
        Pool(start=False)


# ----------------------------------------------------------------------------------------------- how it looks


def test_a_long_sentence_in_a_table_goes_on_below_its_beginning():
    said = "Fell off the bus (XID 79): the GPU is gone until its node is rebooted, as it was at noon."
    shown = tables.table((("gpu", lambda row: row[0]), ("says", lambda row: row[1])), [("gpu0", said)])
    assert max(map(len, shown.splitlines())) <= len("gpu0  ") + tables.SENTENCE
    assert " ".join(shown.replace("gpu0", "").split()).endswith(said)


def test_times_amounts_and_tables_are_said_in_words():
    assert display.duration(3599) == "59 min 59 s"
    assert display.duration(2 * 86400 + 3600) == "2 d 1 h"
    assert display.gigabytes(85520809984) == "80 GiB"
    others = {"lease": "", "lease_name": "", "milli": 1000, "user": "eve"}  # as `views.masked` leaves it
    shown = dict(display.DEVICE_COLUMNS)["leases"]
    assert shown({"parts": [others, {**others, "milli": 250}]}) == "(eve), 0.25 (eve)"
    assert display.waiting_words({**PENDING, "place": 2, "reasons": []}) == "place 2 in the queue (no room)"


def test_a_lease_says_what_it_is_on_its_way_to_and_who_may_use_it_too(pool):
    lease = pool.request(gpus=1, max_gpus=2, name="open")
    wait_until(lambda: len(lease.refresh().slices) == 2)
    assert "wants" not in repr(lease)
    assert ", wants 1," in repr(lease.scale(1)), "the other GPU is just leaving"
    assert f"shared with eve (who can run code as {lease.user})" in repr(lease.share("eve"))


def test_what_others_wrote_reaches_no_terminal_and_no_page_as_code(pool):
    evil = {
        **PENDING,
        "name": "<script>x</script>\x1b[2J",
        "user": "u",
        "project": "p",
        "ends_at": None,
        "place": 1,
    }
    rows = display.lease_rows([evil])
    assert "<script>" not in rows._repr_html_()
    assert "\x1b" not in repr(rows)


def test_an_error_pickles_as_what_it_is():
    import pickle

    error = PoolError("bad_request", "No.", "Do so.", "gpus")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, str(again), again.field) == ("bad_request", "No. Do so.", "gpus")


@pytest.mark.parametrize(
    ("shell", "said", "asked"),
    [
        pytest.param(SimpleNamespace(kernel=1), {}, {"interactive": True}, id="a notebook's kernel"),
        pytest.param(SimpleNamespace(kernel=1), {"interactive": False}, {"interactive": False}, id="said"),
        pytest.param(SimpleNamespace(kernel=1), {"preemptible": True}, {"preemptible": True}, id="batch"),
        pytest.param(SimpleNamespace(), {"gpus": 2}, {"gpus": 2}, id="IPython in a terminal"),
        pytest.param(None, {}, {}, id="a script"),
    ],
)
def test_a_request_from_a_notebook_is_interactive_unless_it_says_otherwise(monkeypatch, shell, said, asked):
    import IPython

    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    assert from_here(said) == asked
