"""The controller between its agents and the pool: instructions, connections, reports."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpupool import wire
from jupyter_gpupool.controller import reports, versions
from jupyter_gpupool.controller.accounts import Accounts
from jupyter_gpupool.controller.agents import Agents
from jupyter_gpupool.controller.auth import Authority
from jupyter_gpupool.controller.keys import Keys
from jupyter_gpupool.controller.machine import Controller
from jupyter_gpupool.controller.plugin import Orders
from jupyter_gpupool.controller.records import StoreError
from jupyter_gpupool.controller.store import Store
from jupyter_gpupool.core import model
from jupyter_gpupool.core.model import (
    GB,
    HOUR,
    Device,
    Instruction,
    LeaseRekeyed,
    LeaseReleased,
    LeaseState,
    Node,
    Reading,
    Request,
    RequestSubmitted,
    Verdict,
    encode,
)
from jupyter_gpupool.core.state import NodeState

NOW = 1_000_000


def a_node(name: str = "node-1", gpus: int = 2) -> Node:
    devices = tuple(
        Device(uuid=f"GPU-{name}-{index}", node=name, index=index, model="H100-80GB", memory=80 * GB)
        for index in range(gpus)
    )
    return Node(name=name, devices=devices, cpus=16_000, memory=64 * GB, simulated=True)


def a_request(ident: str = "L1", **more: Any) -> Request:
    said = {
        "user": "ann",
        "project": "default",
        "name": ident,
        "time_limit": HOUR,
        "cpus": 1000,
        "memory": GB,
    }
    return Request(id=ident, **{**said, **more})


# ------------------------------------------------------------------------------------------------ stand-ins


class Wired:
    """A Dask scheduler that only remembers what is sent to whom."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.stream_comms: dict[str, Any] = {}
        self.sent: list[tuple[str, dict]] = []

    def add(self, worker: str, name: str, certificate: str) -> None:
        subject = ((("commonName", certificate),),)
        comm = SimpleNamespace(extra_info={"peercert": {"subject": subject}})
        self.workers[worker] = SimpleNamespace(name=name)
        self.stream_comms[worker] = SimpleNamespace(comm=comm)

    def worker_send(self, worker: str, message: dict) -> None:
        self.sent.append((worker, message))

    def orders(self) -> list[dict]:
        """The orders about leases; each agent is also greeted with the health thresholds."""
        orders = [order for _, message in self.sent for order in message.get("orders", ())]
        return [order for order in orders if order["order"] != "thresholds"]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "journal.sqlite")
    yield store
    store.close()


@pytest.fixture
def controller(store, tmp_path):
    """A controller with its pool and journal, and agents that only remember what they are told."""
    made = Controller(store, Authority(tmp_path))
    made.agents = Agents(Wired())
    return made


def connect(controller: Controller, node: Node, *, head: bool = False, **joined: Any) -> Wired:
    """An agent comes and presents itself."""
    wired, worker = controller.agents._scheduler, f"tls://{node.name}:1"
    wired.add(worker, f"{node.name}|boot|1", wire.agent_name(node.name))
    controller.agents.came(worker)
    said = {"report": "joined", "node": encode(node), "head": head, "adopted": [], "leases": [], "seq": 0}
    controller.hearing.on_reports(worker=worker, reports=[{**said, **joined}])
    return wired


def say(controller: Controller, node: str, *said: dict, first: int = 1) -> None:
    numbered = [{"boot": "boot", "seq": first + place, **each} for place, each in enumerate(said)]
    controller.hearing.on_reports(worker=f"tls://{node}:1", reports=numbered)


def start_lease(controller: Controller, ident: str = "L1", **more: Any) -> Any:
    """Request a lease and let its processes start."""
    now = controller.clock.now()
    controller.submit(RequestSubmitted(now=now, request=a_request(ident, arrived=now, **more)))
    lease = controller.pool.leases[ident]
    home = controller.home(ident)
    say(
        controller,
        home,
        {"report": "scheduler_started", "lease": ident, "address": "tls://s:1", "dashboard": "https://d:1"},
        *(
            {"report": "slice_started", "slice": each.id}
            for each in lease.slices.values()
            if each.node == home
        ),
        first=100 * int(ident[1:]),
    )
    return controller.pool.leases[ident]


