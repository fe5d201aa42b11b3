"""NVML for the rest of the package: devices, readings, NVML events. The only module that imports `pynvml`.

Rule 1: what the driver does not support is None, which is never bad.
Rule 2: an error that speaks of the device ("GPU_IS_LOST") goes into its reading. One that speaks of the
        monitor or of its container ("NO_PERMISSION", "LIB_RM_VERSION_MISMATCH"…) condemns no device: it is a
        `DriverError`.
Rule 3: a device is known by its UUID, and found again by its PCI bus id: the search for a UUID may touch
        other GPUs and fails when one of them is lost (nvml.h).

Not its business: when to read (`node.reader`) and what a reading means (`core.health`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import pynvml

from jupyter_gpupool.core.model import Device, Instance, MigProfile, NvmlEvent, Reading
from jupyter_gpupool.driver import links, partitions
from jupyter_gpupool.driver.errors import OF_DEVICE, DriverError, name_of, optional, text
from jupyter_gpupool.driver.events import Events
from jupyter_gpupool.driver.products import short_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Driver", "DriverError", "prepare", "reason_unavailable", "short_model", "use_library"]

_RECOVERY_ACTION = 230


def use_library(library: Any) -> None:
    """Let `pynvml` call this object instead of the driver's library, in this process."""
    pynvml.nvmlLib = library
    # It keeps functions of the library that it had before, also when that was none.
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 (there is no other way to drop them)


def reason_unavailable() -> str:
    """Why NVML cannot be used on this machine, in one sentence; "" if it can."""
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return str(DriverError(name_of(error)))
    return "" if count else "the NVIDIA driver lists no GPU"


def prepare() -> str:
    """Initialise NVML for others in this process who call `pynvml` themselves, as dask-cuda does.

    They find a device by its UUID also while another one on the node is lost.

    Returns:
        Why it cannot be used, in one sentence; "" if it can.
    """
    search = pynvml.nvmlDeviceGetHandleByUUID
    if not hasattr(search, "past_lost"):
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
            wanted = text(uuid)
            found = next(
                (each for each in _working() if text(pynvml.nvmlDeviceGetUUID(each)) == wanted), None
            )
            if found is None:
                raise
            return found

    find.past_lost = True  # type: ignore[attr-defined]  # so that it is done once
    return find


