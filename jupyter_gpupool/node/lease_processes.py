"""The processes of the leases on one node: started, listened to, watched and ended.

Not its business: what an order or a report means (`leases`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.node import attach, guard
from jupyter_gpupool.node.launch import Account, LaunchError, Launchers, find_account
from jupyter_gpupool.node.lease_child import UNUSABLE
from jupyter_gpupool.node.lease_logs import cut, read_tail
from jupyter_gpupool.node.lease_socket import LeaseSocket
from jupyter_gpupool.node.lease_specs import launch_order, wishes
from jupyter_gpupool.node.lease_table import RUNNING, STARTING, Entry, Table
from jupyter_gpupool.node.yielding import Yielding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    DevicePids = Callable[[str], set[int] | Awaitable[set[int] | None] | None]
    Hear = Callable[[Entry, dict[str, Any]], Awaitable[dict[str, Any] | None]]

logger = logging.getLogger(__name__)

#: Seconds for what a process that has been seen gone said last, and for its launcher to tell its exit status.
_WORD, _STATUS = 0.05, 2.0
#: Seconds between two looks at whether somebody has stopped one, and how many in a row must find it so.
_LOOK, _TIMES = 2.0, 3
#: Seconds until a driver that has not said what it lists is asked again.
_ASK = 0.5


class Processes:
    """The processes of one agent's leases.

    Args:
        table: Which there are.
        hear: Called with what one of them says; what it answers is sent back.
        failed: Called with one that has ended without having been told to, and why.
        device_pids: Answers with the PIDs that the driver lists on a device; None where it does not say.
        switches: Whether they run as the leases' owners.
        environ: Variables for all of them.
        grace_s: Seconds that they have to end before they are killed.
    """

    def __init__(
        self,
        table: Table,
        *,
        hear: Hear,
        failed: Callable[[Entry, str], None],
        device_pids: DevicePids,
        switches: bool,
        environ: dict[str, str],
        grace_s: float,
    ) -> None:
        self._table = table
        self._hear, self._failed = hear, failed
        self._device_pids = device_pids
        self._switches = switches
        self._grace_s = grace_s
        self._sockets: dict[str, LeaseSocket] = {}
        self._launchers = Launchers(table.run, switches=switches, environ=environ)

    async def warm(self) -> None:
        """Have a launcher ready for the agent's own user, who may be the only one.

        Raises:
            LaunchError: Not even that can be started; the sentence says why.
        """
        await self._launchers.warm(find_account("", switches=False))

    async def start(self, entry: Entry, options: dict[str, Any], spec: dict[str, Any]) -> None:
        """Start the process of an entry.

        Args:
            entry: Which.
            options: The request's; "environment" may name an interpreter, variables and a working directory.
            spec: What the process is told.

        Raises:
            LaunchError: It could not be started.
        """
        account = find_account(entry.user, switches=self._switches)
        self._make_folder(entry, account)
        await self.listen(entry)
        environment = options.get("environment") or {}
        variables = {str(name): str(value) for name, value in (environment.get("variables") or {}).items()}
        entry.pid = await self._launchers.start_in(
            account,
            launch_order(self._table, entry, environment, spec),
            python=environment.get("python", ""),
            preferred=wishes(environment).get("python", ""),
            variables=variables,
        )
        entry.started = guard.started_at(entry.pid)

    async def listen(self, entry: Entry) -> None:
        """Listen to a process, in place of an agent that did so before.

        Raises:
            LaunchError: Its user is not known here any more.
        """
        if entry.key in self._sockets:
            return
        uid = self._uid(entry)

        async def hear(message: dict[str, Any]) -> dict[str, Any] | None:
            now = self._table.entries.get(entry.key)
            return None if now is None else await self._hear(now, message)

        line = self._sockets[entry.key] = LeaseSocket(self._table.socket(entry.key), uid, hear)
        await line.open()

    def send(self, key: str, order: dict[str, Any]) -> bool:
        """Send an order to a process, now or when it is connected; False where nobody listens to one."""
        if key not in self._sockets:
            return False
        self._sockets[key].send(order)
        return True

    def mention(self, key: str, order: dict[str, Any]) -> None:
        """Send an order to a process if it hears it now."""
        if key in self._sockets:
            self._sockets[key].mention(order)

    async def watch(self, entry: Entry) -> None:
        """Wait until a process has ended, and say so where it had not been told to."""
        await guard.wait_gone((entry.pid, entry.started))
        await asyncio.sleep(_WORD)
        code = await self._launchers.exit_status(entry.pid, _STATUS)
        if self._table.entries.get(entry.key) is entry and entry.state in (STARTING, RUNNING):
            said = self.tail(entry).strip().splitlines()
            self._failed(entry, _why(code, said[-1][:500] if said else "none"))

    async def watch_stopped(self) -> None:
        """Kill for good what somebody has stopped: it does nothing for its lease and never ends by itself.

        A worker is its host's to look after. This is for hosts and schedulers, after which the pool starts
        others. Schedulers that never pause yield to everybody else meanwhile.
        """
        found: dict[guard.Identity, int] = {}
        yielding = Yielding()
        while True:
            await asyncio.sleep(_LOOK)
            there = self._table.entries.values()
            working = [each for each in there if each.pid and each.state in (STARTING, RUNNING)]
            yielding.look(each.pid for each in working if each.is_scheduler)
            now = [(each.pid, each.started) for each in working if guard.is_stopped(each.pid)]
            found = {each: found.get(each, 0) + 1 for each in now}
            for each in (each for each, times in found.items() if times >= _TIMES):
                logger.warning("process %d was stopped for %.0f s; it is killed", each[0], _TIMES * _LOOK)
                guard.send(each, signal.SIGKILL)

    async def end(self, entry: Entry, why: str = "") -> bool:
        """End an entry's process and all that it has started, and return when all have been seen gone.

        Args:
            entry: Which.
            why: What a lease's clients are told.

        Returns:
            Whether the driver, too, has said so. One that does not answer is waited for, and not for ever.
        """
        marks = [self._table.mark(entry.key)]
        # Before they are told: one that has gone at once may stay in the driver's list for a while.
        processes = await asyncio.to_thread(guard.look)
        there = guard.find(marks, entry.roots, processes, self._marks())
        self.send(entry.key, {"order": "end" if entry.is_scheduler else "stop", "why": why})
        said = await asyncio.gather(
            self._end_all(entry, marks, entry.roots | there), self._end_attached(entry)
        )
        if entry.key in self._sockets:
            await self._sockets.pop(entry.key).close()
        self._table.socket(entry.key).unlink(missing_ok=True)
        return all(said)

    async def _end_all(self, entry: Entry, marks: Iterable[str], there: set[guard.Identity]) -> bool:
        """End processes, and return whether the driver has said at last that it lists none of them."""
        device, last = entry.slice.get("device", ""), [True]

        async def listed() -> set[int] | None:
            found = await self._pids_on(device)
            last[0] = found is not None
            return found

        await guard.end(
            marks,
            there,
            grace_s=self._grace_s,
            device_pids=listed if device else set,
            others=self._marks,
        )
        return last[0]

    async def _end_attached(self, entry: Entry) -> bool:
        """End its owner's own processes that use the device: all, where the driver does not say in time."""
        if not entry.attached:
            return True
        device, until = entry.slice.get("device", ""), time.monotonic() + guard.STALE
        while (pids := await self._pids_on(device)) is None and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_ASK)
        using = attach.using(entry, pids, await asyncio.to_thread(guard.look), self._marks())
        return await self._end_all(entry, (), using) if using else True

    async def _pids_on(self, device: str) -> set[int] | None:
        found = self._device_pids(device)
        return await found if inspect.isawaitable(found) else found

    def _marks(self) -> set[str]:
        """Return the marks of all that there is here."""
        return {self._table.mark(key) for key in self._table.entries}

    async def end_strangers(self, processes: dict[int, guard.Process]) -> None:
        """End what carries a mark of this agent's and is in no entry.

        Args:
            processes: All there are, as `guard.look` answers.
        """
        known = self._marks()
        strangers = [mark for mark in guard.marked(self._table.mark(""), processes) if mark not in known]
        if strangers:
            logger.warning("processes of %d lost entries are ended", len(strangers))
            await guard.end(strangers, (), grace_s=self._grace_s, others=self._marks)

    def find(self, entry: Entry, processes: dict[int, guard.Process]) -> bool:
        """Whether an entry's process lives; one that was forked just before its agent died has its mark.

        Args:
            entry: Which.
            processes: All there are, as `guard.look` answers.
        """
        if not entry.pid:
            mark = self._table.mark(entry.key)
            mine = guard.marked(mark, processes).get(mark, set())
            leaders = [each for each in mine if processes[each[0]].session == each[0]]
            entry.pid, entry.started = min(leaders, key=lambda each: each[1], default=(0, 0))
        there = processes.get(entry.pid)
        return there is not None and there.started == entry.started and not there.zombie

    def tail(self, entry: Entry) -> str:
        """Answer with the end of an entry's log."""
        with contextlib.suppress(LaunchError):
            return read_tail(self._table.log(entry), self._uid(entry))
        return ""

    def remove_folder(self, lease: str) -> None:
        """Remove a lease's own folder when nothing of the lease is left here."""
        if not self._table.of_lease(lease):
            shutil.rmtree(self._table.folder(lease), ignore_errors=True)

    async def keep_house(self) -> None:
        """Cut logs that are too large, and end launchers that nobody uses and what dead workers left."""
        for entry in list(self._table.entries.values()):
            with contextlib.suppress(LaunchError):
                cut(self._table.log(entry), self._uid(entry))
        there = await asyncio.to_thread(guard.look)
        left = guard.orphans(self._launchers.forkservers(), there, guard.ticks(), self._marks())
        if left:
            logger.warning("%d processes that dead workers left behind are ended", len(left))
            await guard.end((), left, grace_s=self._grace_s, others=self._marks)
        await self._launchers.end_unused(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Let go of everything; what runs goes on."""
        for line in list(self._sockets.values()):
            await line.close()
        self._sockets.clear()
        await self._launchers.close()

    def _make_folder(self, entry: Entry, account: Account) -> None:
        folder = self._table.folder(entry.lease)
        folder.mkdir(mode=0o700, exist_ok=True)
        if account.switch:
            os.chown(folder, account.uid, account.gid, follow_symlinks=False)

    def _uid(self, entry: Entry) -> int:
        return find_account(entry.user, switches=self._switches).uid


def _why(code: int | None, last: str) -> str:
    """Say why a process has ended, by its exit status and its last words."""
    if code == UNUSABLE:
        return last
    status = "" if code is None else f" with status {code}"
    return f"its process ended{status}; its last words: {last}"
