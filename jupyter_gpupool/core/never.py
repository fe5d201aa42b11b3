"""What the pool can never hold, whatever is free, and the nearest thing that it could.

Rule 1: nodes and devices count that are here, in whatever state: what is out today may be back tomorrow.
Rule 2: one refusal, the most telling one, with the numbers and what to ask for instead.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from jupyter_gpupool.core import mig
from jupyter_gpupool.core.model import WHOLE, Reason, Refusal
from jupyter_gpupool.core.wants import Room, Want, by_host, room, suits, want_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.cluster import Cluster
    from jupyter_gpupool.core.model import Request

#: Fields of a request that leave out devices, in the order in which they are named.
_CONSTRAINTS = ("model", "min_vram", "vram", "mig", "isolated", "node", "exclude")


def asked(request: Request, count: int) -> str:
    """What is asked for, in words.

    >>> from jupyter_gpupool.core.model import Request
    >>> asked(Request(id="1", user="ann", project="vision", name="a"), 2)
    '2 GPUs'
    """
    several = f"{count} x " if count > 1 else ""
    if request.mig:
        return f"{several or 'a '}{request.mig}"
    memory = gigabytes(request.vram) if request.vram else ""
    if request.isolated:
        return f"{several or 'a '}MIG instance with {memory or 'any memory'}"
    if request.milli >= WHOLE:
        return "a GPU" if count == 1 else f"{count} GPUs"
    share = f"{request.milli / WHOLE:g} of a GPU" if request.milli else ""
    return several + (" with ".join(filter(None, (share, memory))) or "no GPU")


def gigabytes(amount: int) -> str:
    """Bytes in words."""
    return f"{amount / 1e9:.4g} GB"


def feasible_ever(request: Request, cluster: Cluster) -> tuple[Refusal, ...]:
    """Say why the pool can never hold a request, whatever is free; () if it can.

    With no GPU in the pool nothing is refused: the request waits for one.
    """
    if not any(node.devices for node in cluster.nodes.values()):
        return ()
    want = want_of(request)
    found = room(cluster, want)
    for refusal in _checks(request, cluster, want, found):
        if refusal:
            return (refusal,)
    return ()


def _checks(request: Request, cluster: Cluster, want: Want, found: Room) -> Iterator[Refusal | None]:
    yield _unknown_model(want, cluster)
    yield _unknown_node(want, cluster)
    yield _unknown_profile(want, cluster)
    yield _parts_linked(request, want)
    yield _too_much_memory(want, cluster)
    yield _only_mig(want, cluster)
    yield _contradiction(request, want, found, cluster)
    yield _too_much_host(cluster, want, found)
    yield _too_many(request, cluster, want, found)


def _unknown_model(want: Want, cluster: Cluster) -> Refusal | None:
    here = {device.model for node in cluster.nodes.values() for device in node.devices}
    unknown = [name for name in want.models if name not in here]
    if not unknown:
        return None
    return Refusal(
        reason=Reason.UNKNOWN_MODEL,
        sentence=f"No GPU of the pool is of the model {unknown[0]}.",
        advice=f"Its models are: {', '.join(sorted(here)) or 'none'}.",
        field="model",
    )


def _unknown_node(want: Want, cluster: Cluster) -> Refusal | None:
    if not want.node or want.node in cluster.nodes:
        return None
    return Refusal(
        reason=Reason.UNKNOWN_NODE,
        sentence=f"The pool has no node {want.node}.",
        advice=f"Its nodes are: {', '.join(sorted(cluster.nodes))}.",
        field="node",
    )


def _profiles(cluster: Cluster) -> dict[str, int]:
    """All MIG profiles that devices here can be cut into, and their bytes of memory, the smallest first."""
    used = {int(number) for number in np.unique(cluster.geometry) if number > 0}
    kinds = [geometry for number, geometry in enumerate(cluster.geometries) if number in used and geometry]
    found = [(each.size, each.compute, each.name, each.memory) for kind in kinds for each in kind.profiles]
    return {name: memory for _, _, name, memory in sorted(found)}


def _unknown_profile(want: Want, cluster: Cluster) -> Refusal | None:
    profiles = _profiles(cluster) if want.instance else {}
    if not want.instance or want.mig in profiles:
        return None
    if not profiles:
        return Refusal(
            reason=Reason.NO_MIG,
            sentence="No GPU of the pool is in MIG mode.",
            advice="Ask for a share instead: gpus=0.5, or vram.",
            field="mig",
        )
    if want.mig:
        return Refusal(
            reason=Reason.UNKNOWN_PROFILE,
            sentence=f"No GPU of the pool has a MIG profile {want.mig}.",
            advice=f"There are: {', '.join(profiles)}.",
            field="mig",
        )
    most = max(profiles.values())
    if want.vram <= most:
        return None
    return Refusal(
        reason=Reason.TOO_MUCH_MEMORY,
        sentence=f"No MIG instance has {gigabytes(want.vram)} of memory: {gigabytes(most)} is the most.",
        advice=f"Ask for at most {most // 10**9}GB, or for a whole GPU.",
        field="vram",
    )


def _too_much_memory(want: Want, cluster: Cluster) -> Refusal | None:
    most = int(cluster.vram.max(initial=0))
    for name, amount in (("vram", want.vram), ("min_vram", want.min_vram)):
        if amount > most:
            return Refusal(
                reason=Reason.TOO_MUCH_MEMORY,
                sentence=f"No GPU of the pool has {gigabytes(amount)}: {gigabytes(most)} is the most.",
                advice=f"Ask for at most {most // 10**9}GB.",
                field=name,
            )
    return None


def _parts_linked(request: Request, want: Want) -> Refusal | None:
    if not request.nvlink or request.count == 1 or want.whole:
        return None
    what = "MIG instances have no NVLink" if want.instance else "Shares are not placed by NVLink"
    return Refusal(
        reason=Reason.CONTRADICTION,
        sentence=f"{what}: nvlink is for whole GPUs.",
        advice="Leave out nvlink, or ask for whole GPUs.",
        field="nvlink",
    )


def _only_mig(want: Want, cluster: Cluster) -> Refusal | None:
    if want.instance or want.host_only or (cluster.geometry[cluster.vram > 0] == 0).any():
        return None
    return Refusal(
        reason=Reason.CONTRADICTION,
        sentence="All GPUs of the pool are in MIG mode: they are given as MIG instances only.",
        advice=f"Ask for one of: {', '.join(_profiles(cluster)) or 'none'}.",
        field="gpus",
    )


def _contradiction(request: Request, want: Want, found: Room, cluster: Cluster) -> Refusal | None:
    if found.fits.any() or want.host_only:
        return None
    fields = [name for name in _CONSTRAINTS if getattr(request, name)]
    advice = f"Leave out one of {', '.join(fields)}." if len(fields) > 1 else "Leave it out."
    kind = suits(cluster, dataclasses.replace(want, node="", exclude=()))
    if kind.any() and (want.node or want.exclude):
        nodes = sorted(cluster.names[row] for row in np.flatnonzero(kind.any(axis=1)))
        advice = f"Such GPUs are on: {', '.join(nodes[:5])}{' …' if len(nodes) > 5 else ''}."
    return Refusal(
        reason=Reason.CONTRADICTION,
        sentence=f"No GPU of the pool meets {', '.join(fields) or 'the request'}"
        + (" together." if len(fields) > 1 else "."),
        advice=advice,
        field=fields[0] if fields else "",
    )


def _hosts(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """Host CPUs and memory of each row's node when it is empty."""
    cpus, memory = np.zeros_like(cluster.cpus), np.zeros_like(cluster.memory)
    for name, row in cluster.row_of.items():
        cpus[row], memory[row] = cluster.nodes[name].cpus, cluster.nodes[name].memory
    return cpus, memory


