"""Simulated faults hurt the tasks, results and actors of a real `dask_cuda.CUDAWorker` as real ones do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, Scheduler
from distributed.utils import TimeoutError as DaskTimeout

from jupyter_gpupool.driver import simulated

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
        device_memory_limit="1 GiB", preload=["jupyter_gpupool.driver.preload"], host="127.0.0.1",
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
            [sys.executable, script, scheduler],
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


def mistake() -> None:
    simulated.fault("illegal_address")


class Counter:
    n = 0

    def add(self) -> int:
        self.n += 1
        return self.n


@pytest.mark.asyncio
async def test_a_lost_gpu_fails_the_next_task_and_its_results_cannot_be_fetched(
    machine: simulated.Machine, tmp_path: Path
) -> None:
    async with cluster(machine, tmp_path, ["gpu2"]) as (client, logs):
        before = client.submit(double, 21)
        assert await before == 42
        actor = await client.submit(Counter, actor=True)
        assert await actor.add() == 1
        machine.lose("gpu2")
        with pytest.raises(simulated.CUDARuntimeError, match="cudaErrorLaunchFailure"):
            await client.submit(double, 1)
        with pytest.raises(simulated.CUDARuntimeError, match="cudaErrorLaunchFailure"):
            await actor.add()
        with pytest.raises((DaskTimeout, TypeError, Exception)):
            await client.gather(before, direct=True)
        log = logs[0].read_text()
        assert "Unable to start CUDA Context" not in log
