"""CUDA as a process on a simulated GPU meets it: a context, memory, and errors that stick.

Rule 1: a context is good for one epoch of its device. Once the device is lost or reset it is dead, whatever
        happens to the device later; only a new process gets a new one. That is CUDA's own rule for sticky
        errors.
Rule 2: errors read as CUDA's own do, "cudaErrorIllegalAddress: an illegal memory access was encountered".

Import it without cost: an error of this module is unpickled by schedulers and clients.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jupyter_gpupool.driver.simulated import models
from jupyter_gpupool.driver.simulated.processes import Record, identity, uses
from jupyter_gpupool.driver.simulated.state import State, configured

#: CUDA's runtime errors: name -> (number, text), from the CUDA runtime API.
ERRORS: dict[str, tuple[int, str]] = {
    "cudaErrorMemoryAllocation": (2, "out of memory"),
    "cudaErrorDevicesUnavailable": (46, "CUDA-capable device(s) is/are busy or unavailable"),
    "cudaErrorNoDevice": (100, "no CUDA-capable device is detected"),
    "cudaErrorECCUncorrectable": (214, "uncorrectable ECC error encountered"),
    "cudaErrorNvlinkUncorrectable": (220, "uncorrectable NVLink error detected during the execution"),
    "cudaErrorContained": (721, "Invalid access of peer GPU memory over nvlink or a hardware error"),
    "cudaErrorIllegalAddress": (700, "an illegal memory access was encountered"),
    "cudaErrorLaunchTimeout": (702, "the launch timed out and was terminated"),
    "cudaErrorAssert": (710, "device-side assert triggered"),
    "cudaErrorIllegalInstruction": (715, "an illegal instruction was encountered"),
    "cudaErrorMisalignedAddress": (716, "misaligned address"),
    "cudaErrorLaunchFailure": (719, "unspecified launch failure"),
    "cudaErrorUnknown": (999, "unknown error"),
}
#: What a program's own fault does: its sticky error, and the XID that the driver then announces.
OWN_FAULTS: dict[str, tuple[str, int]] = {
    "illegal_address": ("cudaErrorIllegalAddress", 31),
    "illegal_instruction": ("cudaErrorIllegalInstruction", 13),
    "launch_failure": ("cudaErrorLaunchFailure", 13),
    "device_assert": ("cudaErrorAssert", 43),
}


class CUDARuntimeError(RuntimeError):
    """As CuPy's: its text is the error's name and CUDA's sentence."""

    def __init__(self, name: str) -> None:
        number, text = ERRORS[name]
        super().__init__(f"{name}: {text}")
        self.name, self.status = name, number

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[str]]:
        return type(self), (self.name,)


class OutOfMemoryError(MemoryError):
    """As CuPy's; it does not stick."""

    def __init__(self, wanted: int, used: int, limit: int) -> None:
        super().__init__(
            f"Out of memory allocating {wanted:,} bytes (allocated so far: {used:,} bytes, "
            f"limit set to: {limit:,} bytes)."
        )
        self.sizes = (wanted, used, limit)

    def __reduce__(self) -> tuple[type[OutOfMemoryError], tuple[int, int, int]]:
        return type(self), self.sizes


@dataclass(slots=True)
class Context:
    """This process's context on its device (the first of CUDA_VISIBLE_DEVICES)."""

    pid: int
    #: Folder and node, as the environment names them.
    where: tuple[str, str]
    state: State
    #: Of the device, and of the MIG instance on it where that is what the process has.
    device: str
    on: str
    epoch: int
    record: Record
    identity: str
    #: The error that it has died of, or "".
    dead: str = ""
    #: address -> bytes
    allocations: dict[int, int] = field(default_factory=dict)


_context: Context | None = None
_lock = threading.RLock()
_addresses = itertools.count(0x7F00_0000_0000, 0x200)


def active() -> bool:
    """Does this process run on a simulated machine?"""
    return configured() is not None


def context() -> Context:
    """This process's context, made when there is none yet (a child after a fork makes its own).

    Raises:
        CUDARuntimeError: There is no such device, or it does not work.
    """
    global _context  # noqa: PLW0603 (one context a process, as in CUDA)
    with _lock:
        if _context is None or _context.pid != os.getpid() or _context.where != configured():
            _context = _make()
        return _context