# --------------------------------------------------------------------------------------------------- orders


@pytest.mark.asyncio
async def test_every_instruction_has_a_method(controller):
    names = {each.__name__ for each in Orders(controller)._methods}
    assert names == {each.__name__ for each in Instruction.__subclasses__()}


@pytest.mark.asyncio
async def test_a_grant_starts_the_scheduler_and_a_host_that_is_told_its_address_when_it_answers(controller):
    wired = connect(controller, a_node(), head=True)
    lease = start_lease(controller)
    assert [each["order"] for each in wired.orders()] == ["start_worker", "start_scheduler", "start_worker"]
    host, scheduler, worker = wired.orders()
    assert host == {**worker, "address": ""}
    keys = controller.keys.of("L1")
    assert (
        scheduler["credentials"]
        == worker["credentials"]
        == {part: keys[part] for part in ("ca", "cert", "key")}
    )
    assert worker["address"] == "tls://s:1"
    assert worker["slice"]["device"] == "GPU-node-1-0"
    assert lease.state is LeaseState.ACTIVE
    assert controller.connection("L1", "ann") == {
        "address": "tls://s:1",
        "dashboard": "https://d:1",
        **{part: keys[part] for part in ("ca", "cert", "key", "secret")},
    }


@pytest.mark.asyncio
async def test_a_lease_starts_anew_on_new_keys_when_all_that_has_the_old_ones_is_gone(controller):
    wired = connect(controller, a_node(), head=True)
    start_lease(controller)
    old = {**controller.keys.of("L1")}
    del wired.sent[:]
    controller.submit(LeaseRekeyed(now=controller.clock.now(), lease="L1"))
    assert [each["order"] for each in wired.orders()] == ["end_lease", "stop_slice"]
    assert controller.connection("L1", "ann") is None
    say(controller, "node-1", {"report": "slice_freed", "slice": "L1/0"}, first=500)
    say(controller, "node-1", {"report": "lease_freed", "lease": "L1"}, first=501)
    host, scheduler = wired.orders()[2:]
    assert [each["order"] for each in (scheduler, host)] == ["start_scheduler", "start_worker"]
    new = controller.keys.of("L1")
    for part in ("ca", "cert", "key"):
        assert scheduler["credentials"][part] == host["credentials"][part] == new[part] != old[part]
    assert scheduler["secret"] == new["secret"] != old["secret"]
    assert (new["dashboard"], new["holders"]) == ("", [])


@pytest.mark.asyncio
async def test_a_lease_keeps_the_os_user_that_it_was_started_as(controller, store):
    wired = connect(controller, a_node(), head=True)
    controller.accounts = Accounts({"ann": "ann-of-old"})
    start_lease(controller)
    controller.accounts = Accounts({"ann": "another"})
    controller.keys = Keys(store)  # the controller was started anew, with another map
    controller.submit(LeaseRekeyed(now=controller.clock.now(), lease="L1"))
    say(controller, "node-1", {"report": "slice_freed", "slice": "L1/0"}, first=500)
    say(controller, "node-1", {"report": "lease_freed", "lease": "L1"}, first=501)
    start_lease(controller, "L2")
    users = {(each["lease"], each["user"]) for each in wired.orders() if "user" in each}
    assert users == {("L1", "ann-of-old"), ("L2", "another")}


@pytest.mark.asyncio
async def test_an_ended_lease_leaves_no_keys(controller, store):
    connect(controller, a_node(), head=True)
    start_lease(controller)
    controller.submit(LeaseReleased(now=controller.clock.now(), lease="L1"))
    say(controller, "node-1", {"report": "slice_freed", "slice": "L1/0"}, first=500)
    say(controller, "node-1", {"report": "lease_freed", "lease": "L1"}, first=501)
    assert controller.pool.leases["L1"].state is LeaseState.ENDED
    assert store.secret_leases() == []
    assert controller.connection("L1", "ann") is None


