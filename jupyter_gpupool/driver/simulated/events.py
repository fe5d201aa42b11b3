# ruff: noqa: D103, N802 (functions bear the names of the driver's symbols, and are described by its manual)
"""NVML events of the simulated driver: sets, registration, and waiting without polling.

Rule 1: as with the real driver, what happened before a device was registered with a set is not reported by
        it.
Rule 2: a wait sleeps on inotify until the state changes; where there is none, it looks at it every 20 ms.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.driver.abi import EVENT_TYPES, NO_INSTANCE, Code
from jupyter_gpupool.driver.simulated.abi import (
    Refused,
    handle_of,
    number,
    put,
    put_handle,
    put_handle_field,
    target,
)
from jupyter_gpupool.driver.simulated.library import Gpu, Library, general, of_device

if TYPE_CHECKING:
    from pathlib import Path

#: All that the simulated driver can announce, as a mask.
SUPPORTED = sum(EVENT_TYPES.values()) & ~EVENT_TYPES["clock"]
#: Seconds between looks where inotify is not to be had; else the longest sleep, should a notice be missed.
LOOK, LONGEST = 0.02, 1.0
IN_MOVED_TO, IN_NONBLOCK, IN_CLOEXEC = 0x80, 0o4000, 0o2000000


class Watch:
    """Sleep until something in a folder is renamed."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC)
        if self.descriptor >= 0:
            self._libc.inotify_add_watch(self.descriptor, os.fsencode(folder), IN_MOVED_TO)

    def sleep(self, seconds: float) -> None:
        """Return at the next change, or after `seconds` at most; early now and then."""
        if self.descriptor < 0:
            time.sleep(min(seconds, LOOK))
            return
        ready, _, _ = select.select([self.descriptor], [], [], min(seconds, LONGEST))
        if ready:
            os.read(self.descriptor, 65536)

    def close(self) -> None:
        """Give the descriptor back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True)
class EventSet:
    """What one event set waits for."""

    watch: Watch
    #: device -> (mask of types, sequence number at registration)
    devices: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Sequence number of the last event that was looked at.
    seen: int = 0


@general
def nvmlEventSetCreate(library: Library, answer: Any) -> None:
    if not library.initialised:
        raise Refused(Code.UNINITIALIZED)
    put_handle(answer, library.keep(EventSet(Watch(library.state.path))))


@general
def nvmlEventSetFree(library: Library, handle: Any) -> None:
    _set_of(library, handle).watch.close()
    del library.objects[handle_of(handle)]


def _set_of(library: Library, handle: Any) -> EventSet:
    found = library.objects.get(handle_of(handle))
    if not isinstance(found, EventSet):
        raise Refused(Code.INVALID_ARGUMENT)
    return found


@of_device
def nvmlDeviceGetSupportedEventTypes(_gpu: Gpu, mask: Any) -> None:
    put(mask, SUPPORTED)


@of_device
def nvmlDeviceRegisterEvents(gpu: Gpu, mask: Any, handle: Any) -> None:
    if number(mask) & ~SUPPORTED or gpu.instance is not None:
        raise Refused(Code.NOT_SUPPORTED)
    events = _set_of(gpu.library, handle)
    events.devices[gpu.data["uuid"]] = (number(mask), gpu.library.state.read()["sequence"])


@general
def nvmlEventSetWait_v2(library: Library, handle: Any, answer: Any, timeout: Any) -> None:
    events = _set_of(library, handle)
    until = time.monotonic() + number(timeout) / 1000
    while True:
        data = library.state.read()
        event = _next(events, data)
        if event is not None:
            _fill(library, data, event, target(answer))
            return
        left = until - time.monotonic()
        if left <= 0:
            raise Refused(Code.TIMEOUT)
        events.watch.sleep(left)


def _next(events: EventSet, data: dict[str, Any]) -> dict[str, Any] | None:
    if data["sequence"] <= events.seen:
        return None
    for event in data["events"]:
        mask, since = events.devices.get(event["device"], (0, 0))
        if event["sequence"] <= events.seen:
            continue
        events.seen = event["sequence"]
        if event["sequence"] > since and EVENT_TYPES[event["kind"]] & mask:
            found: dict[str, Any] = event
            return found
    return None


def _fill(library: Library, data: dict[str, Any], event: dict[str, Any], answer: Any) -> None:
    put_handle_field(answer, "device", library.handle(data["devices"][event["device"]]))
    answer.eventType = EVENT_TYPES[event["kind"]]
    answer.eventData = event["xid"]
    answer.gpuInstanceId = event["gi"] if event["gi"] >= 0 else NO_INSTANCE
    answer.computeInstanceId = event["ci"] if event["ci"] >= 0 else NO_INSTANCE
