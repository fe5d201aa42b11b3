"""NVML events: what the driver announces between two polls.

Rule 1: a device is registered once; one that cannot announce anything is polled all the same.
Rule 2: a wait that fails condemns no device: the set is dropped, and the next wait makes a new one.

It takes the bindings (`api`) first, so that only `driver.nvml` imports them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import NvmlEvent
from jupyter_gpupool.driver.abi import EVENT_TYPES, NO_INSTANCE
from jupyter_gpupool.driver.errors import LACKING, OF_DEVICE, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Kinds of NVML events that are worth telling; single-bit errors, clocks and power states are not.
TOLD = {value: kind for kind, value in EVENT_TYPES.items() if kind not in ("ecc_single", "pstate", "clock")}


class Events:
    """One event set, made when it is first waited for. One thread at a time waits."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._set: Any = None
        #: The number behind a device's handle -> its UUID
        self._registered: dict[int, str] = {}

    def wait(self, handles: dict[str, Any], timeout_s: float, clock: Callable[[], int]) -> list[NvmlEvent]:
        """Wait `timeout_s` seconds at most for something to be announced, and return all of it.

        Args:
            handles: UUID -> handle of the devices; new ones are registered first.
            timeout_s: seconds
            clock: Tells milliseconds, for the events.

        Raises:
            NVMLError: Waiting does not work.
        """
        try:
            self._register(handles)
            found = [self._api.nvmlEventSetWait_v2(self._set, int(timeout_s * 1000))]
        except self._api.NVMLError as error:
            if name_of(error) == "TIMEOUT":
                return []
            self.drop()
            raise
        found += self._more()
        now = clock()
        return [event for event in (self._event(each, now) for each in found) if event is not None]

    def drop(self) -> None:
        """Give the set back."""
        events, self._set = self._set, None
        self._registered.clear()
        with contextlib.suppress(self._api.NVMLError):
            if events is not None:
                self._api.nvmlEventSetFree(events)

    def _register(self, handles: dict[str, Any]) -> None:
        if self._set is None:
            self._set = self._api.nvmlEventSetCreate()
        for uuid, handle in handles.items():
            if self._registered.get(self._address(handle)) != uuid:
                self._register_device(uuid, handle)

    def _register_device(self, uuid: str, handle: Any) -> None:
        self._registered[self._address(handle)] = uuid
        try:
            supported = self._api.nvmlDeviceGetSupportedEventTypes(handle)
            self._api.nvmlDeviceRegisterEvents(handle, supported & sum(TOLD), self._set)
        except self._api.NVMLError as error:
            if name_of(error) not in LACKING | OF_DEVICE:
                raise

    def _address(self, handle: Any) -> int:
        """The number behind an opaque handle, by which two of them compare."""
        return self._api.cast(handle, self._api.c_void_p).value or 0

    def _more(self) -> Iterator[Any]:
        """What else has come at the same time."""
        with contextlib.suppress(self._api.NVMLError):
            while True:
                yield self._api.nvmlEventSetWait_v2(self._set, 0)

    def _event(self, data: Any, now: int) -> NvmlEvent | None:
        uuid = self._registered.get(self._address(data.device))
        kind = TOLD.get(int(data.eventType))
        if uuid is None or kind is None:
            return None
        return NvmlEvent(
            device=uuid,
            now=now,
            kind=kind,
            xid=int(data.eventData) if kind == "xid" else 0,
            gpu_instance=-1 if data.gpuInstanceId == NO_INSTANCE else int(data.gpuInstanceId),
            compute_instance=-1 if data.computeInstanceId == NO_INSTANCE else int(data.computeInstanceId),
        )
