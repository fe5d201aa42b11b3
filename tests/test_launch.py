"""How a lease's processes are started: as whom, with which environment, and what they outlive."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from jupyter_gpupool.lease import process
from jupyter_gpupool.node import guard, lease_launcher
from jupyter_gpupool.node.launch import (
    ALLOWED,
    Account,
    LaunchError,
    Launchers,
    allowed_environment,
    find_account,
)

#: Seconds that anything may take.
LONGEST = 60

ME = Account("me", 1000, 1000, (), "/home/me", switch=False)


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("PATH", True),
        ("LC_ALL", True),
        ("CUDA_MPS_PIPE_DIRECTORY", True),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("GPUPOOL_TOKEN", False),
        ("JUPYTERHUB_API_TOKEN", False),
        ("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", False),
        ("XPATH", False),
    ],
)
def test_only_what_the_list_names_passes_to_a_lease(name, passes):
    assert (name in allowed_environment({name: "x"}, ME)) is passes


def test_the_environment_is_its_user_s_and_counts_threads_before_numpy_does():
    environ = allowed_environment({"HOME": "/root", "USER": "root"}, ME, {"MORE": "1"})
    assert (environ["HOME"], environ["USER"], environ["MORE"]) == ("/home/me", "me", "1")
    assert environ["OMP_NUM_THREADS"] == "1"
    assert all(name == name.upper() for name in ALLOWED)


def test_a_lease_of_nobody_is_refused_with_what_to_do():
    with pytest.raises(LaunchError, match="create the account there or map the name"):
        find_account("no-such-user-here", switches=True)


def test_without_switching_everybody_is_the_agent_s_own_user():
    account = find_account("no-such-user-here", switches=False)
    assert (account.uid, account.switch) == (os.geteuid(), False)


def sleep(spec):
    """Run in a lease process: say who it is, and stay."""
    facts = {
        "session": os.getsid(0) == os.getpid(),
        "mark": os.environ[guard.MARK].rstrip("."),
        "lease": os.environ["GPUPOOL_LEASE"],
        "secret": os.environ.get("SECRET", ""),
        "folder": str(Path.cwd()),
        "loaded": "distributed.dashboard.scheduler" in sys.modules,
    }
    print(json.dumps(facts), flush=True)
    time.sleep(spec.get("seconds", 600))
    sys.exit(spec.get("code", 0))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder, a launcher that is warm, and an event loop for it; one launcher starts in 2 s or more."""
    os.environ["SECRET"] = "the agent's"
    # A module of the tests is no part of what is installed.
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    loop = asyncio.new_event_loop()
    folder = tmp_path_factory.mktemp("launch")
    launchers = Launchers(folder, switches=False, environ={})

    def do(work):
        return loop.run_until_complete(asyncio.wait_for(work, LONGEST))

    yield Place(folder, launchers, do)
    do(launchers.close())
    loop.close()
    del os.environ["SECRET"], os.environ["PYTHONPATH"]


class Place:
    def __init__(self, folder, launchers, do):
        self.folder, self.launchers, self.do = folder, launchers, do
        self.account = find_account("", switches=False)

    def order(self, name, **spec):
        return {
            "mark": f"test-{os.getpid()}:{name}",
            "environ": {"GPUPOOL_LEASE": name},
            "log": str(self.folder / f"{name}.log"),
            "umask": 0o077,
            "folder": str(self.folder),
            "target": "tests.test_launch:sleep",
            "spec": spec,
        }

    def said(self, name, last="\n"):
        deadline = time.monotonic() + LONGEST
        while time.monotonic() < deadline:
            text = (self.folder / f"{name}.log").read_text() if (self.folder / f"{name}.log").exists() else ""
            if last in text:
                return text
            time.sleep(0.01)
        raise AssertionError(f"{name} said nothing")


def until(holds):
    deadline = time.monotonic() + LONGEST
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end(pid):
    started = guard.started_at(pid)
    asyncio.run(guard.end([], {(pid, started)}, grace_s=1))


