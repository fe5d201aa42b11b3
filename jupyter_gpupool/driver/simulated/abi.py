"""The C side of NVML as `pynvml` calls it: return codes, constants, and how a value gets into a C argument.

The numbers are those of NVIDIA's nvml.h. They are written down here, and not taken from `pynvml`, because this is
the other side of that interface.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any


class Code(IntEnum):
    """What an NVML function returns."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    INSUFFICIENT_RESOURCES = 23
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


#: Kinds of NVML events, by the names that `core.model.NvmlEvent.kind` has.
EVENT_TYPES: dict[str, int] = {
    "ecc_single": 0x1,
    "ecc_double": 0x2,
    "pstate": 0x4,
    "xid": 0x8,
    "clock": 0x10,
    "mig_config": 0x100,
    "ecc_storm": 0x200,
    "retirement": 0x400,
    "retirement_failure": 0x800,
    "poison_contained": 0x1000,
    "poison_fatal": 0x2000,
    "unavailable": 0x4000,
    "recovery_action": 0x8000,
}

#: "The whole device" in an event's or process's instance ids.
NO_INSTANCE = 0xFFFFFFFF


class Refused(Exception):  # noqa: N818 (a return code on its way out, not an error of the program)
    """Leave an NVML function with this return code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def number(argument: Any) -> int:
    """The integer in an argument that is a ctypes integer or a plain one."""
    return int(getattr(argument, "value", argument))


def target(argument: Any) -> Any:
    """The object that a `byref` argument refers to; arrays and objects stand for themselves."""
    return getattr(argument, "_obj", argument)


def put(argument: Any, value: int) -> None:
    """Store an integer in an out argument."""
    target(argument).value = value


def put_text(buffer: Any, text: str, size: Any) -> None:
    """Store a string in a caller's buffer of `size` bytes."""
    encoded = text.encode()
    if len(encoded) >= number(size):
        raise Refused(Code.INSUFFICIENT_SIZE)
    target(buffer).value = encoded


def put_handle(argument: Any, handle: int) -> None:
    """Store an opaque handle in an out argument of a pointer type."""
    ctypes.c_void_p.from_buffer(target(argument)).value = handle


def put_handle_field(structure: Any, field: str, handle: int) -> None:
    """Store an opaque handle in a field of a structure."""
    offset = getattr(type(structure), field).offset
    ctypes.c_void_p.from_buffer(structure, offset).value = handle


def handle_of(argument: Any) -> int:
    """The number of an opaque handle; 0 for a null pointer."""
    return ctypes.cast(argument, ctypes.c_void_p).value or 0
