"""The journal: what is confirmed is on the disk, what is damaged is said, what is secret stays secret."""

from __future__ import annotations

import _sqlite3
import ctypes
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jupyter_gpupool.controller import schema
from jupyter_gpupool.controller.backup import backup, check, put_back
from jupyter_gpupool.controller.clock import MARK_EVERY, Clock, Mark
from jupyter_gpupool.controller.records import NOTICES
from jupyter_gpupool.controller.store import Once, Seen, Store, StoreError
from jupyter_gpupool.core.model import ANY, LeaseReleased, Notice, Notify, Request, RequestSubmitted, Tick

ONE = Once("ann", "key-1", "f1")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


@pytest.fixture
def store(path):
    opened = Store(path)
    yield opened
    opened.close()


def submitted(ident="a", now=1, **what):
    what = {"user": "ann", "project": "default", "name": ident, **what}
    return RequestSubmitted(now=now, cause="ann", request=Request(id=ident, **what))


def say(sentence, user="ann", lease="a"):
    return Notify(user=user, notice=Notice.GRANTED, lease=lease, sentence=sentence)


def edit(path, *statements):
    """Change the file behind the store's back."""
    sql = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        sql.execute(statement)
    sql.close()


# --------------------------------------------------------------------------------------------- the journal


def append_all(store, events):
    """Append each, and return the number of the last one."""
    return [store.append(each) for each in events][-1]


def test_what_was_appended_is_replayed_in_its_order_after_opening_anew(path):
    with_store = Store(path)
    events = [submitted(f"r{n}", now=n) for n in range(5)]
    assert [with_store.append(each) for each in events[:2]] == [1, 2]
    assert append_all(with_store, events[2:]) == 5
    with_store.close()
    again = Store(path)
    assert list(again.replay()) == list(enumerate(events, start=1))
    assert (again.last_seq, again.last_now) == (5, 4)
    again.close()


def test_after_a_snapshot_only_later_events_are_replayed_and_numbers_go_on(path):
    store = Store(path)
    append_all(store, [Tick(now=1), Tick(now=2)])
    store.snapshot(json.dumps({"leases": ["é", 1]}))
    store.append(Tick(now=3))
    assert store.since_snapshot == 1
    store.close()
    again = Store(path)
    assert again.restore() == ({"leases": ["é", 1]}, 2)
    assert list(again.replay()) == [(3, Tick(now=3))]
    again.snapshot(json.dumps({}), 3)
    again.snapshot(json.dumps({"more": 1}))
    assert again.restore() == ({"more": 1}, 3)
    assert again.append(Tick(now=4)) == 4
    assert list(again.replay()) == [(4, Tick(now=4))]
    again.close()


def test_a_snapshot_of_an_earlier_event_keeps_the_later_ones(store):
    append_all(store, [Tick(now=1), Tick(now=2), Tick(now=3)])
    store.snapshot(json.dumps({"at": 2}), 2)
    assert list(store.replay()) == [(3, Tick(now=3))]
    assert store.since_snapshot == 1


def test_what_was_written_does_not_stay_in_memory(store):
    """Neither the text of a snapshot nor a secret, which SQLite would keep with a statement for next time."""
    sqlite = ctypes.CDLL(_sqlite3.__file__)
    sqlite.sqlite3_memory_used.restype = ctypes.c_int64
    before = sqlite.sqlite3_memory_used()
    assert before > 0
    store.snapshot(json.dumps(["x" * 5_000_000]))
    assert sqlite.sqlite3_memory_used() - before < 1_000_000, "the cache of pages, and no more"


def test_an_event_that_cannot_be_written_leaves_nothing(store):
    with pytest.raises(TypeError):
        store.append(object())
    assert list(store.replay()) == []
    assert store.append(Tick(now=2)) == 1


