"""MIG through NVML: instances at exactly their place, nothing half done, orphans found."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import TYPE_CHECKING

import pynvml
import pytest

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import Instance
from jupyter_gpupool.driver import nvml, simulated
from jupyter_gpupool.driver.nvml import Driver, DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[simulated.Machine]:
    simulated.create(tmp_path, {"node-1": ["A100-40GB", "H100-80GB", "A30-24GB", "H200-141GB", "L40S-48GB"]})
    for name, value in simulated.environment(tmp_path, "node-1").items():
        monkeypatch.setenv(name, value)
    simulated.install()
    found = simulated.Machine(tmp_path)
    for device in ("gpu0", "gpu1", "gpu2", "gpu3"):
        found.mig(device)
    yield found
    nvml.use_library(None)


@pytest.fixture
def driver(machine: simulated.Machine) -> Iterator[Driver]:
    found = Driver()
    found.open()
    found.devices("node-1")
    yield found
    found.close()


def at(profile: str, start: int) -> Instance:
    return Instance(profile=profile, start=start, size=0)


PROFILES = {
    "gpu0": ["1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"],
    "gpu1": ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"],
    "gpu2": ["1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"],
    "gpu3": ["1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"],
    "gpu4": [],
}


@pytest.mark.parametrize("device", PROFILES)
def test_profiles_are_the_drivers_own(machine: simulated.Machine, driver: Driver, device: str) -> None:
    found = driver.profiles(machine.find(device))
    assert sorted(each.name for each in found) == sorted(PROFILES[device])
    assert all(each.memory > 2**30 and each.starts and each.size for each in found)


def test_places_are_those_that_nvidia_publishes(machine: simulated.Machine, driver: Driver) -> None:
    found = {each.name: (each.starts, each.size) for each in driver.profiles(machine.find("gpu1"))}
    assert found == {
        "1g.10gb": ((0, 1, 2, 3, 4, 5, 6), 1),
        "1g.10gb+me": ((0, 1, 2, 3, 4, 5, 6), 1),
        "1g.20gb": ((0, 2, 4, 6), 2),
        "2g.20gb": ((0, 2, 4), 2),
        "3g.40gb": ((0, 4), 4),
        "4g.40gb": ((0,), 4),
        "7g.80gb": ((0,), 8),
    }


@pytest.mark.parametrize("device", PROFILES)
def test_the_simulated_driver_and_the_built_in_tables_say_the_same(
    machine: simulated.Machine, driver: Driver, device: str
) -> None:
    described = next(each for each in driver.devices("node-1") if each.uuid == machine.find(device))
    table = mig.geometry_of(dataclasses.replace(described, profiles=()))
    assert sorted(driver.profiles(described.uuid), key=lambda each: each.name) == sorted(
        table.profiles if table else (), key=lambda each: each.name
    )


def test_an_instance_is_created_exactly_where_it_was_asked_for(
    machine: simulated.Machine, driver: Driver
) -> None:
    uuid = machine.find("gpu1")
    made = driver.create_instance(uuid, at("1g.10gb", 6))
    assert (made.profile, made.start, made.size, made.memory) == ("1g.10gb", 6, 1, 9856 * 2**20)
    assert made.uuid.startswith("MIG-")
    assert driver.instances(uuid) == (made,)
    device = next(each for each in driver.devices("node-1") if each.uuid == uuid)
    assert (device.mig, device.mig_managed, device.instances) == (True, True, (made,))
    assert device.profiles == driver.profiles(uuid)
    driver.destroy_instance(uuid, made)
    assert driver.instances(uuid) == ()
    driver.destroy_instance(uuid, made)  # nothing there: nothing happens


def test_a_careless_small_instance_forbids_the_large_ones(machine: simulated.Machine, driver: Driver) -> None:
    uuid = machine.find("gpu1")
    driver.create_instance(uuid, at("1g.10gb", 0))
    for profile in ("4g.40gb", "7g.80gb"):
        with pytest.raises(DriverError, match="INSUFFICIENT_RESOURCES to create a"):
            driver.create_instance(uuid, at(profile, 0))
    driver.create_instance(uuid, at("3g.40gb", 4))


LAYOUTS = [
    ("4g and 3g", [("4g.40gb", 0), ("3g.40gb", 4)], True),
    ("3g and 3g", [("3g.40gb", 0), ("3g.40gb", 4)], True),
    ("seven of 1g", [("1g.10gb", start) for start in range(7)], True),
    ("six of 1g and a double one", [*(("1g.10gb", start) for start in range(6)), ("1g.20gb", 6)], True),
    ("two of 4g", [("4g.40gb", 0), ("4g.40gb", 4)], False),
    ("2g at 6", [("2g.20gb", 6)], False),
    ("1g at 7", [("1g.10gb", 7)], False),
    ("two with media engines", [("1g.10gb+me", 0), ("1g.10gb+me", 1)], False),
]


@pytest.mark.parametrize(("parts", "legal"), [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
def test_layouts_are_legal_or_not_as_on_real_hardware(
    machine: simulated.Machine, driver: Driver, *, parts: list[tuple[str, int]], legal: bool
) -> None:
    uuid = machine.find("gpu1")
    for profile, start in parts[:-1]:
        driver.create_instance(uuid, at(profile, start))
    if legal:
        driver.create_instance(uuid, at(*parts[-1]))
        assert [(each.profile, each.start) for each in driver.instances(uuid)] == parts
    else:
        before = driver.instances(uuid)
        with pytest.raises(DriverError):
            driver.create_instance(uuid, at(*parts[-1]))
        assert driver.instances(uuid) == before


STEPS = [
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetMigDeviceHandleByIndex",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_creation_that_fails_half_way_leaves_nothing(
    machine: simulated.Machine, driver: Driver, step: str
) -> None:
    uuid = machine.find("gpu1")
    machine.fail_next("gpu1", step, "INSUFFICIENT_RESOURCES")
    with pytest.raises(DriverError) as raised:
        driver.create_instance(uuid, at("2g.20gb", 4))
    assert "create" in str(raised.value)
    assert machine.describe("gpu1")["instances"] == []
    assert driver.create_instance(uuid, at("2g.20gb", 4)).start == 4


def test_what_even_the_clean_up_could_not_remove_is_found_as_an_orphan_and_can_go(
    machine: simulated.Machine, driver: Driver
) -> None:
    uuid = machine.find("gpu1")
    machine.fail_next("gpu1", "nvmlGpuInstanceCreateComputeInstance", "UNKNOWN")
    machine.fail_next("gpu1", "nvmlGpuInstanceDestroy", "UNKNOWN")
    with pytest.raises(DriverError, match=r"UNKNOWN to create a 3g.40gb at 4"):
        driver.create_instance(uuid, at("3g.40gb", 4))
    (orphan,) = driver.instances(uuid)
    assert (orphan.profile, orphan.start, orphan.uuid) == ("3g.40gb", 4, "")
    device = next(each for each in driver.devices("node-1") if each.uuid == uuid)
    assert device.instances == ()  # it is not offered
    driver.destroy_instance(uuid, orphan)
    assert driver.instances(uuid) == ()


def test_an_instance_in_use_is_not_destroyed(
    machine: simulated.Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = machine.find("gpu1")
    made = driver.create_instance(uuid, at("1g.10gb", 6))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", made.uuid)
    simulated.malloc(2**30)
    with pytest.raises(DriverError, match=r"IN_USE to destroy the 1g.10gb at 6: a process"):
        driver.destroy_instance(uuid, made)
    ((pid, _),) = driver.processes(uuid)
    assert pid == os.getpid()
    with pytest.raises(simulated.OutOfMemoryError):
        simulated.malloc(10 * 2**30)  # there is that much on the device, but not in the instance


def test_without_the_right_instances_are_offered_as_they_are_and_none_is_made(
    machine: simulated.Machine, driver: Driver
) -> None:
    uuid = machine.find("gpu1")
    made = [
        driver.create_instance(uuid, at(*each)) for each in (("3g.40gb", 4), ("1g.10gb", 0), ("1g.10gb", 1))
    ]
    machine.set("gpu1", "mig_permission", value=False)
    device = next(each for each in driver.devices("node-1") if each.uuid == uuid)
    assert not device.mig_managed
    assert {each.uuid for each in device.instances} == {each.uuid for each in made}
    slots = [set(range(each.start, each.start + each.size)) for each in device.instances]
    assert all(not one & other for one, other in itertools.combinations(slots, 2))
    with pytest.raises(DriverError, match=r"NO_PERMISSION to create a 1g.10gb at 2: this needs root"):
        driver.create_instance(uuid, at("1g.10gb", 2))


def test_a_gpu_without_mig_says_so(machine: simulated.Machine, driver: Driver) -> None:
    uuid = machine.find("gpu4")
    assert driver.instances(uuid) == ()
    with pytest.raises(DriverError, match=r"create a 1g.10gb: the device has no such profile"):
        driver.create_instance(uuid, at("1g.10gb", 0))


def test_in_mig_mode_a_device_lacks_what_a_real_one_lacks(machine: simulated.Machine, driver: Driver) -> None:
    uuid = machine.find("gpu1")
    driver.create_instance(uuid, at("1g.10gb", 6))
    reading = driver.read(uuid, 1)
    assert (reading.utilisation, reading.ecc_uncorrected, reading.remap_pending) == (None, None, None)
    assert (reading.nvlinks, reading.error) == (None, "")
    assert reading.temperature is not None


def test_a_mig_device_leads_back_to_its_gpu(machine: simulated.Machine, driver: Driver) -> None:
    from dask_cuda.utils import get_device_total_memory, get_gpu_count_mig, get_gpu_handle

    uuid = machine.find("gpu0")
    made = driver.create_instance(uuid, at("2g.10gb", 4))
    assert pynvml.nvmlDeviceGetUUID(get_gpu_handle(made.uuid)) == uuid
    assert get_device_total_memory(uuid) == 40960 * 2**20
    assert get_gpu_count_mig(return_uuids=True) == (1, [made.uuid])
    part = pynvml.nvmlDeviceGetHandleByUUID(made.uuid.encode())
    assert pynvml.nvmlDeviceGetName(part) == "NVIDIA A100-SXM4-40GB MIG 2g.10gb"
    assert pynvml.nvmlDeviceGetMemoryInfo(part).total == 9856 * 2**20
    assert pynvml.nvmlDeviceGetAttributes(part).gpuInstanceSliceCount == 2


def test_a_handle_of_a_destroyed_instance_is_worth_nothing_though_its_number_is_given_anew(
    machine: simulated.Machine, driver: Driver
) -> None:
    uuid = machine.find("gpu1")
    old = driver.create_instance(uuid, at("1g.10gb", 6))
    handle = pynvml.nvmlDeviceGetHandleByUUID(old.uuid.encode())
    number = pynvml.nvmlDeviceGetGpuInstanceId(handle)
    driver.destroy_instance(uuid, old)
    new = driver.create_instance(uuid, at("1g.10gb", 6))
    assert new.uuid != old.uuid
    assert pynvml.nvmlDeviceGetGpuInstanceId(pynvml.nvmlDeviceGetHandleByUUID(new.uuid.encode())) == number
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetUUID(handle)


def test_a_change_of_the_layout_is_announced(machine: simulated.Machine, driver: Driver) -> None:
    driver.wait_events(0)
    driver.create_instance(machine.find("gpu1"), at("1g.10gb", 6))
    assert [(each.device, each.kind) for each in driver.wait_events(1)] == [
        (machine.find("gpu1"), "mig_config")
    ]


def test_the_mode_is_not_switched_under_a_process(
    machine: simulated.Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(machine.find("gpu2").encode())
    pynvml.nvmlDeviceSetMigMode(handle, 0)
    assert pynvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.find("gpu2"))
    simulated.check()
    with pytest.raises(pynvml.NVMLError) as raised:
        pynvml.nvmlDeviceSetMigMode(handle, 1)
    assert raised.value.value == pynvml.NVML_ERROR_IN_USE
