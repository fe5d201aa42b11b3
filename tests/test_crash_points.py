"""The controller dies after every single write of a day, and nothing confirmed is lost or done twice.

At each commit the journal's files are copied as a `kill -9` would leave them: what follows has not been done,
nothing has been acknowledged. A new controller starts from each copy, with the agents as they were at that
moment. The agents stand in for real ones: they have no processes, and do as they are told.
"""

from __future__ import annotations

import copy
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_gpupool import wire
from jupyter_gpupool.controller import keeper, keys, machine, routes_admin, routes_leases, store
from jupyter_gpupool.controller.agents import Agents
from jupyter_gpupool.controller.auth import Authority, Person
from jupyter_gpupool.controller.clock import Clock
from jupyter_gpupool.controller.machine import Controller
from jupyter_gpupool.controller.router import Call
from jupyter_gpupool.controller.store import Database, Store
from jupyter_gpupool.core.model import MINUTE, LeaseState, Tick, encode
from jupyter_gpupool.core.pool import Pool
from tests.pool_helpers import node
from tests.test_plugin import Wired

if TYPE_CHECKING:
    from pathlib import Path

#: When the day begins, in milliseconds of the pool's clock.
START = 1_000_000_000
#: The rest of the day is lived on from every so many-th crash; from each of them only until all is quiet.
LIVED_ON = 12


# -------------------------------------------------------------------------------------------- who stands in


@dataclass
class StandIn:
    """An agent without processes: what runs on its node, and what it has yet to get through."""

    name: str
    head: bool
    gpus: int
    boot: str = "boot"
    connections: int = 0
    slices: set[str] = field(default_factory=set)
    leases: set[str] = field(default_factory=set)
    orders: list[dict[str, Any]] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0

    @property
    def worker(self) -> str:
        return f"tls://{self.name}:{self.connections}"

    def joined(self) -> dict[str, Any]:
        said = {"report": "joined", "node": encode(node(self.name, self.gpus)), "head": self.head}
        return {**said, "adopted": sorted(self.slices), "leases": sorted(self.leases), "seq": 0}

    def put(self, kind: str, **more: Any) -> None:
        self.number += 1
        report = {"report": kind, "boot": self.boot, "seq": self.number, **more}
        self.kept.append(report)
        self.said.append(report)

    def hear(self, message: dict[str, Any]) -> None:
        if message["op"] == wire.ACK:
            self.kept = [each for each in self.kept if each["seq"] > message["seq"]]
        self.orders += message.get("orders", ())

    def obey(self) -> None:
        orders, self.orders = self.orders, []
        for order in orders:
            OBEY.get(order["order"], lambda _agent, _order: None)(self, order)

    def start_scheduler(self, order: dict[str, Any]) -> None:
        self.leases.add(order["lease"])
        self.put("scheduler_started", lease=order["lease"], address=f"tls://{order['lease']}", dashboard="")

    def start_worker(self, order: dict[str, Any]) -> None:
        self.slices.add(order["slice"]["id"])
        if order["address"]:  # else its host waits for that
            self.put("slice_started", slice=order["slice"]["id"])

    def drain(self, order: dict[str, Any]) -> None:
        self.put("slice_drained", slice=order["slice"], forced=[], lost=[])

    def stop_slice(self, order: dict[str, Any]) -> None:
        self.slices.discard(order["slice"])
        self.put("slice_freed", slice=order["slice"])

    def end_lease(self, order: dict[str, Any]) -> None:
        self.leases.discard(order["lease"])
        self.put("lease_freed", lease=order["lease"])


OBEY = {
    name: getattr(StandIn, name)
    for name in ("start_scheduler", "start_worker", "drain", "stop_slice", "end_lease")
}


@dataclass
class Outside:
    """All that goes on when the controller dies: the clock, the agents, what people were told."""

    now: int = START
    agents: dict[str, StandIn] = field(default_factory=dict)
    #: By key: what was asked for, and the id that was confirmed.
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    confirmed: dict[str, str] = field(default_factory=dict)
    step: int = 0
    ids: int = 0