def test_what_append_has_returned_survives_a_kill_that_leaves_no_time_to_close(path):
    script = """
        import os, sys
        from jupyter_gpupool.controller.store import Store
        from jupyter_gpupool.core.model import Tick
        store = Store(sys.argv[1])
        for n in range(50):
            store.append(Tick(now=n))
            os.write(1, b"%d\\n" % n)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        capture_output=True,
        check=False,
        timeout=60,
    )
    confirmed = [int(line) for line in done.stdout.split()]
    assert done.returncode == -9
    assert confirmed == list(range(50))
    store = Store(path)
    assert [event.now for _, event in store.replay()] == confirmed
    store.close()


def test_a_second_process_is_refused_the_journal_with_the_first_ones_number(store, path):
    with pytest.raises(StoreError, match=rf"in use by process {os.getpid()}: stop that controller first"):
        Store(path)


def test_the_journal_is_readable_by_its_owner_only(store, path):
    store.append(Tick(now=1))
    files = [each for each in path.parent.iterdir() if each.name.startswith("journal")]
    assert len(files) == 4  # with its write-ahead log, index and lock
    assert {oct(each.stat().st_mode & 0o777) for each in files} == {"0o600"}


# --------------------------------------------------------------------------------------- what can go wrong


def test_on_a_full_disk_the_event_is_refused_in_one_sentence_and_nothing_has_changed(store):
    store.append(Tick(now=1))
    pages = store._db.row("PRAGMA page_count")[0]
    store._db.row(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(StoreError, match=r"is full: free some space and try again\.$"):
        store.append(submitted("big", options="x" * 100_000), ONE)
    assert store.last_seq == 1
    assert store.seen("ann", "key-1", 1) is None
    store._db.row("PRAGMA max_page_count = 1000000")
    assert store.append(Tick(now=2)) == 2
    assert [event.now for _, event in store.replay()] == [1, 2]


def test_a_file_that_cannot_grow_refuses_events_and_keeps_what_it_has(path):
    script = """
        import resource, signal, sys
        from jupyter_gpupool.controller.store import Store, StoreError
        from jupyter_gpupool.core.model import Tick
        store = Store(sys.argv[1])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        done = 0
        try:
            for n in range(1000):
                store.append(Tick(now=n, cause="x" * 5000))
                done = n
        except StoreError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        store.append(Tick(now=done + 1))
        print(done, [event.now for _, event in store.replay()] == [*range(done + 2)])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        capture_output=True,
        check=False,
        timeout=60,
        text=True,
    )
    said, last = done.stdout.splitlines()
    assert "journal.sqlite cannot be written" in said or "is full" in said
    assert last.endswith("True"), done.stdout + done.stderr
    assert int(last.split()[0]) > 3


DAMAGES = {
    "a changed event": "UPDATE journal SET event = replace(event, '\"now\":2', '\"now\":3') WHERE seq = 2",
    "an event that is missing in the middle": "DELETE FROM journal WHERE seq = 2",
    "an event that is missing at the beginning": "DELETE FROM journal WHERE seq = 1",
    "a changed checksum": "UPDATE journal SET crc = crc + 1 WHERE seq = 3",
    "an event of an unknown kind": 'UPDATE journal SET event = \'{"type":"Nonsense","now":2}\' WHERE seq = 2',
    "an event that is no JSON": "UPDATE journal SET event = 'x' WHERE seq = 3",
}


@pytest.mark.parametrize("statement", DAMAGES.values(), ids=DAMAGES)
def test_damage_to_the_journal_is_found_and_named(path, statement):
    store = Store(path)
    append_all(store, [Tick(now=1), Tick(now=2), Tick(now=3)])
    store.close()
    edit(path, statement)
    again = Store(path)
    with pytest.raises(StoreError, match=r"is damaged at event \d.*: put a backup back with"):
        list(again.replay())
    again.close()


