"""What of a lease needs no process: claims, paths, the table, logs, interfaces, idleness."""

from __future__ import annotations

import json
import math
import os
from types import SimpleNamespace

import pytest
from distributed.protocol import dumps

from jupyter_gpupool.lease.idle import CALLS, IdleWatch
from jupyter_gpupool.node.lease_claims import read_claim
from jupyter_gpupool.node.lease_logs import KEPT, KeptLogs, read_tail
from jupyter_gpupool.node.lease_specs import address_of
from jupyter_gpupool.node.lease_table import Entry, Table, safe_name

SCHEDULER, WORKER = Entry("a", "a", "me"), Entry("a/0", "a", "me", {"id": "a/0"})


@pytest.mark.parametrize(
    ("entry", "said", "report"),
    [
        pytest.param(
            SCHEDULER,
            {"report": "drained", "slice": "a/1", "forced": ["x"], "lost": []},
            {"report": "slice_drained", "slice": "a/1", "forced": ["x"], "lost": [], "work": 0, "lease": "a"},
            id="a scheduler speaks of its own slices",
        ),
        pytest.param(SCHEDULER, {"report": "drained", "slice": "b/1"}, None, id="and of no other lease's"),
        pytest.param(SCHEDULER, {"report": "drained", "slice": ["a/1"]}, None, id="in the right types"),
        pytest.param(
            WORKER, {"report": "drained", "slice": "a/0"}, None, id="a worker does not drain itself"
        ),
        pytest.param(WORKER, {"report": "idle", "since": 5}, None, id="nor says that the lease is idle"),
        pytest.param(
            SCHEDULER,
            {"report": "idle", "since": "5"},
            {"report": "lease_idle", "since": 5, "lease": "a"},
            id="idle",
        ),
        pytest.param(
            SCHEDULER,
            {"report": "stays", "slice": "a/1", "actors": {"c-1": "no"}, "seconds": 9.5},
            {"report": "actors_stay", "slice": "a/1", "actors": {"c-1": "no"}, "seconds": 9, "lease": "a"},
            id="actors that cannot move",
        ),
        pytest.param(
            SCHEDULER, {"report": "stays", "slice": "a/1", "actors": 7, "seconds": 1}, None, id="or nonsense"
        ),
        pytest.param(SCHEDULER, {"report": "idle", "since": "long"}, None, id="idle since nobody knows when"),
        pytest.param(
            SCHEDULER,
            {"report": "holds", "parts": [["x", 5]] * 99, "count": -1, "size": 10**99, "more": "of it"},
            {"report": "lease_holds", "parts": [("x", 5)] * 10, "count": 10, "size": 10**15, "lease": "a"},
            id="what it holds, within bounds",
        ),
        pytest.param(
            WORKER, {"report": "holds", "parts": [], "count": 0, "size": 0}, None, id="of workers nobody asks"
        ),
        pytest.param(
            WORKER,
            {"report": "first_task", "slice": "b/7"},
            {"report": "first_task", "slice": "a/0", "lease": "a"},
            id="a worker speaks of its own slice, whatever it says",
        ),
        pytest.param(
            SCHEDULER, {"report": "slice_freed", "slice": "a/0"}, None, id="only the agent says free"
        ),
        pytest.param(SCHEDULER, {"report": ["drained"]}, None, id="what is no report is none"),
    ],
)
def test_what_a_lease_says_is_a_claim(entry, said, report):
    assert read_claim(entry, said) == report


def test_claims_are_of_a_bounded_length():
    report = read_claim(SCHEDULER, {"report": "drained", "slice": "a/1", "forced": ["x" * 10_000] * 10_000})
    assert len(json.dumps(report)) < 400_000


@pytest.mark.parametrize(
    "wild", [10**30, -(10**30), math.inf, math.nan, "\ud800", ["\ud800"], "9" * 99, None]
)
@pytest.mark.parametrize(
    "said",
    [
        {"report": "drained", "slice": "a/1", "forced": [], "lost": [], "work": 0},
        {"report": "drained", "slice": "a/\ud800" + "1" * 9999},
        {"report": "stays", "slice": "a/1", "actors": {"c-1": "no"}, "seconds": 1},
        {"report": "idle", "since": 1},
        {"report": "holds", "parts": [["x", 5]], "count": 1, "size": 5},
    ],
)
def test_whatever_a_lease_says_the_agent_s_connection_can_carry_it(said, wild):
    """Else one lease would cut its node off from the controller: the report would be sent again and again."""
    for name in said.keys() - {"report", "slice"}:
        report = read_claim(SCHEDULER, {**said, name: wild})
        assert sum(map(len, dumps(report))) < 1000
    assert sum(map(len, dumps(read_claim(SCHEDULER, said)))) < 1000


def test_no_two_ids_share_a_path():
    ids = ["a", "a/0", "a_0", "a/1", "A", "../a", "a" * 300, "a" * 299 + "b", "ä"]
    names = [safe_name(each) for each in ids]
    assert len(set(names)) == len(ids)
    assert all("/" not in name and len(name) <= 40 and not name.startswith(".") for name in names)


