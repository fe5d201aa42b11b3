"""The controller's side of its agents: who is connected, what they are told, what they are asked.

Rule 1: a node is heard through one connection, its newest; what comes on an older one is dropped.
Rule 2: a node's reports come from the certificate of that node's agent. Two agents that claim one name do not
        take turns: the one that is there stays, the other is told why.
Rule 3: what cannot be sent is not kept: when an agent is back, it is told what follows from the pool's state.

Not its business: what a report means (`reports`), and what is to be ordered (`machine`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jupyter_gpupool import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jupyter_gpupool.controller.certificates import Certificates

logger = logging.getLogger(__name__)

#: An agent that has been heard within so many seconds is there; another one of its name is refused.
FRESH = 2.5 * wire.HEARTBEAT


class Name(NamedTuple):
    """What an agent's Dask name says: the node, its agent's life, which connection, and its protocol."""

    node: str
    boot: str
    number: str
    speaks: int = 1


def parse_name(name: Any) -> Name | None:
    """Read the Dask name of an agent's worker, or None where it is something else."""
    node, boot, number, speaks, *more = [*str(name).split("|"), "", "", ""]
    if not node or not number or any(more) or not (speaks or "1").isdecimal():
        return None
    return Name(node, boot, number, int(speaks or 1))


@dataclass(slots=True)
class _Present:
    """A node's connection."""

    worker: str
    name: Name


class Agents:
    """All agents.

    Args:
        scheduler: The controller's Dask scheduler.
        heard: How far the journal has each node's reports: node, the agent's life, number.
        clock: Seconds that nobody can set.
        certificates: Which of the agents' certificates are good; None: all that the authority has signed.
    """

    def __init__(
        self,
        scheduler: Any,
        heard: Iterable[tuple[str, str, int]] = (),
        clock: Callable[[], float] = time.monotonic,
        certificates: Certificates | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._certificates = certificates
        self._clock = clock
        #: When each Dask worker was heard last. Dask keeps that by a clock that can be set.
        self._heard_at: dict[str, float] = {}
        self._present: dict[str, _Present] = {}
        self._inbox = wire.Inbox({node: (boot, seq) for node, boot, seq in heard})
        self._questions: dict[int, asyncio.Future[wire.Message]] = {}
        self._numbers = itertools.count(1)

    # ---------------------------------------------------------------------------------------- connections

    def came(self, worker: str) -> None:
        """A Dask worker has registered: its node's connection from now on, unless it must be refused."""
        self.beat(worker)
        name = parse_name(self._scheduler.workers[worker].name)
        if name is None:
            logger.warning("%s is no agent of this pool; nothing is taken from it.", worker)
            return
        old = self._present.get(name.node)
        why = wire.misunderstanding(name.node, name.speaks)
        if not why and old and old.name.boot != name.boot and self.silence(old.worker) < FRESH:
            why = f"A node {name.node} is in the pool already: end that agent, or join under another name."
        if why:
            logger.warning("%s (from %s)", why, worker)
            self._scheduler.worker_send(worker, {"op": wire.OP, "orders": [{"order": "refused", "why": why}]})
            return
        self._present[name.node] = _Present(worker, name)

    def stranger(self, comm: Any, dask_name: Any) -> str:
        """Say why who registers under that Dask name is not the node's agent; "" where it may be."""
        name = parse_name(dask_name)
        if name is None:  # nothing is taken from it, see `came`
            return ""
        if wire.peer_name(comm) != wire.agent_name(name.node):
            return f"Somebody speaks for node {name.node} without its certificate, and is not heard."
        if self._certificates is not None and not self._certificates.good(name.node, comm):
            return f"The certificate of {name.node} was revoked: let it join anew, with a new line."
        return ""

    async def hang_up(self, node: str) -> None:
        """Break a node's connection, if it has one."""
        present = self._present.get(node)
        if present is not None:
            await self._scheduler.remove_worker(present.worker, stimulus_id="removed", close=False)

    def beat(self, worker: str) -> None:
        """A Dask worker has been heard."""
        self._heard_at[worker] = self._clock()

    def silence(self, worker: str) -> float:
        """Return for how many seconds a Dask worker has not been heard; infinite: it is not there."""
        return self._clock() - self._heard_at.get(worker, float("-inf"))

    def left(self, worker: str) -> str:
        """A Dask worker is gone; return the node that is not heard now, or "" where there is another one."""
        self._heard_at.pop(worker, None)
        for node, present in self._present.items():
            if present.worker == worker:
                del self._present[node]
                return node
        return ""

    def node_of(self, worker: str) -> str:
        """Return the node whose connection a Dask worker is, or "": then nothing that it says counts."""
        state, comm = self._scheduler.workers.get(worker), self._scheduler.stream_comms.get(worker)
        name = parse_name(state.name) if state else None
        if name is None or comm is None or comm.comm is None:
            return ""
        present = self._present.get(name.node)
        if present is None or present.worker != worker:
            return ""
        if wire.peer_name(comm.comm) != wire.agent_name(name.node):
            logger.error("%s speaks for node %s without its certificate; it is not heard.", worker, name.node)
            return ""
        return name.node

    def connected(self, node: str) -> bool:
        """Return whether a node hears what it is told."""
        return node in self._present

    def speaks(self, node: str) -> int:
        """Return the version of the protocol that a connected node's agent speaks."""
        return self._present[node].name.speaks

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that are connected, in the order of their arrival."""
        return tuple(self._present)

    # -------------------------------------------------------------------------------------------- talking

    def tell(self, node: str, *orders: wire.Message) -> bool:
        """Send orders to a node's agent; return whether it is connected."""
        present = self._present.get(node)
        if present is None or not orders:
            return present is not None
        self._scheduler.worker_send(present.worker, {"op": wire.OP, "orders": list(orders)})
        return True

    async def ask(self, node: str, question: wire.Message, timeout: float) -> wire.Message | None:  # noqa: ASYNC109 - a bound, not a scope
        """Ask an agent something and return its answer, or None where none has come.

        Args:
            node: Which agent.
            question: An order that is answered.
            timeout: Seconds to wait.
        """
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.tell(node, {**question, "ask": number}):
                return None
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            return None
        finally:
            del self._questions[number]

    def answered(self, report: wire.Message) -> None:
        """An agent has answered a question."""
        future = self._questions.get(report.get("ask", 0))
        if future is not None and not future.done():
            future.set_result(report)

    # ------------------------------------------------------------------------------------------- hearing

    def hear(self, node: str, reports: Iterable[Any], take: Callable[[str, wire.Message], None]) -> None:
        """Let `take` have the reports that have not been here before, and acknowledge what it has taken.

        Args:
            node: Whose reports.
            reports: In their order.
            take: Takes one; where it raises, that report and those after it are left to be sent again.
        """
        done = 0
        try:
            for report in reports:
                if not isinstance(report, dict):
                    continue
                if self._inbox.is_early(node, report):
                    break  # the one before it has yet to be taken
                if self._inbox.is_new(node, report):
                    self._inbox.begin(node, report)
                    take(node, report)
                done = max(done, self._inbox.done(node, report))
        finally:
            if done:
                self._acknowledge(node, done)

    def _acknowledge(self, node: str, seq: int) -> None:
        present = self._present.get(node)
        if present is not None:
            self._scheduler.worker_send(present.worker, {"op": wire.ACK, "seq": seq})