@pytest.mark.asyncio
async def test_an_agent_that_is_back_is_told_what_it_may_have_missed(controller):
    connect(controller, a_node(), head=True)
    start_lease(controller, "L1")
    start_lease(controller, "L2")
    controller.submit(LeaseReleased(now=controller.clock.now(), lease="L1"))
    controller.agents._scheduler.sent.clear()
    wired = connect(controller, a_node(), head=True, adopted=["L1/0", "L2/0"], leases=["L1", "L2"])
    told = {(each["order"], each.get("slice") or each["lease"]) for each in wired.orders()}
    assert told == {("end_lease", "L1"), ("stop_slice", "L1/0")}


@pytest.mark.asyncio
async def test_a_scheduler_that_does_not_run_any_more_is_started_anew(controller):
    connect(controller, a_node(), head=True)
    start_lease(controller)
    controller.agents._scheduler.sent.clear()
    wired = connect(controller, a_node(), head=True, adopted=["L1/0"], leases=[])
    assert "start_scheduler" in [each["order"] for each in wired.orders()]
    assert controller.pool.leases["L1"].state is LeaseState.STARTING


@pytest.mark.asyncio
async def test_what_a_node_runs_and_nobody_knows_is_ended(controller):
    wired = connect(controller, a_node(), head=True, adopted=["L9/0"], leases=["L9"])
    told = {(each["order"], each.get("slice") or each["lease"]) for each in wired.orders()}
    assert told == {("end_lease", "L9"), ("stop_slice", "L9/0")}


@pytest.mark.asyncio
async def test_what_is_left_of_a_scheduler_that_nobody_wants_is_ended(controller):
    """It failed where it was started, and the lease has ended or lives elsewhere by now."""
    wired = connect(controller, a_node(), head=True, remains=["L9"])
    assert [(each["order"], each["lease"]) for each in wired.orders()] == [("end_lease", "L9")]


@pytest.mark.asyncio
@pytest.mark.parametrize("report", [{"report": "slice_started"}, {"report": "slice_failed", "why": "no"}])
async def test_a_slice_that_starts_or_fails_after_the_pool_has_given_it_up_is_ended(controller, report):
    wired = connect(controller, a_node(), head=True)
    start_lease(controller)
    say(controller, "node-1", {**report, "slice": "L1/7"}, first=300)
    assert wired.orders()[-1] == {"order": "stop_slice", "lease": "L1", "slice": "L1/7"}
    sent = len(wired.orders())
    say(controller, "node-1", {"report": "slice_started", "slice": "L1/0"}, first=301)
    assert len(wired.orders()) == sent, "one that it knows is left alone"


@pytest.mark.asyncio
async def test_a_grant_before_the_head_has_come_is_carried_out_when_it_comes(controller):
    connect(controller, a_node("node-2"))
    controller.submit(RequestSubmitted(now=controller.clock.now(), request=a_request()))
    assert controller.agents._scheduler.orders() == []
    connect(controller, a_node("node-1"), head=True)
    assert [each["order"] for each in controller.agents._scheduler.orders()] == ["start_scheduler"]
    assert controller.home("L1") == "node-1"


@pytest.mark.asyncio
async def test_orders_that_could_not_be_carried_out_are_owed(controller, store, monkeypatch):
    wired = connect(controller, a_node(), head=True)

    def fail(*_arguments: Any) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(store, "keep_secret", fail)
    controller.submit(RequestSubmitted(now=controller.clock.now(), request=a_request()))
    assert wired.orders() == []
    monkeypatch.undo()
    controller._tick()
    assert [each["order"] for each in wired.orders()] == ["start_scheduler"]


# --------------------------------------------------------------------------------------------------- agents


def test_a_second_agent_of_a_name_is_refused_while_the_first_is_there():
    wired = Wired()
    agents = Agents(wired)
    wired.add("a", "node-1|one|1", wire.agent_name("node-1"))
    wired.add("b", "node-1|two|1", wire.agent_name("node-1"))
    agents.came("a")
    agents.came("b")
    assert [(worker, message["orders"][0]["order"]) for worker, message in wired.sent] == [("b", "refused")]
    assert (agents.node_of("a"), agents.node_of("b")) == ("node-1", "")


