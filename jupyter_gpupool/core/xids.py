"""The XIDs: what each of the driver's error codes means for the GPU, once, repeated and spread over several.

Rule 1: every code belongs to exactly one class, and the class says the verdicts. There are no other branches.
Rule 2: a class may condemn on one XID only where the published sources agree that the GPU is unusable.
Rule 3: where the sources disagree, where NVIDIA calls a code unused, and where nobody knows it, it warns.
Rule 4: an administrator may put any code into any other class (`Thresholds.xids`).

Sources, as named in `why`: NVIDIA's XID catalogue; gpud (leptonai/gpud), NVSentinel (NVIDIA/NVSentinel),
the Kubernetes device plugin and DRA driver, DCGM's health watches, Azure's node health checks, Meta's gcm;
and the study of the Delta system (arXiv 2503.11901). "Drain" there is "retire" or "evacuate" here.

Not its business: counting and windows (`history`), and what follows for a device (`health`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import NvmlEvent, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class XidClass(StrEnum):
    """What kind of trouble an XID announces."""

    INFO = "info"
    SECONDARY = "secondary"
    WARN = "warn"
    APPLICATION = "application"
    CONTAINED = "contained"
    LINK = "link"
    RESET = "reset"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ClassRow:
    """The verdicts of a class: for one XID, for repeated ones on one GPU, and on several GPUs at once."""

    single: Verdict
    repeated: Verdict
    spread: Verdict
    #: One sentence, for docs/health.md.
    says: str


_V = Verdict

CLASSES: dict[XidClass, ClassRow] = {
    XidClass.INFO: ClassRow(
        _V.FINE, _V.FINE, _V.FINE, "A note of the driver; where memory is concerned, NVML is asked at once."
    ),
    XidClass.SECONDARY: ClassRow(
        _V.FINE, _V.WATCH, _V.WATCH, "Follows another error or the end of a process; alone it means nothing."
    ),
    XidClass.WARN: ClassRow(
        _V.WATCH,
        _V.WATCH,
        _V.WATCH,
        "The sources disagree or do not know: shown to people, nothing is moved.",
    ),
    XidClass.APPLICATION: ClassRow(
        _V.RESTART_WORKER,
        _V.RETIRE_SOON,
        _V.RESTART_WORKER,
        "The program has failed: its process is restarted. Under several programs on one GPU it is the GPU.",
    ),
    XidClass.CONTAINED: ClassRow(
        _V.RESTART_WORKER,
        _V.RETIRE_SOON,
        _V.RETIRE_SOON,
        "A memory error that cost one process and nothing else: the process is restarted on the same GPU.",
    ),
    XidClass.LINK: ClassRow(
        _V.WATCH, _V.RETIRE_SOON, _V.WATCH, "A link between GPUs retried; on both ends it is the link."
    ),
    XidClass.RESET: ClassRow(
        _V.EVACUATE, _V.EVACUATE, _V.EVACUATE, "The GPU computes nothing any more until it is reset."
    ),
    XidClass.GONE: ClassRow(
        _V.GONE, _V.GONE, _V.GONE, "The GPU cannot be reached until the node is rebooted."
    ),
}


@dataclass(frozen=True, slots=True)
class Xid:
    """One code of the driver, or another NVML event, which is judged in the same way."""

    #: "XID 79", or the name of the NVML event.
    label: str
    meaning: str
    kind: XidClass
    #: Why it is in this class.
    why: str
    #: The code alone decides nothing: the reader is asked for a reading at once.
    poll: bool = False


_I, _S, _W, _A = XidClass.INFO, XidClass.SECONDARY, XidClass.WARN, XidClass.APPLICATION
_C, _L, _R, _G = XidClass.CONTAINED, XidClass.LINK, XidClass.RESET, XidClass.GONE
_RESTART = "NVIDIA: restart the application"
_RESET = "NVIDIA and NVSentinel: reset the GPU"
_IGNORE = "NVIDIA and NVSentinel: ignore"
_ONLY = "only gpud rates it"
_Row = tuple[tuple[int, ...], XidClass, str, str]

#: (codes, class, meaning, why); codes that are in no row are those that NVIDIA does not document as emitted.
_ROWS: tuple[_Row, ...] = (
    ((8,), _A, "the GPU stopped processing a channel", _RESTART),
    ((11, 25), _A, "invalid or corrupted push buffer", _RESTART),
    ((13,), _A, "graphics engine exception: out of bounds or illegal instruction", _RESTART),
    ((31,), _A, "page fault: the program reached outside its memory", _RESTART),
    ((32,), _W, "corrupted push buffer", "NVIDIA restarts the application, gpud reboots"),
    ((37,), _I, "driver firmware error", _IGNORE),
    ((38,), _W, "driver firmware watchdog", "NVIDIA ignores it, gpud reboots, DCGM warns"),
    ((39, 40, 41), _A, "copy engine exception", _RESTART),
    ((43,), _A, "channel reset: the program's work was stopped", "all but DCGM ignore or warn"),
    ((44,), _W, "fault during a context switch", "NVIDIA ignores it, gpud reboots"),
    (
        (45,),
        _S,
        "clean-up after an error or after a process ended",
        "as fatal it once flagged 77 sound nodes",
    ),
    ((46,), _R, "the GPU stopped processing", _RESET),
    ((48,), _R, "double-bit memory error", "all sources: fatal"),
    ((54,), _W, "auxiliary power not connected", "NVIDIA: look at the cables; DCGM and gpud warn"),
    ((60,), _W, "video processor exception", "NVIDIA restarts the application, gpud reboots"),
    ((62,), _R, "internal micro-controller halted", _RESET),
    ((64,), _R, "memory remapping failed", _RESET),
    ((66, 67), _I, "illegal access by the driver", _IGNORE),
    ((68,), _W, "video decoder exception", "five sources, four opinions"),
    ((69,), _W, "graphics engine class error", "NVIDIA restarts the application, Azure drains"),
    ((70, 71, 72, 75, 76, 77, 85), _A, "copy engine error", _RESTART),
    ((74,), _L, "NVLink error", "DCGM: fail; Delta: many were retried well or met idle GPUs"),
    ((78,), _W, "virtual GPU did not start", "NVIDIA: update the software; no statement about the GPU"),
    ((79,), _G, "fallen off the bus", "all sources: reboot the node"),
    ((80,), _W, "corrupted data sent to the GPU", "NVIDIA restarts the application, Azure drains"),
    ((82, 99, 100, 101, 102, 103, 104, 105), _A, "JPEG engine error", _RESTART),
    ((83, 84, 88, 89, 96, 97, 98), _A, "video decoder error", _RESTART),
    ((86, 139), _A, "optical flow engine error", _RESTART),
    ((93,), _I, "InfoROM worn", _IGNORE),
    ((94,), _C, "contained memory error: one process lost", "NVIDIA: restart the application; DCGM warns"),
    ((95,), _R, "uncontained memory error: every process on the GPU lost", "all sources: reset"),
    ((106, 107), _I, "test message", _IGNORE),
    ((109,), _W, "context switch timed out", "NVIDIA resets, the device plugin ignores, gpud warns"),
    ((110,), _R, "security fault", _RESET),
    ((119, 120), _R, "GPU system processor does not answer", _RESET),
    ((121,), _W, "chip-to-chip link error", "NVIDIA ignores it, gpud: fatal"),
    (tuple(range(126, 136)), _A, "copy engine error", _RESTART),
    ((136,), _R, "NVLink training failed", _RESET),
    ((137,), _W, "NVLink privilege error", "NVIDIA ignores it, DCGM warns, the device plugin condemns"),
    ((140,), _R, "unrecovered memory error", "all sources: reset"),
    ((141,), _I, "CUDA fast path error", _IGNORE),
    ((143,), _R, "the GPU did not initialise", _RESET),
    (tuple(range(144, 151)), _W, "NVLink 5 error", "its sub-code decides, and NVML does not give it"),
    (
        (151,),
        _R,
        "key rotation of confidential computing failed",
        "NVIDIA and NVSentinel: restart the machine",
    ),
    ((152, 153), _I, "deep-learning accelerator error", _IGNORE),
    ((155,), _R, "NVLink error defined by software", _RESET),
    ((157, 161), _I, "a part could not be retired", _IGNORE),
    ((158,), _R, "fatal timeout of the GPU", _RESET),
    ((159,), _W, "error on the host link", "NVIDIA: look for a second error"),
    ((162, 163, 164, 165), _W, "power smoothing circuit", "NVIDIA is silent"),
    ((166, 170), _W, "NVLink security", _ONLY),
    ((167,), _W, "PCIe timeout", _ONLY),
    ((168,), _W, "less memory than there should be", _ONLY),
    ((169,), _W, "internal micro-controller halted", _ONLY),
    ((171, 172), _W, "more about a memory error announced as XID 48", _ONLY),
    ((173,), _W, "not in NVIDIA's catalogue", _ONLY),
)

#: Codes on which NVML itself is to be asked: the code alone says too little.
_POLL_ROWS: tuple[_Row, ...] = (
    ((63,), _I, "memory remapped, or a page retired", "harmless by itself; NVML's remap flags decide"),
    ((92,), _I, "many corrected memory errors", "NVIDIA, NVSentinel, gpud: ignore"),
    ((154,), _I, "the recommended recovery action changed", "NVML's recovery action decides"),
    ((156,), _W, "a part of the GPU was retired", "NVIDIA says both reset and ignore"),
    ((160,), _W, "a memory channel was retired", "NVIDIA ignores it, NVSentinel reboots"),
)

#: How the driver writes "the whole device" in an event.
WHOLE_DEVICE = (-1, 0xFFFFFFFF)
#: NVIDIA's catalogue ends here (October 2025 edition and what gpud adds).
LAST_CODE = 173


def _table() -> dict[int, Xid]:
    rows = [(row, False) for row in _ROWS] + [(row, True) for row in _POLL_ROWS]
    known = {
        code: Xid(f"XID {code}", meaning, kind, why, poll)
        for (codes, kind, meaning, why), poll in rows
        for code in codes
    }
    unused = "NVIDIA does not document it as emitted"
    every = range(1, LAST_CODE + 1)
    return {code: known.get(code, Xid(f"XID {code}", "unused code", _W, unused)) for code in every}


#: Every code that the sources know, in order.
XIDS: dict[int, Xid] = _table()


def _event(label: str, code: int) -> Xid:
    return replace(XIDS[code], label=label, why=f"the same as XID {code}")


#: NVML events other than XIDs. One that is not here is a note.
EVENTS: dict[str, Xid] = {
    "ecc_double": _event("double-bit ECC event", 48),
    "ecc_storm": _event("single-bit ECC storm", 92),
    "retirement": _event("DRAM retirement event", 63),
    "retirement_failure": _event("DRAM retirement failure", 64),
    "poison_contained": _event("contained poison event", 94),
    "poison_fatal": _event("fatal poison event", 95),
    "unavailable": Xid(
        "GPU unavailable event", "the driver has given the GPU up", _R, "its definition in NVML"
    ),
    "recovery_action": _event("recovery action event", 154),
}


def lookup(code: int, classes: Mapping[int, str] | None = None) -> Xid:
    """Give the row of a code, in the class that the administrator has put it, if any.

    >>> lookup(79).kind, lookup(4711).kind, lookup(109, {109: "reset"}).kind
    (<XidClass.GONE: 'gone'>, <XidClass.WARN: 'warn'>, <XidClass.RESET: 'reset'>)
    """
    row = XIDS.get(code) or Xid(f"XID {code}", "a code unknown to this version", _W, "in no source")
    kind = (classes or {}).get(code)
    return row if kind is None else replace(row, kind=XidClass(kind), why="set by the administrator")


def lookup_event(event: NvmlEvent, classes: Mapping[int, str] | None = None) -> Xid:
    """Give the row by which an NVML event is judged."""
    if event.kind == "xid":
        return lookup(event.xid, classes)
    return EVENTS.get(event.kind) or Xid(event.kind, "a note of the driver", _I, "no statement about the GPU")


def concerned(instance: int, slices: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Give the slices of a device that an NVML event concerns: all of them, unless it names a MIG instance.

    Args:
        instance: The event's GPU instance, or -1 for the whole device.
        slices: (id of the slice, its GPU instance, or -1 where it is none or is not known).

    >>> concerned(-1, [("a/0", 1), ("b/0", 2)]), concerned(2, [("a/0", 1), ("b/0", 2)])
    (('a/0', 'b/0'), ('b/0',))
    """
    whole = instance in WHOLE_DEVICE
    return tuple(name for name, own in slices if whole or own in (instance, -1))