def test_a_changed_snapshot_is_found(path):
    store = Store(path)
    store.append(Tick(now=1))
    store.snapshot(json.dumps({"a": 1}))
    store.close()
    edit(path, "UPDATE snapshot SET state = '{\"a\":2}'")
    again = Store(path)
    with pytest.raises(StoreError, match="damaged at the snapshot after event 1"):
        again.restore()
    again.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"this is no database at all" * 200,
        lambda data: data[:100] + os.urandom(4000) + data[4100:],
    ],
    ids=["another file", "random bytes in the first page"],
)
def test_a_file_that_is_no_journal_is_refused_with_what_to_do(path, damage):
    Store(path).close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match="jupyter gpupool restore FILE"):
        Store(path)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(StoreError, match="cannot be opened: the folder must exist"):
        Store(tmp_path / "nowhere" / "journal.sqlite")


def test_a_journal_of_a_newer_version_is_refused(path):
    Store(path).close()
    edit(path, f"INSERT INTO migrations VALUES ({schema.VERSION + 1}, 'later')")
    with pytest.raises(StoreError, match=r"written by a newer version .* upgrade jupyter-gpupool"):
        Store(path)


@pytest.mark.parametrize("version", range(schema.VERSION))
def test_a_journal_of_each_older_version_is_brought_up_to_date(path, version, monkeypatch):
    steps = schema.STEPS
    monkeypatch.setattr(schema, "STEPS", steps[:version])
    if version:
        Store(path).close()
    monkeypatch.setattr(schema, "STEPS", steps)
    store = Store(path)
    assert store.append(Tick(now=1)) == 1
    assert [row["version"] for row in store.dump() if row["table"] == "migrations"] == [
        *range(1, len(steps) + 1)
    ]
    store.close()


def test_a_step_of_the_schema_that_fails_leaves_the_file_as_it_was(path, monkeypatch):
    Store(path).close()
    monkeypatch.setattr(
        schema, "STEPS", (*schema.STEPS, "CREATE TABLE extra (x);\nCREATE TABLE journal (y);\n")
    )
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(StoreError):
        Store(path)
    monkeypatch.undo()
    store = Store(path)
    assert store._db.row("SELECT name FROM sqlite_master WHERE name = 'extra'") is None
    store.close()


# ----------------------------------------------------------------------------------------------- beside it


def test_an_idempotency_key_is_kept_with_its_event_for_a_day_of_the_pools_clock(path):
    """However the wall clock jumps: else a request that is sent again after a jump would be granted twice."""
    wall, day = [1_000_000.0], 86_400_000
    store = Store(path, wall=lambda: wall[0])
    store.append(submitted("a", now=1000), ONE)
    assert store.seen("ann", "key-1", 1000) == Seen("a", "f1")
    assert store.seen("ben", "key-1", 1000) is None
    for jump in (10 * 86_400, -20 * 86_400):
        wall[0] += jump
        store.append(submitted(f"after {jump}", now=2000), ONE._replace(key=f"{jump}"))
        assert store.seen("ann", "key-1", 1000 + day) == Seen("a", "f1")
    assert store.seen("ann", "key-1", 1001 + day) is None
    store.append(submitted("b", now=3000 + day), ONE._replace(key="key-2"))
    assert store._db.rows("SELECT key FROM keys") == [("key-2",)]
    store.forget_key("ann", "key-2")
    assert store.seen("ann", "key-2", 3000 + day) is None
    store.close()


def test_a_notice_that_is_said_again_at_replay_is_kept_once(store):
    assert store.add_notices(1, [say("one"), say("two")])
    assert not store.add_notices(1, [say("one"), say("two")])
    assert store.add_notices(2, [say("three")])
    assert not store.add_notices(2, [])
    assert [each["sentence"] for each in store.notices(0, "ann").notices] == ["one", "two", "three"]


def test_a_notice_that_follows_from_no_event_is_kept_as_often_as_it_is_said(store):
    store.add_notices(None, [say("hot")])
    store.add_notices(None, [say("hot")])
    assert len(store.notices(0, "ann").notices) == 2


def test_a_person_gets_their_own_notices_and_administrators_those_for_them(store):
    store.add_notices(1, [say("for ann"), say("for ben", "ben"), say("a GPU broke", ANY)])
    assert [each["sentence"] for each in store.notices(0, "ann").notices] == ["for ann"]
    assert [each["sentence"] for each in store.notices(0, "ben", admin=True).notices] == [
        "for ben",
        "a GPU broke",
    ]


