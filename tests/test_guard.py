"""All processes of a slice are found and ended, however they hide, and nobody else's are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from jupyter_gpupool.node import guard

#: Seconds that anything may take.
LONGEST = 20
MARK = f"guard-{os.getpid()}:lease/0"


def process(pid, parent=1, session=None, mark="", *, zombie=False):
    return guard.Process(pid, parent, pid if session is None else session, pid * 10, zombie, mark)


def table(*processes):
    return {each.pid: each for each in processes}


@pytest.mark.parametrize(
    ("processes", "roots", "found"),
    [
        pytest.param(
            table(process(5, mark="m"), process(6, mark="other"), process(7)), (), {5}, id="a mark tells it"
        ),
        pytest.param(table(process(5), process(6)), {(5, 50)}, {5}, id="a known process is one"),
        pytest.param(table(process(5)), {(5, 51)}, set(), id="a PID that was given anew is another's"),
        pytest.param(
            table(process(5, mark="m"), process(6, parent=5), process(7, parent=6), process(8)),
            (),
            {5, 6, 7},
            id="what it started belongs to it",
        ),
        pytest.param(
            table(process(5, mark="m"), process(6, session=5), process(7, session=1)),
            (),
            {5, 6},
            id="who is in the session that it leads belongs to it",
        ),
        pytest.param(
            table(process(5, session=1, mark="m"), process(6, session=1)),
            (),
            {5},
            id="who is in a session that it only is in does not",
        ),
        pytest.param(
            table(process(5, mark="m"), process(6, parent=5, mark="other"), process(7, parent=6)),
            (),
            {5},
            id="another slice's process is that slice's, whoever started it",
        ),
        pytest.param(
            table(process(5, mark="m"), process(6, parent=5, mark="x"), process(7, parent=6)),
            (),
            {5, 6, 7},
            id="a mark that a program has given itself frees nobody",
        ),
        pytest.param(
            table(process(5, mark="m", zombie=True), process(6, parent=5)),
            (),
            {6},
            id="a zombie is gone, its children are not",
        ),
    ],
)
def test_whose_a_process_is(processes, roots, found):
    assert {pid for pid, _ in guard.find(["m"], roots, processes, ["m", "other"])} == found


def test_what_dead_workers_left_below_a_forkserver_is_found_by_having_no_mark():
    """A program with an environment of its own, whose worker died first; not what was forked just now.

    A mark that is no lease's here is none.
    """
    old, now = 100, 100 + int(guard.UNMARKED * os.sysconf("SC_CLK_TCK")) + 1
    left = guard.Process(6, 5, 6, old, zombie=False, mark="")
    there = table(
        left,
        guard.Process(7, 5, 7, old, zombie=False, mark="a:lease"),
        guard.Process(8, 5, 8, now, zombie=False, mark=""),
        guard.Process(9, 1, 9, old, zombie=False, mark=""),
        guard.Process(10, 5, 10, old, zombie=True, mark=""),
    )
    assert guard.orphans({5}, there, now, ["a:lease"]) == {left.identity}
    own = guard.Process(11, 5, 11, old, zombie=False, mark="x")
    assert guard.orphans({5}, there | {11: own}, now, ["a:lease"]) == {left.identity, own.identity}


SHELL = "import os, signal, sys, time; "
IGNORING = SHELL + "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
#: Leaves its parent, its session and its group, as a daemon does.
DAEMON = SHELL + (
    "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@pytest.fixture
def start():
    started = []

    def start(code, mark=MARK):
        popen = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, guard.MARK: mark.ljust(guard.WIDTH, ".")},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        started.append(popen)
        assert popen.stdout.readline() == b"up\n"
        return popen

    yield start
    for popen in started:
        popen.kill()
        popen.stdout.close()
        popen.wait(LONGEST)
    for pid, _ in guard.marked(f"guard-{os.getpid()}:", guard.look()).get(MARK, ()):
        os.kill(pid, signal.SIGKILL)


def end(*arguments, **options):
    return asyncio.run(asyncio.wait_for(guard.end(*arguments, **options), LONGEST))


def alive(mark=MARK):
    return guard.find([mark], (), guard.look())


@pytest.mark.parametrize("code", [IGNORING, DAEMON], ids=["one that ignores SIGTERM", "a daemon of its own"])
def test_no_process_outlives_its_slice(start, code):
    start(code)
    assert alive()
    end([MARK], (), grace_s=0.3)
    assert not alive()


def test_a_process_that_ends_when_asked_is_not_killed(start, tmp_path):
    said = tmp_path / "said"
    start(
        SHELL
        + f"signal.signal(signal.SIGTERM, lambda *_: (open({str(said)!r}, 'w').write('bye'), sys.exit())); "
        "print('up', flush=True); time.sleep(600)"
    )
    end([MARK], (), grace_s=LONGEST)
    assert said.read_text() == "bye"


def test_another_slice_s_processes_are_left_alone(start):
    other = start(IGNORING, MARK + "0")
    start(IGNORING)
    end([MARK], (), grace_s=0.1)
    assert other.poll() is None


def test_nothing_is_free_while_the_driver_lists_one_of_its_processes(start):
    """The driver may list a process for a while after it has ended; others' are no reason to wait."""
    popen = start(IGNORING)
    answers = [{popen.pid, 1}, {popen.pid}, {1}]
    end([MARK], (), grace_s=0.1, device_pids=lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    assert answers == [{1}]


def test_a_process_that_only_the_driver_knows_keeps_its_slice_for_a_while(monkeypatch):
    """A worker that ended before anybody looked, or a process of another PID namespace: nobody can tell."""
    monkeypatch.setattr(guard, "STALE", 0.3)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(LONGEST)
    began = time.monotonic()
    end([MARK], (), device_pids=lambda: {gone.pid})
    assert time.monotonic() - began >= 0.3
    answers = [{gone.pid}, set()]
    end([MARK], (), device_pids=lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    assert answers == [set()]


def test_a_driver_that_does_not_say_what_it_lists_keeps_the_slice_for_a_while(monkeypatch):
    monkeypatch.setattr(guard, "STALE", 0.3)
    began = time.monotonic()
    end([MARK], (), device_pids=lambda: None)
    assert time.monotonic() - began >= 0.3
    answers = [None, set()]
    end([MARK], (), device_pids=lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    assert answers == [set()]


def test_a_stopped_process_is_ended_too(start):
    popen = start(SHELL + "print('up', flush=True); time.sleep(600)")
    os.kill(popen.pid, signal.SIGSTOP)
    end([MARK], (), grace_s=0.2)
    assert not alive()


def test_a_signal_never_reaches_a_process_that_has_got_the_pid_since(start):
    popen = start(SHELL + "print('up', flush=True); time.sleep(600)")
    guard.send((popen.pid, guard.started_at(popen.pid) + 1), signal.SIGKILL)
    time.sleep(0.1)
    assert popen.poll() is None


def test_the_end_of_any_process_can_be_waited_for(start):
    popen = start(SHELL + "print('up', flush=True); sys.stdin.read(); time.sleep(0.2)")

    async def wait():
        identity = popen.pid, guard.started_at(popen.pid)
        await asyncio.wait_for(guard.wait_gone(identity), LONGEST)
        await asyncio.wait_for(guard.wait_gone(identity), LONGEST)  # it is gone already

    asyncio.run(wait())
    assert popen.wait(LONGEST) == 0


def test_a_name_in_proc_may_hold_anything():
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) R 7 (b'); print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as popen:
        popen.stdout.readline()
        found = guard.look_at(popen.pid)
        popen.kill()
    assert (found.parent, found.pid) == (os.getpid(), popen.pid)
