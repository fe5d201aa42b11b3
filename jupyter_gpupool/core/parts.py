"""A part of a device with its part of the host: what is offered, taken and held."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_gpupool.core.model import Instance, Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a device with its part of the host: what a placement offers and what a slice occupies."""

    node: str
    #: Empty: host CPUs and memory only.
    device: str
    #: Thousandths of the device, charged; and bytes of its memory.
    milli: int
    vram: int
    #: Where it is a MIG instance; its `uuid` is empty where it has yet to be created.
    instance: Instance | None = None
    #: Host CPUs in thousandths of a core, and host memory in bytes.
    cpus: int = 0
    memory: int = 0
    #: The node's generation.
    generation: int = 0

    def slice(self, ident: str, lease: str, *, replaces: str = "") -> Slice:
        """Make a slice of this part, of the given id and lease."""
        return Slice(
            id=ident,
            lease=lease,
            device=self.device,
            node=self.node,
            milli=self.milli,
            vram=self.vram,
            instance=self.instance,
            cpus=self.cpus,
            memory=self.memory,
            replaces=replaces,
            generation=self.generation,
        )


def part_of(slice_: Slice) -> Part:
    """Say which part a slice occupies."""
    return Part(
        node=slice_.node,
        device=slice_.device,
        milli=slice_.milli,
        vram=slice_.vram,
        instance=slice_.instance,
        cpus=slice_.cpus,
        memory=slice_.memory,
        generation=slice_.generation,
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """A part that is not free: by whom, and whether it is only held for them."""

    key: str
    holder: str
    part: Part
    held: bool = False
