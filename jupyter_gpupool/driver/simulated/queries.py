# ruff: noqa: D103, N802 (functions bear the names of the driver's symbols, and are described by its manual)
"""What the simulated driver says of a device: the NVML functions that only read.

Rule 1: a figure is what was set for it, else what follows from what really goes on: the memory and the CPU
        time of the processes on the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_gpupool.driver.abi import NO_INSTANCE, Code
from jupyter_gpupool.driver.simulated.abi import Refused, number, put, put_text, target
from jupyter_gpupool.driver.simulated.library import Gpu, Library, general, of_device

#: Degrees Celsius of a device that does nothing, and how many more at full load.
COOL, WARMER = 32, 38
#: NVML's codes: the idle reason of the clocks, and types of a field.
IDLE = 0x1
UNSIGNED, UNSIGNED_LONG_LONG = 1, 3


@general
def nvmlSystemGetDriverVersion(library: Library, text: Any, size: Any) -> None:
    put_text(text, library.state.read()["driver"], size)


@general
def nvmlSystemGetNVMLVersion(library: Library, text: Any, size: Any) -> None:
    put_text(text, f"13.{library.state.read()['driver']}", size)


@general
def nvmlSystemGetCudaDriverVersion_v2(_library: Library, version: Any) -> None:
    put(version, 13000)


@general
def nvmlSystemGetCudaDriverVersion(_library: Library, version: Any) -> None:
    put(version, 13000)


@general
def nvmlSystemGetProcessName(_library: Library, pid: Any, text: Any, size: Any) -> None:
    try:
        name = Path(f"/proc/{number(pid)}/exe").readlink()
    except OSError:
        raise Refused(Code.NOT_FOUND) from None
    put_text(text, str(name), size)


@of_device
def nvmlDeviceGetUUID(gpu: Gpu, text: Any, size: Any) -> None:
    put_text(text, gpu.uuid, size)


@of_device
def nvmlDeviceGetName(gpu: Gpu, text: Any, size: Any) -> None:
    name = gpu.model.name
    put_text(text, f"{name} MIG {gpu.instance['profile']}" if gpu.instance else name, size)


@of_device
def nvmlDeviceGetSerial(gpu: Gpu, text: Any, size: Any) -> None:
    put_text(text, gpu.data["serial"], size)


@of_device
def nvmlDeviceGetIndex(gpu: Gpu, index: Any) -> None:
    if gpu.instance is not None:
        raise Refused(Code.NOT_SUPPORTED)
    present = gpu.library.present()
    put(index, [each["uuid"] for each in present].index(gpu.data["uuid"]))


@of_device
def nvmlDeviceGetMinorNumber(gpu: Gpu, minor: Any) -> None:
    put(minor, gpu.data["index"])


@of_device
def nvmlDeviceGetCudaComputeCapability(gpu: Gpu, major: Any, minor: Any) -> None:
    put(major, gpu.model.capability[0])
    put(minor, gpu.model.capability[1])


@of_device
def nvmlDeviceGetNumGpuCores(gpu: Gpu, cores: Any) -> None:
    _whole(gpu)
    put(cores, gpu.model.cores)


@of_device
def nvmlDeviceGetComputeMode(_gpu: Gpu, mode: Any) -> None:
    put(mode, 0)


@of_device
def nvmlDeviceGetPersistenceMode(_gpu: Gpu, mode: Any) -> None:
    put(mode, 1)


def _memory(gpu: Gpu) -> tuple[int, int]:
    total = gpu.instance["memory"] if gpu.instance else gpu.field("memory_total", gpu.model.memory)
    reserved = 0 if gpu.instance else gpu.model.reserved
    used = reserved + sum(use.memory for use in gpu.uses()) + int(gpu.field("memory_extra", 0))
    return int(total), int(gpu.field("memory_used", min(used, total)))


@of_device
def nvmlDeviceGetMemoryInfo(gpu: Gpu, info: Any) -> None:
    memory = target(info)
    memory.total, memory.used = _memory(gpu)
    memory.free = memory.total - memory.used


@of_device
def nvmlDeviceGetMemoryInfo_v2(gpu: Gpu, info: Any) -> None:
    nvmlDeviceGetMemoryInfo(gpu, info)
    target(info).reserved = gpu.model.reserved


@of_device
def nvmlDeviceGetUtilizationRates(gpu: Gpu, rates: Any) -> None:
    _whole(gpu)
    target(rates).gpu = gpu.utilisation()
    target(rates).memory = gpu.utilisation() // 2


def _whole(gpu: Gpu) -> None:
    """Refuse what NVML does not support on devices in MIG mode and on instances."""
    if gpu.data["mig"]:
        raise Refused(Code.NOT_SUPPORTED)


def _temperature(gpu: Gpu) -> int:
    return int(gpu.field("temperature", COOL + gpu.utilisation() * WARMER // 100))


@of_device
def nvmlDeviceGetTemperature(gpu: Gpu, sensor: Any, degrees: Any) -> None:
    if number(sensor) != 0:
        raise Refused(Code.INVALID_ARGUMENT)
    put(degrees, _temperature(gpu))


@of_device
def nvmlDeviceGetTemperatureV(gpu: Gpu, answer: Any) -> None:
    target(answer).temperature = _temperature(gpu)


@of_device
def nvmlDeviceGetTemperatureThreshold(gpu: Gpu, which: Any, degrees: Any) -> None:
    limits = {0: 92, 1: 89, 2: 95, 3: 87}
    if number(which) not in limits:
        raise Refused(Code.NOT_SUPPORTED)
    del gpu
    put(degrees, limits[number(which)])


@of_device
def nvmlDeviceGetPowerUsage(gpu: Gpu, milliwatts: Any) -> None:
    model = gpu.model
    usual = model.idle_power + gpu.utilisation() * (model.power_limit - model.idle_power) // 100
    put(milliwatts, int(gpu.field("power", usual)))


@of_device
def nvmlDeviceGetEnforcedPowerLimit(gpu: Gpu, milliwatts: Any) -> None:
    put(milliwatts, gpu.model.power_limit)


@of_device
def nvmlDeviceGetCurrentClocksEventReasons(gpu: Gpu, reasons: Any) -> None:
    put(reasons, int(gpu.field("slowdown", 0 if gpu.utilisation() else IDLE)))


@of_device
def nvmlDeviceGetSupportedClocksEventReasons(_gpu: Gpu, reasons: Any) -> None:
    put(reasons, 0x1FF)


@of_device
def nvmlDeviceGetCurrPcieLinkWidth(gpu: Gpu, width: Any) -> None:
    put(width, int(gpu.field("pcie_width", gpu.model.pcie_width)))


@of_device
def nvmlDeviceGetMaxPcieLinkWidth(gpu: Gpu, width: Any) -> None:
    put(width, gpu.model.pcie_width)


@of_device
def nvmlDeviceGetCurrPcieLinkGeneration(gpu: Gpu, generation: Any) -> None:
    # A real link slows down when its device is idle: only its width tells of a fault.
    usual = gpu.model.pcie_generation if gpu.utilisation() else 1
    put(generation, int(gpu.field("pcie_generation", usual)))


@of_device
def nvmlDeviceGetMaxPcieLinkGeneration(gpu: Gpu, generation: Any) -> None:
    put(generation, gpu.model.pcie_generation)


@of_device
def nvmlDeviceGetPcieReplayCounter(gpu: Gpu, count: Any) -> None:
    put(count, int(gpu.field("pcie_replays", 0)))


# ----------------------------------------------------------------------------------------------------- memory


@of_device
def nvmlDeviceGetEccMode(_gpu: Gpu, current: Any, pending: Any) -> None:
    put(current, 1)
    put(pending, 1)


@of_device
def nvmlDeviceGetTotalEccErrors(gpu: Gpu, kind: Any, counter: Any, count: Any) -> None:
    _whole(gpu)
    name = "ecc_uncorrected" if number(kind) else "ecc_corrected"
    usual = gpu.field(name, 0)  # the aggregate is at least what the volatile counter says
    put(count, int(gpu.field(f"{name}_aggregate", usual) if number(counter) else usual))


@of_device
def nvmlDeviceGetRemappedRows(gpu: Gpu, corrected: Any, uncorrected: Any, pending: Any, failed: Any) -> None:
    if gpu.model.capability < (8, 0) or gpu.data["instances"]:
        raise Refused(Code.NOT_SUPPORTED)
    put(corrected, int(gpu.field("remapped_corrected", 0)))
    put(uncorrected, int(gpu.field("remapped_uncorrected", 0)))
    put(pending, int(bool(gpu.field("remap_pending", 0))))
    put(failed, int(bool(gpu.field("remap_failed", 0))))


#: Field id -> (name that it is set by, its type). What is not here is not supported.
FIELDS: dict[int, tuple[str, int]] = {
    3: ("ecc_corrected", UNSIGNED_LONG_LONG),
    4: ("ecc_uncorrected", UNSIGNED_LONG_LONG),
    94: ("pcie_replays", UNSIGNED),
    142: ("remapped_corrected", UNSIGNED),
    143: ("remapped_uncorrected", UNSIGNED),
    144: ("remap_pending", UNSIGNED),
    145: ("remap_failed", UNSIGNED),
    161: ("nvlink_replays", UNSIGNED_LONG_LONG),
    162: ("nvlink_recoveries", UNSIGNED_LONG_LONG),
    163: ("nvlink_crc", UNSIGNED_LONG_LONG),
    230: ("recovery_action", UNSIGNED),
}


@of_device
def nvmlDeviceGetFieldValues(gpu: Gpu, count: Any, values: Any) -> None:
    array = target(values)
    for at in range(number(count)):
        each = array[at]
        each.nvmlReturn = _fill_field(gpu, each)


def _fill_field(gpu: Gpu, each: Any) -> int:
    if each.fieldId == 91:
        each.valueType, each.value.uiVal = UNSIGNED, gpu.model.links
        return Code.SUCCESS
    name, kind = FIELDS.get(each.fieldId, ("", 0))
    if not name or (name.startswith("nvlink") and each.scopeId >= gpu.model.links):
        return Code.NOT_SUPPORTED
    try:
        value = int(gpu.field(name, 0))
    except Refused as refused:
        return refused.code
    if name.startswith("nvlink") and each.scopeId:
        value = 0  # one counter is kept; it shows at the first link
    each.valueType = kind
    if kind == UNSIGNED:
        each.value.uiVal = value
    else:
        each.value.ullVal = value
    return Code.SUCCESS


# -------------------------------------------------------------------------------------------------- processes


@of_device
def nvmlDeviceGetComputeRunningProcesses_v3(gpu: Gpu, count: Any, array: Any) -> None:
    found = gpu.uses()
    room = number(target(count))
    put(count, len(found))
    if room < len(found):
        raise Refused(Code.INSUFFICIENT_SIZE)
    ids = {each["uuid"]: (each["gi"], each["ci"]) for each in gpu.data["instances"]}
    for at, use in enumerate(found):
        each = target(array)[at]
        each.pid, each.usedGpuMemory = use.pid, use.memory
        each.gpuInstanceId, each.computeInstanceId = ids.get(use.on, (NO_INSTANCE, NO_INSTANCE))


@of_device
def nvmlDeviceGetComputeRunningProcesses_v2(gpu: Gpu, count: Any, array: Any) -> None:
    nvmlDeviceGetComputeRunningProcesses_v3(gpu, count, array)


@of_device
def nvmlDeviceGetGraphicsRunningProcesses_v3(_gpu: Gpu, count: Any, _array: Any) -> None:
    put(count, 0)


@of_device
def nvmlDeviceGetMPSComputeRunningProcesses_v3(_gpu: Gpu, count: Any, _array: Any) -> None:
    put(count, 0)


# -------------------------------------------------------------------------------------------- MIG, only asked


@of_device
def nvmlDeviceGetMigMode(gpu: Gpu, current: Any, pending: Any) -> None:
    if not gpu.model.mig:
        raise Refused(Code.NOT_SUPPORTED)
    put(current, int(gpu.data["mig"]))
    put(pending, int(gpu.data["mig"]))


@of_device
def nvmlDeviceIsMigDeviceHandle(gpu: Gpu, answer: Any) -> None:
    put(answer, int(gpu.instance is not None))
