"""NVML for the rest of the package: devices, readings, NVML events. The only module that imports `pynvml`.

Rule 1: what the driver does not support is None, which is never bad.
Rule 2: an error that speaks of the device ("GPU_IS_LOST") goes into its reading. An error that speaks of the monitor or
        the container ("NO_PERMISSION", "LIB_RM_VERSION_MISMATCH"…) condemns no device: it is a `DriverError`.
Rule 3: a device is known by its UUID, and found again by its PCI bus id: the search for a UUID may touch other GPUs
        and fails when one of them is lost (nvml.h).

Not its business: when to read (`node.reader`) and what a reading means (`core.health`).
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pynvml

from jupyter_gpupool.core.model import GB, Device, NvmlEvent, Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

#: Codes by name, without their prefix: "GPU_IS_LOST" -> 15.
CODES: dict[str, int] = {
    name.removeprefix("NVML_ERROR_"): value
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}
NAMES: dict[int, str] = {value: name for name, value in CODES.items()}
#: The driver or the device lacks what was asked for. Never bad.
LACKING = frozenset(
    {"NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NO_DATA", "DEPRECATED"}
)
#: These speak of the device itself. All others may as well speak of the monitor.
OF_DEVICE = frozenset({"GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND", "IRQ_ISSUE", "INSUFFICIENT_POWER"})
#: What to do about an error of the driver or of the container.
ADVICE: dict[str, str] = {
    "LIBRARY_NOT_FOUND": "there is no NVIDIA driver on this machine: install it, or use simulated GPUs",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded: load the kernel module, or restart the machine",
    "NO_PERMISSION": "this needs root or a capability that the process does not have",
    "LIB_RM_VERSION_MISMATCH": "the driver was upgraded under running processes: restart this one, or the machine",
    "OPERATING_SYSTEM": "the operating system blocks the device: look at the container's device rules",
    "UNINITIALIZED": "NVML was not initialised in this process",
    "UNKNOWN": "in a container this often means that its devices were taken away: restart the container",
    "IN_USE": "a process or another instance still uses it",
}
#: NVML event types in the words of `NvmlEvent.kind`; those that older versions of the bindings lack are left out.
EVENT_KINDS: dict[int, str] = {
    0x2: "ecc_double",
    0x8: "xid",
    0x100: "mig_config",
    0x200: "ecc_storm",
    0x400: "retirement",
    0x800: "retirement_failure",
    0x1000: "poison_contained",
    0x2000: "poison_fatal",
    0x4000: "unavailable",
    0x8000: "recovery_action",
}
WANTED_EVENTS = sum(EVENT_KINDS)
#: "The whole device" in an NVML event.
WHOLE_DEVICE = 0xFFFFFFFF
RECOVERY_ACTION, LINK_COUNT, LINK_REPLAYS, LINK_RECOVERIES = 230, 91, 161, 162
MOST_LINKS = 18
#: How NVML's names of products are cut to the names that people use.
_NOISE = re.compile(
    r"\b(NVIDIA|Tesla|Quadro|GeForce|HBM\w*|SXM\d?|\d+\s*GB|PCIe|Generation|Edition|MIG \S+)\b", re.I
)


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


def use_library(library: Any) -> None:
    """Let `pynvml` call this object instead of the driver's library, in this process."""
    pynvml.nvmlLib = library
    # It keeps functions of the library that it had before, also when that was none.
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 (there is no other way to drop them)


def prepare() -> str:
    """Initialise NVML for others in this process who call `pynvml` themselves, as dask-cuda does.

    They find a device by its UUID also while another one on the node is lost.

    Returns:
        Why it cannot be used, in one sentence; "" if it can.
    """
    search = pynvml.nvmlDeviceGetHandleByUUID
    if not hasattr(search, "__wrapped__"):
        pynvml.nvmlDeviceGetHandleByUUID = _past_lost_neighbours(search)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(DriverError(name_of(error)))
    return ""


