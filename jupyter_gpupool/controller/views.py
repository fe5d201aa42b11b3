"""What people see of the pool: pure functions from its records to JSON.

Rule 1: times leave as seconds since the epoch, shares of GPUs as thousandths, memory as bytes.
Rule 2: everybody sees the pool and who uses what of it; names and ids of leases see those who may reach them.
Rule 3: nothing here changes anything, and nothing here is secret.
"""

from __future__ import annotations

import getpass
import json
import zlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.mig import geometry_of, plain
from jupyter_gpupool.core.model import WHOLE, Instance, LeaseState, Verdict
from jupyter_gpupool.core.state import NodeState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.core.model import Device, Slice
    from jupyter_gpupool.core.pool import Pool
    from jupyter_gpupool.core.state import DeviceRecord, Lease

#: The version of the API in every path.
API = 1
SIMULATED = "These GPUs are simulated: there is no NVIDIA driver here, and no computation runs on a GPU."
WAITING = (LeaseState.PENDING, LeaseState.SUSPENDED)
#: Verdicts with which a device takes new work.
FIT = (Verdict.FINE, Verdict.WATCH, Verdict.RESTART_WORKER)


# ----------------------------------------------------------------------------------------------- the pool


def pool(face: ControllerFace) -> dict[str, Any]:
    """Return what the pool is and how it stands; who asks is added by the route."""
    view = face.pool
    free = free_by_node(view)
    there = [record for record in view.devices.values() if _up(view, record)]
    live = [lease for lease in view.leases.values() if lease.state is not LeaseState.ENDED]
    waiting = [lease for lease in live if lease.state in WAITING]
    return {
        "version": version("jupyter-gpupool"),
        "api": API,
        "simulated": simulated(view),
        "simulated_note": SIMULATED if simulated(view) else "",
        "trust_users": face.trust_users,
        "one_user": one_user(face),
        "nodes": [_node(face, record) for _, record in sorted(view.nodes.items())],
        "gpus": len(there),
        "gpus_free": sum(sum(each) for each in free.values()) / WHOLE,
        "largest_together": max(
            (sum(1 for milli in each if milli == WHOLE) for each in free.values()), default=0
        ),
        "models": _counted(record.device.model for record in there),
        "pending": len(waiting),
        "leases": len(live) - len(waiting),
    }


def simulated(view: Pool) -> bool:
    """Return whether any of the pool's GPUs is simulated."""
    return any(record.node.simulated and record.node.devices for record in view.nodes.values())


def one_user(face: ControllerFace) -> str | None:
    """Return the only person whom the pool serves, as its agents cannot switch users; None: it serves all."""
    switch = all(record.node.switches_users for record in face.pool.nodes.values())
    return None if face.trust_users or switch else str(face.store.get("owner") or getpass.getuser())


def _node(face: ControllerFace, record: Any) -> dict[str, Any]:
    node = record.node
    return {
        "name": node.name,
        "address": node.address,
        "state": record.state.value,
        "connected": face.connected(node.name),
        "cordoned": record.cordoned,
        "retired": record.retired,
        "cpus": node.cpus / 1000,
        "memory": node.memory,
        "devices": len(node.devices),
        "simulated": node.simulated,
    }


def _up(view: Pool, record: DeviceRecord) -> bool:
    return view.nodes[record.device.node].state is not NodeState.LOST


