"""What a launcher is told to start: the specifications of a lease's scheduler and of a slice's host."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from typing import TYPE_CHECKING, Any

import psutil

from jupyter_gpupool.node import guard
from jupyter_gpupool.node.launch import UMASK

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.node.lease_table import Entry, Table

#: What a worker loads before it takes tasks, and before dask-cuda's own preload: NVML, or what stands for it.
_PRELOAD = ("jupyter_gpupool.driver.preload",)
#: What a host calls before it makes the worker: dask-cuda asks NVML for the device in the host already.
_DRIVER = "jupyter_gpupool.driver.nvml:prepare"
#: A worker whose slice says nothing of host memory gets this part of the node's: without a limit it would
#: take all.
_MEMORY_PART = 8


def scheduler_spec(table: Table, order: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    """Specify a lease's scheduler for `lease.scheduler.main`.

    Args:
        table: Where its files are.
        order: "start_scheduler", as the controller sends it.
        common: What all processes of this node share: address, ports, simulated.
    """
    return {
        "target": "jupyter_gpupool.lease.scheduler:main",
        "secret": order["secret"],
        "idle_timeout": order.get("idle_timeout") or 0,
        **_spec(table, order, order["lease"], common),
    }


def worker_spec(
    table: Table, part: Slice, order: dict[str, Any], common: dict[str, Any], limits: dict[str, str]
) -> dict[str, Any]:
    """Specify the host of a slice for `lease.host.main`.

    Args:
        table: Where its files are.
        part: The slice.
        order: "start_worker", as the controller sends it; without an address the host waits for one.
        common: As for `scheduler_spec`.
        limits: Variables by which its processes keep within a share, as `share_limits.limits` answers.
    """
    return {
        "target": "jupyter_gpupool.lease.host:main",
        "slice": part.id,
        "device": device_of(part),
        "vram": part.vram,
        "memory": part.memory or psutil.virtual_memory().total // _MEMORY_PART,
        "scheduler": order["address"],
        "preload": [*_PRELOAD],
        "driver": _DRIVER,
        # For the worker itself, which is no child of its host's but of the forkserver.
        "environ": {
            **limits,
            "GPUPOOL_LEASE": order["lease"],
            "GPUPOOL_SLICE": part.id,
            "GPUPOOL_GPU_MEMORY": str(part.vram),
            "GPUPOOL_SOCKET": str(table.socket(part.id)),
            "GPUPOOL_LOG": str(table.log(table.entries[part.id])),
            guard.MARK: table.mark(part.id),
            "GPUPOOL_WISHES": json.dumps(wishes((order.get("options") or {}).get("environment") or {})),
        },
        **_spec(table, order, part.id, common),
    }


def device_of(part: Slice) -> str:
    """Name the device, or the MIG instance, of a slice for CUDA.

    By UUID: indexes change over reboots, and when a GPU is lost.
    """
    return part.instance.uuid if part.instance else part.device


def wishes(environment: dict[str, Any]) -> dict[str, str]:
    """Return what a request would like of its workers where the node has it: `python`, `folder`.

    Args:
        environment: The request's.

    >>> wishes({"preferred_python": "/opt/bin/python", "working_directory": "/data"})
    {'python': '/opt/bin/python'}
    """
    found = {
        "python": "" if environment.get("python") else environment.get("preferred_python", ""),
        "folder": "" if environment.get("working_directory") else environment.get("preferred_directory", ""),
    }
    return {name: str(each) for name, each in found.items() if each}


def _spec(table: Table, order: dict[str, Any], key: str, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "lease": order["lease"],
        "socket": str(table.socket(key)),
        "directory": str(table.folder(order["lease"])),
        "credentials": order.get("credentials") or {},
        "options": order.get("options") or {},
        **common,
    }


def launch_order(
    table: Table, entry: Entry, environment: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    """Write the order to a launcher, as `lease_child.run` takes it.

    Args:
        table: Where the entry's files are.
        entry: What is started.
        environment: The request's; it may name a working directory.
        spec: What it is told.
    """
    return {
        "mark": table.mark(entry.key),
        "semaphores": guard.semaphores(table.mark(entry.key)),
        "environ": spec.get("environ") or {"GPUPOOL_LEASE": entry.lease},
        "log": str(table.log(entry)),
        "umask": UMASK,
        "folder": environment.get("working_directory", ""),
        "preferred_folder": environment.get("preferred_directory", ""),
        "target": spec["target"],
        "spec": spec,
    }


def address_of(interface: str) -> str:
    """Answer with the address that an interface has, or that is given itself.

    Args:
        interface: "eth0", or an address.

    Raises:
        ValueError: There is no such interface, or it has no address.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    known = psutil.net_if_addrs()
    for each in known.get(interface, ()):
        if each.family.name == "AF_INET":
            return str(each.address)
    raise ValueError(
        f"there is no network interface {interface} with an address here; there are {', '.join(known)}"
    )
