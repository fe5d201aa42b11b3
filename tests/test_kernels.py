"""Leases and kernels: a lease is a person's, survives its kernel, and ends with it where that was asked."""

from __future__ import annotations

import os
import signal

import pytest
from jupyter_client.manager import KernelManager

from tests.conftest import wait_until


class Kernel:
    """A real kernel; what cells print comes back."""

    def __init__(self):
        self.manager = KernelManager()
        self.manager.start_kernel()
        self._connect()

    def _connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext jupyter_gpupool")

    def run(self, code):
        said = []
        answer = self.client.execute_interactive(code, timeout=60, output_hook=said.append)
        shown = [each["content"] for each in said]
        assert answer["content"]["status"] == "ok", shown
        return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in shown)

    def restart(self):
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def kill(self):
        os.kill(self.manager.provisioner.pid, signal.SIGKILL)
        wait_until(lambda: not self.manager.is_alive())

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(shared_pool):
    kernel = Kernel()
    yield kernel
    kernel.close()


def test_a_lease_survives_its_kernel_unless_it_was_to_end_with_it(kernel, pool):
    """A kernel that is killed gives nothing back: what it had idles out, though it was to end with it."""
    kernel.run("%gpupool request --gpus 1 --name left --with-kernel")
    kernel.run("left = %gpupool use left\nleft.client().submit(sum, [1]).result()")
    kernel.kill()
    kernel.restart()
    assert pool.lease("left").state == "active"

    kernel.run("%gpupool request --gpus 1 --name stays")
    kernel.run("%gpupool request --gpus 1 --name goes --with-kernel")
    kernel.restart()
    wait_until(lambda: pool.lease("goes").state == "ended")
    assert "released by its owner" in pool.lease("goes").why
    assert "Lease stays" in kernel.run("lease = %gpupool use stays\nprint(repr(lease))")
    assert "3" in kernel.run("print(lease.client().submit(sum, [1, 2]).result())")
    wait_until(lambda: pool.lease("left").data["idle_since"])
