"""Leases and kernels: a lease is a person's, survives its kernel, and ends with it where that was asked."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until
from tests.kernel import Kernel


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
