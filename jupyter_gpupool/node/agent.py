"""The agent of a node: presents its devices, carries orders out, reports what becomes of them.

Rule 1: it survives the controller, and what it has started survives it. It leaves by `os._exit` when its
        list of processes is written, from which the next agent adopts them.
Rule 2: reports are kept until the controller has them. Readings are not: the next one is better.
Rule 3: whatever an order brings, a failure is a report, never the agent's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import os
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Node, encode
from jupyter_gpupool.node import host
from jupyter_gpupool.node.connection import Connection
from jupyter_gpupool.node.fitness import Fitness
from jupyter_gpupool.node.instances import Instances
from jupyter_gpupool.node.launch import allowed_environment, find_account
from jupyter_gpupool.node.leases import ALONE, Leases
from jupyter_gpupool.node.locks import DeviceLocks
from jupyter_gpupool.node.outside import OutsideWatch
from jupyter_gpupool.node.reader import Finding, Reader
from jupyter_gpupool.node.share_guard import LOOK, ShareGuard

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_gpupool.core.model import Device, NvmlEvent, Reading
    from jupyter_gpupool.node.membership import Membership
    from jupyter_gpupool.wire import Message

logger = logging.getLogger(__name__)

#: Seconds between two readings of the devices, and between two tries to lock those that another pool has.
INTERVAL, LOCK_AGAIN = 15.0, 30.0
#: Errors with which a device is granted to nobody, and runs nothing that could be listed.
OUT = ("GPU_IS_LOST", "RESET_REQUIRED", "GPU_NOT_FOUND", "NOT_FOUND")
#: Seconds for the last reports when the agent is told to leave.
LAST_WORDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an agent is run."""

    #: Runs the schedulers of all leases.
    head: bool = False
    #: The address by which other machines reach this one.
    address: str = "127.0.0.1"
    #: The interface or address on which leases listen; "": `address`.
    interface: str = ""
    #: First and last port that leases may take; None: any.
    ports: tuple[int, int] | None = None
    #: Thousandths of a core and bytes for leases; 0: all that there is.
    cpus: int = 0
    memory: int = 0
    #: Seconds between two readings.
    interval: float = INTERVAL
    #: Seconds without an agent after which the processes of leases end themselves.
    alone: float = ALONE
    #: Where a simulated node's machine is, by the variables that lead to it; empty: real GPUs.
    simulated: dict[str, str] = field(default_factory=dict)