def test_an_agent_that_starts_anew_takes_the_place_of_one_that_is_not_heard():
    wired, now = Wired(), [0.0]
    agents = Agents(wired, clock=lambda: now[0])
    wired.add("a", "node-1|one|1", wire.agent_name("node-1"))
    wired.add("b", "node-1|two|1", wire.agent_name("node-1"))
    agents.came("a")
    now[0] += 60
    agents.came("b")
    assert (agents.node_of("a"), agents.node_of("b")) == ("", "node-1")
    assert agents.left("a") == "", "the node is still heard"
    assert agents.left("b") == "node-1"


@pytest.mark.parametrize(
    ("name", "certificate"),
    [
        ("node-1|boot|1", wire.agent_name("node-2")),
        ("node-1|boot|1", wire.CONTROLLER),
        ("node-1|boot|1", ""),
        ("node-1", wire.agent_name("node-1")),
        ("|boot|1", wire.agent_name("")),
    ],
    ids=["another node's", "the controller's", "none", "a name that is no agent's", "no name"],
)
def test_nobody_speaks_for_a_node_but_the_holder_of_its_certificate(name, certificate):
    wired = Wired()
    agents = Agents(wired)
    wired.add("a", name, certificate)
    agents.came("a")
    assert agents.node_of("a") == ""


def test_reports_that_could_not_be_taken_are_not_acknowledged():
    wired, taken = Wired(), []
    agents = Agents(wired)
    wired.add("a", "node-1|boot|1", wire.agent_name("node-1"))
    agents.came("a")
    full = [True]

    def take(_node: str, report: dict) -> None:
        if report["report"] == "b" and full[0]:
            raise StoreError("The disk is full.")
        taken.append(report["report"])

    said = [{"report": name, "boot": "boot", "seq": place} for place, name in enumerate("abc", 1)]
    with pytest.raises(StoreError):
        agents.hear("node-1", said, take)
    full[0] = False
    agents.hear("node-1", said, take)
    assert taken == ["a", "b", "c"], "each once, in their order"
    assert [message["seq"] for _, message in wired.sent] == [1, 3]


def test_a_report_that_comes_before_one_that_could_not_be_taken_waits_for_it():
    """It would be acknowledged, and with it the one before."""
    wired, taken = Wired(), []
    agents = Agents(wired)
    wired.add("a", "node-1|boot|1", wire.agent_name("node-1"))
    agents.came("a")

    def full(_node: str, _report: dict) -> None:
        raise StoreError("The disk is full.")

    first, second = ({"report": name, "boot": "boot", "seq": place} for place, name in enumerate("ab", 1))
    with pytest.raises(StoreError):
        agents.hear("node-1", [first], full)
    agents.hear("node-1", [second], lambda _, report: taken.append(report["report"]))
    assert (taken, wired.sent) == ([], [])
    agents.hear("node-1", [first, second], lambda _, report: taken.append(report["report"]))
    assert taken == ["a", "b"]


@pytest.mark.asyncio
async def test_a_report_that_was_journaled_counts_once_over_a_restart(controller, store, tmp_path):
    """The controller dies after it has written it and before the agent hears so: the agent says it again."""
    connect(controller, a_node(), head=True)
    start_lease(controller)
    lost = {"report": "scheduler_failed", "lease": "L1", "why": "killed"}
    say(controller, "node-1", lost, first=200)
    again = Controller(store, Authority(tmp_path))
    again.agents = Agents(Wired(), store.heard())
    connect(again, a_node(), head=True, leases=["L1"], adopted=["L1/0"])
    say(again, "node-1", lost, first=200)
    assert again.pool.leases["L1"].state is LeaseState.STARTING, "not given up for a second failure"
    assert again.agents._scheduler.sent[-1] == ("tls://node-1:1", {"op": wire.ACK, "seq": 200})


@pytest.mark.asyncio
async def test_a_node_whose_coming_could_not_be_journaled_is_asked_to_present_itself(
    controller, store, monkeypatch
):
    def fail(*_arguments: Any) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(store, "append", fail)
    wired = connect(controller, a_node(), head=True)
    assert not controller.pool.nodes
    monkeypatch.undo()
    controller._patient_until = 0
    controller._tick()
    assert wired.orders() == [{"order": "present"}]
    connect(controller, a_node(), head=True)
    wired.sent.clear()
    controller._tick()
    assert wired.orders() == [], "it is there"