def test_whether_there_may_be_news_for_a_person_is_known_without_looking(store):
    assert not store.is_told("ann", 0)
    store.add_notices(1, [say("one"), say("two", "ben"), say("a GPU broke", ANY)])
    assert store.is_told("ann", 0)
    assert not store.is_told("cleo", 0)
    assert store.is_told("cleo", 0, admin=True)
    assert not store.is_told("ann", store.notices(0, "ann").next)


def test_reading_notices_in_pieces_loses_none_and_repeats_none(store):
    for n in range(25):
        store.add_notices(n + 1, [say(f"a{n}"), say(f"b{n}", "ben")])
    found, after = [], 0
    while True:
        piece = store.notices(after, "ann", limit=4)
        found += [each["sentence"] for each in piece.notices]
        after = piece.next
        if not piece.notices:
            break
    assert found == [f"a{n}" for n in range(25)]
    assert store.notices(after, "ann") == ([], after, False)


def test_only_so_many_notices_are_kept_and_whoever_missed_some_is_told(store):
    store.add_notices(1, [say(f"n{n}") for n in range(50)])
    assert not store.notices(10, "ann").missed
    store.add_notices(2, [say(f"m{n}") for n in range(NOTICES - 20)])
    assert store._db.row("SELECT count(*) FROM notices")[0] == NOTICES
    assert store.notices(10, "ann").missed
    assert not store.notices(30, "ann").missed
    assert not store.notices(0, "ann").missed
    after_restore = store.notices(10**9, "ann", limit=1)
    assert after_restore.missed
    assert len(after_restore.notices) == 1


def test_the_last_sentences_about_a_lease_are_its_notes(store):
    store.add_notices(1, [say(f"n{n}") for n in range(8)] + [say("another", lease="b")])
    assert store.notes("a", 3) == ["n5", "n6", "n7"]


def test_secrets_are_in_no_dump_and_are_gone_from_the_file_when_the_lease_ends(path):
    store = Store(path)
    secret = "correct-horse-" + "battery" * 10
    store.keep_secret("a", {"key": secret})
    store.share("a", ["ben", "cleo"])
    store.append(
        submitted("a", options=json.dumps({"environment": {"variables": {"TOKEN": secret, "N": "1"}}}))
    )
    assert store.secret("a") == {"key": secret}
    assert store.secret_leases() == ["a"]
    dump = json.dumps(list(store.dump()))
    assert secret not in dump
    assert "TOKEN" in dump
    store.forget_secret("a")
    assert store.secret("a") is None
    assert store.shared_with("a") == ()
    store.close()
    store = Store(path)
    store.snapshot(json.dumps({}))  # the request, whose own variables hold it, is gone as well
    store.close()
    assert secret.encode() not in path.read_bytes()


def test_a_lease_is_shared_with_those_named_last(store):
    store.share("a", ["ben", "cleo", "ben"])
    store.share("b", ["ben"])
    assert store.shared_with("a") == ("ben", "cleo")
    assert store.shared_to("ben") == {"a", "b"}
    store.share("a", ["dan"])
    assert store.shared_with("a") == ("dan",)
    assert store.shared_to("ben") == {"b"}


def test_facts_are_kept_over_a_restart(path):
    store = Store(path)
    store.put("ports", {"api": 8790})
    store.put("ports", {"api": 8791})
    store.close()
    store = Store(path)
    assert store.get("ports") == {"api": 8791}
    assert store.get("nothing", "else") == "else"
    store.close()


# ------------------------------------------------------------------------------------------------- backups


