"""What Dask's dashboard shows of a lease's GPUs comes from the node's reader."""

from __future__ import annotations

import json
import types
import urllib.request

import pytest

from jupyter_gpupool import embedded
from jupyter_gpupool.core.model import GB, WHOLE, Instance, Reading, Slice
from jupyter_gpupool.lease import gauges
from jupyter_gpupool.lease.scheduler import SECRET_HEADER
from jupyter_gpupool.node.gauges import figures
from tests.conftest import wait_until
from tests.leasing import Node, running

OWNERS = {1: "L/0", 2: "L/0", 3: "M/0", 4: "L"}
READ = Reading(
    device="g",
    now=1,
    utilisation=40,
    memory_used=30 * GB,
    processes=((1, GB), (2, GB), (3, 20 * GB), (4, GB)),
)


def part(**what):
    return Slice(
        **{"id": "L/0", "lease": "L", "device": "g", "node": "n", "milli": WHOLE, "vram": 80 * GB, **what}
    )


@pytest.mark.parametrize(
    ("slice_", "used"),
    [
        pytest.param(part(), 30 * GB, id="of a whole GPU all that is used on it"),
        pytest.param(part(milli=250, vram=20 * GB), 2 * GB, id="of a share what its own processes have"),
        pytest.param(
            part(instance=Instance(profile="1g.10gb", start=0, size=1)), 2 * GB, id="and of a MIG instance"
        ),
    ],
)
def test_a_slice_is_shown_its_own_memory(slice_, used):
    said = figures(slice_, READ, lambda pid: OWNERS.get(pid, ""))
    assert said == {"utilisation": 40, "memory_used": used, "memory": slice_.vram}
    assert json.loads(json.dumps(said)) == said


def test_a_device_that_answers_with_an_error_has_no_figures():
    assert figures(part(), Reading(device="g", now=1, error="GPU_IS_LOST"), OWNERS.get) == {}


def test_memory_that_a_driver_does_not_tell_is_a_number_all_the_same():
    """Dask's page divides by two, and would show nothing at all."""
    assert figures(part(), Reading(device="g", now=1), OWNERS.get)["memory_used"] == 0


def test_old_figures_are_shown_no_more(monkeypatch):
    worker = types.SimpleNamespace(metrics={}, startup_information={})
    shown = gauges.Gauges(worker, 80 * GB)
    with pytest.raises(LookupError):
        worker.metrics["gpu_utilization"](worker)
    shown.show({"utilisation": 40, "memory_used": 1, "memory": 2})
    assert worker.metrics["gpu_utilization"](worker) == 40
    assert worker.metrics["gpu"](worker) == {"utilization": 40, "memory-used": 1}
    assert worker.startup_information["gpu"](worker) == {"memory-total": 80 * GB}
    monkeypatch.setattr(gauges, "STALE", 0.0)
    with pytest.raises(LookupError):
        worker.metrics["gpu_memory_used"](worker)
    shown.show({})
    with pytest.raises(LookupError):
        worker.metrics["gpu"](worker)


@pytest.mark.slow
def test_readings_reach_the_scheduler_and_the_dashboard_lists_its_gpu_page(tmp_path):
    node = Node(tmp_path)
    node.start()
    try:
        with running(node, "shown") as lease, lease.client() as client:
            device = lease.parts[0].device
            reading = Reading(device=device, now=1, utilisation=63, memory_used=7 * GB)

            def metrics():
                node.run(_show(node, reading))
                [worker] = client.scheduler_info(n_workers=-1)["workers"].values()
                return worker["metrics"]

            wait_until(lambda: metrics().get("gpu_memory_used") == 7 * GB)
            assert {name: metrics()[name] for name in ("gpu_utilization", "gpu-memory-total")} == {
                "gpu_utilization": 63,
                "gpu-memory-total": 80 * GB,
            }
            assert 'href="gpu"' in page(lease, "/status")
            assert "GPU" in page(lease, "/gpu")
            node.run(_show(node, Reading(device="GPU-of-nobody", now=1, utilisation=1)))
    finally:
        node.stop()


def test_a_lease_of_a_pool_shows_what_its_agent_has_read(pool):
    with pool.request(gpus=1) as lease, lease.client() as client:
        device = lease.slices[0].device
        embedded.machine().set(device, "utilisation", 71)
        embedded.machine().xid(device, 106)  # a test message of the driver's: it is read at once then

        def metrics():
            [worker] = client.scheduler_info(n_workers=-1)["workers"].values()
            return worker["metrics"]

        wait_until(lambda: metrics().get("gpu_utilization") == 71)
        assert metrics()["gpu-memory-total"] == lease.slices[0].vram > 70 * GB


async def _show(node, reading):
    node.leases.show([reading])


def page(lease, path):
    asked = urllib.request.Request(lease.dashboard + path, headers={SECRET_HEADER: lease.secret})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return answer.read().decode()
