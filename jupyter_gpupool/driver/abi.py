"""NVML's numbers, as NVIDIA's nvml.h has them: return codes and kinds of events."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """What an NVML function returns."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    ALREADY_INITIALIZED = 5
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    INSUFFICIENT_RESOURCES = 23
    FREQ_NOT_SUPPORTED = 24
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    GPU_NOT_FOUND = 28
    INVALID_STATE = 29
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