class Day:
    """A controller on a journal, and what is outside it."""

    def __init__(self, folder: Path, outside: Outside) -> None:
        self.folder, self.outside = folder, outside
        self.controller = Controller(Store(folder / "journal.sqlite"), AUTHORITY[0], trust_users=True)
        self.wired = Wired()
        self.wired.worker_send = self._send
        self.controller.agents = Agents(self.wired, self.controller.store.heard())

    def close(self) -> None:
        self.controller.store.close()

    # ------------------------------------------------------------------------------------------ the agents

    def _send(self, worker: str, message: dict[str, Any]) -> None:
        agent = next((each for each in self.outside.agents.values() if each.worker == worker), None)
        if agent:
            agent.hear(copy.deepcopy(message))

    def connect(self, agent: StandIn) -> None:
        """An agent comes: it says again what nobody has acknowledged, and presents itself."""
        agent.connections += 1
        agent.orders, agent.said = [], []
        self.wired.add(agent.worker, f"{agent.name}|{agent.boot}|1", wire.agent_name(agent.name))
        self.controller.agents.came(agent.worker)
        self.controller.hearing.on_reports(worker=agent.worker, reports=[*agent.kept])
        self.controller.hearing.on_reports(worker=agent.worker, reports=[agent.joined()])

    def settle(self) -> None:
        """Let everybody do what they are told until nobody has anything left to do."""
        agents = [each for each in self.outside.agents.values() if self.controller.connected(each.name)]
        while any(each.orders or each.said for each in agents):
            for agent in agents:
                said, agent.said = agent.said, []
                self.controller.hearing.on_reports(worker=agent.worker, reports=said)
                agent.obey()

    def until(self, ms: int) -> None:
        """Let time pass until then, with a tick at every time that the pool has asked for."""
        until = START + ms
        while (when := self.controller.pool.next_time()) is not None and when <= until:
            self.outside.now = max(self.outside.now, when)
            before = self.controller.store.last_seq
            self.controller._tick()
            self.settle()
            if self.controller.store.last_seq == before and self.controller.pool.next_time() == when:
                break
        self.outside.now = until
        self.controller._tick()
        self.settle()

    # ------------------------------------------------------------------------------------------ the people

    def call(self, handler: Any, **what: Any) -> Any:
        """Call a route's handler as an administrator; none of these waits for anything."""
        person = Person(user="ann", scopes=frozenset({"read", "use", "admin"}), token="t")
        said = {"path": {}, "query": {}, "body": None, "headers": {}, **what}
        call = Call(
            controller=self.controller, person=person, peer="", url="", memory={}, waiters=None, **said
        )
        try:
            handler(call).send(None)
        except StopIteration as done:
            return done.value.data
        raise AssertionError("it waits")

    def ask(self, key: str, **body: Any) -> str:
        """Request with a key; the id that is confirmed."""
        self.outside.asked[key] = {"time_limit": "2h", "name": key, "cpus": 1, "memory": "1GB", **body}
        return self.ask_again(key)

    def ask_again(self, key: str) -> str:
        headers = {"idempotency-key": key}
        data = self.call(routes_leases.request, body=self.outside.asked[key], headers=headers)
        self.outside.confirmed[key] = data["id"]
        return data["id"]

    def release(self, key: str) -> None:
        self.call(routes_leases.release, path={"lease": self.outside.confirmed[key]})

    def change(self, key: str, **body: Any) -> None:
        headers = {"idempotency-key": f"{key} {body}"}
        path = {"lease": self.outside.confirmed[key]}
        self.call(routes_leases.change, path=path, body=body, headers=headers)

    def health(self, target: str, **body: Any) -> None:
        self.call(routes_admin.health, path={"target": target}, body=body)

    def report(self, name: str, kind: str, **more: Any) -> None:
        self.outside.agents[name].put(kind, **more)

    def weight(self, number: int) -> None:
        projects = [{"name": "default", "members": ["*"]}, {"name": "other", "weight": number}]
        self.call(routes_admin.set_projects, body={"projects": projects})

    def fail_scheduler(self, key: str) -> None:
        """A lease's scheduler is killed; its agent sees it."""
        lease = self.outside.confirmed[key]
        agent = self.outside.agents[self.controller.home(lease)]
        if lease in agent.leases:
            agent.leases.discard(lease)
            agent.put("scheduler_failed", lease=lease, why="killed")

    def leave(self, name: str) -> None:
        self.controller.on_left(self.outside.agents[name].worker)

    def join(self, name: str, *, head: bool = False, gpus: int = 4) -> None:
        self.connect(self.outside.agents.setdefault(name, StandIn(name, head, gpus)))