def _make() -> Context:
    where = configured() or _no_device()
    state, node = State(where[0]), where[1]
    data = state.read()
    device, on = _visible(data, node)
    if device["lost"] or device["vanished"] or device["reset_required"]:
        raise CUDARuntimeError("cudaErrorDevicesUnavailable")
    if int(device["set"].get("recovery_action") or 0) == 1:
        # After an uncontained error nothing starts on the device until it was reset.
        raise CUDARuntimeError("cudaErrorDevicesUnavailable")
    record = Record.own(state)
    record.uses[on] = {"memory": models.MODELS[device["model"]].context, "busy": None}
    record.write()
    pid = os.getpid()
    return Context(pid, where, state, device["uuid"], on, device["epoch"], record, identity(pid))


def _no_device() -> NoReturn:
    raise CUDARuntimeError("cudaErrorNoDevice")


def _visible(data: dict[str, Any], node: str) -> tuple[dict[str, Any], str]:
    """The device that CUDA_VISIBLE_DEVICES names first, and the UUID of it or of its MIG instance."""
    devices = [data["devices"][uuid] for uuid in data["nodes"].get(node, {"devices": []})["devices"]]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if wanted.isdecimal():
        present = [each for each in devices if not each["vanished"]]
        if int(wanted) < len(present):
            return present[int(wanted)], present[int(wanted)]["uuid"]
        _no_device()
    for device in devices:
        if device["uuid"] == wanted or wanted in [
            each["uuid"] for each in device["instances"] if each["uuid"]
        ]:
            return device, wanted
    _no_device()


def check() -> None:
    """Do what every CUDA call does first: find out that the context is dead.

    Raises:
        CUDARuntimeError: The error that it died of; again at every call, until the process ends.
    """
    mine = context()
    device = mine.state.read()["devices"][mine.device]
    if not mine.dead:
        poison = device["poisoned"].get(mine.identity, "")
        mine.dead = device["blow"] if device["epoch"] != mine.epoch else poison
        if mine.dead and device["aborts"]:
            _abort()
    if mine.dead:
        raise CUDARuntimeError(mine.dead)


def _abort() -> NoReturn:
    """End as a process whose driver calls abort() does; without a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.abort()


def fault(kind: str) -> NoReturn:
    """Make a mistake of the program's own; the context is dead from then on.

    Args:
        kind: "illegal_address", "illegal_instruction", "launch_failure" or "device_assert".

    Raises:
        CUDARuntimeError: What such a mistake raises.
    """
    from jupyter_gpupool.driver.simulated.machine import Machine

    error, xid = OWN_FAULTS[kind]
    check()
    mine = context()
    mine.dead = error
    Machine(mine.state.path).xid(mine.device, xid)
    raise CUDARuntimeError(error)


def malloc(size: int) -> int:
    """Allocate `size` bytes on this process's device and return their address.

    Raises:
        OutOfMemoryError: The device, with what all its processes have, has no room for it.
        CUDARuntimeError: The context is dead.
    """
    check()
    mine = context()
    with _lock, mine.state.lock():  # nobody allocates between the look and the entry
        used, limit = _room(mine)
        if used + size > limit:
            raise OutOfMemoryError(size, used, limit)
        mine.record.uses[mine.on]["memory"] += size
        mine.record.write()
        address = next(_addresses)
        mine.allocations[address] = size
    return address


def _room(mine: Context) -> tuple[int, int]:
    device = mine.state.read()["devices"][mine.device]
    model = models.MODELS[device["model"]]
    names = {mine.on}
    if mine.on == mine.device:
        limit, used = model.memory, model.reserved
        names |= {each["uuid"] for each in device["instances"]}
    else:
        limit, used = next(each["memory"] for each in device["instances"] if each["uuid"] == mine.on), 0
    return used + sum(use.memory for use in uses(mine.state, names)), limit


def free(address: int) -> None:
    """Give back what `malloc` returned; nothing happens for an address that is not in use.

    Raises:
        CUDARuntimeError: The context is dead.
    """
    check()
    mine = context()
    with _lock:
        size = mine.allocations.pop(address, 0)
        mine.record.uses[mine.on]["memory"] -= size
        mine.record.write()


def allocated() -> int:
    """Bytes that this process has allocated."""
    return sum(context().allocations.values())


def busy(percent: int | None) -> None:
    """Say how busy this process keeps its device; None: its CPU time tells."""
    mine = context()
    with _lock:
        mine.record.uses[mine.on]["busy"] = percent
        mine.record.write()