def test_a_backup_of_a_running_journal_is_whole_private_and_can_be_put_back(path, tmp_path):
    store = Store(path)
    append_all(store, [submitted("a"), submitted("b")])
    store.snapshot(json.dumps({"state": 1}), 1)
    store.keep_secret("a", {"key": "k"})
    target = tmp_path / "copy"
    assert backup(path, target) == {"events": 1, "last": 2, "snapshot": 1, "has_snapshot": True}
    assert oct(target.stat().st_mode & 0o777) == "0o600"
    store.append(LeaseReleased(now=9, lease="a"))
    with pytest.raises(StoreError, match="in use by process"):
        put_back(target, path)
    store.close()
    put_back(target, path)
    again = Store(path)
    assert again.restore() == ({"state": 1}, 1)
    assert list(again.replay()) == [(2, submitted("b"))]
    assert again.secret("a") == {"key": "k"}
    again.close()
    assert check(path.with_name("journal.sqlite.before"))["last"] == 3


def test_a_journal_is_put_back_with_what_stands_only_in_the_log_beside_it(path, tmp_path):
    store = Store(path)
    append_all(store, [submitted("a"), submitted("b")])
    killed = (
        tmp_path / "killed"
    )  # as a controller that is killed leaves its folder, or a copy of a running one
    killed.mkdir()
    for each in path.parent.glob(f"{path.name}*"):
        shutil.copy(each, killed)
    store.close()
    target = tmp_path / "new" / path.name
    target.parent.mkdir()
    assert put_back(killed / path.name, target)["last"] == 2
    again = Store(target)
    assert [seq for seq, _ in again.replay()] == [1, 2]
    again.close()


def test_a_backup_is_refused_rather_than_written_over_something_or_nowhere(store, path, tmp_path):
    target = tmp_path / "copy"
    target.write_text("precious")
    with pytest.raises(StoreError, match="exists: name a new file"):
        backup(path, target)
    assert target.read_text() == "precious"
    with pytest.raises(StoreError, match=r"/nowhere/copy"):
        backup(path, tmp_path / "nowhere" / "copy")
    with pytest.raises(StoreError, match="is not there"):
        backup(tmp_path / "none", tmp_path / "new")


