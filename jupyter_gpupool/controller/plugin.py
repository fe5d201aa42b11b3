"""Dask's side of the controller: its hooks become pool events, the pool's instructions orders to agents.

Rule 1: no decision is made here. One line for each of Dask's hooks, one short method for each instruction.
Rule 2: the scheduler runs no task and has no client. It is closed (`wire`), and its agents are its workers.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.spans import SpansSchedulerExtension

from jupyter_gpupool import wire
from jupyter_gpupool.core.model import (
    AddSlice,
    CreateInstance,
    DestroyInstance,
    DrainSlice,
    EndLease,
    Notify,
    RefuseRequest,
    RestartWorker,
    StartLease,
    StopSlice,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jupyter_gpupool.controller.agents import Agents
    from jupyter_gpupool.controller.machine import Controller
    from jupyter_gpupool.core.model import Instruction, Request, Slice

logger = logging.getLogger(__name__)


class PoolScheduler(Scheduler):
    """Dask's scheduler, closed, for agents only.

    Args:
        controller: Whose reports come in here.
        host: The address to listen on, and the port; 0: any.
        security: The controller's certificate for Dask's comms.
        folder: The controller's own, for Dask's scratch files: Dask puts that folder first on `sys.path`.
    """

    def __init__(self, controller: Controller, *, host: str, port: int, security: Any, folder: Path) -> None:
        self._controller = controller
        super().__init__(
            host=host,
            port=port,
            protocol="tls",
            security=security,
            local_directory=str(folder),
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            # Dask's other extensions send pickled plugins to workers, or serve clients; there are none.
            extensions={"spans": SpansSchedulerExtension},
            plugins=(GPUPoolPlugin(controller),),
        )
        wire.shut(self, "controller", {wire.OP: controller.hearing.on_reports})
        wire.quieten(self)

    def _agents(self) -> Agents:
        return self._controller.agents

    def start_http_server(self, *_arguments: Any, **_more: Any) -> None:
        """Serve no HTTP: people have the pool's own API, and there is nothing else to see here."""

    async def add_worker(self, comm: Any, **message: Any) -> None:
        """Take an agent in, if its certificate says that it is the node's and has not been revoked."""
        why = self._agents().stranger(comm, message.get("name"))
        if why:
            logger.warning("%s (from %s)", why, comm.peer_address)
            await comm.write({"status": "error", "message": why, "time": time.time()})
            return
        await super().add_worker(comm, **message)

    def heartbeat_worker(self, **message: Any) -> dict[str, Any]:
        """Take an agent's heartbeat; Dask's own interval for so few workers would be half a second."""
        self._agents().beat(str(message.get("address")))
        answer: dict[str, Any] = super().heartbeat_worker(**message)
        return {**answer, "heartbeat-interval": wire.HEARTBEAT}

    async def check_worker_ttl(self) -> None:
        """Let go of agents that have not been heard for too long; the controller calls it at each tick.

        Dask would look once in that time only, by a clock that can be set, and would try to restart them.
        """
        for address in list(self.workers):
            silence = self._agents().silence(address)
            if self.worker_ttl and silence > self.worker_ttl:
                await self.remove_worker(address, stimulus_id=f"silent-for-{silence:.0f}-s")


class GPUPoolPlugin(SchedulerPlugin):
    """Makes Dask's scheduler the pool's: what Dask tells of its workers is handed on to the controller."""

    name = "gpupool"

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    # -------------------------------------------------------------------------------------- Dask's hooks

    def add_worker(self, scheduler: Any, worker: str) -> None:  # noqa: ARG002 - Dask's signature
        """An agent has connected; it presents itself with the report `joined`."""
        self._controller.agents.came(worker)

    def remove_worker(self, scheduler: Any, worker: str, **more: Any) -> None:  # noqa: ARG002 - Dask's signature
        """An agent's connection is gone."""
        self._controller.on_left(worker)


