"""The simulated machines: one state for all processes, changed while they run, and the driver's own words."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dask_cuda
import distributed
import pynvml
import pytest

from jupyter_gpupool import driver as package
from jupyter_gpupool.driver import nvml, simulated
from jupyter_gpupool.driver.nvml import Driver, DriverError
from jupyter_gpupool.driver.simulated import library, load, processes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[simulated.Machine]:
    simulated.create(tmp_path, {"node-1": 4, "node-2": 4})
    for name, value in simulated.environment(tmp_path, "node-1").items():
        monkeypatch.setenv(name, value)
    simulated.install()
    yield simulated.Machine(tmp_path)
    nvml.use_library(None)


@pytest.fixture
def driver(machine: simulated.Machine) -> Iterator[Driver]:
    found = Driver()
    found.open()
    found.devices("node-1")
    yield found
    found.close()


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def run(machine: simulated.Machine, code: str, device: str = "gpu0") -> subprocess.Popen[str]:
    """Another process on the first node, with the device of this name; the test's end is its end."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": machine.find(device)}
    process = subprocess.Popen(
        [sys.executable, "-c", "from jupyter_gpupool.driver import simulated\n" + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    _started.append(process)
    return process


# -------------------------------------------------------------------------------------------------- the state


def test_devices_are_found_by_their_names_and_uuids(machine: simulated.Machine) -> None:
    everything = machine.devices()
    assert [machine.find(f"gpu{at}") for at in range(8)] == everything
    assert machine.find("node-2/gpu1") == everything[5] == machine.find(everything[5])
    assert machine.nodes() == ["node-1", "node-2"]
    with pytest.raises(ValueError, match="no simulated device 'gpu8'; there are node-1/gpu0, "):
        machine.find("gpu8")


def test_machines_that_exist_stay_as_they_are(machine: simulated.Machine, tmp_path: Path) -> None:
    machine.lose("gpu0")
    simulated.create(tmp_path, {"other": 1})
    assert machine.describe("gpu0")["lost"]
    simulated.create(tmp_path, {"other": 1}, replace=True)
    assert machine.nodes() == ["other"]


@pytest.mark.parametrize(
    ("nodes", "wiring", "sentence"),
    [
        ({"n": ["H101"]}, "", "unknown model 'H101'; there are H100-80GB"),
        ({"n": 2}, "rope", "unknown wiring 'rope'; there are switch, mesh, pairs and none"),
    ],
    ids=["model", "wiring"],
)
def test_what_cannot_be_made_is_said_and_leaves_nothing(
    tmp_path: Path, nodes: dict[str, int | list[str]], wiring: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        simulated.create(tmp_path / "new", nodes, wiring=wiring)
    with pytest.raises(FileNotFoundError):
        simulated.Machine(tmp_path / "new")


def test_only_its_owner_can_read_it(machine: simulated.Machine, tmp_path: Path) -> None:
    machine.xid("gpu0", 13)
    assert tmp_path.stat().st_mode & 0o77 == 0
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


def test_without_the_variables_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUPOOL_SIMULATED", raising=False)
    nvml.use_library(None)
    assert not simulated.install()
    assert pynvml.nvmlLib is None


def test_a_change_by_another_process_is_seen_at_once(machine: simulated.Machine, driver: Driver) -> None:
    assert driver.read(machine.find("gpu0"), 1).temperature != 91
    changer = run(machine, f"simulated.Machine({str(machine.state.path)!r}).set('gpu0', 'temperature', 91)")
    assert changer.wait(20) == 0
    assert driver.read(machine.find("gpu0"), 1).temperature == 91


def test_a_writer_that_is_killed_breaks_nothing_for_others(machine: simulated.Machine) -> None:
    code = (
        f"machine = simulated.Machine({str(machine.state.path)!r}); print('on', flush=True)\n"
        "while True: machine.xid('gpu0', 13)"
    )
    for _ in range(5):
        writer = run(machine, code)
        assert writer.stdout.readline() == "on\n"
        before = machine.state.read()["sequence"]
        while machine.state.read()["sequence"] < before + 20:
            time.sleep(0.001)
        writer.kill()
        writer.wait()
        sequence = machine.state.read()["sequence"]
        machine.xid("gpu1", 31)  # the lock is free, the file is whole
        assert machine.state.read()["sequence"] == sequence + 1
    json.loads((machine.state.path / "state.json").read_text())


def test_writers_at_the_same_time_lose_nothing(machine: simulated.Machine) -> None:
    def announce() -> None:
        mine = simulated.Machine(machine.state.path)
        for _ in range(25):
            mine.xid("gpu0", 13)

    threads = [threading.Thread(target=announce) for _ in range(4)]
    before = machine.state.read()["sequence"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.state.read()["sequence"] == before + 100


# --------------------------------------------------------------------------------------- the driver's answers


def test_it_answers_every_call_that_dask_dask_cuda_and_this_package_make() -> None:
    bindings = Path(pynvml.__file__).read_text()
    bodies = dict(re.findall(r"^def (nvml\w+)\(.*?\n((?:[ \t].*\n|\n)*)", bindings, re.MULTILINE))
    folders = [Path(module.__file__).parent for module in (distributed, dask_cuda, package)]
    sources = [path for folder in folders for path in folder.rglob("*.py") if "tests" not in path.parts]
    called = {
        name for path in sources for name in re.findall(r"(?:pynvml|api)\.(nvml[A-Z]\w+)", path.read_text())
    }
    called &= bodies.keys()

    def symbols(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        body = bodies.get(name, "")
        inner = {each for each in re.findall(r"\b(nvml\w+)\(", body) if each in bodies} - seen - {name}
        found = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', body))
        return found.union(*(symbols(each, seen | {name}) for each in inner))

    wanted = set().union(*(symbols(name) for name in called))
    machine_library = load.library("/nowhere", "node-1")
    lacking = {name for name in wanted if not hasattr(machine_library, name)}
    assert len(called) > 40
    assert lacking == set()


def test_what_the_driver_lacks_is_a_function_not_found(driver: Driver) -> None:
    with pytest.raises(pynvml.NVMLError) as raised:
        pynvml.nvmlDeviceGetRepairStatus(pynvml.nvmlDeviceGetHandleByIndex(0))
    assert raised.value.value == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND


def test_nothing_is_answered_before_the_driver_is_initialised(machine: simulated.Machine) -> None:
    nvml.use_library(load.library(str(machine.state.path), "node-1"))
    for call in (pynvml.nvmlDeviceGetCount, lambda: pynvml.nvmlDeviceGetHandleByIndex(0)):
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            call()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetUUID(handle)


def test_a_node_that_does_not_exist_has_no_driver(
    machine: simulated.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUPOOL_SIMULATED_NODE", "node-9")
    simulated.install()
    assert "DRIVER_NOT_LOADED" in nvml.reason_unavailable()


def test_errors_have_the_drivers_words(driver: Driver) -> None:
    assert pynvml.nvmlErrorString(15) == "Gpu is lost"
    assert pynvml.nvmlSystemGetDriverVersion().startswith("580.")


def test_a_lost_gpu_answers_so_to_every_call_and_its_neighbours_keep_their_handles(
    machine: simulated.Machine, driver: Driver
) -> None:
    handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(4)]
    machine.lose("gpu1", vanish=True)
    for call in (pynvml.nvmlDeviceGetUUID, pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlDeviceGetName):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            call(handles[1])
    assert pynvml.nvmlDeviceGetUUID(handles[2]) == machine.find("gpu2")
    assert pynvml.nvmlDeviceGetCount() == 3
    assert pynvml.nvmlDeviceGetIndex(handles[2]) == 1  # indexes move, as after a restart of the real driver
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)) == machine.find("gpu2")


def test_a_device_is_found_by_uuid_and_by_bus(machine: simulated.Machine, driver: Driver) -> None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(machine.find("gpu2").encode())
    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    again = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode() if isinstance(bus, str) else bus)
    assert pynvml.nvmlDeviceGetUUID(again) == machine.find("gpu2")
    with pytest.raises(pynvml.NVMLError_NotFound):
        pynvml.nvmlDeviceGetHandleByUUID(machine.find("node-2/gpu0").encode())


def test_a_hanging_call_hangs_and_only_that(machine: simulated.Machine, driver: Driver) -> None:
    machine.hang("gpu1", 30)
    done = threading.Event()
    found: list[object] = []
    thread = threading.Thread(
        target=lambda: (found.append(driver.read(machine.find("gpu1"), 1)), done.set()), daemon=True
    )
    thread.start()
    assert driver.read(machine.find("gpu2"), 1).error == ""
    assert not done.wait(0.2)
    machine.hang("gpu1", 0)
    assert done.wait(10)
    assert found[0].error == ""
    thread.join()


def test_calls_fail_as_often_as_was_asked(machine: simulated.Machine, driver: Driver) -> None:
    machine.fail_next("gpu1", "nvmlDeviceGetPowerUsage", "UNKNOWN", times=2)
    for _ in range(2):
        with pytest.raises(DriverError, match="UNKNOWN"):
            driver.read(machine.find("gpu1"), 1)
        assert driver.read(machine.find("gpu2"), 1).error == ""
    assert driver.read(machine.find("gpu1"), 1).error == ""
    machine.fail_next("node-1", "nvmlDeviceGetCount_v2", 999, times=-1)
    for _ in range(3):
        with pytest.raises(DriverError, match="UNKNOWN"):
            driver.count()
    machine.heal("node-1")
    assert driver.count() == 4


def test_events_are_kept_for_those_who_wait_and_no_longer(machine: simulated.Machine) -> None:
    for _ in range(600):
        machine.xid("gpu0", 13)
    assert len(machine.state.read()["events"]) == 512


# ---------------------------------------------------------------------------- what really goes on shows in it


def test_memory_is_that_of_living_processes(machine: simulated.Machine, driver: Driver) -> None:
    uuid = machine.find("gpu0")
    empty = driver.read(uuid, 1).memory_used
    code = "simulated.malloc(3 * 10**9); print('has', flush=True); input()"
    users = [run(machine, code) for _ in range(2)]
    assert [each.stdout.readline() for each in users] == ["has\n"] * 2
    assert driver.read(uuid, 1).memory_used > empty + 6 * 10**9
    assert {pid for pid, _ in driver.processes(uuid)} == {each.pid for each in users}
    for each in users:
        each.kill()  # it never gave anything back
        each.wait()
    assert driver.read(uuid, 1).memory_used == empty
    assert driver.processes(uuid) == ()
    assert list((machine.state.path / "processes").iterdir()) == []


def test_there_is_no_more_memory_than_the_device_has(machine: simulated.Machine) -> None:
    first = run(machine, "simulated.malloc(70 * 10**9); print('has', flush=True); input()")
    assert first.stdout.readline() == "has\n"
    second = run(
        machine,
        "try: simulated.malloc(20 * 10**9)\n"
        "except simulated.OutOfMemoryError as error: print(error)\n"
        "address = simulated.malloc(10**9); simulated.free(address); print(simulated.allocated())",
    )
    output, _ = second.communicate(timeout=20)
    first.communicate("\n", timeout=20)
    refused, left = output.splitlines()
    assert refused.startswith("Out of memory allocating 20,000,000,000 bytes (allocated so far: 7")
    assert left == "0"


def test_a_process_that_computes_makes_its_device_busy_warm_and_thirsty(
    machine: simulated.Machine, driver: Driver
) -> None:
    uuid = machine.find("gpu0")
    idle = driver.read(uuid, 1)
    worker = run(machine, "simulated.check(); print('on', flush=True)\nwhile True: pass")
    sleeper = run(machine, "simulated.check(); print('on', flush=True); input()", "gpu1")
    try:
        assert worker.stdout.readline() == sleeper.stdout.readline() == "on\n"
        end = time.monotonic() + 20
        while (busy := driver.read(uuid, 2)).utilisation < 10:
            assert time.monotonic() < end
            time.sleep(0.15)
        assert busy.temperature > idle.temperature
        assert busy.power > idle.power
        assert (idle.slowdown, busy.slowdown) == (1, 0)
        assert driver.read(machine.find("gpu1"), 2).utilisation == 0
    finally:
        worker.kill()
        worker.wait()
        sleeper.communicate("\n", timeout=20)


def test_a_process_can_say_itself_how_busy_it_keeps_its_device(
    machine: simulated.Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", machine.find("gpu3"))
    simulated.busy(75)
    assert driver.read(machine.find("gpu3"), 1).utilisation == 75


def test_a_pid_that_was_given_anew_is_somebody_else(machine: simulated.Machine) -> None:
    record = {"start": 1, "uses": {machine.find("gpu0"): {"memory": 5, "busy": None}}}
    (machine.state.path / "processes" / f"{os.getpid()}.json").write_text(json.dumps(record))
    assert processes.uses(machine.state) == []


def test_a_fork_has_a_context_of_its_own(machine: simulated.Machine) -> None:
    code = (
        "import os\nsimulated.malloc(10**6); print(os.getpid(), flush=True)\n"
        "if not os.fork(): simulated.malloc(10**6); print(os.getpid(), flush=True)\n"
        "input()"
    )
    parent = run(machine, code)
    pids = {int(parent.stdout.readline()), int(parent.stdout.readline())}
    assert {use.pid for use in processes.uses(machine.state)} == pids
    parent.communicate("\n\n", timeout=20)


# ---------------------------------------------------------------------------------------------- CUDA's errors


def test_errors_read_as_cudas_own_and_travel(machine: simulated.Machine) -> None:
    import pickle

    error = pickle.loads(pickle.dumps(simulated.CUDARuntimeError("cudaErrorIllegalAddress")))
    assert repr(error) == (
        "CUDARuntimeError('cudaErrorIllegalAddress: an illegal memory access was encountered')"
    )
    assert isinstance(error, RuntimeError)
    assert error.status == 700
    full = pickle.loads(pickle.dumps(simulated.OutOfMemoryError(3, 2, 4)))
    assert isinstance(full, MemoryError)
    assert "allocating 3 bytes" in str(full)


TRY = (
    "def attempt():\n"
    "    try: simulated.check(); print('fine', flush=True)\n"
    "    except simulated.CUDARuntimeError as error: print(error.name, flush=True)\n"
)


def test_a_context_from_before_a_loss_stays_dead_and_a_new_process_works(machine: simulated.Machine) -> None:
    old = run(machine, TRY + "while True: attempt(); input()")
    assert old.stdout.readline() == "fine\n"
    machine.lose("gpu0")
    new = run(machine, TRY + "attempt()")
    assert new.communicate(timeout=20)[0] == "cudaErrorDevicesUnavailable\n"
    machine.restore("gpu0")
    old.stdin.write("\n")
    old.stdin.flush()
    assert old.stdout.readline() == "cudaErrorLaunchFailure\n"
    new = run(machine, TRY + "attempt()")
    assert new.communicate(timeout=20)[0] == "fine\n"
    old.kill()
    old.wait()


def test_a_mistake_of_the_programs_own_sticks_to_its_process_alone(
    machine: simulated.Machine, driver: Driver
) -> None:
    driver.wait_events(0)
    code = TRY + (
        "try: simulated.fault('illegal_address')\n"
        "except simulated.CUDARuntimeError as error: print(error.name, flush=True)\n"
        "attempt(); input()"
    )
    neighbour = run(machine, TRY + "attempt(); input(); attempt()")
    assert neighbour.stdout.readline() == "fine\n"
    wrong = run(machine, code)
    assert [wrong.stdout.readline() for _ in range(2)] == ["cudaErrorIllegalAddress\n"] * 2
    assert [(each.device, each.xid) for each in driver.wait_events(1)] == [(machine.find("gpu0"), 31)]
    assert neighbour.communicate("\n", timeout=20)[0] == "fine\n"
    wrong.communicate("\n", timeout=20)


HARM = [
    (79, "cudaErrorLaunchFailure", {"error": "GPU_IS_LOST"}),
    (95, "cudaErrorECCUncorrectable", {"ecc_uncorrected": 1, "recovery_action": 1}),
    (48, "cudaErrorECCUncorrectable", {"ecc_uncorrected": 1, "remap_pending": True}),
    (94, "cudaErrorContained", {"ecc_uncorrected": 1}),
    (31, "cudaErrorIllegalAddress", {"recovery_action": 0}),
    (63, "fine", {"remap_pending": True}),
    (106, "fine", {"recovery_action": 0}),
]


@pytest.mark.parametrize(("xid", "error", "read"), HARM, ids=[f"XID {row[0]}" for row in HARM])
def test_an_xid_does_the_harm_that_goes_with_it(
    machine: simulated.Machine, driver: Driver, xid: int, error: str, read: dict[str, object]
) -> None:
    driver.wait_events(0)
    victim = run(machine, TRY + "while True: attempt(); input()")
    assert victim.stdout.readline() == "fine\n"
    machine.fail("gpu0", xid)
    victim.stdin.write("\n")
    victim.stdin.flush()
    assert victim.stdout.readline() == f"{error}\n"
    assert [each.xid for each in driver.wait_events(1)] == [xid]
    reading = driver.read(machine.find("gpu0"), 1)
    assert {name: getattr(reading, name) for name in read} == read
    victim.kill()
    victim.wait()


def test_a_process_may_abort_instead(machine: simulated.Machine) -> None:
    victim = run(machine, TRY + "attempt(); input(); attempt()")
    assert victim.stdout.readline() == "fine\n"
    machine.lose("gpu0", abort=True)
    victim.communicate("\n", timeout=20)
    assert victim.returncode == -signal.SIGABRT


def test_one_process_can_be_poisoned_from_outside(machine: simulated.Machine) -> None:
    victim = run(machine, TRY + "attempt(); input(); attempt()")
    assert victim.stdout.readline() == "fine\n"
    machine.poison(victim.pid)
    assert victim.communicate("\n", timeout=20)[0] == "cudaErrorIllegalAddress\n"
    with pytest.raises(ValueError, match="has no CUDA context on a simulated device"):
        machine.poison(victim.pid)


def test_there_is_no_function_of_the_tables_that_the_bindings_do_not_call() -> None:
    bindings = Path(pynvml.__file__).read_text()
    tables = {*library.GENERAL, *library.OF_DEVICE, *library.OF_INSTANCE} - {"nvmlInit_v2"}
    assert {name for name in tables if f'"{name}"' not in bindings} == set()
