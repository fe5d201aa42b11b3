"""What an NVML error says, of the device or of the monitor, and what to do about it.

The functions take any NVML error of the bindings, which has the code as `value`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from jupyter_gpupool.driver.abi import Code

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

#: The driver or the device lacks what was asked for. Never bad.
LACKING = frozenset(
    {"NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NO_DATA", "DEPRECATED"}
)
#: These speak of the device itself. All others may as well speak of the monitor, or of its container.
OF_DEVICE = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND", "IRQ_ISSUE", "INSUFFICIENT_POWER"})
#: What to do, where it is the driver, the container or the caller's rights.
ADVICE: dict[str, str] = {
    "LIBRARY_NOT_FOUND": "there is no NVIDIA driver on this machine: install it, or use simulated GPUs",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded: load the kernel module, or restart the machine",
    "NO_PERMISSION": "this needs root or a capability that the process does not have",
    "LIB_RM_VERSION_MISMATCH": "the driver was upgraded meanwhile: restart this process, or the machine",
    "OPERATING_SYSTEM": "the operating system blocks the device: look at the container's device rules",
    "UNINITIALIZED": "NVML was not initialised in this process",
    "UNKNOWN": "in a container this often means that its devices were taken away: restart the container",
    "IN_USE": "a process or another instance still uses it",
    "INSUFFICIENT_RESOURCES": "there is no room for it beside what exists",
    "GPU_IS_LOST": "the GPU has fallen off the bus: restart the machine",
    "RESET_REQUIRED": "the GPU works again only after a reset",
}


class DriverError(Exception):
    """An NVML call failed; its text is one sentence that says what to do."""

    def __init__(self, name: str, doing: str = "") -> None:
        advice = ADVICE.get(name, "")
        super().__init__(
            f"NVML answers {name}{f' to {doing}' if doing else ''}{f': {advice}' if advice else ''}"
        )
        #: NVML's name of the code, without its prefix.
        self.name = name
        self.doing = doing

    @property
    def of_device(self) -> bool:
        """It speaks of the device; else it may be the monitor's or the container's fault."""
        return self.name in OF_DEVICE


def name_of(error: Any) -> str:
    """NVML's name of an error: "GPU_IS_LOST"; "CODE_77" for one that is newer than this package."""
    try:
        return Code(error.value).name
    except ValueError:
        return f"CODE_{error.value}"


def optional(error: type[Exception], call: Callable[..., _T], *arguments: Any) -> _T | None:
    """What a call says, or None where the driver or the device lacks it or the caller may not ask.

    Args:
        error: The bindings' class of NVML errors; any other of them is raised.
        call: A function of the bindings.
        arguments: Its arguments.
    """
    try:
        return call(*arguments)
    except error as failure:
        if name_of(failure) in LACKING or name_of(failure) == "NO_PERMISSION":
            return None
        raise


def text(value: Any) -> str:
    """NVML's strings are bytes in some versions of the bindings."""
    return value.decode() if isinstance(value, bytes) else str(value)
