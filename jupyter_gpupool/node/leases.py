"""The leases of one node: carries out the controller's orders about them and reports what becomes of them.

Every order may come twice. Every process is in the table before it is started, so that the next agent finds
it. A slice is reported free only when all its processes have been seen gone (`guard`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.health import concerned
from jupyter_gpupool.core.model import Device, DrainMode, Layer, Slice, decode
from jupyter_gpupool.node import attach, guard
from jupyter_gpupool.node.gauges import figures
from jupyter_gpupool.node.launch import LaunchError, find_account
from jupyter_gpupool.node.lease_claims import read_claim, text
from jupyter_gpupool.node.lease_layers import Layers
from jupyter_gpupool.node.lease_logs import KeptLogs
from jupyter_gpupool.node.lease_processes import Processes
from jupyter_gpupool.node.lease_specs import address_of, device_of, scheduler_spec, worker_spec
from jupyter_gpupool.node.lease_table import FAILED, RUNNING, STARTING, STOPPING, Entry, Table, safe_name
from jupyter_gpupool.node.lease_verdicts import Verdicts
from jupyter_gpupool.node.share_limits import ShareLimits, own_layers

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Reading

logger = logging.getLogger(__name__)

#: Seconds between two rounds of housekeeping: logs that grew too large, launchers that nobody uses.
_ROUND = 60.0
#: Seconds without an agent after which the processes of leases end themselves: none is expected any more.
ALONE = 86_400.0
#: Seconds that a lease's scheduler has to answer after the deadline of a drain; it runs its owner's code, and
#: may hang.
_SILENCE = 10.0
#: So many slices that are over are remembered.
_OVER = 10_000
#: What a process says when it works, and what of that is kept.
_WORKS = {"ready": ("address", "dashboard"), "started": ("worker", "layers")}

Report = Callable[[dict[str, Any]], None]
DevicePids = Callable[[str], "set[int] | Awaitable[set[int] | None] | None"]


def _no_pids(device: str) -> set[int]:
    """Stand for a driver that lists no process on any device."""
    del device
    return set()


def _no_device(device: str) -> None:
    """Stand for a node that knows nothing of its devices."""
    del device


def _unsure(entry: Entry) -> dict[str, Any]:
    """Say that a slice is taken to be free although the driver does not say so."""
    sentence = (
        f"The processes of slice {entry.key} have ended, but the driver does not say whether its device is "
        "free; the slice is given back all the same. Look at `nvidia-smi` on that node."
    )
    return {
        "report": "finding",
        "about": "monitor",
        "subject": entry.slice.get("device", ""),
        "sentence": sentence,
    }


def _scheduler_is(address: str) -> dict[str, str]:
    return {"order": "scheduler", "address": address}


class Leases:
    """What the agent has of leases.

    Args:
        directory: The agent's own folder (0700); the table and the logs of ended leases stand there.
        report: Called with each report.
        interface: Address or network interface on which leases listen.
        ports: First and last port that they may take, or None: any.
        device_pids: Answers, at once or as a coroutine, with the PIDs that the driver lists on a device now;
            None where it does not say.
        simulated_environ: Variables that put a process onto this node's simulated machine; empty: real GPUs.
        switches_users: Whether processes run as the lease's owner; otherwise all run as the agent does.
        scratch: Where the leases' own folders stand; default: where temporary files do.
        grace_s: Seconds that processes have to end before they are killed.
        alone_s: Seconds without an agent after which they end themselves.
        hung_s: Seconds without an answer and without any work after which a worker hangs; 0: never.
        device_of: Answers with a device by its UUID, or None.
    """

    def __init__(
        self,
        directory: str | Path,
        report: Report,
        *,
        interface: str = "127.0.0.1",
        ports: tuple[int, int] | None = None,
        device_pids: DevicePids = _no_pids,
        simulated_environ: dict[str, str] | None = None,
        switches_users: bool = False,
        scratch: str | None = None,
        grace_s: float = guard.GRACE,
        alone_s: float = ALONE,
        hung_s: float = 0.0,
        device_of: Callable[[str], Device | None] = _no_device,
    ) -> None:
        folder = Path(directory)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._report = report
        self._common: dict[str, Any] = {
            "address": address_of(interface),
            "ports": list(ports) if ports else None,
            "simulated": bool(simulated_environ),
            "alone": alone_s,
            "hung": hung_s,
        }
        self._table = Table(folder / "leases.json", scratch)
        # Others find their own sockets and folders in it by name; nobody but the agent can list it.
        self._table.run.chmod(0o711 if switches_users else 0o700)
        self._logs = KeptLogs(folder / "logs")
        self._verdicts = Verdicts(report)
        self._switches, self._simulated_environ = switches_users, dict(simulated_environ or {})
        self.layers = Layers(report)
        self.shares = ShareLimits(folder / "overheads.json", device_of)
        #: Seconds from SIGTERM to SIGKILL.
        self.grace_s = grace_s
        self._processes = Processes(
            self._table,
            hear=self._hear,
            failed=self._fail,
            device_pids=device_pids,
            switches=switches_users,
            environ=dict(simulated_environ or {}),
            grace_s=grace_s,
        )
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Slices that a scheduler has been told to drain, until it has said that it is done.
        self._draining: dict[str, asyncio.Event] = {}
        self._closing = False
        #: Slices that have been seen gone: over for good, whatever order is still on its way.
        self._over: dict[str, None] = {}

    # --------------------------------------------------------------------------------------- the agent's side

    @property
    def hung_s(self) -> float:
        """Seconds after which a worker that is started from now on hangs; 0: never."""
        return float(self._common["hung"])

    @hung_s.setter
    def hung_s(self, seconds: float) -> None:
        self._common["hung"] = seconds

    async def start(self) -> None:
        """Warm the forkserver of the agent's own user, in the background."""
        self._do(self._keep_house())
        self._do(self._processes.watch_stopped())
        self._do(self._warm())

    async def warm(self) -> None:
        """Wait until the forkserver of the agent's own user is warm.

        Raises:
            LaunchError: Not even that can be started; the sentence says why.
        """
        await self._processes.warm()

    async def adopt(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Take over what a former agent of this folder has left, and end what belongs to nothing.

        Returns:
            The slices and the leases (their schedulers) whose processes live.
        """
        there = await asyncio.to_thread(guard.look)
        for entry in list(self._table.entries.values()):
            alive = self._processes.find(entry, there)
            if entry.state == STOPPING:
                self._do(self._end(entry))
            elif alive and entry.state != FAILED and await self._listen(entry):
                self._do(self._processes.watch(entry))
            else:
                entry.state = FAILED
        self._table.save()
        self._do(self._processes.end_strangers(there))
        alive_now = [each for each in self._table.entries.values() if each.state in (STARTING, RUNNING)]
        return (
            tuple(each.key for each in alive_now if not each.is_scheduler),
            tuple(each.key for each in alive_now if each.is_scheduler),
        )

    def present(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Answer with what is here: slices whose processes have not been seen gone, and live schedulers."""
        entries = list(self._table.entries.values())
        return (
            tuple(each.key for each in entries if not each.is_scheduler),
            tuple(each.key for each in entries if each.is_scheduler and each.state in (STARTING, RUNNING)),
        )

    def remains(self) -> tuple[str, ...]:
        """Answer with the leases whose scheduler is still on the list and does not work."""
        there = self._table.entries.values()
        return tuple(each.key for each in there if each.is_scheduler and each.state == FAILED)

    def parts(self) -> list[dict[str, Any]]:
        """Answer with the slices that are here, as `core.model.encode` writes them."""
        return [dict(each.slice) for each in self._table.entries.values() if each.slice]

    def users_on(self, device: str, gpu_instance: int = -1) -> list[str]:
        """Answer with the people whose slices an NVML event concerns.

        Args:
            device: The device's UUID.
            gpu_instance: The MIG instance that it names; -1: the whole device.
        """
        there = [each for each in self._table.entries.values() if each.slice.get("device") == device]
        numbers = [(each.key, (each.slice.get("instance") or {}).get("gpu_instance", -1)) for each in there]
        named = concerned(gpu_instance, numbers)
        return sorted({each.user for each in there if each.key in named})

    async def obey(self, order: dict[str, Any]) -> None:
        """Carry out one order; the reports say what came of it.

        Args:
            order: As the controller sends it.

        Raises:
            ValueError: There is no such order.
        """
        orders: dict[str, Callable[[dict[str, Any]], Coroutine[Any, Any, None]]] = {
            "start_scheduler": self._start_scheduler,
            "start_worker": self._start_worker,
            "drain": self._drain,
            "restart_worker": self._restart_worker,
            "stop_slice": self._stop,
            "end_lease": self._stop,
            "verdict": self._verdict,
        }
        if order.get("order") not in orders:
            raise ValueError(f"{order.get('order')!r} is no order; there are {', '.join(orders)}")
        # In the background: a cold start takes seconds, and orders about other leases must not wait for it.
        self._do(orders[order["order"]](order))

    def logs(self, lease: str) -> list[dict[str, str]]:
        """Answer with what the processes of a lease said, those that have ended included.

        Args:
            lease: The lease's id.
        """
        found = {each["name"]: each for each in self._logs.read(safe_name(lease))}
        for entry in self._table.of_lease(lease):
            if said := self._processes.tail(entry):
                found[entry.name] = {"name": entry.name, "text": said}
        return [found[name] for name in sorted(found)]

    def owner(self, pid: int) -> str:
        """Say whose a process is: a slice's id, a lease's id (its scheduler), or "" if it is none of ours.

        Args:
            pid: Its PID.
        """
        mine = self._table.mark("")
        key = guard.mark_of(pid, mine).removeprefix(mine)
        return key or attach.owner_of(self._table.entries.values(), pid)

    def attach(self, order: dict[str, Any]) -> dict[str, Any]:
        """Let a process of a lease's owner use the lease's devices here, and answer with what it needs.

        Args:
            order: `lease`, `user`, and `pid`, `started` and `boot` of the process.

        Returns:
            `devices` (UUIDs) and `environ`; none of these where "why" says why not.
        """
        parts = [
            each for each in self._table.of_lease(order["lease"]) if each.slice and each.state == RUNNING
        ]
        if attach.elsewhere(order) or not parts:
            return {"why": ""}
        try:
            account = find_account(order["user"], switches=self._switches)
        except LaunchError as error:
            return {"why": str(error)}
        if why := attach.refusal(order, account.uid, account.name):
            return {"why": why}
        self._detach(order)
        for entry in parts:
            entry.attached.append([order["pid"], order["started"]])
        self._table.note()
        devices = [device_of(decode(Slice, each.slice)) for each in parts]
        environ = {**self._simulated_environ, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        return {"why": "", "devices": devices, "environ": environ}

    def _detach(self, order: dict[str, Any]) -> None:
        """Forget where the process was attached before, and those that have ended."""
        for entry in self._table.entries.values():
            entry.attached = [
                [pid, started]
                for pid, started in entry.attached
                if pid != order["pid"] and guard.started_at(pid) == started
            ]

    def hold(self, part: str, *, hold: bool) -> None:
        """Have a slice's worker take no further task, or go on."""
        self._processes.send(part, {"order": "hold" if hold else "go_on"})

    def show(self, readings: Iterable[Reading]) -> None:
        """Tell workers what their devices do, for Dask's dashboard.

        Args:
            readings: Of all devices of the node, or of some.
        """
        found = {each.device: each for each in readings}
        owner = functools.cache(self.owner)
        for entry in self._table.entries.values():
            if entry.state == RUNNING and entry.slice.get("device") in found:
                part = decode(Slice, entry.slice)
                said = figures(part, found[part.device], owner)
                self._processes.mention(entry.key, {"order": "reading", "figures": said})

    def guarded(self, part: str) -> None:
        """The guard has seen a process of a share, and so holds."""
        if part in self._table.entries:
            self.layers.know(self._table.entries[part], Layer.GUARD)

    async def close(self, *, keep: bool = True) -> None:
        """Stop looking after the leases.

        Args:
            keep: Their processes go on, for the next agent; otherwise they are ended first.
        """
        self._closing = True
        if not keep:
            for key in list(self._table.entries):
                self._do(self._stop({"slice": key}))
            while self._table.entries:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._processes.close()
        if not self._table.entries:
            self._table.remove_run()
        self._table.close()

    # ------------------------------------------------------------------------------------------------- orders

    async def _start_scheduler(self, order: dict[str, Any]) -> None:
        entry = Entry(order["lease"], order["lease"], order["user"])
        await self._start_process(entry, order, lambda: scheduler_spec(self._table, order, self._common))

    async def _start_worker(self, order: dict[str, Any]) -> None:
        part = decode(Slice, order["slice"])
        entry = Entry(part.id, order["lease"], order["user"], order["slice"], scheduler=order["address"])

        def spec() -> dict[str, Any]:
            limits = self.shares.limits(entry, part, self._table.entries.values())
            return worker_spec(self._table, part, order, self._common, limits)

        await self._start_process(entry, order, spec)

    async def _drain(self, order: dict[str, Any]) -> None:
        lease, part = order["lease"], order["slice"]
        entry = self._table.entries.get(lease)
        if entry is None or entry.state not in (STARTING, RUNNING) or not self._processes.send(lease, order):
            # The scheduler is gone, and with it all that there was to move.
            self._say_drained(lease, part)
            return
        answered = self._draining.setdefault(part, asyncio.Event())
        deadline = 0 if order["mode"] == DrainMode.NOW else int(order.get("deadline_in") or 0)
        try:
            await asyncio.wait_for(answered.wait(), deadline / 1000 + _SILENCE)
        except TimeoutError:
            logger.warning(
                "the scheduler of lease %s does not answer; slice %s is taken from it", lease, part
            )
            self._say_drained(lease, part)
        finally:
            self._draining.pop(part, None)

    def _say_drained(self, lease: str, part: str) -> None:
        self._report({"report": "slice_drained", "slice": part, "lease": lease, "forced": [], "lost": []})

    async def _restart_worker(self, order: dict[str, Any]) -> None:
        self._processes.send(order["slice"], {"order": "restart", "why": order.get("why", "")})

    async def _verdict(self, order: dict[str, Any]) -> None:
        self._verdicts.say(order)

    async def _stop(self, order: dict[str, Any]) -> None:
        key = order.get("slice") or order["lease"]
        async with self._lock(key):
            entry = self._table.entries.get(key) or Entry(key, order.get("lease", key), "", state=STOPPING)
            if entry.state == STOPPING and key in self._table.entries:
                return  # it is being ended already
            entry.state = STOPPING
            self._table.entries[key] = entry
            self._table.note()
        await self._end(entry, order.get("why", ""))

    # ----------------------------------------------------------------------------------- starting one process

    async def _start_process(
        self, entry: Entry, order: dict[str, Any], make_spec: Callable[[], dict[str, Any]]
    ) -> None:
        async with self._lock(entry.key):
            if self._closing:
                return  # a replacement for what is ended here; it goes where the pool sees this node gone
            if entry.key in self._over:
                self._say_freed(entry)
                return
            there = self._table.entries.get(entry.key)
            if there is not None and there.state != FAILED:
                if entry.scheduler and not there.scheduler:
                    self._tell_scheduler(there, entry.scheduler)
                elif there.scheduler != entry.scheduler:
                    # It worked for a scheduler that is lost; the pool replaces it when it has been seen gone.
                    self._do(self._stop({"lease": entry.lease, "slice": entry.key}))
                elif there.state == RUNNING:
                    self._say_running(there)
                return
            self._table.entries[entry.key] = entry
            try:
                self._table.save()
                await self._processes.start(entry, order.get("options") or {}, make_spec())
                self._table.save()
            except LaunchError as error:
                self._fail(entry, str(error))
            except Exception as error:
                # Whatever it is: the pool must hear of it, or it would wait for ever.
                logger.exception("%s could not be started", entry.key)
                self._fail(entry, f"it could not be started: {type(error).__name__}: {error}")
            else:
                self._do(self._processes.watch(entry))

    def _tell_scheduler(self, entry: Entry, address: str) -> None:
        """Let a host that waits know where its scheduler is."""
        entry.scheduler = address
        self._table.note()
        self._processes.send(entry.key, _scheduler_is(address))

    async def _listen(self, entry: Entry) -> bool:
        try:
            await self._processes.listen(entry)
        except (LaunchError, OSError) as error:
            logger.warning("%s cannot be adopted: %s", entry.key, error)
            return False
        return True

    # ------------------------------------------------------------------------------ what processes say and do

    async def _hear(self, entry: Entry, message: dict[str, Any]) -> dict[str, Any] | None:
        """Take what a process says; it is a claim, and can only be about its own lease."""
        kind = message.get("report")
        if kind == "suspect" and entry.state != STOPPING:
            return await self._verdicts.ask(entry, text(message.get("error"), 1000))
        if kind in _WORKS and entry.state in (STARTING, RUNNING):
            self._take_up(entry, {name: text(message.get(name)) for name in _WORKS[kind]})
            for each in message.get("drained") or ():
                self._pass_on(entry, each)
        elif kind == "failed" and entry.state == STARTING:
            self._fail(entry, text(message.get("why"), 1000))
        elif kind == "starting" and entry.scheduler:
            # Told on every connection: what a former agent sent, or this one on a broken line, may be lost.
            self._processes.send(entry.key, _scheduler_is(entry.scheduler))
        elif kind == "layers":
            self.layers.claim(entry, text(message.get("layers")))
        else:
            self._pass_on(entry, message)
        return None

    def _take_up(self, entry: Entry, said: dict[str, str]) -> None:
        """Note that a process works, and say so each time it connects: a former agent may not have."""
        if (entry.state, entry.said) != (RUNNING, said):
            entry.state, entry.said = RUNNING, said
            self._table.note()
        self._say_running(entry)

    def _pass_on(self, entry: Entry, message: dict[str, Any]) -> None:
        report = read_claim(entry, message)
        if report is None:
            return
        if report["report"] == "slice_drained" and report["slice"] in self._draining:
            self._draining[report["slice"]].set()
        self._report(report)

    def _say_running(self, entry: Entry) -> None:
        if entry.is_scheduler:
            said = {"address": entry.said["address"], "dashboard": entry.said["dashboard"]}
            self._report({"report": "scheduler_started", "lease": entry.lease, **said})
        else:
            self._report({"report": "slice_started", "slice": entry.key, "lease": entry.lease})
            for layer in own_layers(entry):
                self.layers.know(entry, layer)
            self.layers.claim(entry, entry.said.get("layers", ""))  # an older agent kept none

    def _fail(self, entry: Entry, why: str) -> None:
        begun, entry.state = entry.state == RUNNING, FAILED
        self._table.note()
        if entry.is_scheduler:
            self._report({"report": "scheduler_failed", "lease": entry.lease, "why": why})
            if not begun:  # the pool gives such a lease up, and does not ask for its end
                self._do(self._stop({"lease": entry.lease}))
        else:
            self._report({"report": "slice_failed", "slice": entry.key, "lease": entry.lease, "why": why})

    # ------------------------------------------------------------------------------------------------- ending

    async def _end(self, entry: Entry, why: str = "") -> None:
        """End all processes of a slice or of a scheduler, and say so when they have been seen gone."""
        if not await self._processes.end(entry, why):
            self._report(_unsure(entry))
        said = self._processes.tail(entry)
        try:
            kept = [{"name": entry.name, "text": said}]
            await asyncio.to_thread(self._logs.keep, safe_name(entry.lease), kept)
        except OSError as error:  # the slice is free all the same
            logger.warning("what %s said cannot be kept: %s", entry.key, error)
        self._table.entries.pop(entry.key, None)
        self._locks.pop(entry.key, None)
        self.layers.forget(entry.key)
        self.shares.overheads.forget(entry.key)
        self._table.note()
        await asyncio.to_thread(self._processes.remove_folder, entry.lease)
        if not entry.is_scheduler:
            self._over[entry.key] = None
            if len(self._over) > _OVER:
                del self._over[next(iter(self._over))]
        self._say_freed(entry)

    def _say_freed(self, entry: Entry) -> None:
        if entry.is_scheduler:
            self._report({"report": "lease_freed", "lease": entry.lease})
        else:
            self._report({"report": "slice_freed", "slice": entry.key, "lease": entry.lease})

    # ------------------------------------------------------------------------------------------------ helpers

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("an order could not be carried out", exc_info=task.exception())

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_ROUND)
            try:
                await self._processes.keep_house()
            except Exception:
                # One that cannot be cleaned up after must not keep the node from all others.
                logger.exception("a round of housekeeping failed")

    async def _warm(self) -> None:
        try:
            await self._processes.warm()
        except LaunchError as error:
            logger.error("no lease can be started here: %s", error)  # noqa: TRY400 - the sentence says it all