def _past_lost_neighbours(search: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """NVML's search for a UUID may meet a lost GPU first, and then fails (nvml.h): look at each one then."""

    @functools.wraps(search)
    def find(uuid: bytes) -> Any:
        try:
            return search(uuid)
        except pynvml.NVMLError as error:
            if name_of(error) != "GPU_IS_LOST":
                raise
            found = next((each for each in _working() if _has(each, uuid)), None)
            if found is None:
                raise
            return found

    return find


def _working() -> Iterator[Any]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            yield handle
            yield from _parts(handle)


def _parts(handle: Any) -> Iterator[Any]:
    """The MIG instances of a device."""
    for index in range(optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)


def _has(handle: Any, uuid: bytes) -> bool:
    return text(pynvml.nvmlDeviceGetUUID(handle)) == text(uuid)


def name_of(error: pynvml.NVMLError) -> str:
    """NVML's name of an error: "GPU_IS_LOST"."""
    return NAMES.get(error.value, f"CODE_{error.value}")


@contextlib.contextmanager
def _calling(doing: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise DriverError(name_of(error), doing) from error


def optional(call: Callable[..., _T], *arguments: Any) -> _T | None:
    """What a call says, or None where the driver or the device lacks it.

    Raises:
        pynvml.NVMLError: Any other error.
    """
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if name_of(error) in LACKING or name_of(error) == "NO_PERMISSION":
            return None
        raise


def text(value: Any) -> str:
    """NVML's strings are bytes in some versions of the bindings."""
    return value.decode() if isinstance(value, bytes) else str(value)


def short_model(name: str, memory: int) -> str:
    """The short name of a product: "NVIDIA H100 80GB HBM3" with 85 GB is "H100-80GB".

    Args:
        name: As NVML says it.
        memory: bytes, as NVML says it; the marketing number is in the name or is the nearest usual one.

    >>> short_model("NVIDIA A100-SXM4-40GB", 42949672960)
    'A100-40GB'
    """
    family = re.sub(r"[\s_/-]+", "-", _NOISE.sub(" ", name.replace("-", " ")).strip()).strip("-")
    said = re.search(r"(\d+)\s*GB", name)
    size = int(said.group(1)) if said else _usual_size(memory)
    kind = "-PCIE" if "pcie" in name.lower() and family.startswith(("H100", "A100")) else ""
    return f"{family or 'GPU'}{kind}-{size}GB"


def _usual_size(memory: int) -> int:
    sizes = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 180, 186, 192, 279, 288)
    gibibytes = memory / 2**30
    return (
        min(sizes, key=lambda size: abs(size - gibibytes)) if memory >= 2 * GB else max(1, round(gibibytes))
    )


def reason_unavailable() -> str:
    """Why NVML cannot be used on this machine, in one sentence; "" if it can."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return str(DriverError(name_of(error)))
    return "" if count else "the NVIDIA driver lists no GPU"


class Driver:
    """NVML in this process. Safe to call from several threads; a call may hang, so keep them off an event loop."""

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        #: UUID -> handle, PCI bus id
        self._handles: dict[str, Any] = {}
        self._pci: dict[str, str] = {}
        #: UUID -> number of NVLinks that the device has
        self._links: dict[str, int] = {}
        self._events: Any = None
        self._registered: dict[int, str] = {}

    def open(self) -> None:
        """Initialise NVML.

        Raises:
            DriverError: There is no driver, or it cannot be used.
        """
        with self._lock, _calling("initialise"):
            if not self._open:
                pynvml.nvmlInit()
                self._open = True

    def close(self) -> None:
        """Give everything back; the driver may be opened again."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            with contextlib.suppress(pynvml.NVMLError):
                if self._events is not None:
                    pynvml.nvmlEventSetFree(self._events)
                pynvml.nvmlShutdown()
            self._events = None
            self._handles.clear()
            self._registered.clear()

    def count(self) -> int:
        """How many devices the driver lists.

        Raises:
            DriverError: It does not answer.
        """
        with _calling("count the devices"):
            return int(pynvml.nvmlDeviceGetCount())

    def present(self) -> dict[str, str]:
        """What the driver lists now: the UUID of each device, and "" or the error that it answers with.

        A device that was known and answers with an error keeps its UUID; one that never answered is left out.

        Raises:
            DriverError: The driver itself does not answer.
        """
        found: dict[str, str] = {}
        for index in range(self.count()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found[self._remember(handle)] = ""
            except pynvml.NVMLError as error:
                if name_of(error) not in OF_DEVICE:
                    raise DriverError(name_of(error), f"look at device {index}") from error
        for uuid in self._handles.keys() - found.keys():
            answer = self._answer(uuid)
            if answer:
                found[uuid] = answer
        return found

    def _answer(self, uuid: str) -> str:
        """The error that a device that is not listed answers with."""
        try:
            pynvml.nvmlDeviceGetHandleByPciBusId(self._pci[uuid].encode())
        except pynvml.NVMLError as error:
            return "" if name_of(error) == "NOT_FOUND" else name_of(error)
        return ""

    def _remember(self, handle: Any) -> str:
        uuid = text(pynvml.nvmlDeviceGetUUID(handle))
        if uuid not in self._pci:
            self._pci[uuid] = text(pynvml.nvmlDeviceGetPciInfo(handle).busId).upper()
        self._handles[uuid] = handle  # a device that was reset may have another one
        return uuid

    def _handle(self, uuid: str) -> Any:
        found = self._handles.get(uuid)
        if found is None:
            self.present()
            found = self._handles.get(uuid)
        if found is None:
            raise DriverError("GPU_NOT_FOUND", f"look at {uuid}")
        return found

    # ------------------------------------------------------------------------------------------------------ devices

    def devices(self, node: str) -> tuple[Device, ...]:
        """The devices that work, in the driver's order.

        Args:
            node: The name of this node, for their descriptions.

        Raises:
            DriverError: The driver itself does not answer.
        """
        working = [uuid for uuid, error in self.present().items() if not error]
        found = []
        for uuid in working:
            with contextlib.suppress(DriverError):  # lost between the two looks: the next one tells
                found.append(self._describe(uuid, node, working))
        return tuple(found)

    def _describe(self, uuid: str, node: str, peers: list[str]) -> Device:
        handle = self._handle(uuid)
        with _calling(f"describe {uuid}"):
            memory = optional(pynvml.nvmlDeviceGetMemoryInfo, handle)
            total = int(memory.total) if memory is not None else 0
            numa = optional(pynvml.nvmlDeviceGetNumaNodeId, handle)
            return Device(
                uuid=uuid,
                node=node,
                index=int(pynvml.nvmlDeviceGetIndex(handle)),
                model=short_model(text(pynvml.nvmlDeviceGetName(handle)), total),
                memory=total,
                pci=self._pci[uuid],
                numa=-1 if numa is None else int(numa),
                links=self._peers(uuid, peers),
                mig=bool((optional(pynvml.nvmlDeviceGetMigMode, handle) or (0, 0))[0]),
            )

    def _peers(self, uuid: str, peers: list[str]) -> tuple[tuple[str, int], ...]:
        """The NVLinks from a device to its peers; behind a switch each peer is reached over all of them."""
        by_bus = {self._pci[peer]: peer for peer in peers if peer != uuid}
        ends = [end for end in self._ends(uuid) if end]
        found = {peer: ends.count(bus) for bus, peer in by_bus.items() if bus in ends}
        if "switch" in ends:
            found |= {peer: ends.count("switch") for peer in by_bus.values() if "switch" in self._ends(peer)}
        return tuple(sorted(found.items()))

    def _ends(self, uuid: str) -> list[str]:
        """For each NVLink where it ends: a PCI bus id, "switch", or "" where it is down."""
        handle = self._handle(uuid)
        return [_end(handle, link) for link in range(self._link_count(uuid))]

    def _link_count(self, uuid: str) -> int:
        if uuid not in self._links:
            self._links[uuid] = _count_links(self._handle(uuid))
        return self._links[uuid]

    # ----------------------------------------------------------------------------------------------------- readings

    def read(self, uuid: str, now: int) -> Reading:
        """Read all signals of a device.

        Args:
            uuid: Which.
            now: milliseconds of the caller's clock, for the reading.

        Raises:
            DriverError: The driver, or this process's rights in it, are the matter and not the device.
        """
        try:
            return self._read(uuid, now)
        except pynvml.NVMLError as error:
            failure = DriverError(name_of(error), f"read {uuid}")
        except DriverError as error:
            failure = error
        if failure.of_device:
            return Reading(device=uuid, now=now, error=failure.name)
        raise failure

    def _read(self, uuid: str, now: int) -> Reading:
        handle = self._handle(uuid)
        ask = functools.partial(_ask, handle)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        use = ask(pynvml.nvmlDeviceGetUtilizationRates)
        remap = ask(pynvml.nvmlDeviceGetRemappedRows)
        states, errors = self._read_links(uuid, handle)
        return Reading(
            device=uuid,
            now=now,
            utilisation=None if use is None else int(use.gpu),
            memory_used=None if memory is None else int(memory.used),
            temperature=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            power=ask(pynvml.nvmlDeviceGetPowerUsage),
            recovery_action=_field(handle, RECOVERY_ACTION),
            remap_pending=None if remap is None else bool(remap[2]),
            remap_failed=None if remap is None else bool(remap[3]),
            ecc_uncorrected=ask(
                pynvml.nvmlDeviceGetTotalEccErrors,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
            slowdown=ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons),
            pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
            nvlinks=states,
            nvlink_errors=errors,
            processes=self._processes(handle),
        )

    def _read_links(self, uuid: str, handle: Any) -> tuple[tuple[bool, ...] | None, int | None]:
        count = self._link_count(uuid)
        if not count:
            return None, None
        states = [optional(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(count)]
        wanted = [(field, link) for field in (LINK_REPLAYS, LINK_RECOVERIES) for link in range(count)]
        values = optional(pynvml.nvmlDeviceGetFieldValues, handle, wanted) or ()
        known = [_value(each) for each in values if each.nvmlReturn == pynvml.NVML_SUCCESS]
        return tuple(bool(each) for each in states if each is not None) or None, sum(known) if known else None

    def processes(self, uuid: str) -> tuple[tuple[int, int], ...]:
        """(PID, bytes) of the compute processes on a device.

        Raises:
            DriverError: The device or the driver does not answer.
        """
        with _calling(f"list the processes on {uuid}"):
            return self._processes(self._handle(uuid))

    @staticmethod
    def _processes(handle: Any) -> tuple[tuple[int, int], ...]:
        found = optional(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        sizes: dict[int, int] = {}
        for each in found:  # a process may be there once for each MIG instance
            sizes[int(each.pid)] = sizes.get(int(each.pid), 0) + int(each.usedGpuMemory or 0)
        return tuple(sorted(sizes.items()))

    # ------------------------------------------------------------------------------------------------------- events

    def wait_events(self, timeout_s: float) -> list[NvmlEvent]:
        """Wait until the driver announces something, `timeout_s` seconds at most, and return it (often nothing).

        Devices that have come since are registered first.

        Raises:
            DriverError: Waiting does not work; the next call starts with a new event set.
        """
        try:
            self._register()
            first = pynvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
        except pynvml.NVMLError as error:
            if name_of(error) == "TIMEOUT":
                return []
            self._drop_events()
            raise DriverError(name_of(error), "wait for NVML events") from error
        events = [first, *self._more_events()]
        now = time.time_ns() // 1_000_000
        return [event for event in (self._event(each, now) for each in events) if event is not None]

    def _register(self) -> None:
        if self._events is None:
            self._events = pynvml.nvmlEventSetCreate()
            self._registered.clear()
        for uuid, handle in list(self._handles.items()):
            if self._registered.get(_address(handle)) == uuid:
                continue
            self._registered[_address(handle)] = uuid
            try:
                supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                pynvml.nvmlDeviceRegisterEvents(handle, supported & WANTED_EVENTS, self._events)
            except pynvml.NVMLError as error:
                if name_of(error) not in LACKING | OF_DEVICE:
                    raise

    def _more_events(self) -> Iterator[Any]:
        """What else has come at the same time."""
        with contextlib.suppress(pynvml.NVMLError):
            while True:
                yield pynvml.nvmlEventSetWait_v2(self._events, 0)

    def _drop_events(self) -> None:
        events, self._events = self._events, None
        with contextlib.suppress(pynvml.NVMLError):
            if events is not None:
                pynvml.nvmlEventSetFree(events)

    def _event(self, data: Any, now: int) -> NvmlEvent | None:
        uuid = self._registered.get(_address(data.device))
        kind = EVENT_KINDS.get(int(data.eventType))
        if uuid is None or kind is None:
            return None
        whole = (-1, WHOLE_DEVICE)
        return NvmlEvent(
            device=uuid,
            now=now,
            kind=kind,
            xid=int(data.eventData) if kind == "xid" else 0,
            gpu_instance=-1 if data.gpuInstanceId in whole else int(data.gpuInstanceId),
            compute_instance=-1 if data.computeInstanceId in whole else int(data.computeInstanceId),
        )


def _ask(handle: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    return optional(call, handle, *arguments)


def _address(handle: Any) -> int:
    """The number behind an opaque handle, by which two of them compare."""
    return pynvml.cast(handle, pynvml.c_void_p).value or 0


def _value(each: Any) -> int:
    """A field's value, of whichever integer type it is."""
    names = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    return int(getattr(each.value, names.get(each.valueType, "uiVal")))


def _field(handle: Any, field: int) -> int | None:
    values = optional(pynvml.nvmlDeviceGetFieldValues, handle, [field])
    if not values or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    return _value(values[0])


def _count_links(handle: Any) -> int:
    """How many NVLinks a device has; indexes above are not supported, which is normal."""
    said = _field(handle, LINK_COUNT)
    if said is not None:
        return min(said, MOST_LINKS)
    states = (optional(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(MOST_LINKS))
    return sum(1 for state in states if state is not None)


def _end(handle: Any, link: int) -> str:
    with contextlib.suppress(pynvml.NVMLError):
        if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
            return ""
        kind = optional(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "switch"
        return text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).upper()
    return ""
