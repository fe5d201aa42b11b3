"""The controller's process, with two agents on simulated nodes: real processes, really killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

import pytest

from jupyter_gpupool.controller.backup import backup, put_back
from jupyter_gpupool.driver import simulated
from tests.pool_processes import PoolProcesses, wait_for


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with PoolProcesses(tmp_path_factory.mktemp("pool")) as pool:
        yield pool.start()


def test_two_agents_register_with_their_devices(pool):
    devices = pool.call("GET", "/v1/devices")["devices"]
    assert sorted(each["name"] for each in devices) == [
        f"node-{node}/gpu{gpu}" for node in (1, 2) for gpu in range(4)
    ]


def test_a_port_in_use_is_an_error_and_never_another_port(pool, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option in ("--port", "--comm-port"):
            command = [
                sys.executable,
                "-m",
                "jupyter_gpupool.controller",
                "--dir",
                str(tmp_path / option),
                option,
                port,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 1
            last = done.stderr.strip().splitlines()[-1]
            assert "in use" in last
            assert "Traceback" not in done.stderr
            assert not (tmp_path / option / "pool.json").exists()


def test_a_second_controller_in_the_same_folder_is_refused(pool):
    command = [sys.executable, "-m", "jupyter_gpupool.controller", "--dir", str(pool.folder / "controller")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"process {pool.pid('controller')}" in done.stderr
    assert pool.node_states() == {"node-1": "up", "node-2": "up"}


def test_the_controller_may_be_killed_under_load_and_nothing_that_agents_report_is_lost(pool):
    """Leases are being started, and one given back, when the controller dies; all of it is seen through."""
    kept, given = pool.request(name="kept", gpus=2), pool.request(name="given")
    pool.wait_for_lease(kept, "active")
    pool.wait_for_lease(given, "active")
    before = pool.lease(kept)
    pool.call("DELETE", f"/v1/leases/{given}")
    starting = [pool.request(name=f"starting-{number}", gpus=2) for number in range(2)]
    time.sleep(0.1)
    pool.kill("controller")
    time.sleep(0.5)  # what is being started and ended goes on, and is reported to nobody
    pool.start_controller()
    pool.wait_for_nodes({"node-1", "node-2"})
    pool.wait_for_lease(given, "ended")
    for ident in starting:
        pool.wait_for_lease(ident, "active")
    after = pool.lease(kept)
    for name in ("state", "slices"):
        assert after[name] == before[name]
    for name in ("granted_at", "started_at", "ends_at"):
        assert after[name] == pytest.approx(before[name], abs=1), "as people's clocks say it"
    for ident in (kept, *starting):
        pool.call("DELETE", f"/v1/leases/{ident}")
        pool.wait_for_lease(ident, "ended")
    assert pool.call("GET", "/v1/pool")["gpus_free"] == 8


def test_a_backup_of_a_running_pool_gives_it_back_with_what_still_runs(pool, tmp_path):
    """What was requested after the backup is not in it: its processes are strangers, and end."""
    kept = pool.request(name="kept")
    before = pool.wait_for_lease(kept, "active")
    journal, copy = pool.folder / "controller" / "journal.sqlite", tmp_path / "copy"
    backup(journal, copy)
    later = pool.request(name="later")
    pool.wait_for_lease(later, "active")
    pool.kill("controller")
    put_back(copy, journal)
    pool.start_controller()
    wait_for(lambda: pool.call("GET", "/v1/pool")["gpus_free"] == 7, "what was not in the backup has ended")
    again = pool.lease(kept)
    assert (again["state"], again["slices"]) == ("active", before["slices"])
    assert [each["id"] for each in pool.call("GET", "/v1/leases")["leases"] if each["state"] != "ended"] == [
        kept
    ]
    wait_for(lambda: {entry["lease"] for _, entry in pool.tables()} == {kept}, "nothing else runs")
    pool.call("DELETE", f"/v1/leases/{kept}")
    pool.wait_for_lease(kept, "ended")


def test_an_agent_one_version_ahead_is_heard_and_one_further_ahead_is_told_what_to_do(pool):
    def node_2(state: str) -> None:
        wait_for(
            lambda: pool.node_states()["node-2"] in (state, "lost" if state != "up" else state), state, 100
        )

    code = "from jupyter_gpupool import wire; wire.PROTOCOL += {}; import runpy; "
    code += "runpy.run_module('jupyter_gpupool.node', run_name='__main__')"
    environ = simulated.environment(pool.simulated, "node-2")
    for ahead in (1, 2):
        pool.kill("node-2")
        node_2("silent")
        pool._run("node-2", code.format(ahead), ["--name", "node-2"], environ)
        if ahead == 1:
            node_2("up")
    said = "upgrade jupyter-gpupool of the controller first"
    wait_for(lambda: said in pool.log("node-2"), "it is told", 100)
    assert pool.node_states()["node-2"] != "up"
    pool.kill("node-2")
    pool.start_agent("node-2")
    node_2("up")


def test_the_controllers_end_on_sigterm_is_soft_and_its_ports_stay(pool):
    said = pool.said
    pool.kill("controller", signal.SIGTERM)
    assert pool.running["controller"].returncode == 0
    assert not pool.said, "pool.json is gone with it"
    pool.start_controller()
    again = pool.said
    assert (again["url"], again["comm"]) == (said["url"], said["comm"])
    pool.wait_for_nodes({"node-1", "node-2"})


def test_a_drill_condemns_the_device_and_its_end_brings_it_back(pool):
    def verdict() -> str:
        devices = pool.call("GET", "/v1/devices")["devices"]
        return next(each["verdict"] for each in devices if each["name"] == "node-2/gpu3")

    device = next(
        each["uuid"] for each in pool.call("GET", "/v1/devices")["devices"] if each["name"] == "node-2/gpu3"
    )
    pool.call("POST", f"/v1/health/{device}", {"action": "drill", "xid": 79})
    wait_for(lambda: verdict() == "gone", "the device is gone")
    pool.call("POST", f"/v1/health/{device}", {"action": "undrill"})
    wait_for(lambda: verdict() in ("fine", "watch"), "the device is back")
