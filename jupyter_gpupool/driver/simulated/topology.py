# ruff: noqa: D103, N802 (functions bear the names of the driver's symbols, and are described by its manual)
"""Where the simulated devices are: PCI bus, NUMA node, CPUs near them, and the NVLinks between them."""

from __future__ import annotations

import os
from typing import Any

from jupyter_gpupool.driver.abi import Code
from jupyter_gpupool.driver.simulated.abi import Refused, handle_of, number, put, target
from jupyter_gpupool.driver.simulated.library import Gpu, of_device
from jupyter_gpupool.driver.simulated.models import MODELS
from jupyter_gpupool.driver.simulated.state import FEW_CPUS

#: NVML's codes: how far a peer is; whether it can be reached over NVLink; what is at a link's other end.
SAME_NUMA, OTHER_NUMA, ITSELF = 40, 50, 0
P2P_NVLINK, P2P_OK, P2P_UNSUPPORTED = 2, 0, 5
PEER_GPU, PEER_SWITCH = 0, 2
SWITCH_BUS, SWITCH_ID = "00000000:06:00.0", 0x22A310DE


@of_device
def nvmlDeviceGetPciInfo_v3(gpu: Gpu, info: Any) -> None:
    fill_pci(target(info), gpu.data["pci"], gpu.model.pci_id)


def fill_pci(info: Any, bus_id: str, pci_id: int) -> None:
    """Fill a structure with a PCI address."""
    domain, bus, rest = bus_id.split(":")
    info.domain, info.bus, info.device = int(domain, 16), int(bus, 16), int(rest.split(".")[0], 16)
    info.pciDeviceId, info.pciSubSystemId = pci_id, pci_id
    info.busId, info.busIdLegacy = bus_id.encode(), bus_id[4:].encode()


@of_device
def nvmlDeviceGetNumaNodeId(gpu: Gpu, node: Any) -> None:
    put(node, int(gpu.field("numa", gpu.data["numa"])))


@of_device
def nvmlDeviceGetCpuAffinity(gpu: Gpu, words: Any, mask: Any) -> None:
    count = os.cpu_count() or 1
    cpus = list(range(count))
    if count >= FEW_CPUS:
        half = count // 2
        cpus = cpus[half:] if gpu.data["numa"] else cpus[:half]
    array = target(mask)
    for word in range(number(words)):
        array[word] = sum(1 << cpu - 64 * word for cpu in cpus if 0 <= cpu - 64 * word < 64)


@of_device
def nvmlDeviceGetMemoryAffinity(gpu: Gpu, words: Any, mask: Any, _scope: Any) -> None:
    array = target(mask)
    for word in range(number(words)):
        array[word] = 0
    array[0] = 1 << gpu.data["numa"]


def _end(gpu: Gpu, link: Any) -> str:
    """Where a link ends; refused where the device has no such link, as higher indexes are."""
    if gpu.data["mig"] or not 0 <= number(link) < gpu.model.links:
        raise Refused(Code.NOT_SUPPORTED)
    return str(gpu.data["links"][number(link)])


@of_device
def nvmlDeviceGetNvLinkState(gpu: Gpu, link: Any, active: Any) -> None:
    end = _end(gpu, link)
    down = gpu.field("nvlinks_down", [])
    put(active, int(end != "" and number(link) not in down))


@of_device
def nvmlDeviceGetNvLinkRemoteDeviceType(gpu: Gpu, link: Any, kind: Any) -> None:
    end = _end(gpu, link)
    if not end:
        raise Refused(Code.NOT_SUPPORTED)
    put(kind, PEER_SWITCH if end == "switch" else PEER_GPU)


@of_device
def nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu: Gpu, link: Any, info: Any) -> None:
    end = _end(gpu, link)
    if not end:
        raise Refused(Code.NOT_SUPPORTED)
    if end == "switch":
        fill_pci(target(info), SWITCH_BUS, SWITCH_ID)
        return
    peer = gpu.library.state.read()["devices"][end]
    fill_pci(target(info), peer["pci"], MODELS[peer["model"]].pci_id)


@of_device
def nvmlDeviceGetNvLinkErrorCounter(gpu: Gpu, link: Any, counter: Any, count: Any) -> None:
    _end(gpu, link)
    names = {0: "nvlink_replays", 1: "nvlink_recoveries", 2: "nvlink_crc", 3: "nvlink_crc"}
    if number(counter) not in names:
        raise Refused(Code.NOT_SUPPORTED)
    value = int(gpu.field(names[number(counter)], 0))
    put(count, 0 if number(link) else value)


@of_device
def nvmlDeviceGetTopologyCommonAncestor(gpu: Gpu, other: Any, level: Any) -> None:
    peer = gpu.library.device(handle_of(other)).data
    if peer["uuid"] == gpu.data["uuid"]:
        put(level, ITSELF)
    else:
        put(level, SAME_NUMA if peer["numa"] == gpu.data["numa"] else OTHER_NUMA)


@of_device
def nvmlDeviceGetP2PStatus(gpu: Gpu, other: Any, index: Any, status: Any) -> None:
    peer = gpu.library.device(handle_of(other)).data
    if number(index) != P2P_NVLINK:
        put(status, P2P_OK)
        return
    ends = gpu.data["links"]
    linked = peer["uuid"] in ends or ("switch" in ends and "switch" in peer["links"])
    put(status, P2P_OK if linked and not gpu.data["mig"] else P2P_UNSUPPORTED)
