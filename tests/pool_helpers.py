"""A small world around a pool: nodes, requests, and agents that do as they are told at once."""

from __future__ import annotations

from jupyter_gpupool.core.model import (
    ANY,
    GB,
    HOUR,
    WHOLE,
    AddSlice,
    ConfigChanged,
    Defaults,
    Device,
    DrainSlice,
    EndLease,
    InstanceCreated,
    LeaseFreed,
    LeaseReleased,
    LeaseStarted,
    Node,
    NodeJoined,
    Project,
    RefuseRequest,
    Request,
    RequestSubmitted,
    SliceDrained,
    SliceFreed,
    SliceStarted,
    StartLease,
    StopSlice,
    Tick,
    VerdictChanged,
)
from jupyter_gpupool.core.pool import Pool


def node(name="node-1", gpus=4, *, model="H100-80GB", memory=80 * GB, cpus=64_000, host=512 * GB):
    devices = tuple(
        Device(uuid=f"GPU-{name}-{index}", node=name, index=index, model=model, memory=memory)
        for index in range(gpus)
    )
    return Node(name=name, devices=devices, cpus=cpus, memory=host)


def request(ident, user="ann", **what):
    what = {"project": "default", "name": ident, "time_limit": HOUR, **what}
    return Request(id=ident, user=user, **what)


class World:
    """A pool whose agents obey at once, unless they are told to be slow."""

    def __init__(self, *nodes, pool=None):
        self.pool = pool or Pool()
        self.now = 1_000_000
        self.events = []
        #: Every instruction so far.
        self.told = []
        #: Kinds of instructions that the agents do not obey.
        self.ignore = set()
        for each in nodes:
            self.send(NodeJoined, node=each)

    def send(self, kind, *, obey=True, **fields):
        """Send an event; the agents obey what follows. Returns the instructions of the event itself."""
        event = kind(now=self.now, **fields)
        self.events.append(event)
        out = self.pool.handle(event)
        self.pool.validate()
        self.told += out
        if obey:
            for each in out:
                self.obey(each)
        return out

    def obey(self, order):
        """Do what an agent does."""
        if type(order) in self.ignore:
            return
        match order:
            case StartLease():
                self.send(LeaseStarted, lease=order.lease, address=f"tls://{order.lease}")
                for each in order.slices:
                    self.send(SliceStarted, slice=each.id)
            case AddSlice():
                self.send(SliceStarted, slice=order.slice.id)
            case DrainSlice():
                self.send(SliceDrained, slice=order.slice)
            case StopSlice():
                self.send(SliceFreed, slice=order.slice)
            case EndLease():
                self.send(LeaseFreed, lease=order.lease)

    def create(self, part):
        """Make the MIG instance of a slice, as its agent does."""
        return self.send(InstanceCreated, slice=part.id, uuid=f"MIG-{part.id}")

    def ask(self, ident, user="ann", **what):
        return self.send(RequestSubmitted, request=request(ident, user, **what))

    def release(self, ident):
        return self.send(LeaseReleased, lease=ident)

    def verdict(self, device, verdict, **more):
        return self.send(VerdictChanged, device=device, verdict=verdict, sentence="XID 79", **more)

    def wait(self, milliseconds):
        """Let time pass, with a tick at every time that the pool has asked for."""
        until = self.now + milliseconds
        while (when := self.pool.next_time()) is not None and when <= until:
            self.now = max(self.now, when)
            self.send(Tick)
        self.now = until
        return self.send(Tick)

    def state(self, ident):
        return str(self.pool.leases[ident].state)

    def devices(self, ident):
        return [each.device for each in self.pool.leases[ident].slices.values()]


def kinds(instructions):
    """The types of some instructions, notices left out."""
    return [type(each).__name__ for each in instructions if type(each).__name__ != "Notify"]


def project(name, quota=0, **more):
    return Project(name=name, quota=((ANY, quota * WHOLE),) if quota else (), **more)


def world(*projects, nodes=2, gpus=4, **defaults):
    """A pool of 8 GPUs, unless told otherwise, half of it the quota of each of the projects `a` and `b`."""
    made = World(*(node(f"node-{number}", gpus) for number in range(1, nodes + 1)))
    half = nodes * gpus // 2
    projects = projects or (project("a", half), project("b", half))
    made.send(ConfigChanged, projects=projects, defaults=Defaults(**defaults))
    return made


def ask(made, ident, who="a", **what):
    return made.ask(ident, f"u{who}", project=who, **what)


def states(made, *idents):
    return [made.state(each) for each in idents]


def refused(out):
    return [each.reason for order in out if isinstance(order, RefuseRequest) for each in order.refusals]
