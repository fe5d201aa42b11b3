"""`driver.nvml` over the real `pynvml`: devices, readings, and whose fault an error is."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from jupyter_gpupool.driver import nvml, simulated
from jupyter_gpupool.driver.nvml import Driver, DriverError, short_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[simulated.Machine]:
    """Two simulated nodes; this process is on the first."""
    simulated.create(tmp_path, {"node-1": 4, "node-2": ["A100-40GB", "T4-16GB"]})
    on_node(tmp_path, monkeypatch, "node-1")
    yield simulated.Machine(tmp_path)
    nvml.use_library(None)


def on_node(path: Path, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    for name, value in simulated.environment(path, node).items():
        monkeypatch.setenv(name, value)
    assert simulated.install()


@pytest.fixture
def driver(machine: simulated.Machine) -> Iterator[Driver]:
    found = Driver()
    found.open()
    yield found
    found.close()


MODELS = [
    ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
    ("NVIDIA H100 PCIe", 81559, "H100-PCIE-80GB"),
    ("NVIDIA H100 NVL", 95830, "H100-NVL-94GB"),
    ("NVIDIA H200", 143771, "H200-141GB"),
    ("NVIDIA B200", 183359, "B200-180GB"),
    ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
    ("NVIDIA A100 80GB PCIe", 81920, "A100-PCIE-80GB"),
    ("NVIDIA A30", 24576, "A30-24GB"),
    ("NVIDIA L40S", 46068, "L40S-48GB"),
    ("NVIDIA RTX A6000", 49140, "RTX-A6000-48GB"),
    ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090-24GB"),
    ("Tesla T4", 15360, "T4-16GB"),
    ("Tesla V100-SXM2-32GB", 32768, "V100-32GB"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "RTX-PRO-6000-Blackwell-Server-96GB"),
    ("", 8192, "GPU-8GB"),
]


@pytest.mark.parametrize(("name", "mib", "short"), MODELS, ids=[row[2] for row in MODELS])
def test_products_have_short_names(name: str, mib: int, short: str) -> None:
    assert short_model(name, mib * 2**20) == short


def test_the_simulated_products_are_asked_for_by_the_names_that_nvml_gives_them() -> None:
    names = {short: short_model(model.name, model.memory) for short, model in simulated.MODELS.items()}
    assert names == {short: short for short in simulated.MODELS}


def test_a_machine_without_a_driver_is_told_with_what_to_do() -> None:
    nvml.use_library(None)
    if not nvml.reason_unavailable():
        pytest.skip("there is an NVIDIA driver on this machine")
    assert nvml.reason_unavailable() == (
        "NVML answers LIBRARY_NOT_FOUND: there is no NVIDIA driver on this machine: install it, "
        "or use simulated GPUs"
    )
    with pytest.raises(DriverError, match="LIBRARY_NOT_FOUND to initialise"):
        Driver().open()


def test_devices_are_described_in_the_drivers_order(machine: simulated.Machine, driver: Driver) -> None:
    assert nvml.reason_unavailable() == ""
    devices = driver.devices("node-1")
    assert [each.uuid for each in devices] == machine.devices("node-1")
    first = devices[0]
    assert (first.node, first.index, first.model, first.numa) == ("node-1", 0, "H100-80GB", 0)
    assert first.memory == 81559 * 2**20
    assert first.pci.startswith("00000000:")
    assert not first.mig
    assert len({each.pci for each in devices}) == 4
    # Four GPUs at an NVSwitch: each reaches each over all of its links.
    assert first.links == tuple(sorted((uuid, 18) for uuid in machine.devices("node-1")[1:]))


WIRINGS = [
    ("mesh", [(1, 6), (2, 6), (3, 6)]),
    ("pairs", [(1, 18)]),
    ("none", []),
    ("switch", [(1, 18), (2, 18), (3, 18)]),
]


@pytest.mark.parametrize(("wiring", "peers"), WIRINGS, ids=[row[0] for row in WIRINGS])
def test_nvlink_topology_is_read_link_by_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wiring: str, peers: list[tuple[int, int]]
) -> None:
    simulated.create(tmp_path, {"node-1": 4}, wiring=wiring)
    on_node(tmp_path, monkeypatch, "node-1")
    driver = Driver()
    driver.open()
    devices = driver.devices("node-1")
    assert devices[0].links == tuple(sorted((devices[at].uuid, count) for at, count in peers))
    driver.close()
    nvml.use_library(None)


def test_a_node_sees_only_its_own_devices(
    machine: simulated.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_node(machine.state.path, monkeypatch, "node-2")
    driver = Driver()
    driver.open()
    assert [each.model for each in driver.devices("node-2")] == ["A100-40GB", "T4-16GB"]
    with pytest.raises(DriverError, match="GPU_NOT_FOUND"):
        driver.processes(machine.devices("node-1")[0])
    driver.close()


SIGNALS: list[tuple[str, Any, str, Any]] = [
    ("utilisation", 63, "utilisation", 63),
    ("memory_used", 10**9, "memory_used", 10**9),
    ("temperature", 88, "temperature", 88),
    ("power", 699_000, "power", 699_000),
    ("recovery_action", 2, "recovery_action", 2),
    ("remap_pending", 1, "remap_pending", True),
    ("remap_failed", 1, "remap_failed", True),
    ("ecc_uncorrected", 3, "ecc_uncorrected", 3),
    ("slowdown", 0x48, "slowdown", 0x48),
    ("pcie_width", 8, "pcie_width", 8),
    ("nvlinks_down", [2], "nvlinks", tuple(at != 2 for at in range(18))),
    ("nvlink_replays", 5, "nvlink_errors", 5),
    ("nvlink_recoveries", 2, "nvlink_errors", 2),
]


@pytest.mark.parametrize(("field", "value", "name", "read"), SIGNALS, ids=[row[0] for row in SIGNALS])
def test_each_signal_reaches_its_reading(
    machine: simulated.Machine, driver: Driver, *, field: str, value: Any, name: str, read: Any
) -> None:
    uuid = machine.find("gpu1")
    before = driver.read(uuid, 1)
    machine.set("gpu1", field, value)
    after = driver.read(uuid, 2)
    assert getattr(before, name) != read
    assert getattr(after, name) == read
    assert (after.device, after.now, after.error) == (uuid, 2, "")


LACKED = [row[0] for row in SIGNALS if not row[0].startswith("nvlink")]


@pytest.mark.parametrize("field", LACKED)
def test_what_a_device_does_not_support_is_none_and_never_bad(
    machine: simulated.Machine, driver: Driver, field: str
) -> None:
    machine.set("gpu1", field, "not supported")
    reading = driver.read(machine.find("gpu1"), 1)
    name = {row[0]: row[2] for row in SIGNALS}[field]
    if field == "memory_used":
        assert reading.memory_used is None
    assert getattr(reading, name) is None
    assert reading.error == ""


def test_an_old_card_without_nvlink_mig_or_remapping_reads_as_just_that(
    machine: simulated.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_node(machine.state.path, monkeypatch, "node-2")
    driver = Driver()
    driver.open()
    device = next(each for each in driver.devices("node-2") if each.model == "T4-16GB")
    reading = driver.read(device.uuid, 1)
    assert (device.links, device.mig, device.mig_managed, device.instances) == ((), False, False, ())
    assert (reading.nvlinks, reading.nvlink_errors, reading.remap_pending) == (None, None, None)
    assert reading.temperature is not None
    driver.close()


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "RESET_REQUIRED"])
def test_an_error_of_the_device_goes_into_its_reading(
    machine: simulated.Machine, driver: Driver, code: str
) -> None:
    uuid = machine.find("gpu3")
    driver.devices("node-1")
    if code == "GPU_IS_LOST":
        machine.lose("gpu3")
    else:
        machine.set("gpu3", "reset_required", value=True)
    assert driver.read(uuid, 1).error == code
    assert driver.present()[uuid] == code
    assert uuid not in [each.uuid for each in driver.devices("node-1")]
    machine.restore("gpu3")
    assert driver.read(uuid, 2).error == ""


OF_THE_MONITOR = [
    "NO_PERMISSION",
    "DRIVER_NOT_LOADED",
    "OPERATING_SYSTEM",
    "LIB_RM_VERSION_MISMATCH",
    "UNKNOWN",
]


@pytest.mark.parametrize("code", OF_THE_MONITOR)
def test_an_error_of_the_monitor_condemns_no_device(
    machine: simulated.Machine, driver: Driver, code: str
) -> None:
    uuid = machine.find("gpu3")
    driver.devices("node-1")
    machine.fail_next("gpu3", "nvmlDeviceGetFieldValues", code)
    if code == "NO_PERMISSION":  # one signal that needs more rights than we have is one that we lack
        assert driver.read(uuid, 1).recovery_action is None
        return
    with pytest.raises(DriverError, match=f"NVML answers {code} to read {uuid}") as raised:
        driver.read(uuid, 1)
    assert not raised.value.of_device
    assert driver.read(uuid, 2).error == ""


def test_one_device_that_cannot_be_opened_hides_no_other(machine: simulated.Machine, driver: Driver) -> None:
    machine.fail_next("gpu1", code="UNKNOWN", times=-1)
    assert len(driver.devices("node-1")) == 3


def test_a_driver_that_refuses_every_device_is_told(machine: simulated.Machine, driver: Driver) -> None:
    machine.fail_next("node-1", "nvmlDeviceGetHandleByIndex_v2", "OPERATING_SYSTEM", times=-1)
    with pytest.raises(DriverError, match="look at the container's device rules"):
        driver.devices("node-1")


def test_a_lost_neighbour_does_not_hide_a_device_from_dask_cuda(machine: simulated.Machine) -> None:
    from dask_cuda.utils import get_gpu_handle

    machine.lose("gpu0")
    machine.search_strict("node-1", strict=True)
    assert nvml.prepare() == ""
    found = get_gpu_handle(machine.find("gpu2"))
    assert pynvml.nvmlDeviceGetUUID(found) == machine.find("gpu2")
    with pytest.raises(ValueError, match="Invalid device index or UUID"):
        get_gpu_handle(machine.find("gpu0"))


# ------------------------------------------------------------------------------------------------ NVML events


def test_events_come_with_their_device_kind_and_instance(machine: simulated.Machine, driver: Driver) -> None:
    driver.devices("node-1")
    machine.xid("gpu0", 13)  # before anybody listened: lost, as with the real driver
    assert driver.wait_events(0) == []
    machine.xid("gpu2", 94, gpu_instance=3, compute_instance=0)
    machine.announce("gpu1", "ecc_double")
    machine.announce("gpu1", "pstate")  # not worth telling
    machine.xid("node-2/gpu0", 79)  # somebody else's
    found = [
        (each.device, each.kind, each.xid, each.gpu_instance, each.compute_instance)
        for each in driver.wait_events(1)
    ]
    assert found == [
        (machine.find("gpu2"), "xid", 94, 3, 0),
        (machine.find("gpu1"), "ecc_double", 0, -1, -1),
    ]
    assert driver.wait_events(0) == []


def test_a_wait_ends_when_the_event_comes(machine: simulated.Machine, driver: Driver) -> None:
    driver.devices("node-1")
    driver.wait_events(0)
    timer = threading.Timer(0.05, machine.xid, ("gpu1", 48))
    timer.start()
    assert [each.xid for each in driver.wait_events(30)] == [48]
    timer.join()


def test_a_wait_that_fails_is_told_and_the_next_one_works(machine: simulated.Machine, driver: Driver) -> None:
    driver.devices("node-1")
    machine.fail_next("node-1", "nvmlEventSetWait_v2", "UNKNOWN")
    with pytest.raises(DriverError, match="UNKNOWN to wait for NVML events"):
        driver.wait_events(0)
    assert driver.wait_events(0) == []
    machine.xid("gpu1", 31)
    assert [each.xid for each in driver.wait_events(1)] == [31]


def test_a_device_that_announces_nothing_stops_no_other(machine: simulated.Machine, driver: Driver) -> None:
    driver.devices("node-1")
    machine.fail_next("gpu0", "nvmlDeviceRegisterEvents", "NOT_SUPPORTED", times=-1)
    driver.wait_events(0)
    machine.xid("gpu0", 31)
    machine.xid("gpu1", 13)
    assert [each.xid for each in driver.wait_events(1)] == [13]


def test_processes_are_listed_with_their_memory_and_go_when_they_do(
    machine: simulated.Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = machine.find("gpu2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    address = simulated.malloc(10**9)
    ((pid, size),) = driver.processes(uuid)
    assert pid == os.getpid()
    simulated.free(address)
    assert driver.processes(uuid) == ((pid, size - 10**9),)
    assert driver.processes(machine.find("gpu1")) == ()