def _working() -> Iterator[Any]:
    """The handles of all devices that answer, and of the MIG instances on them."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            yield handle
            yield from partitions.mig_devices(pynvml, handle).values()


def _ask(handle: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    return optional(pynvml.NVMLError, call, handle, *arguments)


@contextlib.contextmanager
def _calling(doing: str) -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise DriverError(name_of(error), doing) from error


class Driver:
    """NVML in this process.

    Safe to call from several threads. Any call may hang: keep them off an event loop.
    """

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()
        #: UUID -> handle, PCI bus id, and where the device's NVLinks end
        self._handles: dict[str, Any] = {}
        self._pci: dict[str, str] = {}
        self._ends: dict[str, tuple[str, ...]] = {}
        #: UUID -> what the device can be cut into
        self._profiles: dict[str, tuple[partitions.Profile, ...]] = {}
        self._events = Events(pynvml)

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
            self._events.drop()
            self._handles.clear()
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    # ---------------------------------------------------------------------------------------------- devices

    def count(self) -> int:
        """How many devices the driver lists.

        Raises:
            DriverError: It does not answer.
        """
        with _calling("count the devices"):
            return int(pynvml.nvmlDeviceGetCount())

    def present(self) -> dict[str, str]:
        """What the driver lists now: the UUID of each device, and "" or the error that it answers with.

        A device that is lost keeps its UUID where it was known before; one that never answered is left out.

        Raises:
            DriverError: The driver itself does not answer, or refuses every device.
        """
        found: dict[str, str] = {}
        refused = ""
        for index in range(self.count()):
            try:
                found[self._remember(pynvml.nvmlDeviceGetHandleByIndex(index))] = ""
            except pynvml.NVMLError as error:
                refused = "" if name_of(error) in OF_DEVICE else name_of(error)
        if refused and not found:
            raise DriverError(refused, "list the devices")
        for uuid in self._pci.keys() - found.keys():
            answer = self._answer(uuid)
            if answer != "NOT_FOUND":
                found[uuid] = answer
        return found

    def _answer(self, uuid: str) -> str:
        """What the driver says of a device that the listing left out: an error, or "" where it is there."""
        try:
            self._remember(pynvml.nvmlDeviceGetHandleByPciBusId(self._pci[uuid].encode()))
        except pynvml.NVMLError as error:
            return name_of(error)
        return ""

    def _remember(self, handle: Any) -> str:
        uuid = text(pynvml.nvmlDeviceGetUUID(handle))
        if uuid not in self._pci:
            self._pci[uuid] = text(pynvml.nvmlDeviceGetPciInfo(handle).busId).upper()
        self._handles[uuid] = handle  # a device that was reset may have another one
        return uuid

    def know(self, uuid: str, pci: str) -> None:
        """Learn of a device that was here before this process: lost ones cannot be found by listing."""
        self._pci.setdefault(uuid, pci)

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            answer = self.present().get(uuid, "GPU_NOT_FOUND")
            if answer:
                raise DriverError(answer, f"look at {uuid}")
        return self._handles[uuid]

    def devices(self, node: str) -> tuple[Device, ...]:
        """The devices that work, in the driver's order.

        Args:
            node: The name of this node, for their descriptions.

        Raises:
            DriverError: The driver itself does not answer.
        """
        working = [uuid for uuid, error in self.present().items() if not error]
        for uuid in working:
            self._look_at_links(uuid)
        found = []
        for uuid in working:
            with contextlib.suppress(DriverError):  # lost between the two looks: the next one tells
                found.append(self._describe(uuid, node, working))
        return tuple(found)

    def _look_at_links(self, uuid: str) -> None:
        if uuid in self._ends:
            return
        handle = self._handles[uuid]
        with contextlib.suppress(pynvml.NVMLError):
            if not partitions.enabled(pynvml, handle):  # in MIG mode they all read as down
                self._ends[uuid] = links.ends(pynvml, handle, links.count(pynvml, handle))

    def _describe(self, uuid: str, node: str, peers: list[str]) -> Device:
        handle = self._handle(uuid)
        others = {peer: (self._pci[peer], self._ends.get(peer, ())) for peer in peers if peer != uuid}
        with _calling(f"describe {uuid}"):
            memory = _ask(handle, pynvml.nvmlDeviceGetMemoryInfo)
            total = int(memory.total) if memory is not None else 0
            numa = _ask(handle, pynvml.nvmlDeviceGetNumaNodeId)
            mig = partitions.enabled(pynvml, handle)
            return Device(
                uuid=uuid,
                node=node,
                index=int(pynvml.nvmlDeviceGetIndex(handle)),
                model=short_model(text(pynvml.nvmlDeviceGetName(handle)), total),
                memory=total,
                pci=self._pci[uuid],
                numa=-1 if numa is None else int(numa),
                links=links.peers(self._ends.get(uuid, ()), others),
                mig=mig,
                mig_managed=mig and partitions.managed(pynvml, handle, self._known_profiles(uuid)),
                instances=tuple(each for each in self.instances(uuid) if each.uuid) if mig else (),
                profiles=self.profiles(uuid) if mig else (),
            )

    # --------------------------------------------------------------------------------------------- readings

    def read(self, uuid: str, now: int) -> Reading:
        """Read all signals of a device.

        Args:
            uuid: Which.
            now: milliseconds of the caller's clock, for the reading.

        Raises:
            DriverError: The driver, or this process's rights in it, are the matter and not the device.
        """
        try:
            with _calling(f"read {uuid}"):
                return self._read(uuid, now)
        except DriverError as failure:
            if failure.of_device:
                return Reading(device=uuid, now=now, error=failure.name)
            raise

    def _read(self, uuid: str, now: int) -> Reading:
        handle = self._handle(uuid)
        ask = functools.partial(_ask, handle)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo)
        use = ask(pynvml.nvmlDeviceGetUtilizationRates)
        remap = ask(pynvml.nvmlDeviceGetRemappedRows)
        self._look_at_links(uuid)
        count = len(self._ends.get(uuid, ()))
        return Reading(
            device=uuid,
            now=now,
            utilisation=None if use is None else int(use.gpu),
            memory_used=None if memory is None else int(memory.used),
            temperature=ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
            power=ask(pynvml.nvmlDeviceGetPowerUsage),
            recovery_action=links.field(pynvml, handle, _RECOVERY_ACTION),
            remap_pending=None if remap is None else bool(remap[2]),
            remap_failed=None if remap is None else bool(remap[3]),
            ecc_uncorrected=ask(
                pynvml.nvmlDeviceGetTotalEccErrors,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                pynvml.NVML_VOLATILE_ECC,
            ),
            slowdown=ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons),
            pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth),
            nvlinks=links.states(pynvml, handle, count),
            nvlink_errors=links.errors(pynvml, handle, count),
            processes=_processes(handle),
        )

    def processes(self, uuid: str) -> tuple[tuple[int, int], ...]:
        """(PID, bytes) of the compute processes on a device, those on its MIG instances included.

        Raises:
            DriverError: The device or the driver does not answer.
        """
        with _calling(f"list the processes on {uuid}"):
            return _processes(self._handle(uuid))

    # ------------------------------------------------------------------------------------------- MIG

    def _known_profiles(self, uuid: str) -> tuple[partitions.Profile, ...]:
        handle = self._handle(uuid)
        found = self._profiles.get(uuid) or partitions.profiles(pynvml, handle)
        self._profiles[uuid] = found
        return found

    def profiles(self, uuid: str) -> tuple[MigProfile, ...]:
        """The MIG profiles of a device and their legal places, as the driver says.

        Raises:
            DriverError: The device or the driver does not answer.
        """
        return tuple(each.said for each in self._known_profiles(uuid))

    def instances(self, uuid: str) -> tuple[Instance, ...]:
        """All MIG instances on a device; one without a UUID is an orphan, half made or half destroyed.

        Raises:
            DriverError: The device or the driver does not answer.
        """
        with _calling(f"list the MIG instances of {uuid}"):
            return partitions.instances(pynvml, self._handle(uuid), self._known_profiles(uuid))

    def create_instance(self, uuid: str, wanted: Instance) -> Instance:
        """Create a MIG instance at exactly its place; returns it with its UUID.

        Raises:
            DriverError: It could not be created; nothing of it is left.
        """
        return partitions.create(pynvml, self._handle(uuid), self._known_profiles(uuid), wanted)

    def destroy_instance(self, uuid: str, gone: Instance) -> None:
        """Destroy the MIG instance at a place, an orphan too; nothing happens where there is none.

        Raises:
            DriverError: It is in use, or this process may not.
        """
        partitions.destroy(pynvml, self._handle(uuid), self._known_profiles(uuid), gone)

    # ------------------------------------------------------------------------------------------- NVML events

    def wait_events(self, timeout_s: float) -> list[NvmlEvent]:
        """Wait until the driver announces something, at most `timeout_s` seconds; often it is nothing.

        Devices that have come since are registered first.

        Raises:
            DriverError: Waiting does not work; the next call starts with a new event set.
        """
        with _calling("wait for NVML events"):
            return self._events.wait(dict(self._handles), timeout_s, lambda: time.time_ns() // 1_000_000)


def _processes(handle: Any) -> tuple[tuple[int, int], ...]:
    found = list(_ask(handle, pynvml.nvmlDeviceGetComputeRunningProcesses) or [])
    for part in partitions.mig_devices(pynvml, handle).values():
        found += _ask(part, pynvml.nvmlDeviceGetComputeRunningProcesses) or []
    sizes: dict[int, int] = {}
    seen = set()
    for each in found:  # drivers differ in whether a device's list has those on its instances
        key = (int(each.pid), int(each.gpuInstanceId), int(each.computeInstanceId))
        if key not in seen:
            seen.add(key)
            sizes[key[0]] = sizes.get(key[0], 0) + int(each.usedGpuMemory or 0)
    return tuple(sorted(sizes.items()))
