"""The leases of one node: carries out the controller's orders about them and reports what becomes of them.

Every order may come twice. Every process is in the table before it is started, so that the next agent finds
it. A slice is reported free only when all its processes have been seen gone (`guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from jupyter_gpupool.core.model import Slice, decode
from jupyter_gpupool.node import guard
from jupyter_gpupool.node.launch import Account, LaunchError, Launchers, find_account
from jupyter_gpupool.node.lease_logs import KeptLogs, cut, read_tail
from jupyter_gpupool.node.lease_socket import LeaseSocket
from jupyter_gpupool.node.lease_specs import launch_order, scheduler_spec, worker_spec
from jupyter_gpupool.node.lease_table import FAILED, RUNNING, STARTING, STOPPING, Entry, Table, safe_name
from jupyter_gpupool.node.lease_verdicts import Verdicts

logger = logging.getLogger(__name__)

#: Seconds between two rounds of housekeeping: logs that grew too large, launchers that nobody uses.
_ROUND = 60.0

Report = Callable[[dict[str, Any]], None]
DevicePids = Callable[[str], "set[int] | Awaitable[set[int]]"]


def _no_pids(device: str) -> set[int]:
    """Stand for a driver that lists no process on any device."""
    del device
    return set()


class Leases:
    """What the agent has of leases.

    Args:
        directory: The agent's own folder (0700); the table and the logs of ended leases stand there.
        report: Called with each report.
        interface: Address or network interface on which leases listen.
        ports: First and last port that they may take, or None: any.
        device_pids: Answers, at once or as a coroutine, with the PIDs that the driver lists on a device now.
        simulated_environ: Variables that put a process onto this node's simulated machine; empty: real GPUs.
        switches_users: Whether processes run as the lease's owner; default: where the agent is root.
        scratch: Where the leases' own folders stand; default: where temporary files do.
        grace_s: Seconds that processes have to end before they are killed.
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
    ) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._report = report
        self._common = {
            "address": address_of(interface),
            "ports": list(ports) if ports else None,
            "simulated": bool(simulated_environ),
        }
        self._device_pids = device_pids
        self._simulated = dict(simulated_environ or {})
        self._switches = switches_users
        self._grace_s = grace_s
        self._table = Table(self._directory / "leases.json", scratch)
        # Others find their own sockets and folders in it by name; nobody but the agent can list it.
        self._table.run.chmod(0o711 if self._switches else 0o700)
        self._logs = KeptLogs(self._directory / "logs")
        if self._simulated:
            self._simulated.setdefault("DASK_CUDA_TEST_SINGLE_GPU", "1")
        self._launchers = Launchers(
            self._table.run, switches=self._switches, environ=self._simulated, on_exit=self._exited
        )
        self._verdicts = Verdicts(report)
        self._sockets: dict[str, LeaseSocket] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._codes: dict[int, int] = {}

    # --------------------------------------------------------------------------------------- the agent's side

    async def start(self) -> None:
        """Warm the forkserver of the user that is known already: the agent's own.

        Raises:
            LaunchError: Not even that can be started; the sentence says why.
        """
        self._do(self._keep_house())
        if not self._switches:
            await self._launchers.warm(find_account("", switches=False))

    async def adopt(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Take over what a former agent of this folder has left, and end what belongs to nothing.

        Returns:
            The slices and the leases (their schedulers) whose processes live.
        """
        processes = await asyncio.to_thread(guard.look)
        for entry in list(self._table.entries.values()):
            if entry.state == STOPPING:
                self._do(self._end(entry))
            elif self._find_process(entry, processes):
                await self._listen(entry)
                self._do(self._watch(entry))
            else:
                entry.state = FAILED
        self._table.save()
        known = {self._table.mark(key) for key in self._table.entries}
        for mark in guard.marked(self._table.mark(""), processes):
            if mark not in known:
                self._do(guard.end([mark], (), grace_s=self._grace_s))
        alive = [each for each in self._table.entries.values() if each.state in (STARTING, RUNNING)]
        return (
            tuple(each.key for each in alive if not each.is_scheduler),
            tuple(each.key for each in alive if each.is_scheduler),
        )

    def present(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Answer with what is here: slices whose processes have not been seen gone, and live schedulers."""
        entries = list(self._table.entries.values())
        return (
            tuple(each.key for each in entries if not each.is_scheduler),
            tuple(each.key for each in entries if each.is_scheduler and each.state in (STARTING, RUNNING)),
        )

    def parts(self) -> list[dict[str, Any]]:
        """Answer with the slices that are here, as `core.model.encode` writes them."""
        return [dict(each.slice) for each in self._table.entries.values() if each.slice]

    def users_on(self, device: str) -> list[str]:
        """Answer with the people whose slices are on a device.

        Args:
            device: Its UUID.
        """
        there = (each for each in self._table.entries.values() if each.slice)
        return sorted({each.user for each in there if each.slice.get("device") == device})

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
            text = self._tail(entry)
            if text:
                found[entry.name] = {"name": entry.name, "text": text}
        return [found[name] for name in sorted(found)]

    def owner(self, pid: int) -> str:
        """Say whose a process is: a slice's id, a lease's id (its scheduler), or "" if it is none of ours.

        Args:
            pid: Its PID.
        """
        process = guard.look_at(pid)
        agent, _, key = ("" if process is None else process.mark).partition(":")
        return key if agent == self._table.agent else ""

    def pids(self) -> set[int]:
        """Answer with the PIDs of all processes of the leases here."""
        found = guard.marked(self._table.mark(""), guard.look())
        return {pid for members in found.values() for pid, _ in members}

    async def close(self, *, keep: bool = True) -> None:
        """Stop looking after the leases.

        Args:
            keep: Their processes go on, for the next agent; otherwise they are ended first.
        """
        if not keep:
            await asyncio.gather(*(self._stop({"slice": key}) for key in list(self._table.entries)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for line in list(self._sockets.values()):
            await line.close()
        await self._launchers.close()
        if not self._table.entries:
            self._table.remove_run()

    # ------------------------------------------------------------------------------------------------- orders

    async def _start_scheduler(self, order: dict[str, Any]) -> None:
        entry = Entry(order["lease"], order["lease"], order["user"])
        await self._start_process(entry, order, lambda: scheduler_spec(self._table, order, self._common))

    async def _start_worker(self, order: dict[str, Any]) -> None:
        part = decode(Slice, order["slice"])
        entry = Entry(part.id, order["lease"], order["user"], order["slice"], scheduler=order["address"])
        await self._start_process(entry, order, lambda: worker_spec(self._table, part, order, self._common))

    async def _drain(self, order: dict[str, Any]) -> None:
        if order["lease"] in self._sockets:
            self._sockets[order["lease"]].send(order)

    async def _restart_worker(self, order: dict[str, Any]) -> None:
        if order["slice"] in self._sockets:
            self._sockets[order["slice"]].send({"order": "restart", "why": order.get("why", "")})

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
            self._table.save()
        await self._end(entry)

    # ----------------------------------------------------------------------------------- starting one process

    async def _start_process(
        self, entry: Entry, order: dict[str, Any], make_spec: Callable[[], dict[str, Any]]
    ) -> None:
        async with self._lock(entry.key):
            there = self._table.entries.get(entry.key)
            if there is not None and there.state != FAILED:
                if there.scheduler != entry.scheduler:
                    # It worked for a scheduler that is lost; the pool replaces it when it has been seen gone.
                    self._do(self._stop({"lease": entry.lease, "slice": entry.key}))
                elif there.state == RUNNING:
                    self._say_running(there)
                return
            self._table.entries[entry.key] = entry
            self._table.save()
            try:
                await self._launch(entry, order.get("options") or {}, make_spec())
            except LaunchError as error:
                self._fail(entry, str(error))
                return
            except Exception as error:
                # Whatever it is: the pool must hear of it, or it would wait for ever.
                logger.exception("%s could not be started", entry.key)
                self._fail(entry, f"it could not be started: {type(error).__name__}: {error}")
                return
            self._do(self._watch(entry))

    async def _launch(self, entry: Entry, options: dict[str, Any], spec: dict[str, Any]) -> None:
        account = find_account(entry.user, switches=self._switches)
        self._make_folder(entry, account)
        await self._listen(entry)
        environment = options.get("environment") or {}
        variables = {str(name): str(value) for name, value in (environment.get("variables") or {}).items()}
        entry.pid = await self._launchers.start(
            account,
            launch_order(self._table, entry, environment.get("working_directory", ""), spec),
            python=environment.get("python", ""),
            variables=variables,
        )
        entry.started = guard.started_at(entry.pid)
        self._table.save()

    def _make_folder(self, entry: Entry, account: Account) -> None:
        folder = self._table.folder(entry.lease)
        folder.mkdir(mode=0o700, exist_ok=True)
        if account.switch:
            os.chown(folder, account.uid, account.gid, follow_symlinks=False)

    async def _listen(self, entry: Entry) -> None:
        if entry.key in self._sockets:
            return
        uid = find_account(entry.user, switches=self._switches).uid

        async def hear(message: dict[str, Any]) -> dict[str, Any] | None:
            return await self._hear(entry.key, message)

        line = self._sockets[entry.key] = LeaseSocket(self._table.socket(entry.key), uid, hear)
        await line.open()

    # ------------------------------------------------------------------------------ what processes say and do

    async def _hear(self, key: str, message: dict[str, Any]) -> dict[str, Any] | None:
        """Take what a process says; it is a claim, and can only be about its own lease."""
        entry = self._table.entries.get(key)
        if entry is None:
            return None
        kind = message.get("report")
        if kind == "suspect" and entry.state != STOPPING:
            return await self._verdicts.ask(entry, str(message.get("error", ""))[:1000])
        if kind in ("ready", "started") and entry.state == STARTING:
            entry.state = RUNNING
            entry.said = {name: str(value) for name, value in message.items()}
            self._table.save()
            self._say_running(entry)
        elif kind == "failed" and entry.state == STARTING:
            self._fail(entry, str(message.get("why", ""))[:1000])
        elif kind in _PASSED_ON:
            self._report(
                {**_PASSED_ON[kind](message), "report": _NAMES.get(kind, kind), "lease": entry.lease}
            )
        return None

    def _say_running(self, entry: Entry) -> None:
        if entry.is_scheduler:
            said = {"address": entry.said["address"], "dashboard": entry.said["dashboard"]}
            self._report({"report": "scheduler_started", "lease": entry.lease, **said})
        else:
            self._report({"report": "slice_started", "slice": entry.key, "lease": entry.lease})

    async def _watch(self, entry: Entry) -> None:
        """Report a process that ends without having been told to."""
        await guard.wait_gone((entry.pid, entry.started))
        await asyncio.sleep(0.05)  # let the launcher's word of its exit status come in
        code = self._codes.pop(entry.pid, None)
        if self._table.entries.get(entry.key) is entry and entry.state in (STARTING, RUNNING):
            status = "" if code is None else f" with status {code}"
            said = self._tail(entry).strip().splitlines()
            self._fail(
                entry, f"its process ended{status}; its last words: {said[-1][:500] if said else 'none'}"
            )

    def _exited(self, pid: int, code: int) -> None:
        if any(each.pid == pid for each in self._table.entries.values()):
            self._codes[pid] = code

    def _fail(self, entry: Entry, why: str) -> None:
        entry.state = FAILED
        self._table.save()
        if entry.is_scheduler:
            self._report({"report": "scheduler_failed", "lease": entry.lease, "why": why})
        else:
            self._report({"report": "slice_failed", "slice": entry.key, "lease": entry.lease, "why": why})

    # ------------------------------------------------------------------------------------------------- ending

    async def _end(self, entry: Entry) -> None:
        """End all processes of a slice or of a scheduler, and say so when they have been seen gone."""
        if entry.key in self._sockets:
            self._sockets[entry.key].send({"order": "end" if entry.is_scheduler else "stop"})
        device = entry.slice.get("device", "")
        await guard.end(
            [self._table.mark(entry.key)],
            entry.roots,
            grace_s=self._grace_s,
            device_pids=(lambda: self._device_pids(device)) if device else set,
        )
        self._logs.keep(safe_name(entry.lease), [{"name": entry.name, "text": self._tail(entry)}])
        if entry.key in self._sockets:
            await self._sockets.pop(entry.key).close()
        self._table.socket(entry.key).unlink(missing_ok=True)
        self._table.entries.pop(entry.key, None)
        self._table.save()
        if not self._table.of_lease(entry.lease):
            await asyncio.to_thread(shutil.rmtree, self._table.folder(entry.lease), ignore_errors=True)
        if entry.is_scheduler:
            self._report({"report": "lease_freed", "lease": entry.lease})
        else:
            self._report({"report": "slice_freed", "slice": entry.key, "lease": entry.lease})

    # ------------------------------------------------------------------------------------------------ helpers

    def _find_process(self, entry: Entry, processes: dict[int, guard.Process]) -> bool:
        """Whether an entry's process lives; one that was forked just before its agent died has its mark."""
        if not entry.pid:
            mine = guard.marked(self._table.mark(entry.key), processes).get(
                self._table.mark(entry.key), set()
            )
            leaders = [each for each in mine if processes[each[0]].session == each[0]]
            entry.pid, entry.started = min(leaders, key=lambda each: each[1], default=(0, 0))
        there = processes.get(entry.pid)
        alive = there is not None and there.started == entry.started and not there.zombie
        return alive and entry.state in (STARTING, RUNNING)

    def _tail(self, entry: Entry) -> str:
        try:
            uid = find_account(entry.user, switches=self._switches).uid
        except LaunchError:
            return ""
        return read_tail(self._table.log(entry), uid)

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
            for entry in list(self._table.entries.values()):
                with contextlib.suppress(LaunchError):
                    cut(self._table.log(entry), find_account(entry.user, switches=self._switches).uid)
            await self._launchers.end_unused(asyncio.get_running_loop().time())


#: What a scheduler or worker says that the controller hears as well, and which of its fields.
_PASSED_ON: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "drained": lambda said: {
        "slice": str(said.get("slice", "")),
        "forced": [str(key) for key in said.get("forced", ())],
        "lost": [str(key) for key in said.get("lost", ())],
    },
    "idle": lambda said: {"since": int(said.get("since", 0))},
    "busy": lambda _: {},
    "first_task": lambda said: {"slice": str(said.get("slice", ""))},
}
_NAMES = {"drained": "slice_drained", "idle": "lease_idle", "busy": "lease_busy"}


def address_of(interface: str) -> str:
    """Answer with the address that an interface has, or that is given itself.

    Args:
        interface: "eth0", or an address.

    Raises:
        ValueError: There is no such interface, or it has no address.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    known = psutil.net_if_addrs()
    for each in known.get(interface, ()):
        if each.family.name == "AF_INET":
            return str(each.address)
    raise ValueError(
        f"there is no network interface {interface} with an address here; there are {', '.join(known)}"
    )
