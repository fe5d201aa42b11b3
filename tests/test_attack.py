"""What is reached on the machines of a lease and a pool: a table, tried cell by cell, and taking back."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import distributed
import psutil
import pytest

from jupyter_gpupool import Pool
from jupyter_gpupool._http import PoolError
from jupyter_gpupool.controller.auth import security
from jupyter_gpupool.driver import simulated
from tests import attack
from tests.conftest import not_shown, wait_until
from tests.pool_processes import PoolProcesses
from tests.test_adoption import SYSTEM_PYTHON, has_second_user, second_path

# --------------------------------------------------------------------------------------- machines and ports

#: Code in a worker of another lease: on the node of the lease that is attacked, and on another one.
ATTACKERS = ("owner", "another", "administrator", "nobody", "code on its node", "code on another node")
OWN, NONE = ("open", *["shut"] * 5), ("shut",) * 6
REACH = {
    "the lease's scheduler": OWN,
    "ports of its workers": OWN,
    "its dashboard": OWN,
    "HTTP of its workers, which has nothing": NONE,
    "`/proc` of its processes": OWN,
    "sockets of its forkserver and processes": OWN,
    "`/proc` of its agent and of the controller": NONE,
    "ports of agents": NONE,
    "the controller's port for agents": NONE,
    "certificates of agents and of the pool": NONE,
    "the administrator's token": NONE,
    "the journal": NONE,
    "lists of lease processes": NONE,
}


def test_the_documentation_shows_this_table():
    assert not not_shown("security", REACH)


class People:
    """OS users for one test, with homes of their own."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.names = {name: f"gpt-{name}-{os.getpid()}" for name in names}
        self._folder = folder

    def __enter__(self):
        for user in self.names.values():
            home = self._folder / user
            subprocess.run(["useradd", "--no-create-home", "--home-dir", home, user], check=True, timeout=30)
            home.mkdir(mode=0o700)
            shutil.chown(home, user)
        return self.names

    def __exit__(self, *_: object) -> None:
        for user in self.names.values():
            subprocess.run(["userdel", user], check=True, timeout=30, capture_output=True)


