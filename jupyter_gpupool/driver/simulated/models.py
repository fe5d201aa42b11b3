"""What the simulated GPUs are: one row a model, with the figures of NVIDIA's data sheets.

Not its business: what happens to a device (`state`, `machine`), nor how MIG cuts it (`mig`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A product as the driver describes it."""

    #: What `nvmlDeviceGetName` says.
    name: str
    #: bytes, as `nvmlDeviceGetMemoryInfo` says
    memory: int
    #: PCI device and vendor id.
    pci_id: int
    #: milliwatts: doing nothing, and at its limit
    idle_power: int
    power_limit: int
    #: NVLinks, and how a node of these is wired unless asked otherwise ("switch", "mesh", "pairs", "none").
    links: int
    wiring: str
    #: PCIe lanes and generation.
    pcie_width: int
    pcie_generation: int
    #: Bytes that the driver keeps for itself, and that each CUDA context costs.
    reserved: int
    context: int
    cores: int
    #: CUDA compute capability.
    capability: tuple[int, int]
    #: Which table of MIG profiles holds ("seven", "four" or "").
    mig: str = ""
    #: Gigabytes in the name of a MIG profile of one memory slice, and MiB by memory slices.
    mig_gb: int = 0
    mig_memory: Mapping[int, int] = field(default_factory=dict)
    #: Streaming multiprocessors of the whole device.
    multiprocessors: int = 0


#: By the short name that people ask for.
MODELS: dict[str, Model] = {
    "H100-80GB": Model(
        name="NVIDIA H100 80GB HBM3",
        memory=81559 * MIB,
        pci_id=0x233010DE,
        idle_power=70_000,
        power_limit=700_000,
        links=18,
        wiring="switch",
        pcie_width=16,
        pcie_generation=5,
        reserved=615 * MIB,
        context=520 * MIB,
        cores=16896,
        capability=(9, 0),
        mig="seven",
        mig_gb=10,
        mig_memory={1: 9856, 2: 19968, 4: 40192, 8: 80384},
        multiprocessors=132,
    ),
    "H100-PCIE-80GB": Model(
        name="NVIDIA H100 PCIe",
        memory=81559 * MIB,
        pci_id=0x233110DE,
        idle_power=47_000,
        power_limit=350_000,
        links=12,
        wiring="pairs",
        pcie_width=16,
        pcie_generation=5,
        reserved=615 * MIB,
        context=520 * MIB,
        cores=14592,
        capability=(9, 0),
        mig="seven",
        mig_gb=10,
        mig_memory={1: 9856, 2: 19968, 4: 40192, 8: 80384},
        multiprocessors=114,
    ),
    "H200-141GB": Model(
        name="NVIDIA H200",
        memory=143771 * MIB,
        pci_id=0x233510DE,
        idle_power=75_000,
        power_limit=700_000,
        links=18,
        wiring="switch",
        pcie_width=16,
        pcie_generation=5,
        reserved=615 * MIB,
        context=540 * MIB,
        cores=16896,
        capability=(9, 0),
        mig="seven",
        mig_gb=18,
        mig_memory={1: 16384, 2: 33280, 4: 71168, 8: 143360},
        multiprocessors=132,
    ),
    "A100-80GB": Model(
        name="NVIDIA A100-SXM4-80GB",
        memory=81920 * MIB,
        pci_id=0x20B210DE,
        idle_power=52_000,
        power_limit=400_000,
        links=12,
        wiring="switch",
        pcie_width=16,
        pcie_generation=4,
        reserved=640 * MIB,
        context=430 * MIB,
        cores=6912,
        capability=(8, 0),
        mig="seven",
        mig_gb=10,
        mig_memory={1: 9856, 2: 19968, 4: 40192, 8: 80384},
        multiprocessors=108,
    ),
    "A100-40GB": Model(
        name="NVIDIA A100-SXM4-40GB",
        memory=40960 * MIB,
        pci_id=0x20B010DE,
        idle_power=45_000,
        power_limit=400_000,
        links=12,
        wiring="switch",
        pcie_width=16,
        pcie_generation=4,
        reserved=560 * MIB,
        context=430 * MIB,
        cores=6912,
        capability=(8, 0),
        mig="seven",
        mig_gb=5,
        mig_memory={1: 4864, 2: 9856, 4: 19968, 8: 40192},
        multiprocessors=108,
    ),
    "A30-24GB": Model(
        name="NVIDIA A30",
        memory=24576 * MIB,
        pci_id=0x20B710DE,
        idle_power=28_000,
        power_limit=165_000,
        links=4,
        wiring="pairs",
        pcie_width=16,
        pcie_generation=4,
        reserved=480 * MIB,
        context=420 * MIB,
        cores=3584,
        capability=(8, 0),
        mig="four",
        mig_gb=6,
        mig_memory={1: 5952, 2: 12032, 4: 24002},
        multiprocessors=56,
    ),
    "L40S-48GB": Model(
        name="NVIDIA L40S",
        memory=46068 * MIB,
        pci_id=0x26B910DE,
        idle_power=32_000,
        power_limit=350_000,
        links=0,
        wiring="none",
        pcie_width=16,
        pcie_generation=4,
        reserved=560 * MIB,
        context=400 * MIB,
        cores=18176,
        capability=(8, 9),
        multiprocessors=142,
    ),
    "T4-16GB": Model(
        name="Tesla T4",
        memory=15360 * MIB,
        pci_id=0x1EB810DE,
        idle_power=9_000,
        power_limit=70_000,
        links=0,
        wiring="none",
        pcie_width=16,
        pcie_generation=3,
        reserved=430 * MIB,
        context=290 * MIB,
        cores=2560,
        capability=(7, 5),
        multiprocessors=40,
    ),
}

#: What a node has where only a number of GPUs is said.
DEFAULT = "H100-80GB"
