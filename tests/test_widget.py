"""Leases and pools as widgets, in a real kernel: what is displayed, said and asked for, when one looks."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import pytest

from jupyter_gpupool._http import Address
from jupyter_gpupool._look import Watch, lease_said
from tests.conftest import environment, wait_until
from tests.kernel import Kernel

VIEW = "application/vnd.jupyter.widget-view+json"
THREADS = "import threading\nprint([each.name for each in threading.enumerate()])"


@pytest.fixture(scope="module")
def kernel(shared_pool):
    kernel = Kernel()
    kernel.run("from jupyter_gpupool import Pool\npool = Pool()")
    yield kernel
    kernel.close()


def said(message):
    """What a widget draws from now on, if the message says that."""
    data = message["content"].get("data", {})
    return data.get("state", {}).get("said") if data.get("method") == "update" else None


def answer(number):
    def so(message):
        content = message["content"].get("data", {}).get("content") or {}
        return message["msg_type"] == "comm_msg" and content.get("number") == number

    return so


def ask(kernel, comm, **what):
    kernel.tell(comm, {**what, "number": 1})
    return kernel.heard(answer(1))["content"]["data"]["content"]


def is_read(lease):
    """Say whether its device has been read; that of a pool that has just started has not."""
    return lease["devices"][0]["utilisation"] is not None


def test_a_lease_is_a_widget_with_its_text_and_html_beside_it_and_looks_only_while_it_is_seen(kernel, pool):
    kernel.run("lease = pool.request(gpus=1, max_gpus=2, name='seen', time_limit='1h')")
    data = kernel.shown("lease")[0]["data"]
    assert data["text/plain"].startswith("Lease seen: ")
    assert "<table>" in data["text/html"]
    comm = data[VIEW]["model_id"]
    assert "gpupool-widget" not in kernel.run(THREADS), "nobody sees it yet"

    kernel.tell(comm, {"view": "a", "shown": True})
    now = said(kernel.heard(lambda each: (said(each) or {}).get("tasks") == {} and is_read(said(each))))
    assert (now["name"], now["state"], now["most"]) == ("seen", "active", 2)
    assert now["devices"][0]["memory"] > 79 * 10**9
    assert now["can"] == ["extend", "scale", "release"]
    kernel.run("kept = lease.client().submit(sum, [1, 2]); kept.result()")
    kernel.heard(lambda each: (said(each) or {}).get("tasks") == {"memory": 1})

    assert ask(kernel, comm, do="extend", lease=now["id"], by="30m") == {
        "number": 1,
        "said": "seen has 30m more.",
    }
    assert "is not a length of time" in ask(kernel, comm, do="extend", lease=now["id"], by="soon")["wrong"]
    assert "gpupool-widget" in kernel.run(THREADS)
    kernel.tell(comm, {"view": "a", "shown": False})
    wait_until(lambda: "gpupool-widget" not in kernel.run(THREADS))

    kernel.tell(comm, {"view": "b", "shown": True})
    assert ask(kernel, comm, do="release", lease=now["id"])["said"] == "seen is given back."
    last = said(kernel.heard(lambda each: (said(each) or {}).get("state") == "ended"))
    assert last["can"] == []
    wait_until(lambda: "gpupool-widget" not in kernel.run(THREADS))


@pytest.mark.parametrize(
    ("state", "can"),
    [
        pytest.param({"state": "pending"}, ["release"], id="what waits can be withdrawn"),
        pytest.param(
            {"state": "draining", "suspending": True}, ["release"], id="so can what is being suspended"
        ),
        pytest.param({"state": "suspended"}, ["release"], id="and what was"),
        pytest.param({"state": "draining"}, [], id="what ends, ends"),
        pytest.param({"state": "active", "idle_since": 1}, ["extend", "keep", "release"], id="what is idle"),
    ],
)
def test_a_widget_offers_what_can_be_done_with_a_lease_now(state, can):
    lease = {
        "id": "a",
        "name": "",
        "why": "",
        "place": None,
        "ends_at": None,
        "gpus": 1,
        "expected_start": None,
    }
    assert lease_said({**lease, "slices": [], "reasons": [], **state}, (), None)["can"] == can


def test_a_pool_is_a_widget_that_requests_and_lists_what_comes_of_it(kernel, pool):
    data = kernel.shown("pool")[0]["data"]
    assert "8 GPUs" in data["text/plain"] or "8 GPUs" in data["text/html"]
    comm = data[VIEW]["model_id"]
    made = kernel.heard(
        lambda each: each["content"].get("comm_id") == comm and each["msg_type"] == "comm_open"
    )
    fields = {each["name"]: each for each in made["content"]["data"]["state"]["said"]["fields"]}
    kernel.tell(comm, {"view": "a", "shown": True})
    assert fields["model"]["choices"] == ["H100-80GB"]
    assert fields["project"]["choices"] == ["default"]
    assert "mig" not in fields, "no device offers a profile"
    assert ask(kernel, comm, do="trial", what={"gpus": "2"})["said"].startswith("It would start now")
    assert "there are at most 8" in ask(kernel, comm, do="trial", what={"gpus": "9"})["wrong"]
    made = ask(kernel, comm, do="request", what={"gpus": "2", "name": "formed"})["said"]
    assert made == 'Requested. In a cell: lease = pool.lease("formed")'
    now = said(
        kernel.heard(lambda each: ((said(each) or {}).get("leases") or [{}])[0].get("state") == "active")
    )
    assert len(now["devices"]) == 8
    assert [each["by"] for each in now["devices"] if each["by"]] == [[pool.status().user["name"]]] * 2
    kernel.tell(comm, {"view": "a", "shown": False})


def test_a_cluster_shows_its_lease(kernel, pool):
    kernel.run("from jupyter_gpupool import GPUPoolCluster\ncluster = GPUPoolCluster(gpus=1, name='dask')")
    data = kernel.shown("cluster")[0]["data"]
    assert "GPUPoolCluster" in data["text/plain"]
    assert data[VIEW]["model_id"]
    kernel.run("cluster.close()")


def test_a_page_that_knows_no_widgets_has_text_and_html_of_everything_and_tab(kernel, pool):
    """Such as an editor's: nobody answers what widgets say, and only what is in the output is shown."""
    kernel.run("lease = pool.request(gpus=1, name='bare')")
    lines = (
        "pool",
        "lease",
        *(f"%gpupool {each}" for each in ("status", "leases", "why bare", "usage", "health")),
    )
    for data in (kernel.shown(each)[-1]["data"] for each in lines):
        assert data["text/plain"].strip()
        assert data["text/html"].strip()
        assert not re.search(r"<script|<link|src=|href=", data["text/html"]), "it needs nothing else"
    for line, found in (("%gpupool releas", "release"), ("%gpupool keep ba", "bare")):
        assert found in kernel.client.complete(line, reply=True, timeout=30)["content"]["matches"]
    kernel.run("lease.release()")