@contextlib.contextmanager
def shared_folder():
    """A folder that other users can pass through, as a pool's is."""
    with tempfile.TemporaryDirectory(prefix="gpt-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@contextlib.contextmanager
def pool_for_people(folder):
    """A pool whose agents run as root, and whose simulated machines every user reaches."""
    pool = PoolProcesses(folder)
    simulated.create(pool.simulated, pool.nodes, replace=True, shared=True)
    with pool:
        yield pool.start()


def ports(pids):
    """The TCP ports that processes listen on."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            all_of_it = psutil.Process(pid).net_connections(kind="tcp")
            found |= {each.laddr.port for each in all_of_it if each.status == psutil.CONN_LISTEN}
    return sorted(found)


def is_http(port):
    """Whether a port answers HTTP without TLS."""
    with socket.create_connection(("127.0.0.1", port), 5) as end, contextlib.suppress(OSError):
        end.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return end.recv(5) == b"HTTP/"
    return False


def processes_of(user):
    uid = pwd.getpwnam(user).pw_uid
    return [each.pid for each in psutil.process_iter() if each.uids().real == uid]


def sockets_of(user):
    """The sockets with a path that a user's processes listen on."""
    uid = pwd.getpwnam(user).pw_uid
    runs = Path(tempfile.gettempdir()).glob("gpupool-*")
    paths = [path for run in runs for path in run.rglob("*")]
    return [str(each) for each in paths if stat.S_ISSOCK(each.lstat().st_mode) and each.lstat().st_uid == uid]


def targets(pool, owner, lease, connection):
    """Whatever there is to attack, by the rows of `REACH`."""
    scheduler = int(connection["address"].rpartition(":")[2])
    dashboard = int(connection["dashboard"].rpartition(":")[2])
    own = processes_of(owner)
    others = [port for port in ports(own) if port not in (scheduler, dashboard)]
    pools = [pool.pid(name) for name in pool.running]
    agents = [pool.pid(name) for name in pool.nodes]
    comm = int(pool.said["comm"].rpartition(":")[2])
    folder, nodes = pool.folder / "controller", [pool.folder / name for name in pool.nodes]
    return {
        "the lease's scheduler": [("comm", scheduler)],
        "ports of its workers": [("comm", port) for port in others if not is_http(port)],
        "HTTP of its workers, which has nothing": [("page", port) for port in others if is_http(port)],
        "its dashboard": [("http", connection["dashboard"])],
        "`/proc` of its processes": [("file", f"/proc/{pid}/environ") for pid in own],
        "sockets of its forkserver and processes": [("socket", path) for path in sockets_of(owner)],
        "`/proc` of its agent and of the controller": [
            *(("file", f"/proc/{pid}/environ") for pid in pools),
            *(("file", f"/proc/{pid}/mem") for pid in pools),
            *(("link", f"/proc/{pid}/cwd") for pid in pools),
        ],
        "ports of agents": [("comm", port) for port in ports(agents)],
        "the controller's port for agents": [("comm", comm)],
        "certificates of agents and of the pool": [
            *(("file", str(node / "agent.json")) for node in nodes),
            ("file", str(folder / "ca.key")),
        ],
        "the administrator's token": [("file", str(folder / "admin.json"))],
        "the journal": [("file", str(folder / "journal.sqlite"))],
        "lists of lease processes": [("file", str(node / "leases" / "leases.json")) for node in nodes],
    }


def tried_by(user, wanted, keys):
    """What a process of an OS user reaches."""
    done = subprocess.run(
        [SYSTEM_PYTHON, attack.__file__],
        input=json.dumps({"targets": wanted, "keys": keys}),
        user=user,
        group=pwd.getpwnam(user).pw_gid,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


def granted(pool, user, **what):
    """A lease of a user's, on a token of their own: its id, and how it is reached."""
    token = pool.call("POST", "/v1/tokens", {"user": user, "scopes": ["read", "use"]})["token"]
    asked = {"gpus": 1, "cpus": 0.1, "memory": "500MB", "environment": {"python": str(SYSTEM_PYTHON)}, **what}
    theirs = {"Authorization": f"Bearer {token}"}
    ident = pool.call("POST", "/v1/requests", asked, **theirs)["id"]
    return (
        ident,
        lambda: (
            pool.wait_for_lease(ident, "active")
            and pool.call("GET", f"/v1/leases/{ident}/connection", **theirs)
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_is_reached_on_the_machines_is_what_the_table_says(monkeypatch):
    if not has_second_user():
        pytest.skip("needs root, and a Python that other users can run: OS users are made for it")
    monkeypatch.setenv("PYTHONPATH", second_path())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shared_folder())
        names = stack.enter_context(People(folder, "owner", "another", "third"))
        pool = stack.enter_context(pool_for_people(folder))
        owner, another = names["owner"], names["another"]
        lease, victim = granted(pool, owner, exclude=["node-2"])
        near, far = (granted(pool, another, exclude=[node])[1] for node in ("node-2", "node-1"))
        keys, near, far = victim(), near(), far()
        wanted = targets(pool, owner, lease, keys)
        assert not [name for name, tries in wanted.items() if not tries], "there is something to attack"
        found = {
            "another": tried_by(another, wanted, near),
            "administrator": tried_by(names["third"], wanted, None),
            "nobody": tried_by("nobody", wanted, None),
        }
        for name, own in (("code on its node", near), ("code on another node", far)):
            with distributed.Client(own["address"], security=security(own), timeout=30) as client:
                found[name] = client.submit(attack.reach, wanted, own).result(60)
                assert client.submit(attack.secrets_of_this_process).result(30) == []
        # The owner comes last: connecting to one's own forkserver, and saying nothing, ends it.
        found["owner"] = tried_by(owner, wanted, keys)
    assert_as_in_the_table(found)


def assert_as_in_the_table(found):
    """Each cell is open or shut as a whole; what is shut refuses, and is not merely absent."""
    wrong = []
    for row, cells in REACH.items():
        for who, cell in zip(ATTACKERS, cells, strict=True):
            for said in found[who][row]:
                there = "FileNotFound" not in said and "refused" not in said
                if not said.startswith(cell) or not there:
                    wrong.append(f"{row} / {who}: {said}, not {cell}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------ taking back


def opened(ports, keys):
    """Which of some ports of a lease let in whoever has these keys."""
    said = {each: attack.reach({"it": [("comm", each)]}, keys)["it"] for each in ports}
    return {port for port, each in said.items() if each == ["open"]}


def ports_of(lease, keys):
    """The ports of a lease's scheduler and of its workers."""
    workers = lease.client().scheduler_info()["workers"]
    return {int(each.rpartition(":")[2]) for each in (keys["address"], *workers)}


@pytest.mark.timeout(180)
def test_who_is_shut_out_of_a_lease_reaches_nothing_of_it_any_more_which_is_said_first(pool):
    lease = pool.request(gpus=2, name="shared")
    path = f"/v1/leases/{lease.id}"
    token = pool.call("POST", "/v1/tokens", {"user": "ben", "label": "of this test"})["token"]
    with Pool(pool.address.url, token, pool.address.ca) as bens:
        assert no(lambda: bens.get(path)) == "unknown_lease"
        lease.share("ben")
        keys, ports = bens.get(f"{path}/connection"), ports_of(lease, pool.get(f"{path}/connection"))
        kept = lease.client().scatter("what only its workers hold")
        assert (len(ports), opened(ports, keys)) == (3, ports)
        said = r"ben can be shut out of shared only by a restart on new keys.* lost.*--restart"
        with pytest.raises(PoolError, match=said):
            lease.share()
        assert lease.client().gather(kept), "nothing was done that was not said"

        assert "starts anew on new keys" in repr(lease.share(restart=True))
        lease.wait(60)
        assert lease.data["shared_with"] == []
        assert no(lambda: bens.get(f"{path}/connection")) == "unknown_lease"
        assert lease.client().submit(sum, [1, 2]).result(60) == 3
        now = pool.get(f"{path}/connection")
        wait_until(lambda: len(lease.client().scheduler_info()["workers"]) == 2)
        anew = ports_of(lease, now)
        assert opened(anew, now) == anew
        assert opened(ports | anew, keys) == set()
        (dashboard,) = attack.reach({"it": [("http", now["dashboard"])]}, keys)["it"]
        assert dashboard.startswith("shut"), "its old secret opens no dashboard"
        lease.release(wait=60)


def no(call):
    """The name of the no that a call is answered with."""
    with pytest.raises(PoolError) as said:
        call()
    return str(said.value.reason)
