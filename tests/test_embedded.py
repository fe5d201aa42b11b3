"""This user's own pool on this machine: found, started, gone on with, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from distributed.client import FutureCancelledError

from jupyter_gpupool import Pool, PoolError, embedded, embedded_start, service
from jupyter_gpupool._http import Trouble
from jupyter_gpupool.service import free_port
from tests.conftest import environment, leaked, wait_until

ONE_NODE = {"node-1": 1}
ASK = "from jupyter_gpupool import embedded; print(embedded.start(nodes={'node-1': 1}).url)"


def start(**more):
    return embedded.start(nodes=ONE_NODE, **more)


def test_two_callers_at_once_get_one_pool(own_folder):
    command = [sys.executable, "-c", ASK]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) for _ in range(2)]
    addresses = {each.communicate(timeout=90)[0].split()[-1] for each in both}
    assert len(addresses) == 1
    assert sorted(embedded.processes()) == ["controller", "node-1"]
    assert embedded.find().url in addresses
    assert embedded.start().url in addresses, "a third one finds it"


def test_its_files_are_for_their_owner_only_and_its_processes_hold_nothing_of_their_starter(own_folder):
    start()
    # Root's leases run as other users too, who must get through to the simulated machines, and there only.
    reached = (own_folder, own_folder / "simulated") if os.geteuid() == 0 else ()
    assert own_folder.stat().st_mode & 0o066 == 0
    for path in [own_folder, *own_folder.rglob("*")]:
        said = path.lstat()
        if path.is_dir() and path.parent in (own_folder, own_folder.parent) and path not in reached:
            assert said.st_mode & 0o077 == 0, path
        if path.is_file() and path.parent in (own_folder, own_folder / "controller", own_folder / "logs"):
            assert said.st_mode & 0o077 == 0, path
    for pid in embedded.processes().values():
        assert os.getsid(pid) == pid
        assert "gpupool:" not in Path(f"/proc/{pid}/cmdline").read_text(), "a line that lets others in"
        for number in (0, 1, 2):
            assert str(Path(f"/proc/{pid}/fd/{number}").readlink()).startswith(("/dev/null", str(own_folder)))


def test_a_pool_whose_controller_was_killed_goes_on_at_the_same_address(own_folder):
    address = start()
    with Pool(start=False) as pool:
        lease = pool.request(gpus=1, timeout=60)
        client = lease.client()
        os.kill(embedded.processes()["controller"], signal.SIGKILL)
        wait_until(lambda: "controller" not in embedded.processes())
        with pytest.raises(PoolError, match="No pool runs"):
            embedded.find()
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3, "the lease does not care"
        again = embedded.start()
        assert (again.url, again.ca) == (address.url, address.ca)
        assert pool.lease(lease.id).state == "active"
        assert client.submit(sum, [3, 4]).result(timeout=30) == 7
        lease.release(wait=30)


def test_a_pool_of_which_nothing_runs_any_more_leaves_nothing_that_is_mistaken_for_one(own_folder):
    start()
    for pid in embedded.processes().values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not embedded.processes())
    said = json.loads((own_folder / "processes.json").read_text())
    said["controller"]["pid"] = os.getpid()  # as if the PID had been given to another process
    (own_folder / "processes.json").write_text(json.dumps(said))
    with pytest.raises(PoolError, match="No pool runs on this machine"):
        embedded.find()
    start()
    with Pool(start=False) as pool:
        wait_until(lambda: pool.status().gpus_free == 1)


def test_stopping_it_ends_leases_and_all_processes(own_folder):
    start()
    with Pool(start=False) as pool:
        lease = pool.request(gpus=1, timeout=60)
        future = lease.client().submit(time.sleep, 600)
        assert embedded.stop()
        with pytest.raises(FutureCancelledError, match="The lease has ended: the pool is stopped"):
            future.result(timeout=30)
        with pytest.raises(PoolError, match=r"on this machine was stopped on \d+ \w+ at .* all its leases"):
            lease.client()
    assert leaked(str(own_folder), 1) == []
    assert not embedded.stop(), "there is none any more"
    assert not (own_folder / "client.json").exists()


def test_stopping_it_ends_the_leases_of_an_agent_that_was_killed(own_folder):
    start()
    with Pool(start=False) as pool:
        lease = pool.request(gpus=1, timeout=60)
        with lease.client() as client:
            worker = client.submit(os.getpid).result(timeout=30)
            scheduler = client.run_on_scheduler(os.getpid)
    left = {pid: embedded.started_at(pid) for pid in (worker, scheduler)}
    os.kill(embedded.processes()["node-1"], signal.SIGKILL)
    wait_until(lambda: "node-1" not in embedded.processes())
    assert embedded.stop()
    assert [pid for pid, started in left.items() if embedded.started_at(pid) == started] == []
    assert leaked(str(own_folder), 5) == []
    assert not embedded.stop(), "there is nothing any more"
    start()
    with Pool(start=False) as pool:
        wait_until(lambda: pool.leases() == [])  # its agent says that nothing of it is left


def test_it_ends_itself_after_a_while_without_leases_unless_it_is_started_on_purpose(own_folder):
    start(idle_exit=1)
    start(idle_exit=0)
    time.sleep(7)  # the controller looks each 5 s
    assert "controller" in embedded.processes()
    (own_folder / "controller" / service.STAY).unlink()
    wait_until(lambda: not embedded.processes(), 40)
    assert leaked(str(own_folder)) == []


def test_a_port_in_use_is_an_error_and_never_another_port(own_folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PoolError) as no:
            start(listen={"port": port})
    assert no.value.reason == Trouble.NOT_STARTED
    assert f"Port {port} on 127.0.0.1 is in use" in str(no.value)
    assert embedded.processes() == {}
    assert not (own_folder / "client.json").exists()


def test_an_unknown_model_is_refused_before_anything_is_started(own_folder):
    with pytest.raises(PoolError, match="unknown model 'H1000'"):
        embedded.start(nodes={"node-1": ["H1000"]})
    assert embedded.processes() == {}


def test_without_a_pool_only_one_that_may_be_started_is_found(own_folder):
    with pytest.raises(PoolError) as no:
        Pool(start=False)
    assert no.value.reason == Trouble.NOT_STARTED
    assert str(no.value) == "No pool runs on this machine. Start one with `jupyter gpupool start`."


def test_a_start_that_cannot_be_leaves_the_next_one_as_it_was(own_folder):
    with pytest.raises(PoolError, match="No such machine can be simulated: unknown model 'B9000'; there are"):
        embedded.start(nodes={"node-1": ["B9000"]})
    with pytest.raises(PoolError, match="The controller cannot listen"):
        embedded.start(listen={"host": "192.0.2.77"}, nodes={"node-1": 1})
    start()
    with pytest.raises(PoolError, match="runs already, without that --host"):
        embedded.may_start({"host": "0.0.0.0"}, None)
    embedded.may_start({"host": None}, {"node-1": 1})


def test_leases_go_on_while_controller_and_agents_are_replaced(own_folder):
    start()
    with Pool(start=False) as pool:
        lease = pool.request(gpus=1, timeout=60)
        future = lease.client().submit(sum, [1, 2])
        assert future.result(timeout=30) == 3
        assert embedded.stop(keep_leases=True)
        assert not embedded.processes()
        assert lease.client().submit(sum, [3, 4]).result(timeout=30) == 7
        start()
        assert lease.refresh().state == "active"
        assert future.result(timeout=30) == 3
        lease.release(wait=30)


def test_a_head_node_without_gpus_waits_for_nodes_that_have_some(own_folder):
    embedded.start(nodes={"head": 0})
    with Pool(start=False) as pool:
        assert (pool.status().gpus, pool.status().simulated) == (0, False)
        assert [each["reason"] for each in pool.trial(gpus=1).reasons] == ["no_nodes"]


def test_a_controller_that_was_killed_and_is_still_to_be_seen_is_waited_out(own_folder, monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as dying:
        known = {"pid": dying.pid, "started": embedded.started_at(dying.pid)}
        embedded.write(own_folder / "processes.json", {"controller": known})
        said = {"url": f"https://127.0.0.1:{free_port()}", "token": "", "ca": ""}
        embedded.write(own_folder / "client.json", said)
        monkeypatch.setattr(embedded_start.Start, "pool", lambda *_: embedded.processes())
        threading.Timer(0.3, dying.kill).start()
        assert embedded.start() == {}
