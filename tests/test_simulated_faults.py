"""Simulated faults hurt the tasks, results and actors of a real `dask_cuda.CUDAWorker` as real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, Scheduler

from jupyter_gpupool.driver import simulated
from jupyter_gpupool.driver.simulated.processes import uses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

WORKER = """
import asyncio, sys
import dask
dask.config.set({"distributed.diagnostics.nvml": False, "distributed.worker.http.routes": []})
from jupyter_gpupool.driver import simulated
simulated.install()
from dask_cuda import CUDAWorker

async def main():
    worker = CUDAWorker(
        sys.argv[1], protocol="tcp", dashboard=False, dashboard_address="127.0.0.1:0", memory_limit="1 GiB",
        device_memory_limit="1 GiB", name=sys.argv[2], host="127.0.0.1",
        preload=["jupyter_gpupool.driver.preload"],
    )
    await worker
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await worker.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def machine(tmp_path: Path) -> simulated.Machine:
    simulated.create(tmp_path / "machines", {"node-1": 4})
    return simulated.Machine(tmp_path / "machines")


@contextlib.contextmanager
def cuda_worker(machine: simulated.Machine, device: str, scheduler: str, folder: Path) -> Iterator[Path]:
    """A real CUDAWorker with its Nanny on one simulated device, in a process of its own."""
    script, log = folder / "worker.py", folder / f"{device}.log"
    script.write_text(WORKER)
    environ = os.environ | simulated.environment(machine.state.path, "node-1")
    environ["CUDA_VISIBLE_DEVICES"] = machine.find(device)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, script, scheduler, device],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environ,
        )
    try:
        yield log
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def cluster(
    machine: simulated.Machine, folder: Path, devices: list[str]
) -> AsyncIterator[tuple[Any, list[Path]]]:
    config = {"distributed.diagnostics.nvml": False, "distributed.comm.timeouts.connect": "5s"}
    with dask.config.set(config), contextlib.ExitStack() as stack:
        async with Scheduler(
            host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0"
        ) as scheduler:
            logs = [
                stack.enter_context(cuda_worker(machine, device, scheduler.address, folder))
                for device in devices
            ]
            async with Client(scheduler.address, asynchronous=True) as client:
                await client.wait_for_workers(len(devices), timeout=40)
                yield client, logs


def double(x: int) -> int:
    return 2 * x


def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


async def slow_async(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


def mistake() -> None:
    simulated.fault("illegal_address")


def fill(size: int) -> int:
    simulated.malloc(size)
    return simulated.allocated()


class Counter:
    n = 0

    def add(self) -> int:
        self.n += 1
        return self.n


@pytest.mark.asyncio
async def test_a_lost_gpu_hurts_tasks_results_and_actors_of_its_worker_alone(
    machine: simulated.Machine, tmp_path: Path
) -> None:
    async with cluster(machine, tmp_path, ["gpu2", "gpu0"]) as (client, logs):
        addresses = {each["name"]: address for address, each in client.scheduler_info()["workers"].items()}
        bad, good = addresses["gpu2"], addresses["gpu0"]
        before = client.submit(double, 21, workers=[bad])
        assert await before == 42
        actor = await client.submit(Counter, actor=True, workers=[bad])
        assert await actor.add() == 1
        running = client.submit(slow, 1.0, workers=[bad])
        await asyncio.sleep(0.3)  # it runs: nothing else does on that worker
        machine.lose("gpu2")
        # A kernel that was running when the GPU went does not come back with a result.
        with pytest.raises(simulated.CUDARuntimeError, match="cudaErrorLaunchFailure"):
            await running
        for task in (client.submit(double, 1, workers=[bad]), client.submit(slow_async, 0.0, workers=[bad])):
            with pytest.raises(simulated.CUDARuntimeError, match="cudaErrorLaunchFailure"):
                await task
        with pytest.raises(simulated.CUDARuntimeError, match="cudaErrorLaunchFailure"):
            await actor.add()
        for direct in (True, False):  # neither a peer nor a client gets the result
            with pytest.raises(TypeError, match="Could not serialize object of type Unreadable"):
                await client.gather(before, direct=direct)
        assert await client.submit(double, 4, workers=[good]) == 8
        # The device is back, the process's context is not; the restarted process has a new one.
        machine.restore("gpu2")
        with pytest.raises(simulated.CUDARuntimeError):
            await client.submit(double, 2, workers=[bad])
        await client.restart_workers([bad], timeout=40)
        assert sorted(await client.gather(client.map(double, [7, 8]))) == [14, 16]
        assert all("Unable to start CUDA Context" not in log.read_text() for log in logs)


@pytest.mark.asyncio
async def test_a_worker_uses_its_device_and_its_own_mistake_sticks_until_it_is_restarted(
    machine: simulated.Machine, tmp_path: Path
) -> None:
    async with cluster(machine, tmp_path, ["gpu1"]) as (client, _):
        (address,) = client.scheduler_info()["workers"]
        pid = (await client.run(os.getpid))[address]
        assert [use.pid for use in uses(machine.state) if use.on == machine.find("gpu1")] == [pid]
        assert await client.submit(fill, 10**9) == 10**9
        with pytest.raises(simulated.OutOfMemoryError, match="Out of memory allocating 90,000,000,000 bytes"):
            await client.submit(fill, 90 * 10**9)
        assert await client.submit(double, 1) == 2  # being out of memory does not stick
        with pytest.raises(simulated.CUDARuntimeError, match="an illegal memory access was encountered"):
            await client.submit(mistake)
        with pytest.raises(simulated.CUDARuntimeError, match="an illegal memory access was encountered"):
            await client.submit(double, 3)
        await client.restart_workers([address], timeout=40)
        assert await client.submit(double, 5) == 10


@pytest.mark.asyncio
async def test_a_worker_may_abort_and_its_nanny_finds_no_working_gpu(
    machine: simulated.Machine, tmp_path: Path
) -> None:
    async with cluster(machine, tmp_path, ["gpu3"]) as (client, logs):
        (first,) = client.scheduler_info()["workers"]
        pid = (await client.run(os.getpid))[first]
        machine.lose("gpu3", abort=True)
        # The next process, on the same GPU, starts, and gets the error without aborting: it has no context.
        with pytest.raises(simulated.CUDARuntimeError, match="CUDA-capable device"):
            await asyncio.wait_for(client.submit(double, 1), 40)
        (second,) = (await client.run(os.getpid)).values()
        assert second != pid
        assert "killed by signal 6" in logs[0].read_text() or "SIGABRT" in logs[0].read_text()
        assert "cudaErrorDevicesUnavailable" in logs[0].read_text()  # dask-cuda's own preload says so