class Agent:
    """The agent of one node.

    Args:
        folder: Its own folder.
        member: Its place in the pool.
        settings: How it is run.
    """

    def __init__(self, folder: Path, member: Membership, settings: Settings) -> None:
        self._folder = folder
        self._member = member
        self._settings = settings
        self._devices: tuple[Device, ...] = ()
        self._refused: dict[str, str] = {}
        self._locks = DeviceLocks(member.url, getpass.getuser())
        self._gone = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        account = find_account("", switches=False)
        self._environ = allowed_environment(dict(os.environ), account, settings.simulated)
        self._reader = self._make_reader()
        self._instances = Instances(folder / "instances.json", self._environ)
        self._leases = Leases(
            folder / "leases",
            self._on_report,
            interface=settings.interface or settings.address,
            ports=settings.ports,
            device_pids=self._device_pids,
            simulated_environ=settings.simulated,
            switches_users=switches_users(),
            alone_s=settings.alone,
            device_of=self._device_of,
        )
        self._fitness = Fitness(
            folder / "health.json",
            member.name,
            self._on_report,
            self._reader.poll,
            self._leases.users_on,
            interval_s=settings.interval,
        )
        self._leases.hung_s = self._fitness.hung_s
        self._outside = OutsideWatch(self._leases.owner)
        self._guard = ShareGuard(
            self._leases, self._reader.poll, self._on_report, look_s=min(LOOK, settings.interval)
        )
        self._connection = Connection(
            member,
            folder,
            uuid.uuid4().hex[:12],
            joined=self._joined,
            connected=self._on_connected,
            obey=self._on_orders,
            address=settings.address,
        )

    def _make_reader(self) -> Reader:
        return Reader(
            self._environ,
            node=self._member.name,
            interval_s=self._settings.interval,
            on_devices=self._on_devices,
            on_readings=self._on_readings,
            on_event=self._on_event,
            on_silence=self._on_silence,
        )

    # --------------------------------------------------------------------------------------------------- life

    async def run(self) -> None:
        """Do the agent's work until it is told to leave.

        Raises:
            ReaderError: There is no driver.
            LaunchError: Not even a launcher can be started.
        """
        devices = await self._reader.start()
        self._take_devices(devices)
        self._fitness.on_devices(devices)
        await self._leases.start()
        await self._end_the_dead()
        self._do(self._connection.run())
        self._do(self._lock_again())
        self._do(self._fitness.keep())
        self._do(self._guard.keep())
        self._do(self._sweep())
        await self._gone.wait()

    async def _end_the_dead(self) -> None:
        """Adopt what lives; what died with the former agent is ended properly, so that it is seen gone."""
        alive, _ = await self._leases.adopt()
        for part in self._leases.parts():
            if part["id"] not in alive:
                await self._leases.obey({"order": "stop_slice", "lease": part["lease"], "slice": part["id"]})

    def stop(self) -> None:
        """End the agent; what it has started goes on."""
        self._gone.set()

    async def close(self) -> None:
        """Write down what the next agent needs, and let go of everything."""
        self._fitness.save()
        await asyncio.gather(self._leases.close(keep=True), self._reader.close(), return_exceptions=True)
        self._locks.release()

    async def _leave(self, _order: Message) -> None:
        await self.leave("The controller ends the pool")

    async def _present(self, _order: Message) -> None:
        """The controller could not take the node in when it came, its disk being full, for one."""
        self._connection.present()

    async def leave(self, why: str) -> None:
        """End everything of the pool on this node, and then the agent; who comes second waits as well."""
        if self._leaving is None:
            logger.info("%s: everything of the pool here ends.", why)
            self._leaving = asyncio.create_task(self._end_everything())
        await asyncio.shield(self._leaving)

    async def _end_everything(self) -> None:
        await self._leases.close(keep=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                while len(self._connection.outbox):  # noqa: ASYNC110 - the other end empties it
                    await asyncio.sleep(0.05)
        self._gone.set()

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("Something could not be done.", exc_info=task.exception())

    # ------------------------------------------------------------------------------------------------ devices

    def _take_devices(self, devices: tuple[Device, ...]) -> bool:
        """Lock the devices; return whether what the node offers has changed."""
        before = self._devices, self._refused
        if self._settings.simulated:
            self._devices = devices
        else:
            self._devices, self._refused = self._locks.take(devices)
        for sentence in set(self._refused.values()) - set(before[1].values()):
            logger.warning("%s", sentence)
        return (self._devices, self._refused) != before

    async def _lock_again(self) -> None:
        """Offer the devices that another pool on this machine has let go."""
        while True:
            await asyncio.sleep(LOCK_AGAIN)
            if self._refused and self._take_devices(self._reader.devices):
                self._connection.present()

    def _on_devices(self, devices: tuple[Device, ...]) -> None:
        self._fitness.on_devices(devices)
        if self._take_devices(devices):
            self._connection.present()

    def _on_readings(self, readings: list[Reading]) -> None:
        self._fitness.on_readings(readings)
        self._guard.on_readings(readings)
        self._leases.show(readings)
        mine = {device.uuid for device in self._devices}
        offered = [each for each in readings if each.device in mine]
        self._connection.outbox.tell({"report": "readings", "readings": [encode(each) for each in offered]})
        for device, who in self._outside.changes(offered):
            self._connection.outbox.put({"report": "outside_use", "device": device, "who": who})

    def _on_event(self, event: NvmlEvent) -> None:
        self._fitness.on_event(event)

    def _on_silence(self, finding: Finding) -> None:
        subject = finding.device or self._member.name
        sentence = f"{self._called(subject)}: {finding.sentence}."
        logger.warning("%s", sentence)
        if finding.seconds or finding.name:  # else readings are back
            sentence += " That condemns no device."
        self._on_report({"report": "finding", "about": "monitor", "subject": subject, "sentence": sentence})

    def _called(self, uuid: str) -> str:
        """Return the name by which people know a device, or what else this is."""
        found = (each for each in self._reader.devices if each.uuid == uuid)
        return next((f"{each.node}/gpu{each.index}" for each in found), uuid)

    def _device_of(self, uuid: str) -> Device | None:
        return next((each for each in self._devices if each.uuid == uuid), None)

    async def _device_pids(self, device: str) -> set[int] | None:
        """Answer with the PIDs that the driver lists on a device now; None where it does not say."""
        asked = self._reader.poll([device])
        await asyncio.wait([asked], timeout=LAST_WORDS)  # whoever waits may be cancelled; the poll may be too
        told = asked.result() if asked.done() and not asked.cancelled() else []
        return listed_in(told, device)

    # --------------------------------------------------------------------------------------- the controller

    def _joined(self) -> Message:
        """Present the node as it is now."""
        slices, leases = self._leases.present()
        refused = [{"device": device, "sentence": each} for device, each in sorted(self._refused.items())]
        return {
            "report": "joined",
            "node": encode(self._node()),
            "head": self._settings.head,
            "adopted": list(slices),
            "leases": list(leases),
            "remains": list(self._leases.remains()),
            "refused": refused,
        }

    def _on_connected(self) -> None:
        """Say how fit the devices are: the controller may have missed it, or did not know them yet."""
        for report in self._fitness.opinions():
            self._connection.outbox.put(report)
        self._leases.layers.say_again()

    def _node(self) -> Node:
        return Node(
            name=self._member.name,
            devices=tuple(self._instances.offered(each) for each in self._devices),
            cpus=self._settings.cpus or host.cpus(),
            memory=self._settings.memory or host.memory(),
            address=self._settings.address,
            simulated=bool(self._settings.simulated),
            switches_users=switches_users(),
        )

    def _on_report(self, report: Message) -> None:
        """Take what the leases or the devices' fitness report."""
        kind = report.get("report")
        if kind == "suspect":
            self._do(self._answer_suspicion(report))
            return
        if kind == "verdict":
            self._do(self._leases.obey({**report, "order": "verdict"}))
        if kind == "lease_idle":
            # `since` is by this machine's monotonic clock, which its processes share and nobody can set
            idle_for = max(0, time.monotonic_ns() // 1_000_000 - report["since"])
            # how long is true now only, and it is said again and again: nothing to be kept
            self._connection.outbox.tell({**report, "idle_for": idle_for})
            return
        self._connection.outbox.put(report)

    async def _answer_suspicion(self, report: Message) -> None:
        await self._leases.obey(await self._fitness.suspect(report["device"]))

    def _on_orders(self, orders: list[Message]) -> None:
        for order in orders:
            self._do(self._obey(order))

    async def _obey(self, order: Message) -> None:
        """Carry out one order; those that the tables below do not name are about leases."""
        name = str(order.get("order"))
        if name in ANSWERS:
            said = await ANSWERS[name](self, order)
            self._connection.outbox.tell({"report": "answer", "ask": order.get("ask"), **said})
        elif name in DEEDS:
            await DEEDS[name](self, order)
        else:
            await self._leases.obey(order)

    async def _take_refusal(self, order: Message) -> None:
        logger.error("%s", order.get("why"))

    async def _create_instance(self, order: Message) -> None:
        part, device, wanted = str(order.get("slice")), str(order.get("device")), order.get("instance") or {}
        said: Message = {"slice": part, "device": device}
        made, why = await self._instances.create_once(part, device, wanted)
        if made is not None:
            said |= {"uuid": made.uuid, "gpu_instance": made.gpu_instance, "instance": encode(made)}
            self._connection.outbox.put({"report": "instance_created", **said})
        else:
            self._connection.outbox.put({"report": "instance_failed", **said, "why": why})

    async def _sweep(self) -> None:
        """Look for MIG instances that belong to nothing, at first soon after the start."""
        while True:
            await asyncio.sleep(2 * self._settings.interval)
            parts = [part.get("instance") or {} for part in self._leases.parts()]
            used = {str(each.get("uuid")) for each in parts}
            looks = self._instances.suspects(used)
            for device in [each for each in self._devices if each.mig_managed and looks]:
                if number := await self._instances.sweep(device.uuid, used):
                    where = self._called(device.uuid)
                    sentence = f"{number} MIG instance(s) on {where} belonged to nothing and were destroyed."
                    self._on_report(
                        {"report": "finding", "about": "mig", "subject": device.uuid, "sentence": sentence}
                    )

    async def _destroy_instance(self, order: Message) -> None:
        device = str(order.get("device"))
        if why := await self._instances.destroy(device, order.get("instance") or {}):
            sentence = f"A MIG instance on {self._called(device)} could not be destroyed: {why}"
            self._on_report({"report": "finding", "about": "mig", "subject": device, "sentence": sentence})

    async def _answer_logs(self, order: Message) -> Message:
        return {"logs": await asyncio.to_thread(self._leases.logs, str(order.get("lease")))}

    async def _answer_attach(self, order: Message) -> Message:
        return self._leases.attach(order)

    async def _answer_drill(self, order: Message) -> Message:
        """Break a device for practice: a simulated one breaks, a real one is only judged so."""
        device, xid = str(order.get("device")), int(order.get("xid", 0))
        if not self._settings.simulated:
            self._fitness.drill(device, xid)
            return {"why": ""}
        from jupyter_gpupool.driver.simulated import Machine

        machine = Machine(self._settings.simulated["GPUPOOL_SIMULATED"])
        try:
            if xid:
                await asyncio.to_thread(machine.fail, device, xid)
            else:
                await asyncio.to_thread(machine.restore, device)
        except (KeyError, ValueError, OSError) as error:
            return {"why": f"{device} cannot be broken: {error}"}
        await self._fitness.look()
        if not xid:
            self._fitness.forgive(device)
        return {"why": ""}

    async def _answer_forgive(self, order: Message) -> Message:
        self._fitness.forgive(str(order.get("device")))
        return {"why": ""}

    async def _answer_blame(self, order: Message) -> Message:
        self._fitness.blame(str(order.get("user")))
        return {"why": ""}

    async def _answer_thresholds(self, order: Message) -> Message:
        try:
            self._fitness.set_limits(dict(order.get("limits") or {}))
        except (TypeError, ValueError) as error:
            return {"why": f"The thresholds are not used: {error}"}
        self._leases.hung_s = self._fitness.hung_s
        return {"why": ""}


#: Questions of the controller's, and who answers them.
ANSWERS = {
    "logs": Agent._answer_logs,  # noqa: SLF001 - the table of this class
    "attach": Agent._answer_attach,  # noqa: SLF001
    "drill": Agent._answer_drill,  # noqa: SLF001
    "forgive": Agent._answer_forgive,  # noqa: SLF001
    "blame": Agent._answer_blame,  # noqa: SLF001
    "thresholds": Agent._answer_thresholds,  # noqa: SLF001
}
#: Orders that are not about a lease's processes.
DEEDS = {
    "refused": Agent._take_refusal,  # noqa: SLF001
    "leave": Agent._leave,  # noqa: SLF001
    "present": Agent._present,  # noqa: SLF001
    "create_instance": Agent._create_instance,  # noqa: SLF001
    "destroy_instance": Agent._destroy_instance,  # noqa: SLF001
}


def listed_in(readings: list[Reading], device: str) -> set[int] | None:
    """Return the PIDs that readings list on a device; None where they do not say.

    Args:
        readings: What the driver has answered.
        device: UUID. One that is lost or not there any more lists nothing, and is granted to nobody.
    """
    for reading in readings:
        if reading.device == device and reading.error in ("", *OUT):
            return {pid for pid, _ in reading.processes}
    return None


def switches_users() -> bool:
    """Return whether this process can start others as other OS users."""
    return os.geteuid() == 0