@pytest.mark.parametrize(
    ("mine", "theirs", "understood"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 3, 0), (3, 1, 0)]
)
def test_an_agent_one_version_away_is_heard_and_another_is_told_which_side_is_old(
    monkeypatch, mine, theirs, understood
):
    monkeypatch.setattr(wire, "PROTOCOL", mine)
    wired = Wired()
    agents = Agents(wired)
    wired.add("a", f"node-1|boot|1|{theirs}", wire.agent_name("node-1"))
    agents.came("a")
    assert agents.node_of("a") == ("node-1" if understood else "")
    if not understood:
        [order] = wired.orders()
        older = "the controller" if theirs > mine else "the agent of node-1"
        assert order["order"] == "refused"
        assert f"upgrade jupyter-gpupool of {older} first" in order["why"]


@pytest.mark.asyncio
async def test_a_question_is_answered_or_not_in_time():
    wired = Wired()
    agents = Agents(wired)
    wired.add("a", "node-1|boot|1", wire.agent_name("node-1"))
    agents.came("a")
    assert await agents.ask("node-2", {"order": "logs"}, 0.05) is None
    assert await agents.ask("node-1", {"order": "logs"}, 0.05) is None
    number = wired.orders()[-1]["ask"]
    agents.answered({"report": "answer", "ask": number})  # too late, and nobody minds
    wired.worker_send = lambda worker, message: agents.answered(
        {"ask": message["orders"][0]["ask"], "logs": [1]}
    )
    assert (await agents.ask("node-1", {"order": "logs"}, 5))["logs"] == [1]


@pytest.mark.asyncio
async def test_a_broken_connection_makes_the_node_silent_and_a_new_one_brings_it_back(controller):
    connect(controller, a_node(), head=True)
    controller.on_left("tls://node-1:1")
    assert controller.pool.nodes["node-1"].state is NodeState.SILENT
    connect(controller, a_node(), head=True)
    assert controller.pool.nodes["node-1"].state is NodeState.UP


@pytest.mark.asyncio
async def test_after_a_start_agents_have_time_to_come_back(store, tmp_path):
    first = Controller(store, Authority(tmp_path))
    first.agents = Agents(Wired())
    connect(first, a_node(), head=True)
    second = Controller(store, Authority(tmp_path))
    second.agents = Agents(Wired())
    second._tick()
    assert second.pool.nodes["node-1"].state is NodeState.UP
    second._patient_until = time.monotonic()
    second._tick()
    assert second.pool.nodes["node-1"].state is NodeState.SILENT


@pytest.mark.asyncio
async def test_a_controller_that_would_not_understand_the_agents_of_leases_says_so_and_does_not_start(
    controller, store, monkeypatch
):
    connect(controller, a_node(), head=True)
    monkeypatch.setattr(wire, "PROTOCOL", 3)
    assert versions.objection(store, controller.pool) == "", "nothing runs there"
    monkeypatch.undo()
    start_lease(controller)
    for protocol, fine in ((1, True), (2, True), (3, False)):
        monkeypatch.setattr(wire, "PROTOCOL", protocol)
        said = versions.objection(store, controller.pool)
        assert (not said) == fine
    assert "upgrade jupyter-gpupool of the agent of node-1 first" in said
    assert "--any-agents" in said


# --------------------------------------------------------------------------------------- a lost head node


def lose(controller: Controller, name: str) -> None:
    """A node goes, and stays away for too long."""
    controller.on_left(f"tls://{name}:1")
    controller.submit(model.NodeLost(now=controller.clock.now(), node=name))


