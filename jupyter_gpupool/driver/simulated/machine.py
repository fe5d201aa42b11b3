"""Change the simulated machines while they run: what a test, a demo or a person does to them.

Rule 1: a fault hurts: with what the driver says changes what the processes on the device get (see `cuda`).
Rule 2: `xid` and `set` only change what the driver says; `lose` and `fail` do the whole damage.

Not its business: what the driver then answers (`library` and its tables).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.driver.abi import EVENT_TYPES, Code
from jupyter_gpupool.driver.simulated.processes import identity, stat_of, uses
from jupyter_gpupool.driver.simulated.state import EVENTS_KEPT, State

if TYPE_CHECKING:
    import os

#: What an XID does: the CUDA error of every process on the device ("": none), or of one (`one`), and fields
#: that then read so. Others are announced only. From NVIDIA's XID catalogue.
XIDS: dict[int, dict[str, Any]] = {
    13: {"error": "cudaErrorLaunchFailure", "one": True},
    31: {"error": "cudaErrorIllegalAddress", "one": True},
    43: {"error": "cudaErrorLaunchFailure", "one": True},
    45: {"error": "cudaErrorLaunchFailure", "one": True},
    46: {"error": "cudaErrorLaunchTimeout", "set": {"recovery_action": 1}},
    48: {"error": "cudaErrorECCUncorrectable", "set": {"ecc_uncorrected": 1, "remap_pending": 1}},
    62: {"error": "cudaErrorLaunchFailure", "set": {"recovery_action": 1}},
    63: {"set": {"remap_pending": 1}},
    64: {"error": "cudaErrorECCUncorrectable", "set": {"remap_failed": 1, "recovery_action": 1}},
    74: {"error": "cudaErrorNvlinkUncorrectable"},
    79: {"error": "cudaErrorLaunchFailure", "lost": True},
    94: {"error": "cudaErrorContained", "one": True, "set": {"ecc_uncorrected": 1}},
    95: {"error": "cudaErrorECCUncorrectable", "set": {"ecc_uncorrected": 1, "recovery_action": 1}},
    109: {"error": "cudaErrorLaunchTimeout", "one": True},
    119: {"error": "cudaErrorLaunchFailure", "set": {"recovery_action": 1}},
    120: {"error": "cudaErrorLaunchFailure", "set": {"recovery_action": 1}},
    140: {"error": "cudaErrorECCUncorrectable", "set": {"ecc_uncorrected": 1, "recovery_action": 1}},
}

#: What `Machine.set` can change.
FIELDS = frozenset(
    (
        *("utilisation", "memory_used", "memory_total", "memory_extra", "temperature", "power"),
        *("recovery_action", "remap_pending", "remap_failed", "ecc_corrected", "ecc_uncorrected", "slowdown"),
        *(
            "pcie_width",
            "pcie_generation",
            "pcie_replays",
            "nvlinks_down",
            "nvlink_replays",
            "nvlink_recoveries",
        ),
        *(
            "nvlink_crc",
            "numa",
            "remapped_corrected",
            "remapped_uncorrected",
            "mig_permission",
            "reset_required",
        ),
    )
)


class Machine:
    """The simulated machines in the folder `path`.

    A device is named "node-1/gpu3", "gpu3" (counted over all nodes in their order) or by its UUID.

    Raises:
        FileNotFoundError: There are no simulated machines in this folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.state = State(path)
        self.state.read()

    def nodes(self) -> list[str]:
        """The names of the nodes, in their order."""
        return list(self.state.read()["nodes"])

    def devices(self, node: str = "") -> list[str]:
        """The UUIDs of a node's devices, or of all, in their order."""
        nodes = self.state.read()["nodes"]
        return [uuid for name, each in nodes.items() if node in ("", name) for uuid in each["devices"]]

    def find(self, device: str) -> str:
        """The UUID of a device.

        Raises:
            ValueError: No device has this name.
        """
        data = self.state.read()
        everything = self.devices()
        names = {f"gpu{at}": uuid for at, uuid in enumerate(everything)}
        names |= {
            f"{data['devices'][uuid]['node']}/gpu{data['devices'][uuid]['index']}": uuid
            for uuid in everything
        }
        if device in data["devices"]:
            return device
        if device not in names:
            there = ", ".join(each for each in names if "/" in each)
            raise ValueError(f"no simulated device {device!r}; there are {there}")
        return names[device]

    def describe(self, device: str) -> dict[str, Any]:
        """What is known of a device, for a test or a person to look at."""
        return dict(self.state.read()["devices"][self.find(device)])

    def xid(self, device: str, number: int, *, gpu_instance: int = -1, compute_instance: int = -1) -> None:
        """Announce an XID, and nothing else."""
        with self.state.change() as data:
            announce(data, self.find(device), "xid", number, (gpu_instance, compute_instance))

    def announce(self, device: str, kind: str) -> None:
        """Announce an NVML event of another kind, such as "ecc_double" or "recovery_action".

        Raises:
            ValueError: The driver has no such kind of event.
        """
        if kind not in EVENT_TYPES:
            raise ValueError(f"unknown kind of NVML event {kind!r}; there are {', '.join(EVENT_TYPES)}")
        with self.state.change() as data:
            announce(data, self.find(device), kind)

    def lose(self, device: str, xid: int = 79, *, abort: bool = False, vanish: bool = False) -> None:
        """Let a GPU fall off the bus: its processes get the CUDA error at their next task, or abort.

        Args:
            device: Which.
            xid: What is announced; 0: nothing, which happens.
            abort: Its processes end by SIGABRT instead of getting an error.
            vanish: The driver does not even list it any more.
        """
        with self.state.change() as data:
            each = data["devices"][self.find(device)]
            each["lost"], each["vanished"] = True, vanish
            _blow(each, "cudaErrorLaunchFailure", aborts=abort)
            if xid:
                announce(data, each["uuid"], "xid", xid)

    def fail(self, device: str, xid: int, *, abort: bool = False, pid: int = 0) -> None:
        """Do all that goes with an XID: the event, what the driver then reads, and the harm to processes.

        Args:
            device: Which.
            xid: The XID; one without harm of its own is only announced.
            abort: Processes that are harmed end by SIGABRT.
            pid: The process that an application error is of (0: the one that has been there longest).
        """
        harm = XIDS.get(xid, {})
        if harm.get("lost"):
            self.lose(device, xid, abort=abort)
            return
        victim = pid or self._oldest_process(self.find(device)) if harm.get("one") else 0
        with self.state.change() as data:
            each = data["devices"][self.find(device)]
            each["set"].update(harm.get("set", {}))
            if victim:
                each["poisoned"][identity(victim)] = harm["error"]
                each["aborts"] = abort
            elif harm.get("error") and not harm.get("one"):
                _blow(each, harm["error"], aborts=abort)
            announce(data, each["uuid"], "xid", xid)

    def _oldest_process(self, uuid: str) -> int:
        found = [(stat_of(use.pid) or (0, 0), use.pid) for use in uses(self.state, {uuid})]
        return min(found)[1] if found else 0

    def restore(self, device: str) -> None:
        """Make a device whole again, as after a reset; contexts from before stay dead."""
        with self.state.change() as data:
            uuid = self.find(device)
            each = data["devices"][uuid]
            if any(each[name] for name in ("lost", "vanished", "reset_required")):
                each["epoch"] += 1
            each.update(
                lost=False, vanished=False, reset_required=False, hang_until=0.0, poisoned={}, aborts=False
            )
            each["set"] = {}
            data["failures"] = [fault for fault in data["failures"] if fault["on"] != uuid]

    def set(self, device: str, field: str, value: Any) -> None:
        """Let the driver read a field so.

        Args:
            device: Which.
            field: One of `FIELDS`.
            value: None: what follows from what really goes on. "not supported": just that.

        `nvlinks_down` is a list of links, and `reset_required` makes every call return that code.

        Raises:
            ValueError: There is no such device or field.
        """
        if field not in FIELDS:
            raise ValueError(f"a GPU has no field {field!r} to be set; there are {', '.join(sorted(FIELDS))}")
        with self.state.change() as data:
            each = data["devices"][self.find(device)]
            if field == "reset_required":
                each["reset_required"] = bool(value)
                _blow(each, "cudaErrorDevicesUnavailable")
            elif value is None:
                each["set"].pop(field, None)
            else:
                each["set"][field] = value

    def hang(self, device: str, seconds: float, call: str = "") -> None:
        """Let every call on a device hang so long; with a node's name every call, or those of one function.

        0 seconds ends it.
        """
        until = time.monotonic() + seconds if seconds else 0.0
        with self.state.change() as data:
            if device in data["nodes"]:
                data["nodes"][device].setdefault("hangs", {})[call] = until
            else:
                data["devices"][self.find(device)]["hang_until"] = until

    def fail_next(self, device: str, call: str = "", code: int | str = Code.UNKNOWN, times: int = 1) -> None:
        """Let the next calls of a function return a code.

        Args:
            device: A device, or the name of a node: any call in it.
            call: The C function ("nvmlDeviceGetTemperature"); "": any.
            code: NVML's code, by number or name ("NO_PERMISSION").
            times: How often; -1: until `restore` or `heal`.
        """
        number = int(Code[code]) if isinstance(code, str) else int(code)
        with self.state.change() as data:
            on = device if device in data["nodes"] else self.find(device)
            data["sequence"] += 1
            data["failures"].append(
                {"id": data["sequence"], "on": on, "call": call, "code": number, "times": times}
            )

    def heal(self, node: str = "") -> None:
        """End all hanging and failing calls of a node, or of all nodes."""
        with self.state.change() as data:
            mine = [each for each in data["devices"].values() if node in ("", each["node"])]
            for each in mine:
                each["hang_until"] = 0.0
            names = {each["uuid"] for each in mine} | ({node} if node else set(data["nodes"]))
            for name in names & set(data["nodes"]):
                data["nodes"][name].pop("hangs", None)
            data["failures"] = [fault for fault in data["failures"] if fault["on"] not in names]

    def poison(self, pid: int, error: str = "cudaErrorIllegalAddress") -> None:
        """Break the CUDA context of one process for good, as its own illegal access does (XID 31).

        Raises:
            ValueError: The process has no context on a simulated device.
        """
        found = [use.on for use in uses(self.state) if use.pid == pid]
        if not found:
            raise ValueError(f"process {pid} has no CUDA context on a simulated device")
        with self.state.change() as data:
            for each in data["devices"].values():
                if {each["uuid"], *(part["uuid"] for part in each["instances"])} & set(found):
                    each["poisoned"][identity(pid)] = error

    def mig(self, device: str, *, on: bool = True) -> None:
        """Switch a device's MIG mode, as an administrator does; its instances go."""
        with self.state.change() as data:
            each = data["devices"][self.find(device)]
            each["mig"], each["instances"] = on, []
            announce(data, each["uuid"], "mig_config")

    def search_strict(self, node: str, *, strict: bool) -> None:
        """Let the driver search for a UUID as nvml.h warns of: it fails when it meets a lost GPU before."""
        with self.state.change() as data:
            data["nodes"][node]["search_strict"] = strict


def _blow(device: dict[str, Any], error: str, *, aborts: bool = False) -> None:
    device["epoch"] += 1
    device["blow"], device["aborts"] = error, aborts


def announce(
    data: dict[str, Any], uuid: str, kind: str, xid: int = 0, part: tuple[int, int] = (-1, -1)
) -> None:
    """Enter an NVML event into the state; `part`: GPU and compute instance."""
    data["sequence"] += 1
    event = {
        "sequence": data["sequence"],
        "device": uuid,
        "kind": kind,
        "xid": xid,
        "gi": part[0],
        "ci": part[1],
    }
    data["events"] = [*data["events"], event][-EVENTS_KEPT:]
