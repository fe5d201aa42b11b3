"""Slices of every kind on a pool of real processes: shares that hold, MIG instances, GPUs that others use."""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
import sys
import textwrap
import time

import pytest

from jupyter_gpupool import Pool, PoolError, cli
from jupyter_gpupool.driver import simulated
from jupyter_gpupool.driver.simulated import cuda
from tests.conftest import all_notices
from tests.pool_processes import PoolProcesses, wait_for
from tests.test_share_limits import MODULES

GB = 10**9
#: What was there before the pool.
BEFORE = ("1g.10gb", 6, 1)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Two H100s in shares, and two A100s in MIG mode; on the first of these somebody has made an instance."""
    folder = tmp_path_factory.mktemp("s")
    with PoolProcesses(folder, {"node-1": 2, "node-2": ["A100-80GB"] * 2}) as processes:
        machine = simulated.Machine(processes.simulated)
        for device in ("node-2/gpu0", "node-2/gpu1"):
            machine.mig(device)
        made = subprocess.run(
            [
                sys.executable,
                "-m",
                "jupyter_gpupool.node.instances",
                "create",
                machine.find("node-2/gpu0"),
                INSTANCE,
            ],
            env={**os.environ, **simulated.environment(processes.simulated, "node-2")},
            check=True,
            capture_output=True,
            timeout=30,
        )
        assert b"MIG-" in made.stdout
        processes.start_controller()
        for name in processes.nodes:
            processes.start_agent(name, "--interval", "0.4")
        processes.wait_for_nodes(set(processes.nodes))
        yield processes


INSTANCE = '{"profile": "1g.10gb", "start": 6, "size": 1}'


@pytest.fixture
def machine(processes):
    return simulated.Machine(processes.simulated)


@pytest.fixture
def pool(processes, monkeypatch, tmp_path):
    """The pool as its administrator has it; all leases are given back afterwards."""
    (tmp_path / "ca").write_text(processes.said["ca"])
    for name, value in (
        ("URL", processes.said["url"]),
        ("CA", str(tmp_path / "ca")),
        ("TOKEN", processes.admin_token()),
    ):
        monkeypatch.setenv(f"GPUPOOL_{name}", value)
    with Pool() as pool:
        yield pool
        for lease in pool.leases(everybody=True):
            lease.release(wait=30)


def ask(pool, **what):
    return pool.request(timeout=60, cpus=0.1, memory="500MB", time_limit="1h", **what)


def terminal(capsys, *words):
    """What a command of the terminal prints."""
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        cli.main(list(words))
    return capsys.readouterr().out


def limits(pool, lease):
    return {
        each["layer"]: each["state"] for each in pool.get(f"/v1/leases/{lease.id}")["slices"][0]["limits"]
    }


def overuse(pool):
    told = all_notices(lambda after: pool.get("/v1/notices", after=after))
    return [each["sentence"] for each in told if each["notice"] == "overuse"]


def allocate(size, seconds):
    cuda.malloc(size)
    time.sleep(seconds)
    return os.getpid()


def test_who_takes_more_than_their_share_is_ended_and_told_while_the_neighbour_finishes(pool):
    greedy, calm = ask(pool, vram="20GB", name="greedy"), ask(pool, vram="60GB", name="calm", node="node-1")
    wait_for(lambda: limits(pool, greedy) == limits(pool, calm) == {"guard": "on"}, "both are guarded")
    assert "limited by guard" in repr(pool.lease("greedy"))
    with greedy.client() as client, calm.client() as other:
        mine = client.submit(os.getpid).result(20)
        slow = other.submit(allocate, 50 * GB, 2)
        theirs = other.submit(os.getpid).result(30)
        client.submit(allocate, 24 * GB, 0).result(20)
        told = wait_for(lambda: len(overuse(pool)) >= 2 and overuse(pool), "a notice")
        assert told[0].startswith("greedy has 24.5")
        assert "its share is 20 GB: free some" in told[0]
        assert f"process {mine} was ended" in told[1]
        assert client.submit(os.getpid, pure=False).result(30) != mine
        assert slow.result(30) == theirs
        assert not [each for each in overuse(pool) if "calm" in each]


def settings():
    """What the libraries of this worker were told."""
    import rmm
    import torch

    return rmm.told[0]["maximum_pool_size"], torch.told, os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]


#: Stand-ins of libraries. Not of CuPy: Dask itself imports that, and needs more of it.
LIBRARIES = {
    **{name: code for name, code in MODULES.items() if "cupy" not in name},
    "rmm/__init__.py": "told = []\nreinitialize = lambda **options: told.append(options)",
}


def test_the_libraries_of_a_share_get_the_share_less_what_a_context_needs(pool, tmp_path):
    for name, code in LIBRARIES.items():
        path = tmp_path / "libraries" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code).replace("{available}", "True"))
    lease = ask(pool, vram="20GB", environment={"variables": {"PYTHONPATH": str(tmp_path / "libraries")}})
    wait_for(lambda: limits(pool, lease) == {"rmm": "on", "torch": "ready", "guard": "on"}, "layers")
    with lease.client() as client:
        most, torch, jax = client.submit(settings).result(30)
    assert 19 * GB < most < 19.5 * GB
    assert torch == ["rmm for torch"]
    assert 0 < float(jax) < 20 / 80
    wait_for(lambda: limits(pool, lease)["torch"] == "on", "it was imported")


# ------------------------------------------------------------------------------------- use outside the pool


def test_a_gpu_that_somebody_else_uses_is_shown_and_not_granted_until_they_are_gone(
    pool, processes, machine, capsys
):
    code = "from jupyter_gpupool.driver.simulated import cuda; cuda.malloc(5); print(1, flush=True); input()"
    environ = {
        **os.environ,
        **simulated.environment(processes.simulated, "node-1"),
        "CUDA_VISIBLE_DEVICES": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as stranger:
        assert stranger.stdout.readline()
        who = f"PID {stranger.pid}, user {getpass.getuser()}"
        wait_for(lambda: outside(pool) == {"node-1/gpu1": who}, "it is shown")
        assert f"in use outside the pool ({who})" in repr(pool.devices())
        # A table may break a long sentence over several lines.
        assert f"PID {stranger.pid}" in terminal(capsys, "health")
        first = ask(pool, gpus=1, node="node-1")
        assert [each["device_name"] for each in first.data["slices"]] == ["node-1/gpu0"]
        waits = pool.request(gpus=1, node="node-1", wait=False, cpus=0.1, memory="500MB")
        assert "1 in use outside the pool" in str(pool.explain(waits.id))
        assert waits.refresh().state == "pending"
        stranger.communicate(b"\n", timeout=10)
    wait_for(lambda: pool.lease(waits.id).state == "active", "it is granted when they are gone")
    assert outside(pool) == {}


def outside(pool):
    return {each["name"]: each["outside"] for each in pool.devices() if each["outside"]}


# ------------------------------------------------------------------------------------------------------ MIG


def everywhere(machine):
    """The instances on both devices."""
    there = [each for n in (0, 1) for each in machine.describe(f"node-2/gpu{n}")["instances"]]
    return [(each["profile"], each["start"], each["size"]) for each in there]


def where():
    return os.environ["CUDA_VISIBLE_DEVICES"], cuda.context().on, cuda.malloc(9 * GB) > 0


def test_an_instance_that_exists_is_offered_as_it_is_and_stays(pool, machine):
    lease = ask(pool, mig="1g.10gb")
    [part] = lease.data["slices"]
    assert (part["device_name"], part["profile"]) == ("node-2/gpu0", "1g.10gb")
    assert {each["layer"] for each in pool.get(f"/v1/leases/{lease.id}")["slices"][0]["limits"]} == {"mig"}
    with lease.client() as client:
        visible, on, _ = client.submit(where).result(20)
    assert visible == on
    assert on == machine.describe("node-2/gpu0")["instances"][0]["uuid"]
    lease.release(wait=30)
    assert everywhere(machine) == [BEFORE]


def test_instances_are_made_on_demand_by_profile_and_by_need_and_destroyed_afterwards(pool, machine):
    large, need = ask(pool, mig="4g.40gb"), ask(pool, vram="15GB", isolated=True)
    profiles = {each.data["slices"][0]["profile"] for each in (large, need)}
    assert profiles == {"4g.40gb", "1g.20gb"}
    for lease in (large, need):
        with lease.client() as client:
            assert client.submit(where).result(20)[2]
    assert {name for name, _, _ in everywhere(machine)} == {"4g.40gb", "1g.20gb", "1g.10gb"}
    large.release(wait=30)
    need.release(wait=30)
    wait_for(lambda: everywhere(machine) == [BEFORE], "what was made is destroyed")


def test_a_creation_that_fails_is_undone_and_the_next_one_serves(pool, machine):
    for device in ("node-2/gpu0", "node-2/gpu1"):
        machine.fail_next(device, "nvmlGpuInstanceCreateComputeInstance", "UNKNOWN")
    lease = ask(pool, mig="2g.20gb")
    assert sorted(name for name, _, _ in everywhere(machine)) == ["1g.10gb", "2g.20gb"], (
        "nothing of it is left"
    )
    with lease.client() as client:
        assert client.submit(where).result(20)[2]
    machine.heal()


def test_an_instance_that_could_not_be_destroyed_goes_soon_after(pool, machine):
    lease = ask(pool, mig="3g.40gb")
    for device in ("node-2/gpu0", "node-2/gpu1"):
        machine.fail_next(device, "nvmlGpuInstanceDestroy", "UNKNOWN")
    lease.release(wait=30)
    wait_for(lambda: everywhere(machine) == [BEFORE], "it is found and destroyed")
    machine.heal()


def test_what_cannot_be_had_of_mig_names_the_nearest_thing(pool, capsys):
    with pytest.raises(
        PoolError, match=r"No GPU of the pool has a MIG profile 5g\.50gb\. There are: 1g\.10gb"
    ):
        pool.request(mig="5g.50gb")
    with pytest.raises(PoolError, match="No MIG instance has 200 GB of memory"):
        pool.request(vram="200GB", isolated=True)
    held = ask(pool, mig="7g.80gb"), ask(pool, mig="4g.40gb", node="node-2")
    said = terminal(capsys, "request", "--mig", "7g.80gb", "--dry-run")
    assert "No room for a 7g.80gb now" in said
    assert "A 2g.20gb is free on node-2, or wait about 60 min." in said
    assert held