#: A pool's keys cost time to make, and none of this is about them.
AUTHORITY: list[Authority] = []

#: What happens on a day, in its order. Each step may be begun again by a client or a node that got no answer.
SCRIPT: tuple[Any, ...] = (
    lambda day: day.join("node-1", head=True),
    lambda day: day.join("node-2"),
    lambda day: day.weight(3),
    lambda day: day.ask("pair", gpus=2),
    lambda day: day.ask("four", gpus=4, time_limit="1h"),
    lambda day: day.ask("half", gpus=0.5),
    lambda day: day.ask("other-half", gpus=0.5),
    lambda day: day.until(1 * MINUTE),
    lambda day: day.ask("waits-first", gpus=3),
    lambda day: day.ask("waits-second", gpus=2),
    lambda day: day.ask("waits-third", gpus=1, time_limit="10m"),
    lambda day: day.change("pair", extend="30m"),
    lambda day: day.until(6 * MINUTE),
    lambda day: day.release("other-half"),
    lambda day: day.fail_scheduler("pair"),
    lambda day: day.until(7 * MINUTE),
    lambda day: day.report(
        "node-1", "verdict", device="GPU-node-1-0", verdict="gone", sentence="XID 79", probation=False
    ),
    lambda day: day.until(8 * MINUTE),
    lambda day: day.leave("node-2"),
    lambda day: day.until(10 * MINUTE),
    lambda day: day.join("node-2"),
    lambda day: day.until(11 * MINUTE),
    lambda day: day.weight(7),
    lambda day: day.health("node-2/gpu3", action="drain", why="a fan", deadline="5m"),
    lambda day: day.ask("elastic", gpus=1, max_gpus=4),
    lambda day: day.until(71 * MINUTE),
    lambda day: day.release("waits-second"),
    lambda day: day.health("node-2/gpu3", action="undrain"),
    lambda day: day.until(131 * MINUTE),
    lambda day: day.release("elastic"),
    lambda day: day.until(311 * MINUTE),
)


def live(day: Day) -> None:
    """Live the day from where it is to its end."""
    for step in range(day.outside.step, len(SCRIPT)):
        day.outside.step = step
        SCRIPT[step](day)
        day.settle()


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Time that only the script moves, ids by number, and no waiting for the disk."""
    if not AUTHORITY:
        (tmp_path / "authority").mkdir()
        AUTHORITY.append(Authority(tmp_path / "authority"))
    outside = Outside()
    current = [outside]

    def token(_length: int) -> str:
        current[0].ids += 1
        return f"{current[0].ids:010x}"

    def clock(marks: Any) -> Clock:
        return Clock(marks, boot="boot", boottime=lambda: current[0].now, wall=lambda: current[0].now / 1000)

    monkeypatch.setattr(machine, "Clock", clock)
    monkeypatch.setattr(keys, "lease_credentials", lambda lease: dict.fromkeys(("ca", "cert", "key"), lease))
    monkeypatch.setattr(machine, "PATIENCE", float("inf"))
    monkeypatch.setattr(keeper, "SNAPSHOT_AFTER", 40)
    monkeypatch.setattr(routes_leases.secrets, "token_hex", token)
    monkeypatch.setattr(store, "PRAGMAS", ("journal_mode=WAL", "synchronous=OFF"))
    return current


@dataclass
class Crash:
    """A moment at which the controller dies."""

    folder: Path
    outside: Outside
    seq: int


@contextmanager
def watched(day: Day, folder: Path, monkeypatch: Any):
    """Take a copy at each commit; yields the crashes, and the pool's state after each event."""
    crashes: list[Crash] = []
    expected: dict[int, dict[str, Any]] = {}
    transaction, handle = Database.transaction, keeper._handle

    @contextmanager
    def copied(database: Database, *, durable: bool = True):
        with transaction(database, durable=durable) as sql:
            yield sql
        target = folder / str(len(crashes))
        target.mkdir()
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{database.path}{suffix}", f"{target / 'journal.sqlite'}{suffix}")
        last = (
            "SELECT max(coalesce((SELECT max(seq) FROM journal), 0), coalesce((SELECT seq FROM snapshot), 0))"
        )
        crashes.append(Crash(target, copy.deepcopy(day.outside), database.row(last)[0]))

    def noted(pool: Any, event: Any) -> Any:
        out = handle(pool, event)
        expected[day.controller.store.last_seq + isinstance(event, Tick)] = pool.snapshot()
        return out

    with monkeypatch.context() as patch:
        patch.setattr(Database, "transaction", copied)
        patch.setattr(keeper, "_handle", noted)
        yield crashes, expected