def _too_much_host(cluster: Cluster, want: Want, found: Room) -> Refusal | None:
    cpus, memory = _hosts(cluster)
    possible = cluster.devices > 0 if want.host_only else found.fits.any(axis=1)
    fits_cpus, fits_memory = possible & (cpus >= found.cpus), possible & (memory >= found.memory)
    if (fits_cpus & fits_memory).any():
        return None
    name = "memory" if fits_cpus.any() else "cpus"
    most_cpus, most_memory = int(cpus[possible].max(initial=0)), int(memory[possible].max(initial=0))
    return Refusal(
        reason=Reason.TOO_MUCH_HOST,
        sentence="No node has the CPUs and host memory that one slice asks for.",
        advice=f"The largest has {most_cpus / 1000:g} CPUs and {gigabytes(most_memory)}.",
        field=name,
    )


def _too_many(request: Request, cluster: Cluster, want: Want, found: Room) -> Refusal | None:
    counts = by_host(
        _by_devices(cluster, want, found, linked=request.nvlink and request.count > 1),
        *zip(_hosts(cluster), (found.cpus, found.memory), strict=True),
    )
    together = request.same_node or (request.nvlink and request.count > 1)
    most = int(counts.max() if together else counts.sum())
    if request.count <= most:
        return None
    kind = "such MIG instances" if want.instance else "such GPUs"
    where = "that NVLink connects" if request.nvlink else "on one node" if together else "in the pool"
    advice = f"Ask for at most {most}." if most else "Leave out nvlink." if request.nvlink else ""
    if most and together:
        advice = f"Ask for at most {most}, or without {'nvlink' if request.nvlink else 'same_node'}."
    return Refusal(
        reason=Reason.TOO_MANY_GPUS,
        sentence=f"{asked(request, request.count)}: there are at most {most} {kind} {where}.",
        advice=advice,
        field="gpus",
    )


def _by_devices(cluster: Cluster, want: Want, found: Room, *, linked: bool) -> np.ndarray:
    """How many slices the devices of each node have room for when it is empty."""
    if want.host_only:
        return np.full(len(found.fits), 1 << 40)
    counts: np.ndarray
    if want.instance:
        most = [
            int(mig.room(geometry, profile)[0]) if geometry and profile else 0
            for geometry, profile in zip(cluster.geometries, found.profiles, strict=True)
        ]
        counts = (np.array(most)[np.maximum(cluster.geometry, 0)] * found.fits).sum(axis=1)
        return counts
    if linked:
        fits = found.fits & (cluster.linked > 0)
        islands = range(int(cluster.island.max(initial=0)) + 1)
        counts = np.max([(fits & (cluster.island == each)).sum(axis=1) for each in islands], axis=0)
        return counts
    each = WHOLE // np.maximum(found.charge, 1) if want.stack else 1
    counts = (found.fits * each).sum(axis=1)
    return counts
