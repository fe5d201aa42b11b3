"""Small pools and requests for the tests of placement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.cluster import Cluster
from jupyter_gpupool.core.model import GB, GIB, Device, Node, Request
from jupyter_gpupool.core.placement import Placement, place

if TYPE_CHECKING:
    from jupyter_gpupool.core.parts import Part

MEMORY = {
    "H100-80GB": 80 * GIB,
    "A100-40GB": 40 * GIB,
    "A30-24GB": 24 * GIB,
    "T4-16GB": 16 * GIB,
    "L40S-48GB": 48 * GIB,
}


def node(name: str, devices: int = 4, model: str = "H100-80GB", **more: Any) -> Node:
    """A node with 8 CPUs and 100 GB of host memory a device; `mig`, and by index `links` and `numa`."""
    mig, links, numa = more.pop("mig", False), more.pop("links", {}), more.pop("numa", ())
    managed, instances = more.pop("managed", mig), more.pop("instances", ())
    made = tuple(
        Device(
            uuid=f"GPU-{name}-{index}",
            node=name,
            index=index,
            model=model,
            memory=MEMORY[model],
            numa=numa[index] if numa else -1,
            links=tuple((f"GPU-{name}-{peer}", count) for peer, count in links.get(index, ())),
            mig=mig,
            mig_managed=managed,
            instances=instances,
        )
        for index in range(devices)
    )
    more.setdefault("cpus", devices * 8000)
    more.setdefault("memory", devices * 100 * GB)
    return Node(name=name, devices=made, **more)


def cluster_of(*nodes: Node) -> Cluster:
    """A cluster with these nodes, all free."""
    cluster = Cluster()
    for each in nodes:
        cluster.add_node(each)
    return cluster


def request(**what: Any) -> Request:
    """A request for a whole GPU, unless said otherwise; `vram` alone asks for memory only."""
    if "vram" in what and "milli" not in what:
        what["milli"] = 0
    return Request(**{"id": "r", "user": "ann", "project": "vision", "name": "work", **what})


def parts_of(cluster: Cluster, **what: Any) -> tuple[Part, ...]:
    """The parts that a request gets; () where it gets none."""
    found = place(request(**what), cluster)
    return found.parts if isinstance(found, Placement) else ()


def take(cluster: Cluster, key: str, **what: Any) -> tuple[Part, ...]:
    """Place a request and take what it gets, as `key`, or `key/0`, `key/1`… of holder `key`."""
    parts = parts_of(cluster, **what)
    assert parts, f"no place for {what}"
    for number, part in enumerate(parts):
        cluster.take(key if len(parts) == 1 else f"{key}/{number}", key, part)
    cluster.validate()
    return parts


def short(parts: tuple[Part, ...]) -> list[str]:
    """Devices of parts as "node:index", sorted."""
    return sorted(f"{part.node}:{part.device.rpartition('-')[2]}" for part in parts)
