"""Leases whose agent dies or is another user: they work on, are adopted, and are their owner's alone."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from jupyter_gpupool.driver import simulated
from jupyter_gpupool.node import guard
from tests.leasing import LONGEST, Lease, Node, running


def test_a_killed_agent_s_leases_work_on_and_the_next_one_adopts_them(tmp_path):
    node = Node(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.leasing", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as agent:
        first = Line(agent)
        lease = Lease(first, "adopted")
        client = lease.client()
        future = client.submit(slow_square, 7)
        orphan = first.tell_of_a_start_that_nobody_finished(lease)
        agent.send_signal(signal.SIGKILL)
        agent.wait(LONGEST)
    before = set(lease_processes(tmp_path))
    assert future.result(timeout=LONGEST) == 49, "it works on without an agent"
    [worker] = client.run(os.getpid).values()
    os.kill(worker, signal.SIGKILL)
    assert client.submit(slow_square, 3, 0).result(timeout=LONGEST) == 9, (
        "its worker is started anew without an agent"
    )
    try:
        slices, leases = node.start()
        assert (slices, leases) == ((lease.parts[0].id,), ("adopted",))
        assert node.wait("scheduler_started", lease="adopted")["address"] == lease.address
        node.wait("slice_started", slice=lease.parts[0].id)
        lease.node = node
        lease.add(1)
        assert lease.drain(0, "finish", 10_000)["forced"] == []
        assert client.submit(slow_square, 4, 0).result(timeout=LONGEST) == 16
        client.close()
        lease.end()
        assert orphan.wait(LONGEST) == -signal.SIGTERM, "what belongs to no entry is ended"
        assert not any(guard.started_at(pid) for pid in before)
    finally:
        node.stop()
    assert not Path(node.leases._table.run).exists()


def test_an_agent_that_closes_properly_leaves_its_leases_to_the_next_one_too(tmp_path):
    first = Node(tmp_path)
    first.start()
    lease = Lease(first, "kept")
    first.stop(keep=True)
    second = Node(tmp_path)
    try:
        assert second.start() == ((lease.parts[0].id,), ("kept",))
        lease.node = second
        lease.end()
    finally:
        second.stop()


def test_what_died_while_there_was_no_agent_is_not_adopted(tmp_path):
    first = Node(tmp_path)
    first.start()
    lease = Lease(first, "died")
    host = first.leases._table.entries[lease.parts[0].id].pid
    first.stop(keep=True)
    os.kill(host, signal.SIGKILL)
    deadline = time.monotonic() + LONGEST
    while guard.started_at(host) and time.monotonic() < deadline:
        time.sleep(0.02)
    second = Node(tmp_path)
    try:
        assert second.start() == ((), ("died",))
        lease.node = second
        lease.end()
        second.wait("slice_freed", slice=lease.parts[0].id)
    finally:
        second.stop()


def slow_square(x, seconds=1.0):
    time.sleep(seconds)
    return x * x


def lease_processes(folder):
    agent = json.loads((folder / "node-1" / "leases.json").read_text())["agent"]
    found = guard.marked(f"{agent}:", guard.look())
    return [pid for members in found.values() for pid, _ in members]


class Line(Node):
    """A node under test in a process of its own, by lines."""

    def __init__(self, agent):
        self._agent, self._untaken, self.name = agent, [], "node-1"
        self.adopted = json.loads(agent.stdout.readline())
        folder = Path(agent.args[-1])
        super().__init__(folder)
        self._untaken = []

    def obey(self, name, **order):
        self._agent.stdin.write(json.dumps({"order": name, **order}) + "\n")
        self._agent.stdin.flush()

    def wait(self, kind, **fields):
        while True:
            for report in list(self._untaken):
                if report["report"] == kind and fields.items() <= report.items():
                    self._untaken.remove(report)
                    return report
            self._untaken.append(json.loads(self._agent.stdout.readline()))

    def tell_of_a_start_that_nobody_finished(self, lease):
        """Leave a process with a mark of this agent's that is in no entry of its table."""
        data = json.loads((self.folder / "node-1" / "leases.json").read_text())
        mark = f"{data['agent']}:lost/7".ljust(guard.WIDTH, ".")
        return subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, guard.MARK: mark},
            start_new_session=True,
        )