def _counted(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def free_by_node(view: Pool) -> dict[str, list[int]]:
    """Return the free thousandths of each device that takes new work, by node."""
    taken = taken_by_device(view)
    found: dict[str, list[int]] = {}
    for uuid, record in view.devices.items():
        if not bars(view, record):
            used = sum(slice_.milli for _, slice_ in taken.get(uuid, ()))
            found.setdefault(record.device.node, []).append(WHOLE - used)
    return found


def taken_by_device(view: Pool) -> dict[str, list[tuple[Lease, Slice]]]:
    """Return the slices on each device, with their leases."""
    found: dict[str, list[tuple[Lease, Slice]]] = {}
    for lease in view.leases.values():
        for slice_ in lease.slices.values():
            found.setdefault(slice_.device, []).append((lease, slice_))
    return found


def bars(view: Pool, record: DeviceRecord) -> list[str]:
    """Return why a device takes no new work, in words of one list."""
    node = view.nodes[record.device.node]
    retired = record.retired or node.retired
    flags = (
        (node.state is not NodeState.UP, f"node {node.state.value}"),
        (record.verdict not in FIT, "out"),
        (retired, "retired"),
        (bool(record.cordoned or node.cordoned) and not retired, "cordoned"),
        (bool(record.outside), "outside use"),
    )
    return [word for there, word in flags if there]


# -------------------------------------------------------------------------------------------------- devices


def devices(face: ControllerFace) -> list[dict[str, Any]]:
    """Return all devices with what is on them and how they are, by node and index; for `masked` to show."""
    taken = taken_by_device(face.pool)
    ordered = sorted(face.pool.devices.values(), key=lambda record: (record.device.node, record.device.index))
    return [_device(face, record, taken.get(record.device.uuid, ())) for record in ordered]


def consolidation(view: Pool, *, dry: bool) -> dict[str, Any]:
    """Return what a consolidation moves, and which devices come free by it."""
    found = view.consolidation()
    moves = [
        {
            "slice": each.slice.id,
            "lease": each.lease.id,
            "lease_name": each.lease.request.name,
            "user": each.lease.request.user,
            "from": view.device_name(each.slice.device),
            "to": view.device_name(each.part.device),
        }
        for each in found.moves
    ]
    return {"moves": moves, "freed": [view.device_name(each) for each in found.freed], "dry_run": dry}


def masked(row: dict[str, Any], seen: frozenset[str] | None) -> dict[str, Any]:
    """Return a device's row without the ids and names of leases that are not among `seen` (None: all are)."""
    if seen is None or all(part["lease"] in seen for part in row["parts"]):
        return row
    hidden = {"slice": "", "lease": "", "lease_name": ""}
    parts = [part if part["lease"] in seen else {**part, **hidden} for part in row["parts"]]
    return {**row, "parts": parts}


def _device(
    face: ControllerFace, record: DeviceRecord, taken: Iterable[tuple[Lease, Slice]]
) -> dict[str, Any]:
    device, barred = record.device, bars(face.pool, record)
    used = sum(slice_.milli for _, slice_ in taken)
    return {
        "uuid": device.uuid,
        "node": device.node,
        "index": device.index,
        "name": face.pool.device_name(device.uuid),
        "model": device.model,
        "memory": device.memory,
        "mig": device.mig,
        "profiles": _profiles(device),
        "verdict": record.verdict.value,
        "verdict_sentence": record.sentence,
        "flags": [*barred, *(["probation"] if record.probation else [])],
        "cordoned": record.cordoned or face.pool.nodes[device.node].cordoned,
        "outside": record.outside,
        "parts": [_part(lease, slice_) for lease, slice_ in taken],
        "free_milli": 0 if barred else WHOLE - used,
        "reading": _reading(face, device),
    }


def _profiles(device: Device) -> list[str]:
    """Return the MIG profiles that can be asked for of a device, the smallest first."""
    if not device.mig:
        return []
    geometry = geometry_of(device) if device.mig_managed else None
    offered = plain(geometry) if geometry else device.instances
    sizes = {each.profile if isinstance(each, Instance) else each.name: each.size for each in offered}
    return sorted(sizes, key=lambda name: (sizes[name], name))


def _part(lease: Lease, slice_: Slice) -> dict[str, Any]:
    return {
        "slice": slice_.id,
        "lease": lease.id,
        "lease_name": lease.request.name,
        "user": lease.request.user,
        "milli": slice_.milli,
        "vram": slice_.vram,
        "state": slice_.state.value,
        "profile": slice_.instance.profile if slice_.instance else "",
        "start": slice_.instance.start if slice_.instance else None,
        "size": slice_.instance.size if slice_.instance else None,
    }


def _reading(face: ControllerFace, device: Device) -> dict[str, Any] | None:
    found = face.readings.get(device.uuid)
    if found is None:
        return None
    return {
        "utilisation": found.utilisation,
        "memory_used": found.memory_used,
        "temperature": found.temperature,
        "power": None if found.power is None else found.power / 1000,
        "error": found.error,
        "age_s": round(face.reading_age(device.uuid), 1),
    }


# ---------------------------------------------------------------------------------------------------- times


def when(face: ControllerFace, pool_ms: int) -> float | None:
    """Return a time of the pool's clock in milliseconds as seconds since the epoch; 0: None."""
    return face.clock.wall(pool_ms) if pool_ms else None


def digest(data: Any) -> int:
    """Return a number that differs when JSON-able data differs."""
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