def recover(crash: Crash, current: list[Outside], expected: dict[str, Any]) -> Day:
    """Start a controller from what a crash has left, and let the agents come back."""
    current[0] = crash.outside
    day = Day(crash.folder, crash.outside)
    assert day.controller.pool.snapshot() == expected, "the replayed pool is the pool that was"
    queue = [ident for ident, _ in day.controller.pool.queue(crash.outside.now)]
    away = {"node-2"} if day.outside.step in AWAY else set()
    for agent in day.outside.agents.values():
        if agent.name not in away:
            day.connect(agent)
    for key in day.outside.asked:
        before = day.outside.confirmed.get(key)
        assert before in (None, day.ask_again(key)), f"{key} was confirmed as {before}, and is another one"
    waiting = [ident for ident, _ in day.controller.pool.queue(crash.outside.now)]
    kept = [ident for ident in waiting if ident in queue]
    assert kept == [ident for ident in queue if ident in kept], "the queue's order is as it was"
    day.settle()
    return day


#: The steps during which node-2 is away.
AWAY = {18, 19}


def check(day: Day) -> None:
    """Nothing is there twice, and what runs is what the pool says."""
    pool = day.controller.pool
    pool.validate()
    names = [each.request.name for each in pool.leases.values()]
    assert len(names) == len(set(names)), "each request once"
    assert set(names) <= set(day.outside.asked)
    slices = {ident for lease in pool.leases.values() for ident in lease.slices}
    for agent in day.outside.agents.values():
        if day.controller.connected(agent.name):
            mine = {ident for ident in slices if _node_of(pool, ident) == agent.name}
            assert agent.slices == mine, f"{agent.name} runs what the pool says"
    ended = {each.id for each in pool.leases.values() if each.state is LeaseState.ENDED}
    running = set().union(*(agent.leases for agent in day.outside.agents.values()))
    assert not running & ended, "an ended lease runs nowhere"


def _node_of(pool: Any, ident: str) -> str:
    return pool.leases[ident.rpartition("/")[0]].slices[ident].node


def accounts(day: Day) -> Any:
    return encode(day.controller.pool.ledger.accounts)


def without_decay(found: Any) -> Any:
    return {name: {**each, "kept": None} for name, each in found.items()}


def decayed(found: Any) -> Any:
    return {name: each["kept"] for name, each in found.items()}


def test_the_controller_may_die_after_every_single_write_of_a_day(world, tmp_path, monkeypatch):
    die_everywhere(world, tmp_path, monkeypatch, LIVED_ON)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_day_goes_on_after_each_of_them_as_if_nothing_had_been(world, tmp_path, monkeypatch):
    die_everywhere(world, tmp_path, monkeypatch, 1)


def die_everywhere(world, tmp_path, monkeypatch, lived_on):
    """Die at each write, and live the rest of the day after every `lived_on`-th death."""
    (tmp_path / "whole").mkdir()
    day = Day(tmp_path / "whole", world[0])
    with watched(day, tmp_path, monkeypatch) as (crashes, expected):
        live(day)
    check(day)
    whole = accounts(day)
    assert sum(account["used"] for account in whole.values()) > 0
    states = {each.request.name: each.state for each in day.controller.pool.leases.values()}
    assert set(states.values()) == {LeaseState.ENDED}
    day.close()
    expected[0] = Pool().snapshot()
    for number, crash in enumerate(crashes):
        again = recover(crash, world, expected[crash.seq])
        check(again)
        if number % lived_on == 0:
            live(again)
            check(again)
            now = accounts(again)
            assert without_decay(now) == without_decay(whole), "the ledger adds up to the millisecond"
            # What has decayed is rounded at each event, and a crash may make for one more.
            assert decayed(now) == pytest.approx(decayed(whole), rel=1e-9)
        again.close()
        shutil.rmtree(crash.folder)
    assert len(crashes) > 150