def test_the_table_outlives_its_agent_and_is_its_owner_s_alone(tmp_path):
    table = Table(tmp_path / "leases.json", str(tmp_path))
    table.entries["a/0"] = Entry("a/0", "a", "me", {"id": "a/0"}, "running", 12, 34)
    table.save()
    again = Table(tmp_path / "leases.json", str(tmp_path))
    assert (again.entries, again.agent, again.run) == (table.entries, table.agent, table.run)
    assert (tmp_path / "leases.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"boot": "another", "agent": "x", "entries": [{"key": 1}]}']
)
def test_a_table_that_is_broken_or_of_another_boot_is_empty(tmp_path, text):
    (tmp_path / "leases.json").write_text(text)
    assert Table(tmp_path / "leases.json", str(tmp_path)).entries == {}


def test_a_folder_that_somebody_else_has_made_in_the_meantime_is_not_taken_for_one_s_own(tmp_path):
    folder, mallory = Table(tmp_path / "leases.json", str(tmp_path)).run, tmp_path / "mallory"
    folder.rmdir()
    mallory.mkdir()
    folder.symlink_to(mallory)
    assert Table(tmp_path / "leases.json", str(tmp_path)).run != folder
    folder.unlink()
    kept = Table(tmp_path / "leases.json", str(tmp_path)).run
    assert Table(tmp_path / "leases.json", str(tmp_path)).run == kept
    if os.geteuid() == 0:
        os.chown(kept, 65534, -1)
        assert Table(tmp_path / "leases.json", str(tmp_path)).run != kept


def test_a_log_is_read_only_where_it_is_a_plain_file_of_its_user(tmp_path):
    secret, link, pipe = tmp_path / "secret", tmp_path / "link", tmp_path / "pipe"
    secret.write_text("of another")
    link.symlink_to(secret)
    os.mkfifo(pipe)
    assert read_tail(secret, os.geteuid()) == "of another"
    assert read_tail(secret, os.geteuid(), 7) == "another"
    assert [read_tail(each, os.geteuid()) for each in (link, pipe, tmp_path, tmp_path / "none")] == [""] * 4


def test_logs_are_kept_of_the_last_leases(tmp_path):
    kept = KeptLogs(tmp_path / "logs")
    for number in range(KEPT + 3):
        kept.keep(f"lease{number}", [{"name": "scheduler", "text": f"{number}"}])
        os.utime(tmp_path / "logs" / f"lease{number}", (number, number))
    assert kept.read("lease0") == []
    assert kept.read(f"lease{KEPT + 2}") == [{"name": "scheduler", "text": f"{KEPT + 2}"}]


def test_an_interface_that_does_not_exist_is_named_with_those_that_do():
    assert (address_of("127.0.0.1"), address_of("lo")) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(ValueError, match=r"no network interface eth77 .* there are .*lo"):
        address_of("eth77")


class Quiet:
    """As much of a scheduler as idleness is read from."""

    def __init__(self):
        self.handlers = dict.fromkeys(CALLS, self.call)
        self.transition_counter = 0
        self.queued, self.unrunnable, self.workers = (), {}, {}

    def call(self):
        return "done"


@pytest.fixture
def watched(monkeypatch):
    """A scheduler, its watch, what the watch said, and a clock."""
    now = [1000.0]
    monkeypatch.setattr("jupyter_gpupool.lease.idle.time.monotonic", lambda: now[0])
    said, scheduler = [], Quiet()
    watch = IdleWatch(scheduler, said.append)
    for name in CALLS:
        scheduler.handlers[name] = watch.noted(scheduler.handlers[name])
    return scheduler, watch, said, now


def test_a_lease_is_idle_since_its_last_task_or_call(watched):
    scheduler, watch, said, now = watched
    scheduler.transition_counter += 1
    watch.look()
    now[0] += 9
    watch.look()
    assert said == []
    now[0] += 1
    watch.look()
    watch.look()
    assert said == [{"report": "idle", "since": 1_000_000}]


def test_what_is_idle_says_so_again_now_and_then_for_a_controller_that_has_started_anew(watched):
    _, watch, said, now = watched
    for _ in range(20):
        now[0] += 10
        watch.look()
    assert said == [{"report": "idle", "since": 1_000_000}] * 4


def test_a_short_time_out_of_the_lease_is_looked_at_soon_enough():
    said = []
    watch = IdleWatch(Quiet(), said.append, 2_000)
    watch._last -= 1.1
    watch.look()
    assert [each["report"] for each in said] == ["idle"]


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda scheduler: scheduler.handlers["broadcast"](), id="a call on all workers"),
        pytest.param(lambda scheduler: setattr(scheduler, "transition_counter", 7), id="a task"),
        pytest.param(lambda scheduler: setattr(scheduler, "queued", ("task",)), id="a task that waits"),
        pytest.param(
            lambda scheduler: setattr(scheduler, "unrunnable", {"t": 1}), id="one that no worker can run"
        ),
        pytest.param(
            lambda scheduler: scheduler.workers.update(a=SimpleNamespace(processing=["t"])),
            id="one that runs long",
        ),
    ],
)
def test_an_idle_lease_is_busy_with_the_first_work(watched, work):
    scheduler, watch, said, now = watched
    now[0] += 10
    watch.look()
    work(scheduler)
    watch.look()
    assert [each["report"] for each in said] == ["idle", "busy"]