@pytest.mark.asyncio
async def test_the_schedulers_of_a_lost_head_node_are_started_on_another_one(controller):
    connect(controller, a_node("node-1"), head=True)
    wired = connect(controller, a_node("node-2", gpus=8))
    start_lease(controller, count=4)
    say(controller, "node-2", *({"report": "slice_started", "slice": f"L1/{n}"} for n in range(4)))
    assert {each.node for each in controller.pool.leases["L1"].slices.values()} == {"node-2"}
    wired.sent.clear()
    lose(controller, "node-1")
    controller._tick()
    lease = controller.pool.leases["L1"]
    assert (lease.state, controller.home("L1")) == (LeaseState.STARTING, "node-2")
    starts = [each for each in wired.orders() if each["order"] == "start_scheduler"]
    assert {each["lease"] for each in starts} == {"L1"}
    notices = [each["sentence"] for each in controller.store.notices(0, "ann").notices]
    assert any("node-1, where it ran, is lost" in each and "submit them again" in each for each in notices)
    wired.sent.clear()
    controller._tick()
    assert wired.orders() == [], "once"


@pytest.mark.asyncio
async def test_a_head_node_that_is_back_ends_the_schedulers_that_have_moved(controller):
    connect(controller, a_node("node-1"), head=True)
    wired = connect(controller, a_node("node-2", gpus=8))
    start_lease(controller, count=4)
    lose(controller, "node-1")
    controller._tick()
    wired.sent.clear()
    back = connect(controller, a_node("node-1"), head=True, leases=["L1"])
    orders = [(each["order"], each["lease"]) for each in back.orders() if each["order"] != "start_scheduler"]
    assert orders == [("end_lease", "L1")]
    assert controller.home("L1") == "node-2", "it stays"
    now = controller.clock.now()
    controller.submit(RequestSubmitted(now=now, request=a_request("L2", arrived=now)))
    assert controller.home("L2") == "node-1", "new leases start where the head is"


@pytest.mark.asyncio
async def test_a_lease_that_ends_while_its_head_node_is_lost_ends(controller):
    connect(controller, a_node("node-1"), head=True)
    connect(controller, a_node("node-2", gpus=8))
    start_lease(controller, count=4)
    controller.on_left("tls://node-1:1")
    controller.submit(LeaseReleased(now=controller.clock.now(), lease="L1"))
    say(controller, "node-2", *({"report": "slice_freed", "slice": f"L1/{n}"} for n in range(4)), first=700)
    assert controller.pool.leases["L1"].state is LeaseState.DRAINING
    lose(controller, "node-1")
    controller._tick()
    assert controller.pool.leases["L1"].state is LeaseState.ENDED


@pytest.mark.asyncio
async def test_with_every_node_lost_schedulers_wait_for_one_to_come(controller):
    connect(controller, a_node("node-1"), head=True)
    start_lease(controller)
    lose(controller, "node-1")
    controller._tick()
    assert controller.home("L1") == "node-1"
    wired = connect(controller, a_node("node-2"))
    wired.sent.clear()
    controller._tick()
    assert ("start_scheduler", "L1") in {(each["order"], each["lease"]) for each in wired.orders()}


# -------------------------------------------------------------------------------------------------- reports


def _known(**names: str):
    return lambda ident: names.get(ident, "")


def _said(node: str, report: dict) -> reports.Said:
    slices = _known(**{"L1/0": "node-1", "L1/1": "node-2"})
    return reports.Said(node, NOW, report, slices, _known(**{"GPU-1": "node-1"}), _known(L1="node-1"))