def reach_out(agent, table):
    """What code in a lease may want to know of its agent."""

    def read(path):
        try:
            return Path(path).read_bytes()[:10]
        except OSError as error:
            return type(error).__name__

    umask = os.umask(0)
    os.umask(umask)
    return {
        "uid": os.getuid(),
        "groups": os.getgroups(),
        "umask": umask,
        "home": os.environ["HOME"],
        "environ": read(f"/proc/{agent}/environ"),
        "table": read(table),
        "secret": os.environ.get("AGENT_SECRET"),
    }


SYSTEM_PYTHON = Path("/usr/bin/python3")


def has_second_user():
    """Whether this is root, and another user can run Python with what is installed here."""
    code = "import distributed, jupyter_gpupool"
    return (
        os.geteuid() == 0
        and not subprocess.run(
            [SYSTEM_PYTHON, "-c", code],
            env={"PYTHONPATH": second_path(), "PATH": os.environ["PATH"]},
            user="nobody",
            cwd="/",
            capture_output=True,
            timeout=LONGEST,
            check=False,
        ).returncode
    )


def second_path():
    import distributed

    return f"{Path(distributed.__file__).parents[1]}:{Path(__file__).parents[1]}"


def test_as_root_a_lease_runs_as_its_owner_who_learns_nothing_of_the_agent(monkeypatch):
    if not has_second_user():
        pytest.skip("needs root, and a Python that the user nobody can run")
    monkeypatch.setenv("PYTHONPATH", second_path())
    monkeypatch.setenv("AGENT_SECRET", "x")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o711)
        simulated.create(folder / "machines", shared=True)
        node = Node(folder, switches_users=True)
        node.start()
        try:
            environment = {"python": str(SYSTEM_PYTHON)}
            lease = Lease(node, "owned", user="nobody", environment=environment)
            with lease.client() as client:
                table = folder / "node-1" / "leases.json"
                facts = client.submit(reach_out, os.getpid(), str(table)).result(timeout=LONGEST)
                uids = {Path(f"/proc/{pid}").stat().st_uid for pid in lease.processes()}
            assert uids == {facts["uid"]} == {pwd.getpwnam("nobody").pw_uid}
            assert facts["groups"] == os.getgrouplist("nobody", pwd.getpwnam("nobody").pw_gid)
            assert (facts["umask"], facts["home"]) == (0o077, pwd.getpwnam("nobody").pw_dir)
            assert (facts["environ"], facts["table"], facts["secret"]) == (
                "PermissionError",
                "PermissionError",
                None,
            )
            assert "Register worker" in "".join(each["text"] for each in node.leases.logs("owned"))
            lease.end()
        finally:
            node.stop()
        assert not node.leases._table.run.exists()


def test_a_lease_of_a_user_who_is_none_fails_and_says_what_to_do(tmp_path):
    node = Node(tmp_path, switches_users=True)
    node.start()
    try:
        node.obey("start_scheduler", lease="x", user="no-such-user", credentials={}, secret="", options={})
        assert "create the account" in node.wait_failed("scheduler_failed", lease="x")["why"]
        node.wait("lease_freed", lease="x")
        assert node.leases.present() == ((), ()), "nothing of it is kept"
        assert not node.leases._table.entries
    finally:
        node.stop()


def test_the_dashboard_is_https_where_others_can_reach_it(tmp_path):
    others = [
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and name != "lo"
    ]
    if not others:
        pytest.skip("this machine has no address but the loopback's")
    node = Node(tmp_path, interface=others[0])
    node.start()
    try:
        with running(node, "https", workers=0) as lease:
            assert lease.dashboard.startswith(f"https://{others[0]}:")
            context = ssl.create_default_context(cadata=lease.keys["ca"])
            context.check_hostname = False
            request = urllib.request.Request(lease.dashboard + "/health")
            request.add_header("X-GPUPool-Lease-Secret", lease.secret)
            with urllib.request.urlopen(request, timeout=20, context=context) as answer:
                assert answer.status == 200
    finally:
        node.stop()
