# ruff: noqa: D103, N802 (functions bear the names of the driver's symbols, and are described by its manual)
"""`libnvidia-ml.so.1` without a GPU: the object that stands as `pynvml.nvmlLib`.

Rule 1: its members are called as the C functions are, with ctypes arguments, and return the driver's own
        codes.
Rule 2: what is not in the tables is a function that this driver does not have.
Rule 3: before a function looks at a device it meets the faults, in this order: the call hangs, the call is
        made to fail, the device is lost, the device needs a reset. That is where real faults show as well.

Not its business: what a function answers (`queries`, `events`, `instances`) and who changes the machine
(`machine`).
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.driver.abi import Code
from jupyter_gpupool.driver.simulated import models
from jupyter_gpupool.driver.simulated.abi import Refused, handle_of, put, put_handle
from jupyter_gpupool.driver.simulated.processes import Meter, Use, uses
from jupyter_gpupool.driver.simulated.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

#: A field that was set to this is one that the driver does not support.
UNSUPPORTED = "not supported"
#: Seconds between looks at whether a hanging call may go on.
HANG_STEP = 0.05
#: Handles of devices, and of everything else, begin here.
DEVICES, OTHERS = 0x1000, 0x100000

#: name -> function(library, *arguments): the functions that are not about one device.
GENERAL: dict[str, Callable[..., None]] = {}
#: name -> function(gpu, *arguments): the functions whose first argument is a device.
OF_DEVICE: dict[str, Callable[..., None]] = {}


#: name -> (kind of handle, function(gpu, instance, *arguments)): the functions whose first argument is an
#: instance.
OF_INSTANCE: dict[str, tuple[str, Callable[..., None]]] = {}


def general(function: Callable[..., None]) -> Callable[..., None]:
    """Enter a function under its own name."""
    GENERAL[function.__name__] = function
    return function


def of_device(function: Callable[..., None]) -> Callable[..., None]:
    """Enter a function of a device under its own name."""
    OF_DEVICE[function.__name__] = function
    return function


def of_instance(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function of a "gpu instance" or a "compute instance" under its own name."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        OF_INSTANCE[function.__name__] = (kind, function)
        return function

    return enter


class Gpu:
    """One device, or a MIG instance on it, as one call sees it."""

    def __init__(
        self, library: Library, data: dict[str, Any], instance: dict[str, Any] | None = None
    ) -> None:
        self.library = library
        self.data = data
        self.model = models.MODELS[data["model"]]
        self.instance = instance
        self.uuid: str = instance["uuid"] if instance else data["uuid"]

    def field(self, name: str, usual: Any = None) -> Any:
        """What was set for the field, else `usual`; refused where it was set to "not supported"."""
        value = self.data["set"].get(name)
        if value == UNSUPPORTED:
            raise Refused(Code.NOT_SUPPORTED)
        return usual if value is None else value

    def uses(self) -> list[Use]:
        """What processes have on it; with its MIG instances, where it is a whole device."""
        names = {self.uuid}
        if self.instance is None:
            names |= {each["uuid"] for each in self.data["instances"] if each["uuid"]}
        return uses(self.library.state, names)

    def utilisation(self) -> int:
        """Percent: what its processes compute, at most 100."""
        busy = sum(self.library.meter.busy(each) for each in self.uses())
        return int(self.field("utilisation", min(100, busy)))


class Library:
    """The driver library of one simulated node, in this process."""

    def __init__(self, path: str, node: str) -> None:
        self.state = State(path)
        self.node = node
        self.meter = Meter()
        self.initialised = 0
        #: Handles that are not devices': MIG instances, event sets…
        self.objects: dict[int, Any] = {}
        self._numbers = itertools.count(OTHERS)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A driver function by its symbol, as a `ctypes.CDLL` has it."""
        if name == "nvmlErrorString":
            function: Callable[..., Any] = _error_string
        elif name in GENERAL:
            function = self._entry(name, self._general, GENERAL[name])
        elif name in OF_DEVICE:
            function = self._entry(name, self._of_device, OF_DEVICE[name])
        elif name in OF_INSTANCE:
            function = self._entry(name, self._of_instance, *OF_INSTANCE[name])
        else:
            raise AttributeError(name)
        self.__dict__[name] = function
        return function

    def _entry(self, name: str, call: Callable[..., None], *how: Any) -> Callable[..., int]:
        def entry(*arguments: Any) -> int:
            try:
                call(name, *how, arguments)
            except Refused as refused:
                return int(refused.code)
            except OSError:
                # Its state is gone or unreadable: to a caller that looks like a driver that was unloaded.
                return int(Code.DRIVER_NOT_LOADED)
            return int(Code.SUCCESS)

        return entry

    def _general(self, name: str, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._meet_faults(name, "")
        body(self, *arguments)

    def _of_device(self, name: str, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        handle = handle_of(arguments[0])
        self._enter(name, lambda: self.device(handle).data)
        body(self.device(handle), *arguments[1:])

    def _of_instance(
        self, name: str, kind: str, body: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        thing = self.objects.get(handle_of(arguments[0]))
        if not isinstance(thing, tuple) or thing[0] != kind:
            raise Refused(Code.INVALID_ARGUMENT)
        self._enter(name, lambda: self._part(thing[1])[0])
        device, part = self._part(thing[1])
        if kind == "compute instance" and part["ci"] < 0:
            raise Refused(Code.NOT_FOUND)
        body(Gpu(self, device), part, *arguments[1:])

    def _enter(self, name: str, find: Callable[[], dict[str, Any]]) -> None:
        """Meet the faults of a device; it is looked for again after a hang, which may have outlasted it."""
        if not self.initialised:
            raise Refused(Code.UNINITIALIZED)
        self._meet_faults(name, find()["uuid"])
        self.refuse_lost(find())

    def _part(self, serial: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Device and data of a GPU instance."""
        for device in self.state.read()["devices"].values():
            for part in device["instances"]:
                if part["serial"] == serial:
                    return device, part
        raise Refused(Code.NOT_FOUND)

    @staticmethod
    def refuse_lost(device: dict[str, Any]) -> None:
        """Every call on a device that is lost or waits for a reset ends here."""
        if device["lost"] or device["vanished"]:
            raise Refused(Code.GPU_IS_LOST)
        if device["reset_required"]:
            raise Refused(Code.RESET_REQUIRED)

    def _meet_faults(self, name: str, device: str) -> None:
        data = self.state.read()
        while time.monotonic() < self._hangs_until(data, name, device):
            time.sleep(HANG_STEP)
            data = self.state.read()
        for fault in data["failures"]:
            if self._concerns(fault, name, device):
                self._count_down(fault["id"])
                raise Refused(fault["code"])

    def _hangs_until(self, data: dict[str, Any], name: str, device: str) -> float:
        until = float(data["devices"][device]["hang_until"]) if device else 0.0
        hangs = data["nodes"].get(self.node, {}).get("hangs", {})
        return max(until, float(hangs.get(name, 0.0)), float(hangs.get("", 0.0)))

    def _concerns(self, fault: dict[str, Any], name: str, device: str) -> bool:
        where = fault["on"]
        return fault["call"] in ("", name) and (where == self.node or (device != "" and where == device))

    def _count_down(self, number: int) -> None:
        with self.state.change() as data:
            for fault in data["failures"]:
                if fault["id"] == number and fault["times"] > 0:
                    fault["times"] -= 1
            data["failures"] = [each for each in data["failures"] if each["times"] != 0]

    def present(self) -> list[dict[str, Any]]:
        """The node's devices that the driver lists, in its order."""
        data = self.state.read()
        node = data["nodes"].get(self.node)
        if node is None:
            raise Refused(Code.DRIVER_NOT_LOADED)
        devices = [data["devices"][uuid] for uuid in node["devices"]]
        return [each for each in devices if not each["vanished"]]

    def device(self, handle: int) -> Gpu:
        """The device or MIG instance of a handle that this library gave out."""
        data = self.state.read()
        if handle >= OTHERS:
            return self._instance(data, self.objects.get(handle))
        devices = data["nodes"].get(self.node, {"devices": []})["devices"]
        if not 0 <= handle - DEVICES < len(devices):
            raise Refused(Code.INVALID_ARGUMENT)
        return Gpu(self, data["devices"][devices[handle - DEVICES]])

    def _instance(self, data: dict[str, Any], wanted: Any) -> Gpu:
        if not isinstance(wanted, str):
            raise Refused(Code.INVALID_ARGUMENT)
        for device in data["devices"].values():
            for instance in device["instances"]:
                if instance["uuid"] == wanted and device["node"] == self.node:
                    return Gpu(self, device, instance)
        raise Refused(Code.NOT_FOUND)  # reconfigured since: the handle is worth nothing any more

    def handle(self, device: dict[str, Any]) -> int:
        """The handle of a device; it stays the same whatever happens to its neighbours."""
        return DEVICES + int(device["index"])

    def keep(self, thing: Any) -> int:
        """A new handle for something that is not a device."""
        with self._lock:
            number = next(self._numbers)
            self.objects[number] = thing
        return number

    def instance_handle(self, uuid: str) -> int:
        """The handle of a MIG instance."""
        known = [number for number, thing in list(self.objects.items()) if thing == uuid]
        return known[0] if known else self.keep(uuid)


def _error_string(code: Any) -> bytes:
    try:
        return Code(int(getattr(code, "value", code))).name.replace("_", " ").capitalize().encode()
    except ValueError:
        return b"Unknown Error"


@general
def nvmlInitWithFlags(library: Library, _flags: Any) -> None:
    library.present()
    library.initialised += 1


@general
def nvmlInit_v2(library: Library) -> None:
    nvmlInitWithFlags(library, 0)


@general
def nvmlShutdown(library: Library) -> None:
    if not library.initialised:
        raise Refused(Code.UNINITIALIZED)
    library.initialised -= 1


@general
def nvmlDeviceGetCount_v2(library: Library, count: Any) -> None:
    if not library.initialised:
        raise Refused(Code.UNINITIALIZED)
    put(count, len(library.present()))


@general
def nvmlDeviceGetHandleByIndex_v2(library: Library, index: Any, handle: Any) -> None:
    present = _initialised(library)
    if not 0 <= int(index.value) < len(present):
        raise Refused(Code.INVALID_ARGUMENT)
    _hand_out(library, present[index.value], handle)


@general
def nvmlDeviceGetHandleByPciBusId_v2(library: Library, bus: Any, handle: Any) -> None:
    wanted = bus.value.decode().upper()
    for device in _initialised(library):
        if device["pci"] == wanted or device["pci"].removeprefix("0000") == wanted:
            _hand_out(library, device, handle)
            return
    raise Refused(Code.NOT_FOUND)


@general
def nvmlDeviceGetHandleByUUID(library: Library, uuid: Any, handle: Any) -> None:
    wanted = uuid.value.decode()
    strict = library.state.read()["nodes"][library.node]["search_strict"]
    for device in _initialised(library):
        if device["uuid"] == wanted:
            _hand_out(library, device, handle)
            return
        if strict:
            # nvml.h: the search may initialise other GPUs, and fails when one of them is lost.
            library.refuse_lost(device)
        if any(each["uuid"] == wanted for each in device["instances"]):
            library.refuse_lost(device)
            put_handle(handle, library.instance_handle(wanted))
            return
    raise Refused(Code.NOT_FOUND)


def _initialised(library: Library) -> list[dict[str, Any]]:
    if not library.initialised:
        raise Refused(Code.UNINITIALIZED)
    return library.present()


def _hand_out(library: Library, device: dict[str, Any], handle: Any) -> None:
    library.refuse_lost(device)
    put_handle(handle, library.handle(device))