@pytest.mark.parametrize(
    ("node", "report", "allowed"),
    [
        ("node-1", {"report": "slice_freed", "slice": "L1/0"}, True),
        ("node-2", {"report": "slice_freed", "slice": "L1/0"}, False),
        ("node-1", {"report": "slice_freed", "slice": "L1/1"}, False),
        ("node-2", {"report": "slice_freed", "slice": "L7/0"}, True),
        ("node-1", {"report": "slice_started", "slice": "L1/1"}, True),
        ("node-2", {"report": "slice_drained", "slice": "L1/1"}, False),
        ("node-2", {"report": "lease_freed", "lease": "L1"}, False),
        ("node-2", {"report": "scheduler_started", "lease": "L1", "address": "tls://evil:1"}, False),
        ("node-2", {"report": "verdict", "device": "GPU-1", "verdict": "gone", "sentence": "!"}, False),
        ("node-1", {"report": "verdict", "device": "GPU-1", "verdict": "gone", "sentence": "!"}, True),
        ("node-1", {"report": "verdict", "device": "GPU-9", "verdict": "gone", "sentence": "!"}, False),
        ("node-1", {"report": "verdict", "device": "GPU-1", "verdict": "splendid", "sentence": "!"}, False),
        ("node-1", {"report": "slice_freed"}, False),
        ("node-1", {"report": "slice_freed", "slice": 7}, False),
        ("node-1", {"report": "joined", "node": {"name": "node-1"}}, False),
        ("node-1", {"report": "joined", "node": encode(a_node("node-2"))}, False),
        ("node-1", {"report": 7}, False),
    ],
    ids=[
        "its own slice is free",
        "another node's slice is not its to free",
        "nor one of a lease at home here",
        "a slice that nobody knows may be gone",
        "a lease at home here has started elsewhere",
        "a lease at home elsewhere is not its to drain",
        "nor to free",
        "nor to move to an address of its own",
        "another node's device is not its to judge",
        "its own device is",
        "one that nobody knows is not",
        "a verdict that there is not",
        "a slice is missing",
        "a slice that is no text",
        "a node without what a node must have",
        "a node of another name",
        "a report without a name",
    ],
)
def test_a_report_is_taken_from_whom_it_concerns(node, report, allowed):
    said = _said(node, report)
    if allowed:
        assert isinstance(reports.to_event(said), model.PoolEvent)
    else:
        with pytest.raises(reports.BadReportError):
            reports.to_event(said)


@pytest.mark.asyncio
async def test_nothing_that_an_agent_reports_breaks_the_controller(controller):
    connect(controller, a_node(), head=True)
    nonsense = [
        None,
        7,
        "x",
        [],
        {},
        {"report": None},
        {"report": "readings", "readings": 7},
        {"report": "readings", "readings": [{"device": 1}]},
        {"report": "answer", "ask": []},
        {"report": "joined", "refused": 3, "leases": 5},
        {"report": "finding", "sentence": {"a": 1}},
        {"report": "slice_freed", "slice": "L1/0", "seq": "x"},
    ]
    for each in nonsense:
        controller.hearing.on_reports(worker="tls://node-1:1", reports=[each])
    controller.hearing.on_reports(worker="tls://node-1:1", reports="nonsense")
    controller.hearing.on_reports(worker=None, reports=None, more=1)
    say(controller, "node-1", {"report": "outside_use", "device": "GPU-node-1-0", "who": "PID 1"})
    assert controller.pool.devices["GPU-node-1-0"].outside == "PID 1"


@pytest.mark.asyncio
async def test_a_verdict_that_is_said_again_is_no_news(controller, store):
    connect(controller, a_node(), head=True)
    gone = {"report": "verdict", "device": "GPU-node-1-0", "verdict": "gone", "sentence": "It is lost."}
    say(controller, "node-1", gone, first=1)
    count = store.last_seq
    say(controller, "node-1", gone, first=2)
    assert store.last_seq == count
    say(controller, "node-1", {**gone, "verdict": "restart_worker"}, first=3)
    say(controller, "node-1", {**gone, "verdict": "restart_worker"}, first=4)
    assert store.last_seq == count + 2, "a restart is told anew for each incident"
    assert controller.pool.devices["GPU-node-1-0"].verdict is Verdict.RESTART_WORKER


@pytest.mark.asyncio
async def test_readings_are_kept_of_ones_own_devices_only_and_not_journaled(controller, store):
    connect(controller, a_node("node-1"), head=True)
    connect(controller, a_node("node-2"))
    count = store.last_seq
    mine = Reading(device="GPU-node-1-0", now=5, utilisation=50)
    other = Reading(device="GPU-node-2-0", now=5)
    readings = [encode(mine), encode(other)]
    controller.hearing.on_reports(
        worker="tls://node-1:1", reports=[{"report": "readings", "readings": readings}]
    )
    assert dict(controller.readings) == {"GPU-node-1-0": mine}
    assert controller.reading_age("GPU-node-1-0") < 5
    assert controller.reading_age("GPU-node-2-0") == float("inf")
    assert store.last_seq == count
