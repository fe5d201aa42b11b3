"""What the processes of a share are told, so that they keep within it by themselves.

Rule 1: only shares are told. A whole GPU has no neighbour; a MIG instance is kept apart by the hardware.
Rule 2: what a process may allocate is the share less what its context and libraries need (`overhead`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import MIB, Layer, Slice, decode
from jupyter_gpupool.node import mps
from jupyter_gpupool.node.launch import LaunchError
from jupyter_gpupool.node.overhead import Overheads
from jupyter_gpupool.node.share_watch import is_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from jupyter_gpupool.core.model import Device
    from jupyter_gpupool.node.lease_table import Entry

#: Bytes for data below which a share is worth nothing.
LEAST = 64 * MIB


class ShareLimits:
    """The limits of the shares on a node.

    Args:
        path: Where is kept what was measured.
        device_of: Answers with a device by its UUID, or None.
    """

    def __init__(self, path: Path, device_of: Callable[[str], Device | None]) -> None:
        self._device_of = device_of
        self.overheads = Overheads(path)

    def limits(self, entry: Entry, part: Slice, others: Iterable[Entry]) -> dict[str, str]:
        """Answer with variables for a slice's processes, and note whether it uses MPS.

        Args:
            entry: The slice's; `mps` is set in it.
            part: The slice.
            others: All entries of the node.

        Raises:
            LaunchError: The share has no room for any data.
        """
        folder = mps.daemon()
        entry.mps = (
            bool(folder)
            and is_share(part)
            and all(each.user == entry.user for each in others if each.mps and each is not entry)
        )
        variables = mps.limits(part, folder) if entry.mps else mps.away() if folder else {}
        return {**variables, **self._memory(part)} if is_share(part) else variables

    def _memory(self, part: Slice) -> dict[str, str]:
        device = self._device_of(part.device)
        overhead = self.overheads.of(device.model if device else "")
        limit = part.vram - overhead
        if limit < LEAST:
            raise LaunchError(
                f"its share of {part.vram / 1e9:.2g} GB has no room for data: CUDA and its libraries take"
                f" {overhead / 1e9:.2g} GB of this GPU; ask for at least {(overhead + LEAST) / 1e9:.2g} GB"
            )
        whole = device.memory if device else 0
        # JAX takes three quarters of a GPU at once unless it is told less; TensorFlow all of it.
        jax = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{limit / whole:.4f}"} if whole else {}
        return {"GPUPOOL_LIMIT": str(limit), "TF_FORCE_GPU_ALLOW_GROWTH": "true", **jax}

    def see(self, part: Slice, used: int) -> None:
        """Take note of what the only process of a slice has."""
        device = self._device_of(part.device)
        self.overheads.see(device.model if device else "", part.id, used)


def own_layers(entry: Entry) -> tuple[Layer, ...]:
    """Answer with the layers that a slice has from its node and its hardware from the start."""
    isolated = bool(entry.slice) and decode(Slice, entry.slice).instance is not None
    return (*((Layer.MIG,) if isolated else ()), *((Layer.MPS,) if entry.mps else ()))