def test_a_kernel_that_ends_leaves_html_where_its_widgets_were(kernel, pool):
    kernel.run("lease = pool.request(gpus=1, name='last')")
    kernel.shown("lease")
    kernel.manager.shutdown_kernel(restart=True)

    def replaced(message):
        return message["msg_type"] == "update_display_data" and "Lease last" in str(message["content"])

    left = kernel.heard(replaced)["content"]["data"]
    assert "Lease last: 1 GPU" in left["text/html"]
    assert VIEW not in left


class Eye:
    """A widget in sight that only remembers by which pool it looks."""

    def __init__(self, address):
        self.address, self.seen = address, asyncio.Event()

    def wanted(self):
        return True

    async def look(self, pool):
        self.pool = pool
        self.seen.set()


@pytest.mark.asyncio
async def test_what_goes_wrong_with_a_look_names_where_the_pool_s_address_is_from():
    eye, watch = Eye(Address(url="https://127.0.0.1:9", token="t", source="GPUPOOL_URL")), Watch()
    watch._seen = {eye}
    assert watch._sort({}, {})
    await asyncio.wait_for(eye.seen.wait(), 10)
    assert eye.pool.address.source == "GPUPOOL_URL"


def test_a_terminal_shows_text(pool):
    code = (
        "%load_ext jupyter_gpupool\n"
        "from jupyter_gpupool import Pool\n"
        "with Pool() as pool, pool.request(gpus=1, name='plain') as lease: display(lease)\n"
        "import sys; 'ipywidgets' in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", "--simple-prompt", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    )
    assert "Lease plain: 1 GPU" in done.stdout
    assert "False" in done.stdout