def test_a_restore_that_dies_on_its_way_leaves_one_journal_or_the_other(path, tmp_path):
    """At each call that changes a file: the journal that is there is whole, and is the old or the new one."""
    store = Store(path)
    store.append(Tick(now=1))
    backup(path, tmp_path / "copy")
    store.append(Tick(now=2))
    script = """
        import os, sys
        from jupyter_gpupool.controller import backup
        left = [int(sys.argv[3])]
        def dying(call):
            def wrapped(*arguments, **more):
                if not left[0]:
                    os.kill(os.getpid(), 9)
                left[0] -= 1
                return call(*arguments, **more)
            return wrapped
        for owner, name in ((os, "link"), (os, "unlink"), (os, "replace"), (os, "rename")):
            setattr(owner, name, dying(getattr(owner, name)))
        backup.put_back(sys.argv[1], sys.argv[2])
    """
    seen = []
    for calls in range(30):
        folder = tmp_path / f"at-{calls}"
        folder.mkdir()
        for suffix in ("", "-wal"):
            (folder / f"journal.sqlite{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
        words = [str(tmp_path / "copy"), str(folder / "journal.sqlite"), str(calls)]
        command = [sys.executable, "-c", textwrap.dedent(script), *words]
        done = subprocess.run(command, check=False, timeout=60, capture_output=True)
        seen.append(check(folder / "journal.sqlite")["last"])
        if not done.returncode:
            break
    store.close()
    assert done.returncode == 0, done.stderr
    assert (seen[0], seen[-1], set(seen)) == (2, 1, {1, 2})


def test_a_damaged_backup_is_not_put_back_and_the_journal_stays(path, tmp_path):
    store = Store(path)
    append_all(store, [Tick(now=n) for n in range(5)])
    target = tmp_path / "copy"
    backup(path, target)
    store.close()
    edit(target, "DELETE FROM journal WHERE seq = 3")
    with pytest.raises(StoreError, match=f"{target} is damaged at event 3"):
        put_back(target, path)
    store = Store(path)
    assert store.last_seq == 5
    store.close()


def test_checking_a_file_leaves_it_and_its_folder_alone(path, tmp_path):
    Store(path).close()
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    copy = folder / "copy"
    backup(path, copy)
    before = copy.read_bytes()
    check(copy)
    assert copy.read_bytes() == before
    assert [each.name for each in folder.iterdir()] == ["copy"]


def test_the_command_line_makes_backups_and_puts_them_back_one_sentence_each(path, tmp_path):
    store = Store(path)
    append_all(store, [Tick(now=1), Tick(now=2)])

    def run(*words):
        command = [sys.executable, "-m", "jupyter_gpupool.cli", *words, "--dir", str(tmp_path)]
        return subprocess.run(command, capture_output=True, check=False, timeout=60, text=True)

    copy = str(tmp_path / "copy")
    assert run("backup", copy).stdout == f"{copy} is a good backup with all that happened up to event 2.\n"
    again = run("backup", copy)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "exists: name a new file" in again.stderr
    assert "in use by process" in run("restore", copy).stderr
    store.append(Tick(now=3))
    store.close()
    assert "up to event 2 at its next start" in run("restore", copy).stdout
    store = Store(path)
    assert store.last_seq == 2
    store.close()


# ---------------------------------------------------------------------------------------- the pool's clock


class Machine:
    """A machine whose clocks a test sets."""

    def __init__(self):
        self.boot, self.up, self.date = "boot-1", 5_000, 1_000_000.0

    def clock(self, store):
        return Clock(store, boot=self.boot, boottime=lambda: self.up, wall=lambda: self.date)

    def passes(self, ms):
        self.up += ms
        self.date += ms / 1000


def test_a_wall_clock_that_jumps_by_hours_neither_hurries_nor_stops_the_pools_clock(store):
    machine = Machine()
    clock = machine.clock(store)
    start = clock.now()
    assert start == 1_000_000_000
    machine.passes(1000)
    machine.date += 7200
    assert clock.now() == start + 1000
    machine.date -= 90_000
    machine.passes(500)
    assert clock.now() == start + 1500


def test_people_see_times_by_the_wall_clock_as_it_is_now(store):
    machine = Machine()
    clock = machine.clock(store)
    then = clock.now()
    machine.passes(60_000)
    assert clock.wall(then) == pytest.approx(machine.date - 60, abs=0.01)
    machine.date += 3600
    assert clock.wall(then) == pytest.approx(machine.date - 60, abs=0.01)
    machine.date += 0.2  # jitter between two readings does not make times flicker
    assert clock.wall(then) == pytest.approx(machine.date - 60.2, abs=0.01)


def test_the_pools_clock_goes_on_while_the_controller_is_down_in_the_same_boot(store):
    machine = Machine()
    clock = machine.clock(store)
    clock.renew()
    before = clock.now()
    machine.passes(30_000)
    machine.date += 50_000
    assert machine.clock(store).now() == before + 30_000


def test_after_a_reboot_it_goes_on_from_the_last_mark_or_the_last_event(store):
    machine = Machine()
    clock = machine.clock(store)
    machine.passes(10_000)
    clock.renew()
    marked = clock.now()
    machine.boot, machine.up, machine.date = "boot-2", 20, machine.date + 86_400
    assert machine.clock(store).now() == marked
    store.append(Tick(now=marked + 700))
    assert machine.clock(store).now() == marked + 700


def test_time_marks_are_written_when_enough_time_has_passed_however_often_it_is_asked(store):
    machine = Machine()
    clock = machine.clock(store)
    clock.renew()
    first = store.last_mark()
    machine.passes(MARK_EVERY - 1)
    clock.renew()
    assert store.last_mark() == first
    machine.passes(1)
    clock.renew()
    assert store.last_mark().pool == first.pool + MARK_EVERY


def test_a_time_mark_replaces_the_one_before(store):
    assert store.last_mark() is None
    store.mark(Mark("b", 1, 2))
    store.mark(Mark("b", 3, 4))
    assert store.last_mark() == Mark("b", 3, 4)


def test_the_real_clocks_of_this_machine_serve(store):
    clock = Clock(store)
    first = clock.now()
    clock.renew()
    assert 0 <= Clock(store).now() - first < 10_000
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() == store.last_mark().boot
