"""The C side of NVML as `pynvml` calls it: how a value gets out of a C argument and into one."""

from __future__ import annotations

import ctypes
from typing import Any

from jupyter_gpupool.driver.abi import Code


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