def test_a_process_leads_its_session_has_its_mark_and_nothing_of_the_agent_s(place):
    pid = place.do(place.launchers.start(place.account, place.order("one")))
    facts = json.loads(place.said("one"))
    mark = f"test-{os.getpid()}:one"
    expected = {"session": True, "mark": mark, "lease": "one", "secret": "", "folder": str(place.folder)}
    assert facts == {**expected, "loaded": True}
    # What /proc shows is the memory of the forkserver's start, written over: forked daemons inherit it.
    assert guard.look_at(pid).mark == mark
    assert (place.folder / "one.log").stat().st_mode & 0o777 == 0o600
    end(pid)


def test_cuda_is_not_initialised_before_the_fork(place):
    server = place.do(place.launchers.warm(place.account))
    assert "libcuda.so" not in Path(f"/proc/{server}/maps").read_text()


def test_the_exit_status_of_a_process_is_told(place):
    pid = place.do(place.launchers.start(place.account, place.order("two", seconds=0, code=7)))
    assert place.do(place.launchers.exit_status(pid, LONGEST)) == 7
    assert place.do(place.launchers.exit_status(pid, LONGEST)) is None, "it is told once"


def test_the_exit_status_of_a_process_that_ends_at_once_is_told_to_an_agent_that_was_busy_meanwhile(place):
    """Both words, that it has been started and that it has ended, lie there when the agent looks again."""
    launchers, order = place.launchers, place.order("at-once", seconds=0, code=7)

    async def start():
        starting = asyncio.create_task(launchers.start(place.account, order))
        while not any(each.waiting for each in launchers._launchers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        place.said("at-once")  # it holds up the loop, as a busy machine does
        mark = f"test-{os.getpid()}:at-once"
        until(lambda: not guard.marked(mark, guard.look()))
        return await launchers.exit_status(await starting, LONGEST)

    assert place.do(start()) == 7


def test_a_process_that_is_started_after_its_order_was_given_up_is_ended(place, monkeypatch):
    """Its slice may be somebody else's by then, or another process may stand in its place."""
    place.do(place.launchers.warm(place.account))
    launcher = place.launchers._launchers[place.account.uid, "", ()]
    monkeypatch.setattr("jupyter_gpupool.node.launch.START", 0.1)
    os.kill(launcher.popen.pid, signal.SIGSTOP)
    try:
        with pytest.raises(LaunchError, match="did not answer"):
            place.do(place.launchers.start(place.account, place.order("late")))
    finally:
        os.kill(launcher.popen.pid, signal.SIGCONT)

    async def ended():
        while launcher.given_up:  # noqa: ASYNC110 - it is heard of
            await asyncio.sleep(0.01)

    place.do(ended())
    mark = f"test-{os.getpid()}:late"
    until(lambda: not guard.marked(mark, guard.look()))


def test_a_target_that_does_not_exist_leaves_its_reason_in_the_log(place):
    place.do(place.launchers.start(place.account, {**place.order("three"), "target": "tests.no_such:thing"}))
    place.said("three", "No module named 'tests.no_such'")


def test_variables_of_a_request_s_own_start_a_launcher_of_their_own(place):
    before = len(place.launchers.forkservers())
    variables = {"SECRET": "the request's"}
    pid = place.do(place.launchers.start(place.account, place.order("four"), variables=variables))
    assert json.loads(place.said("four"))["secret"] == "the request's"
    assert len(place.launchers.forkservers()) == before + 1
    end(pid)


def test_an_interpreter_that_does_not_exist_is_refused_with_what_to_do(place):
    with pytest.raises(LaunchError, match="check that the interpreter exists"):
        place.do(place.launchers.start(place.account, place.order("five"), python="/no/such/python"))


def test_an_interpreter_without_the_package_says_so(place, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named jupyter_gpupool' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(LaunchError, match="No module named jupyter_gpupool"):
        place.do(place.launchers.start(place.account, place.order("six"), python=str(python)))


@pytest.mark.parametrize(
    ("at_first", "then"),
    [
        pytest.param('{"ready": true, "forkserver": 1}', "", id="another's forkserver"),
        pytest.param('{"ready": true, "forkserver": 0}', '{"started": 1, "pid": 1}', id="another's process"),
        pytest.param('{"ready": true}', "", id="half of it"),
        pytest.param("[]", "", id="no object"),
        pytest.param("x", "", id="no JSON"),
    ],
)
def test_an_interpreter_that_says_what_is_not_so_is_ended_and_nobody_else_is(at_first, then):
    folder = Path(tempfile.mkdtemp(prefix="gp-"))  # where another user can enter
    folder.chmod(0o755)
    python = folder / "python"
    says = "printf '%s\\n' '{}' >&$4\n"
    python.write_text(f"#!/bin/bash\n{says.format(at_first)}read line <&$4\n{says.format(then)}sleep 100\n")
    python.chmod(0o755)
    nobody = pwd.getpwnam("nobody")  # process 1 is root's
    other = Account("nobody", nobody.pw_uid, nobody.pw_gid, (), "/", switch=True)
    account = other if os.geteuid() == 0 else find_account("", switches=False)

    async def start():
        launchers = Launchers(folder, switches=False, environ={})
        try:
            with pytest.raises(LaunchError):
                await launchers.start(account, {"spec": {}}, python=str(python))
            return launchers.forkservers()
        finally:
            await launchers.close()

    try:
        assert 1 not in asyncio.run(asyncio.wait_for(start(), LONGEST))
    finally:
        shutil.rmtree(folder)


def waiting(server):
    """The forked processes that are nobody's yet."""
    return {
        each.identity
        for each in guard.look().values()
        if each.parent == server and each.mark == process.SPARE
    }


def test_an_order_goes_to_a_process_that_waits_and_another_one_takes_its_place(place):
    server = place.do(place.launchers.warm(place.account))
    until(lambda: len(waiting(server)) == lease_launcher.SPARES)
    before = waiting(server)
    pid = place.do(place.launchers.start(place.account, place.order("eight")))
    assert pid in {each for each, _ in before}, "it was forked before it was ordered"
    assert json.loads(place.said("eight"))["session"]
    assert guard.look_at(pid).mark.endswith(":eight"), "the mark of those that wait is written over"
    until(lambda: len(waiting(server)) == lease_launcher.SPARES)
    end(pid)


def test_orders_are_carried_out_where_those_that_wait_were_killed_and_where_there_are_too_few(place):
    server = place.do(place.launchers.warm(place.account))
    until(lambda: len(waiting(server)) == lease_launcher.SPARES)
    killed = waiting(server)
    for pid, _ in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(guard.started_at(pid) for pid, _ in killed))
    names = [f"nine-{number}" for number in range(lease_launcher.SPARES + 1)]
    pids = [place.do(place.launchers.start(place.account, place.order(name))) for name in names]
    for name, pid in zip(names, pids, strict=True):
        assert json.loads(place.said(name))["lease"] == name
        end(pid)


def hang_up(spec):
    """Run in a lease process: reach the forkserver, and be gone before anything is asked of it."""
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(spec["forkserver"]["address"])
    print("reached", flush=True)


def test_a_forkserver_survives_who_is_gone_before_it_asks(place):
    """Python's own would end at that before 3.14, and with it the start of every worker."""
    server = place.do(place.launchers.warm(place.account))
    order = {**place.order("ten"), "target": "tests.test_launch:hang_up"}
    place.do(place.launchers.start(place.account, order))
    place.said("ten", "reached")
    pid = place.do(place.launchers.start(place.account, place.order("eleven")))
    place.said("eleven")
    assert guard.started_at(server)
    end(pid)


def test_those_that_wait_are_no_leftovers_of_dead_workers(place):
    server = place.do(place.launchers.warm(place.account))
    until(lambda: len(waiting(server)) == lease_launcher.SPARES)
    later = guard.ticks() + int(2 * guard.UNMARKED * os.sysconf("SC_CLK_TCK"))
    assert not guard.orphans([server], guard.look(), later) & waiting(server)


def test_those_that_wait_reach_another_forkserver_where_theirs_has_died(place):
    server = place.do(place.launchers.warm(place.account))
    until(lambda: len(waiting(server)) == lease_launcher.SPARES)
    os.kill(server, signal.SIGKILL)
    until(lambda: not guard.started_at(server) and len(list(Path(f"/proc/{server}/task").iterdir())) == 1)
    order = {**place.order("twelve"), "target": "tests.test_launch:hang_up"}
    place.do(place.launchers.start(place.account, order))
    place.said("twelve", "reached")
    assert place.do(place.launchers.warm(place.account)) not in (0, server), "the agent knows it"


AGENT = """
import asyncio, sys
from pathlib import Path
from jupyter_gpupool.node.launch import Launchers, find_account
async def main():
    account = find_account("", switches=False)
    launchers = Launchers(Path(sys.argv[1]), switches=False, environ={})
    print(await launchers.start(account, eval(sys.argv[2])), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_what_a_launcher_has_started_outlives_a_killed_agent_and_the_launcher_does_not(place):
    order = place.order("seven")
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(place.folder), repr(order)], stdout=subprocess.PIPE
    ) as agent:
        pid = int(agent.stdout.readline())
        server = guard.look_at(pid).parent
        launcher = guard.look_at(server).parent
        agent.send_signal(signal.SIGKILL)
        agent.wait(LONGEST)
    place.said("seven")
    deadline = time.monotonic() + LONGEST
    while guard.started_at(launcher) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not guard.started_at(launcher)
    assert guard.started_at(pid)
    until(lambda: not waiting(server))
    assert guard.started_at(server), "the forkserver lives as long as what was forked from it"
    end(pid)
    while guard.started_at(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not guard.started_at(server)


SHARING = """
import multiprocessing, os
def grandchild(queue): queue.put(os.getppid())
def child(queue, given):
    from jupyter_gpupool.lease.sharing import share_forkserver
    shared = share_forkserver(given)
    queue.put(shared)
    process = multiprocessing.get_context("forkserver").Process(target=grandchild, args=(queue,))
    process.start(); process.join(); queue.put(os.getppid())
if __name__ == "__main__":
    from jupyter_gpupool.node.lease_launcher import reach
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    context.Process(target=print).start()
    process = context.Process(target=child, args=(queue, reach()))
    process.start()
    print(*(queue.get(timeout=30) for _ in range(3)))
    process.join()
"""


def pythons():
    """The interpreters of this machine that are supported: this one, and others by name."""
    names = [shutil.which(f"python3.{minor}") for minor in range(11, 16)]
    return [sys.executable, *(each for each in names if each and works(each))]


def works(python):
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    return (
        subprocess.run([python, "-c", code], capture_output=True, timeout=LONGEST, check=False).returncode
        == 0
    )


def test_a_child_of_the_forkserver_starts_its_own_children_from_it_too(tmp_path):
    """It reaches into multiprocessing, so it is tried on each Python that is supported and there."""
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for python in pythons():
        said = subprocess.run(
            [python, str(script)], capture_output=True, text=True, timeout=LONGEST, check=True, env=environ
        ).stdout
        shared, parent, own_parent = said.split()[-3:]
        assert shared == "True", python
        assert parent == own_parent, f"with {python} the forkserver is not the parent of both"


def test_where_multiprocessing_has_changed_the_forkserver_is_not_shared(monkeypatch):
    from multiprocessing import forkserver

    from jupyter_gpupool.lease.sharing import share_forkserver

    assert not share_forkserver({"address": "/somewhere", "authkey": ""}), (
        "this process is not forked from one"
    )
    monkeypatch.delattr(forkserver, "_forkserver")
    assert not share_forkserver({"address": "/somewhere", "authkey": ""})
