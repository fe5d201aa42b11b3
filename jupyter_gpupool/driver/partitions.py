"""MIG as NVML does it: list, create and destroy instances, with nothing half done.

Rule 1: geometry comes from the driver, never from a table of ours.
Rule 2: an instance is a GPU instance and the one compute instance that spans it. Where the second cannot be
        made the first is destroyed again; what is made is believed only when the driver lists it.
Rule 3: a GPU instance without a compute instance is an orphan: no other listing shows it.

The functions take the bindings (`api`) first, so that only `driver.nvml` imports them.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

from jupyter_gpupool.core.model import MIB, Instance, MigProfile
from jupyter_gpupool.driver.errors import DriverError, name_of, optional, text

#: NVML's kinds of GPU instance profiles, and of compute instance profiles.
PROFILE_KINDS, COMPUTE_KINDS = range(0x12), range(0x9)
MOST_PLACEMENTS, MOST_INSTANCES = 16, 16


@dataclass(frozen=True, slots=True)
class Profile:
    """A kind of instance that a device can be cut into, with the number that the driver's calls take."""

    id: int
    said: MigProfile


def profiles(api: Any, handle: Any) -> tuple[Profile, ...]:
    """What a device can be cut into; nothing where it cannot. MIG need not be on."""
    found = (_profile(api, handle, kind) for kind in PROFILE_KINDS)
    return tuple(each for each in found if each is not None)


def _profile(api: Any, handle: Any, kind: int) -> Profile | None:
    try:
        info = api.nvmlDeviceGetGpuInstanceProfileInfo(handle, kind)
        places = _placements(api, handle, info.id)
    except api.NVMLError:
        return None
    if not places:
        return None
    said = MigProfile(
        name=text(info.name).removeprefix("MIG ").strip(),
        size=places[0][1],
        starts=tuple(sorted(start for start, _ in places)),
        compute=int(info.sliceCount),
        memory=int(info.memorySizeMB) * MIB,
        most=int(info.instanceCount),
    )
    return Profile(int(info.id), said)


def _placements(api: Any, handle: Any, profile: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint(MOST_PLACEMENTS)
    array = (api.c_nvmlGpuInstancePlacement_t * MOST_PLACEMENTS)()
    api.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile, array, api.byref(count))
    return [(int(array[at].start), int(array[at].size)) for at in range(count.value)]


def enabled(api: Any, handle: Any) -> bool:
    """Is the device in MIG mode?"""
    return bool((optional(api.NVMLError, api.nvmlDeviceGetMigMode, handle) or (0, 0))[0])


def managed(api: Any, handle: Any, known: tuple[Profile, ...]) -> bool:
    """May this process create and destroy instances? It may where it may list them."""
    try:
        for profile in known[:1]:
            _gpu_instances(api, handle, profile.id)
    except api.NVMLError:
        return False
    return True


def _gpu_instances(api: Any, handle: Any, profile: int) -> list[Any]:
    count = ctypes.c_uint(MOST_INSTANCES)
    array = (api.c_nvmlGpuInstance_t * MOST_INSTANCES)()
    api.nvmlDeviceGetGpuInstances(handle, profile, array, api.byref(count))
    return [array[at] for at in range(count.value)]


def _compute_instances(api: Any, part: Any) -> list[Any]:
    found = []
    for kind in COMPUTE_KINDS:
        with contextlib.suppress(api.NVMLError):
            profile = api.nvmlGpuInstanceGetComputeInstanceProfileInfo(part, kind, 0)
            count = ctypes.c_uint(MOST_INSTANCES)
            array = (api.c_nvmlComputeInstance_t * MOST_INSTANCES)()
            api.nvmlGpuInstanceGetComputeInstances(part, profile.id, array, api.byref(count))
            found += [array[at] for at in range(count.value)]
    return found