class Orders:
    """Carries instructions out: one short method each.

    Args:
        controller: Whose agents are told.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._methods: dict[type, Callable[[Any], None]] = {
            StartLease: self.start_lease,
            AddSlice: self.add_slice,
            DrainSlice: self.drain_slice,
            StopSlice: self.stop_slice,
            EndLease: self.end_lease,
            CreateInstance: self.create_instance,
            DestroyInstance: self.destroy_instance,
            RestartWorker: self.restart_worker,
            RefuseRequest: self.nothing,  # `submit` returns it to whoever asked
            Notify: self.nothing,  # the controller keeps it with the event that it follows from
        }

    def carry_out(self, instruction: Instruction) -> None:
        """Do one thing that the pool has ordered."""
        self._methods[type(instruction)](instruction)

    def _tell(self, node: str, order: str, **more: Any) -> None:
        self._controller.agents.tell(node, {"order": order, **more})

    def _keys(self, lease: str) -> dict[str, Any]:
        record = self._controller.pool.leases[lease]
        account = self._controller.account(lease)
        return self._controller.keys.ensure(lease, record.keys, account)

    def start_lease(self, instruction: StartLease) -> None:
        """Start the lease's scheduler, and beside it the hosts of its workers, which wait for its address.

        The first host comes first: it has the longest way to go.
        """
        lease, request = instruction.lease, instruction.request
        keys = self._keys(lease)
        slices = instruction.slices if keys["home"] else ()
        for slice_ in slices[:1]:
            self.start_worker(request, slice_, "")
        self._tell(
            keys["home"],
            "start_scheduler",
            lease=lease,
            user=self._controller.account(lease),
            credentials=credentials(keys),
            secret=keys["secret"],
            options=options(request),
            idle_timeout=request.idle_timeout or self._controller.pool.defaults.idle_timeout,
        )
        for slice_ in slices[1:]:
            self.start_worker(request, slice_, "")

    def add_slice(self, instruction: AddSlice) -> None:
        """Start a slice's worker, unless the lease's scheduler has yet to answer."""
        lease = self._controller.pool.leases[instruction.lease]
        if lease.address:
            self.start_worker(lease.request, instruction.slice, lease.address)

    def start_worker(self, request: Request, slice_: Slice, address: str) -> None:
        """Start a slice's worker for the scheduler at `address`; "": its host is started, and waits."""
        self._tell(
            slice_.node,
            "start_worker",
            lease=slice_.lease,
            slice=encode(slice_),
            user=self._controller.account(slice_.lease),
            address=address,
            credentials=credentials(self._keys(slice_.lease)),
            options=options(request),
        )

    def drain_slice(self, instruction: DrainSlice) -> None:
        """Tell the lease's scheduler to let a worker go."""
        self._tell(
            self._controller.home(instruction.lease),
            "drain",
            lease=instruction.lease,
            slice=instruction.slice,
            mode=instruction.mode.value,
            deadline_in=max(0, instruction.deadline - self._controller.clock.now()),
            why=instruction.why,
        )

    def stop_slice(self, instruction: StopSlice) -> None:
        """End a slice's processes."""
        self._tell(instruction.node, "stop_slice", lease=instruction.lease, slice=instruction.slice)

    def end_lease(self, instruction: EndLease) -> None:
        """End a lease's scheduler."""
        home = self._controller.home(instruction.lease)
        self._tell(home, "end_lease", lease=instruction.lease, why=instruction.why)

    def restart_worker(self, instruction: RestartWorker) -> None:
        """Restart a slice's worker before it takes another task."""
        self._tell(
            instruction.node,
            "restart_worker",
            lease=instruction.lease,
            slice=instruction.slice,
            why=instruction.why,
        )

    def create_instance(self, instruction: CreateInstance) -> None:
        """Create a MIG instance."""
        self._instance("create_instance", instruction)

    def destroy_instance(self, instruction: DestroyInstance) -> None:
        """Destroy a MIG instance."""
        self._instance("destroy_instance", instruction)

    def _instance(self, order: str, instruction: CreateInstance | DestroyInstance) -> None:
        self._tell(
            instruction.node,
            order,
            slice=instruction.slice,
            device=instruction.device,
            instance=encode(instruction.instance),
        )

    def nothing(self, instruction: Instruction) -> None:
        """Do nothing more."""


def credentials(keys: dict[str, Any]) -> dict[str, str]:
    """Return the TLS part of a lease's keys."""
    return {part: keys[part] for part in ("ca", "cert", "key")}


def options(request: Request) -> dict[str, Any]:
    """Return what the pool hands to the node: dask-cuda's options by their names, and the environment."""
    try:
        found = json.loads(request.options)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return {}
    return {**(found.get("options") or {}), "environment": found.get("environment") or {}}
