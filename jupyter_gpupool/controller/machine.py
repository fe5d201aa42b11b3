"""The controller: the pool and its journal on one side, the agents on the other, the HTTP API on top.

Rule 1: what agents report becomes pool events (`reports`), what follows becomes orders (`plugin.Orders`).
        Nothing here decides what is granted, drained or ended: `core.pool` does.
Rule 2: orders are not kept. When an agent is back, and when the controller has started anew, what is
        outstanding follows from the pool's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.accounts import Accounts
from jupyter_gpupool.controller.agents import Agents
from jupyter_gpupool.controller.auth import Authority, Tokens
from jupyter_gpupool.controller.certificates import Certificates
from jupyter_gpupool.controller.clock import Clock
from jupyter_gpupool.controller.fitness import PoolFitness
from jupyter_gpupool.controller.hearing import Hearing
from jupyter_gpupool.controller.homes import Homes
from jupyter_gpupool.controller.keeper import Keeper
from jupyter_gpupool.controller.keys import Keys
from jupyter_gpupool.controller.lease_views import is_over
from jupyter_gpupool.controller.plugin import Orders, PoolScheduler
from jupyter_gpupool.controller.records import StoreError
from jupyter_gpupool.core.model import (
    DrainSlice,
    EndLease,
    LeaseRekeyed,
    LeaseReleased,
    LeaseStarted,
    LeaseState,
    NodeSilent,
    Notice,
    Notify,
    Reading,
    SliceState,
    StartLease,
    VerdictChanged,
)
from jupyter_gpupool.core.state import NodeState, SchedulerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_gpupool.controller.store import Heard, Once, Store
    from jupyter_gpupool.core.model import Instruction, PoolEvent
    from jupyter_gpupool.core.pool import Pool

logger = logging.getLogger(__name__)

#: Seconds between two looks at the time.
TICK = 1.0
#: Seconds that agents have to come back after the controller's start before they count as silent.
PATIENCE = 5.0
#: Seconds to wait for an agent's answer.
ANSWER = 10.0
#: Seconds that agents have to end what they run when the whole pool is stopped.
LEAVING = 30.0
#: What an agent may have missed; what concerns its own slices follows from its joining.
AGAIN = (StartLease, EndLease, DrainSlice)


class Controller:
    """One pool's controller; what the HTTP API needs of it is `face.ControllerFace`.

    Args:
        store: The journal, open.
        authority: The pool's certificate authority.
        trust_users: Whether people trust one another, where agents cannot switch users.
        accounts: As which OS users people's leases run; default: as those of their names.

    Raises:
        StoreError: The journal is damaged.
    """

    def __init__(
        self,
        store: Store,
        authority: Authority,
        *,
        trust_users: bool = False,
        accounts: Accounts | None = None,
    ) -> None:
        self.store = store
        self.authority = authority
        self.accounts = accounts or Accounts()
        self.certificates = Certificates(store)
        self.trust_users = trust_users
        self.clock = Clock(store)
        self.tokens = Tokens(store)
        self.keys = Keys(store)
        self.hearing = Hearing(self)
        self.fitness = PoolFitness(self)
        #: The last reading of each device, by its UUID.
        self.readings: Mapping[str, Reading] = MappingProxyType(self.hearing.readings)
        self.address = ""
        self.stopped = asyncio.Event()
        self._keeper = Keeper(store, self.clock, self._follow)
        self._orders = Orders(self)
        self._homes = Homes(self)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._owed = False
        self._closing = False
        self._patient_until = time.monotonic() + PATIENCE
        self.keys.forget_all_but(self._living())
        self.hearing.idleness.remember(self.pool.leases.values())

    # ------------------------------------------------------------------------------------------ life

    async def start(self, host: str, port: int) -> None:
        """Listen to agents.

        Args:
            host: The address to listen on.
            port: The port; 0: any.

        Raises:
            OSError: The port is in use.
        """
        self.scheduler = PoolScheduler(
            self,
            host=host,
            port=port,
            security=self.authority.comm_security(),
            folder=self.authority.folder,
        )
        self.agents = Agents(self.scheduler, self.store.heard(), certificates=self.certificates)
        try:
            await self.scheduler
        except RuntimeError as error:
            raise error.__cause__ or error from None
        self.address = self.scheduler.address
        self._run(self._tick_forever())

    async def close(self) -> None:
        """Hang up on everybody; leases and agents go on."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await self.scheduler.close(reason="controller-stopped")
        self.store.close()

    def stop(self, why: str, *, everything: bool = False) -> None:
        """End the controller's process softly.

        Args:
            why: For the log.
            everything: Agents end their leases and themselves first; otherwise leases go on.
        """
        logger.info("The controller stops: %s", why)
        self._run(self._stop(why, everything=everything))

    async def _stop(self, why: str, *, everything: bool) -> None:
        if everything:
            with contextlib.suppress(StoreError):  # agents end what runs even so
                self._release_all(why)
            for node in self.agents.nodes:
                self.agents.tell(node, {"order": "leave"})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVING):
                    while self.agents.nodes:
                        await self.changed(1)
        self.stopped.set()

    def _release_all(self, why: str) -> None:
        """Give back all leases, what waits first: the next start must not take them up again."""
        leases = [each for each in self.pool.leases.values() if not is_over(each)]
        for lease in sorted(leases, key=lambda each: each.state is not LeaseState.PENDING):
            self.submit(LeaseReleased(now=self.clock.now(), cause="controller", lease=lease.id, why=why))

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            try:
                await self.scheduler.check_worker_ttl()
                self._tick()
            except StoreError as error:
                logger.error("%s", error)  # noqa: TRY400 - one sentence is all there is to it
            except Exception:
                logger.exception("A tick failed.")

    def _tick(self) -> None:
        self.clock.renew()
        if time.monotonic() > self._patient_until:
            self._note_silence()
            self._ask_who_is_there()
        for event in list(self.hearing.idleness.changes(self.pool.leases, self.readings, self.clock.now())):
            self.submit(event)
        self._keeper.tick()
        self._homes.look()
        if self._owed:
            self._owed = False
            self.again()
        self._keeper.compact()

    def _note_silence(self) -> None:
        """Tell the pool of nodes that are not connected; after a start, agents get some time to come back."""
        for name, record in list(self.pool.nodes.items()):
            if record.state is NodeState.UP and not self.agents.connected(name):
                self.submit(NodeSilent(now=self.clock.now(), cause="not connected", node=name))

    def _ask_who_is_there(self) -> None:
        """Let agents present themselves again whose coming could not be journaled."""
        for name in self.agents.nodes:
            record = self.pool.nodes.get(name)
            if record is None or record.state is not NodeState.UP:
                self.agents.tell(name, {"order": "present"})

    # ------------------------------------------------------------------------------------------ the pool

    @property
    def pool(self) -> Pool:
        """The pool; to be read only."""
        return self._keeper.pool

    def submit(
        self, event: PoolEvent, once: Once | None = None, heard: Heard | None = None
    ) -> list[Instruction]:
        """Journal a pool event, let the pool handle it, carry out what follows, and return that.

        Args:
            event: What has happened.
            once: The idempotency key that came with it.
            heard: The agent's report that it was.

        Raises:
            StoreError: It could not be journaled; nothing has changed.
        """
        return self._keeper.submit(event, once, heard)

    def _follow(self, event: PoolEvent, instructions: list[Instruction]) -> None:
        """Do what follows from a pool event that has been journaled."""
        for instruction in instructions:
            self._carry_out(instruction)
        if isinstance(event, LeaseStarted):
            self._start_workers(event.lease)
        if isinstance(event, LeaseRekeyed):
            self.hearing.idleness.withdraw(event.lease)
        if isinstance(event, VerdictChanged):
            self._pass_on(event)
        for instruction in instructions:
            if isinstance(instruction, Notify) and instruction.notice is Notice.ENDED:
                self.hearing.idleness.withdraw(instruction.lease)
                self.keys.forget(instruction.lease)
        self.wake()

    def _carry_out(self, instruction: Instruction) -> None:
        try:
            self._orders.carry_out(instruction)
        except Exception:  # it has happened, so what follows is still owed
            logger.exception("%s could not be carried out; it is tried again.", instruction)
            self._owed = True

    def again(self, node: str = "") -> None:
        """Carry out again what is outstanding: all of it, or what an agent may have missed."""
        for instruction in self.pool.orders():
            if not node or (isinstance(instruction, AGAIN) and self.home(instruction.lease) == node):
                self._carry_out(instruction)

    def _start_workers(self, lease: str) -> None:
        """Start the workers that waited for their scheduler's address."""
        record = self.pool.leases.get(lease)
        if record is None or record.scheduler is not SchedulerState.UP:
            return
        for slice_ in record.slices.values():
            made = slice_.instance is None or slice_.instance.uuid
            if slice_.state is SliceState.STARTING and made:
                self._orders.start_worker(record.request, slice_, record.address)

    def _pass_on(self, event: VerdictChanged) -> None:
        """Let the leases' schedulers know how fit a device is."""
        order = {"order": "verdict", "device": event.device, "verdict": event.verdict.value}
        self.agents.tell(self.keys.head, {**order, "sentence": event.sentence})

    @property
    def busy(self) -> bool:
        """Whether there is a lease or a request."""
        return bool(self._living())

    def _living(self) -> set[str]:
        return {lease.id for lease in self.pool.leases.values() if not lease.ended_at}

    def account(self, lease: str) -> str:
        """Return the OS user as whom a lease runs: the one it was started as, whatever the map says now."""
        keys = self.keys.of(lease) or {}
        return str(keys.get("account") or self.accounts.of(self.pool.leases[lease].request.user))

    def home(self, lease: str) -> str:
        """Return the node on which a lease's scheduler runs, or is to run."""
        return self.keys.home(lease)

    # ------------------------------------------------------------------------------------- the agents' side

    def on_left(self, worker: str) -> None:
        """An agent's connection is gone."""
        node = self.agents.left(worker)
        if node in self.pool.nodes and not self._closing:
            with contextlib.suppress(StoreError):  # the next tick tries again
                self.submit(NodeSilent(now=self.clock.now(), cause="its connection broke", node=node))
        self.wake()

    async def remove(self, node: str) -> None:
        """Let a node's agent never come back on a certificate that it has, and hang up on it.

        Raises:
            StoreError: It is as it was.
        """
        self.certificates.revoke(node)
        await self.agents.hang_up(node)

    # ---------------------------------------------------------------------------------------- the API's side

    def wake(self) -> None:
        """Let everybody look who waits for a change."""
        old, self._changed = self._changed, asyncio.Event()
        old.set()

    async def changed(self, timeout_s: float) -> None:
        """Return when anything changes, or after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    def connected(self, node: str) -> bool:
        """Return whether a node's agent hears what it is told now."""
        return self.agents.connected(node)

    @property
    def layers_revision(self) -> int:
        """A number that grows whenever a slice's layers change."""
        return self.hearing.overuse.revision

    def layers(self, part: str) -> Mapping[str, str]:
        """Return the layers that keep a slice within its share, with their states."""
        return self.hearing.overuse.layers(part)

    def reading_age(self, device: str) -> float:
        """Return how old the last reading of a device is, in seconds; infinite where there is none."""
        return self.hearing.age(device)

    def connection(self, lease: str, user: str) -> dict[str, Any] | None:
        """Return how a lease's scheduler is reached, with its credentials; None: it does not run.

        Args:
            lease: The lease's id.
            user: Who gets them, which is written down.

        Raises:
            StoreError: It could not be written.
        """
        record, keys = self.pool.leases.get(lease), self.keys.of(lease)
        if record is None or keys is None or record.scheduler is not SchedulerState.UP:
            return None
        self.keys.give(lease, user)
        parts = ("ca", "cert", "key", "dashboard", "secret")
        return {"address": record.address, **{part: keys[part] for part in parts}}

    async def logs(self, lease: str) -> list[dict[str, str]]:
        """Return what a lease's processes have written: "name" and "text" of each."""
        question = {"order": "logs", "lease": lease}
        nodes = self.agents.nodes
        answers = await asyncio.gather(*(self.agents.ask(node, question, ANSWER) for node in nodes))
        found: dict[str, dict[str, str]] = {}
        for answer in answers:
            for log in (answer or {}).get("logs") or ():
                found.setdefault(str(log["name"]), {"name": str(log["name"]), "text": str(log["text"])})
        return [found[name] for name in sorted(found)]

    async def attach(self, lease: str, process: dict[str, Any]) -> dict[str, Any]:
        """Let a process use the lease's devices on its machine: `devices` and `environ`, or "why" not.

        Args:
            lease: The lease's id.
            process: Its `pid`, `started` and `boot`, as it has said them; the agent of its machine looks.
        """
        record = self.pool.leases[lease]
        nodes = sorted({each.node for each in record.slices.values()})
        question = {
            "order": "attach",
            "lease": lease,
            "user": self.account(lease),
            **process,
        }
        answers = await asyncio.gather(*(self.agents.ask(node, question, ANSWER) for node in nodes))
        said = [each for each in answers if each]
        # One node: on a machine there is one, unless they are simulated; a process is on one of these then.
        here = next((each for each in said if each.get("devices")), None)
        if here is not None:
            return {"devices": list(here["devices"]), "environ": dict(here["environ"])}
        why = next((str(each["why"]) for each in said if each.get("why")), "")
        return {"why": why or f"its devices are on {' and '.join(nodes)}, and this process is not"}

    def decided(self, target: str, *, fit: bool) -> None:
        """An administrator has said that a device or node is fit, or that its work is to move away."""
        self.fitness.decided(target, fit=fit)

    async def drill(self, device: str, xid: int) -> str:
        """Break a device for practice (`xid` 0: make it good again); return "" or why not."""
        node = self.hearing.node_of_device(device)
        if not self.agents.connected(node):
            return f"{node or 'The node of ' + device} is not connected: wait until its agent is back."
        answer = await self.agents.ask(node, {"order": "drill", "device": device, "xid": xid}, ANSWER)
        return f"{node} did not answer within {ANSWER:g} s." if answer is None else str(answer.get("why", ""))
