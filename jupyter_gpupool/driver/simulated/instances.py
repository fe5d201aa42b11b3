# ruff: noqa: D103, N802 (functions bear the names of the driver's symbols, and are described by its manual)
"""MIG of the simulated driver: modes, profiles, GPU instances and compute instances.

Rule 1: a GPU instance without its compute instance is listed by nobody but `nvmlDeviceGetGpuInstances`.
Rule 2: a compute instance spans its GPU instance: the smaller ones that NVIDIA has are not offered.
Rule 3: numbers of instances are given anew, as the real driver does; a handle of a destroyed one stays
        worthless.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

from jupyter_gpupool.driver.abi import Code
from jupyter_gpupool.driver.simulated.abi import (
    Refused,
    number,
    put,
    put_handle,
    put_handle_field,
    target,
)
from jupyter_gpupool.driver.simulated.library import Gpu, of_device, of_instance
from jupyter_gpupool.driver.simulated.machine import announce
from jupyter_gpupool.driver.simulated.models import MIB, Model
from jupyter_gpupool.driver.simulated.processes import uses
from jupyter_gpupool.driver.simulated.profiles import MOST_INSTANCES, SHAPES, Shape, free_places, shape


def _privileged(gpu: Gpu) -> None:
    if not gpu.field("mig_permission", usual=True):
        raise Refused(Code.NO_PERMISSION)


def _capable(gpu: Gpu) -> None:
    if not gpu.model.mig or gpu.instance is not None:
        raise Refused(Code.NOT_SUPPORTED)


def _on(gpu: Gpu) -> None:
    _capable(gpu)
    if not gpu.data["mig"]:
        raise Refused(Code.NOT_SUPPORTED)


def _shape(gpu: Gpu, profile: Any) -> Shape:
    found = shape(gpu.model, number(profile))
    if found is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return found


# --------------------------------------------------------------------------------------------- mode, profiles


@of_device
def nvmlDeviceSetMigMode(gpu: Gpu, mode: Any, status: Any) -> None:
    _capable(gpu)
    _privileged(gpu)
    if gpu.uses() or gpu.data["instances"]:
        raise Refused(Code.IN_USE)
    with gpu.library.state.change() as data:
        data["devices"][gpu.data["uuid"]]["mig"] = bool(number(mode))
        announce(data, gpu.data["uuid"], "mig_config")
    put(status, 0)


@of_device
def nvmlDeviceGetMaxMigDeviceCount(gpu: Gpu, count: Any) -> None:
    put(count, MOST_INSTANCES if gpu.model.mig and gpu.instance is None else 0)


def _fill_profile(gpu: Gpu, kind: Any, info: Any) -> None:
    _capable(gpu)
    found = next((each for each in SHAPES[gpu.model.mig] if each.kind == number(kind)), None)
    if found is None:
        raise Refused(Code.NOT_SUPPORTED)
    answer = target(info)
    answer.id, answer.sliceCount, answer.instanceCount = found.id, found.slices, found.most
    answer.multiprocessorCount = found.multiprocessors(gpu.model)
    answer.copyEngineCount = found.slices
    answer.memorySizeMB = found.memory(gpu.model)
    if hasattr(answer, "name"):
        answer.name = f"MIG {found.name(gpu.model)}".encode()


@of_device
def nvmlDeviceGetGpuInstanceProfileInfo(gpu: Gpu, kind: Any, info: Any) -> None:
    _fill_profile(gpu, kind, info)


@of_device
def nvmlDeviceGetGpuInstanceProfileInfoV(gpu: Gpu, kind: Any, info: Any) -> None:
    _fill_profile(gpu, kind, info)


@of_device
def nvmlDeviceGetGpuInstancePossiblePlacements_v2(gpu: Gpu, profile: Any, places: Any, count: Any) -> None:
    _capable(gpu)
    found = _shape(gpu, profile)
    put(count, len(found.starts))
    if places is None:
        return
    for at, start in enumerate(found.starts):
        target(places)[at].start, target(places)[at].size = start, found.size


@of_device
def nvmlDeviceGetGpuInstanceRemainingCapacity(gpu: Gpu, profile: Any, count: Any) -> None:
    _on(gpu)
    found = _shape(gpu, profile)
    room = {"instances": list(gpu.data["instances"])}
    made = 0
    while places := free_places(room, found):
        made += 1
        room["instances"].append({"profile_id": found.id, "start": places[-1], "size": found.size})
    put(count, made)


# ---------------------------------------------------------------------------------------------- GPU instances


@of_device
def nvmlDeviceCreateGpuInstanceWithPlacement(gpu: Gpu, profile: Any, place: Any, answer: Any) -> None:
    wanted = target(place)
    _create(gpu, profile, int(wanted.start), int(wanted.size), answer)


@of_device
def nvmlDeviceCreateGpuInstance(gpu: Gpu, profile: Any, answer: Any) -> None:
    places = free_places(gpu.data, _shape(gpu, profile))
    if not places:
        raise Refused(Code.INSUFFICIENT_RESOURCES)
    _create(gpu, profile, places[0], _shape(gpu, profile).size, answer)


def _create(gpu: Gpu, profile: Any, start: int, size: int, answer: Any) -> None:
    _on(gpu)
    _privileged(gpu)
    found = _shape(gpu, profile)
    if size != found.size or start not in found.starts:
        raise Refused(Code.INVALID_ARGUMENT)
    with gpu.library.state.change() as data:
        device = data["devices"][gpu.data["uuid"]]
        if start not in free_places(device, found):
            raise Refused(Code.INSUFFICIENT_RESOURCES)
        serial = enter(data, device, found, gpu.model, start)
    put_handle(answer, gpu.library.keep(("gpu instance", serial)))


def enter(data: dict[str, Any], device: dict[str, Any], found: Shape, model: Model, start: int) -> int:
    """Enter a new GPU instance into the state, and return its serial number."""
    data["sequence"] += 1
    used = {each["gi"] for each in device["instances"]}
    device["instances"].append(
        {
            "serial": data["sequence"],
            "gi": next(each for each in range(1, 2 + MOST_INSTANCES) if each not in used),
            "ci": -1,
            "profile_id": found.id,
            "profile": found.name(model),
            "slices": found.slices,
            "start": start,
            "size": found.size,
            "memory": found.memory(model) * MIB,
            "multiprocessors": found.multiprocessors(model),
            "uuid": "",
        }
    )
    return int(data["sequence"])


@of_device
def nvmlDeviceGetGpuInstances(gpu: Gpu, profile: Any, array: Any, count: Any) -> None:
    _on(gpu)
    _privileged(gpu)
    _shape(gpu, profile)
    found = [each for each in gpu.data["instances"] if each["profile_id"] == number(profile)]
    for at, each in enumerate(found):
        _put_in_array(array, at, gpu.library.keep(("gpu instance", each["serial"])))
    put(count, len(found))


def _put_in_array(array: Any, at: int, handle: int) -> None:
    ctypes.c_void_p.from_buffer(target(array), at * ctypes.sizeof(ctypes.c_void_p)).value = handle


@of_device
def nvmlDeviceGetGpuInstanceById(gpu: Gpu, wanted: Any, answer: Any) -> None:
    _on(gpu)
    _privileged(gpu)
    for each in gpu.data["instances"]:
        if each["gi"] == number(wanted):
            put_handle(answer, gpu.library.keep(("gpu instance", each["serial"])))
            return
    raise Refused(Code.NOT_FOUND)


@of_instance("gpu instance")
def nvmlGpuInstanceGetInfo(gpu: Gpu, part: dict[str, Any], info: Any) -> None:
    answer = target(info)
    put_handle_field(answer, "device", gpu.library.handle(gpu.data))
    answer.id, answer.profileId = part["gi"], part["profile_id"]
    answer.placement.start, answer.placement.size = part["start"], part["size"]


@of_instance("gpu instance")
def nvmlGpuInstanceDestroy(gpu: Gpu, part: dict[str, Any]) -> None:
    _privileged(gpu)
    if part["ci"] >= 0:
        raise Refused(Code.IN_USE)
    with gpu.library.state.change() as data:
        device = data["devices"][gpu.data["uuid"]]
        device["instances"] = [each for each in device["instances"] if each["serial"] != part["serial"]]


# ------------------------------------------------------------------------------------------ compute instances


def _fill_compute_profile(part: dict[str, Any], kind: Any, engine: Any, info: Any) -> None:
    kinds = {0x0: 1, 0x1: 2, 0x2: 3, 0x3: 4, 0x4: 7}
    if kinds.get(number(kind)) != part["slices"] or number(engine) != 0:
        raise Refused(Code.NOT_SUPPORTED)
    answer = target(info)
    answer.id, answer.sliceCount, answer.instanceCount = number(kind), part["slices"], 1
    answer.multiprocessorCount = part["multiprocessors"]
    if hasattr(answer, "name"):
        answer.name = f"MIG {part['profile']}".encode()


@of_instance("gpu instance")
def nvmlGpuInstanceGetComputeInstanceProfileInfo(
    _gpu: Gpu, part: dict[str, Any], kind: Any, engine: Any, info: Any
) -> None:
    _fill_compute_profile(part, kind, engine, info)


@of_instance("gpu instance")
def nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    _gpu: Gpu, part: dict[str, Any], kind: Any, engine: Any, info: Any
) -> None:
    _fill_compute_profile(part, kind, engine, info)


@of_instance("gpu instance")
def nvmlGpuInstanceCreateComputeInstance(gpu: Gpu, part: dict[str, Any], _profile: Any, answer: Any) -> None:
    _privileged(gpu)
    if part["ci"] >= 0:
        raise Refused(Code.INSUFFICIENT_RESOURCES)
    with gpu.library.state.change() as data:
        device = data["devices"][gpu.data["uuid"]]
        give_compute(data, device, part["serial"])
    put_handle(answer, gpu.library.keep(("compute instance", part["serial"])))


def give_compute(data: dict[str, Any], device: dict[str, Any], serial: int) -> None:
    """Enter the compute instance of a GPU instance: only now there is a MIG device, with its UUID."""
    data["sequence"] += 1
    for each in device["instances"]:
        if each["serial"] == serial:
            each["ci"] = 0
            unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{device['uuid']}/{data['sequence']}")
            each["uuid"] = f"MIG-{unique}"
    announce(data, device["uuid"], "mig_config")


@of_instance("gpu instance")
def nvmlGpuInstanceGetComputeInstances(
    gpu: Gpu, part: dict[str, Any], _profile: Any, array: Any, count: Any
) -> None:
    _privileged(gpu)
    if part["ci"] >= 0:
        _put_in_array(array, 0, gpu.library.keep(("compute instance", part["serial"])))
    put(count, int(part["ci"] >= 0))


@of_instance("compute instance")
def nvmlComputeInstanceGetInfo_v2(gpu: Gpu, part: dict[str, Any], info: Any) -> None:
    answer = target(info)
    put_handle_field(answer, "device", gpu.library.handle(gpu.data))
    put_handle_field(answer, "gpuInstance", gpu.library.keep(("gpu instance", part["serial"])))
    answer.id, answer.profileId = part["ci"], 0
    answer.placement.start, answer.placement.size = 0, part["slices"]


@of_instance("compute instance")
def nvmlComputeInstanceDestroy(gpu: Gpu, part: dict[str, Any]) -> None:
    _privileged(gpu)
    if uses(gpu.library.state, {part["uuid"]}):
        raise Refused(Code.IN_USE)
    with gpu.library.state.change() as data:
        for each in data["devices"][gpu.data["uuid"]]["instances"]:
            if each["serial"] == part["serial"]:
                each["ci"], each["uuid"] = -1, ""
        announce(data, gpu.data["uuid"], "mig_config")


# ------------------------------------------------------------------------------------------------ MIG devices


@of_device
def nvmlDeviceGetMigDeviceHandleByIndex(gpu: Gpu, index: Any, handle: Any) -> None:
    _on(gpu)
    usable = [each for each in gpu.data["instances"] if each["uuid"]]
    if number(index) >= len(usable):
        raise Refused(Code.NOT_FOUND)
    put_handle(handle, gpu.library.instance_handle(usable[number(index)]["uuid"]))


def _part(gpu: Gpu) -> dict[str, Any]:
    if gpu.instance is None:
        raise Refused(Code.INVALID_ARGUMENT)
    return gpu.instance


@of_device
def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu: Gpu, handle: Any) -> None:
    _part(gpu)
    put_handle(handle, gpu.library.handle(gpu.data))


@of_device
def nvmlDeviceGetGpuInstanceId(gpu: Gpu, answer: Any) -> None:
    put(answer, _part(gpu)["gi"])


@of_device
def nvmlDeviceGetComputeInstanceId(gpu: Gpu, answer: Any) -> None:
    put(answer, _part(gpu)["ci"])


@of_device
def nvmlDeviceGetAttributes_v2(gpu: Gpu, attributes: Any) -> None:
    part, answer = _part(gpu), target(attributes)
    answer.multiprocessorCount = part["multiprocessors"]
    answer.gpuInstanceSliceCount = answer.computeInstanceSliceCount = part["slices"]
    answer.memorySizeMB = part["memory"] // MIB