def mig_devices(api: Any, handle: Any) -> dict[int, Any]:
    """The MIG devices of a GPU that can be used, by their GPU instance's id."""
    found = {}
    for index in range(optional(api.NVMLError, api.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        with contextlib.suppress(api.NVMLError):
            device = api.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            found[int(api.nvmlDeviceGetGpuInstanceId(device))] = device
    return found


def instances(api: Any, handle: Any, known: tuple[Profile, ...]) -> tuple[Instance, ...]:
    """All instances on a device by their place; orphans have no UUID.

    Where the process may not ask for places, those of the instances that it can see are worked out: an
    arrangement that is legal, which is all that their offering as they are needs.
    """
    if not enabled(api, handle):
        return ()
    usable = mig_devices(api, handle)
    try:
        found = [
            _place(api, part, profile, usable) for profile in known for part in _parts(api, handle, profile)
        ]
    except api.NVMLError as error:
        if name_of(error) != "NO_PERMISSION":
            raise
        found = _arranged(api, known, usable)
    return tuple(sorted(found, key=lambda each: each.start))


def _parts(api: Any, handle: Any, profile: Profile) -> list[Any]:
    """The GPU instances of a profile; none where the device lacks the profile after all."""
    try:
        return _gpu_instances(api, handle, profile.id)
    except api.NVMLError as error:
        if name_of(error) in ("NOT_SUPPORTED", "INVALID_ARGUMENT"):
            return []
        raise


def _place(api: Any, part: Any, profile: Profile, usable: dict[int, Any]) -> Instance:
    info = api.nvmlGpuInstanceGetInfo(part)
    device = usable.get(int(info.id))
    return Instance(
        profile=profile.said.name,
        start=int(info.placement.start),
        size=int(info.placement.size),
        uuid=text(api.nvmlDeviceGetUUID(device)) if device is not None else "",
        memory=profile.said.memory,
        gpu_instance=int(info.id),
    )


def _arranged(api: Any, known: tuple[Profile, ...], usable: dict[int, Any]) -> list[Instance]:
    by_name = {profile.said.name: profile for profile in known}
    named = [
        (_profile_name(api, device), text(api.nvmlDeviceGetUUID(device)), number)
        for number, device in usable.items()
    ]
    wanted = [(by_name[name], uuid, number) for name, uuid, number in named if name in by_name]
    wanted.sort(key=lambda each: (-each[0].said.size, len(each[0].said.starts), each[1]))
    taken: set[int] = set()
    fitted = (_fit(profile, uuid, number, taken) for profile, uuid, number in wanted)
    return [found for found in fitted if found is not None]


def _fit(profile: Profile, uuid: str, number: int, taken: set[int]) -> Instance | None:
    said = profile.said
    for start in reversed(said.starts):
        slots = set(range(start, start + said.size))
        if not slots & taken:
            taken |= slots
            return Instance(
                profile=said.name,
                start=start,
                size=said.size,
                uuid=uuid,
                memory=said.memory,
                gpu_instance=number,
            )
    return None


def _profile_name(api: Any, device: Any) -> str:
    """A MIG device's GPU profile from its name: "… MIG 1g.10gb", or "… MIG 1c.3g.40gb"."""
    name = text(api.nvmlDeviceGetName(device)).rpartition("MIG ")[2]
    return name.partition("c.")[2] if "c." in name else name


def create(api: Any, handle: Any, known: tuple[Profile, ...], wanted: Instance) -> Instance:
    """Create an instance at exactly its place, and return it with its UUID.

    Raises:
        DriverError: It could not be created, or the driver does not list it; nothing of it is left then.
    """
    profile = next((each for each in known if each.said.name == wanted.profile), None)
    if profile is None:
        raise DriverError("NOT_SUPPORTED", f"create a {wanted.profile}: the device has no such profile")
    doing = f"create a {wanted.profile} at {wanted.start}"
    place = api.c_nvmlGpuInstancePlacement_t(wanted.start, profile.said.size)
    try:
        part = api.nvmlDeviceCreateGpuInstanceWithPlacement(handle, profile.id, api.byref(place))
    except api.NVMLError as error:
        raise DriverError(name_of(error), doing) from error
    try:
        _create_compute(api, part, profile)
        return _verified(api, handle, part, profile)
    except (api.NVMLError, DriverError) as error:
        _undo(api, part)
        raise error if isinstance(error, DriverError) else DriverError(name_of(error), doing) from error


def _create_compute(api: Any, part: Any, profile: Profile) -> None:
    for kind in COMPUTE_KINDS:
        try:
            info = api.nvmlGpuInstanceGetComputeInstanceProfileInfo(part, kind, 0)
        except api.NVMLError:
            continue
        if int(info.sliceCount) == profile.said.compute:
            api.nvmlGpuInstanceCreateComputeInstance(part, info.id)
            return
    raise DriverError("NOT_SUPPORTED", f"create the compute instance of a {profile.said.name}")


def _verified(api: Any, handle: Any, part: Any, profile: Profile) -> Instance:
    found = _place(api, part, profile, mig_devices(api, handle))
    if not found.uuid:
        raise DriverError("NOT_FOUND", f"list the {profile.said.name} that was just created")
    return found


def _undo(api: Any, part: Any) -> None:
    for compute in _compute_instances(api, part):
        with contextlib.suppress(api.NVMLError):
            api.nvmlComputeInstanceDestroy(compute)
    with contextlib.suppress(api.NVMLError):
        api.nvmlGpuInstanceDestroy(part)


def destroy(api: Any, handle: Any, known: tuple[Profile, ...], gone: Instance) -> None:
    """Destroy the instance at a place, with its compute instances; nothing happens where there is none.

    Raises:
        DriverError: It is in use, or the process may not.
    """
    doing = f"destroy the {gone.profile} at {gone.start}"
    try:
        for profile in known:
            for part in _parts(api, handle, profile):
                found = _place(api, part, profile, {})
                if (found.start, found.size) == (gone.start, gone.size):
                    _destroy_part(api, part)
    except api.NVMLError as error:
        raise DriverError(name_of(error), doing) from error


def _destroy_part(api: Any, part: Any) -> None:
    for compute in _compute_instances(api, part):
        api.nvmlComputeInstanceDestroy(compute)
    api.nvmlGpuInstanceDestroy(part)
