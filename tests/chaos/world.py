"""The pool under attack: real processes, a proxy before each agent, and users who want things of it."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from jupyter_gpupool.driver import simulated
from jupyter_gpupool.driver.simulated.processes import uses
from jupyter_gpupool.node.membership import FILE, join
from tests.chaos.proxy import Proxy
from tests.chaos.record import Asked, Record, Wish
from tests.pool_processes import PoolProcesses, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Seconds within which everything is asked again, and seconds that one answer may take.
PATIENCE, ANSWER = 180.0, 10.0
#: Seconds after which a silent node is given up here.
SILENCE = 12
#: Bytes of the small disk on which the journal is.
DISK = 32 * 2**20
NODES = {"node-1": 3, "node-2": 3, "node-3": 2}


class NoAnswerError(Exception):
    """Nobody has answered within all the patience that there is."""


class World(PoolProcesses):
    """One pool of three nodes, each agent behind a proxy, the journal on a small disk if there can be one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NODES)
        self.machine = simulated.Machine(self.simulated)
        self.proxies: dict[str, Proxy] = {}
        self.record = Record()
        self.over = threading.Event()
        self.disk = self._mount()
        self._token, self._context = "", ssl.create_default_context()

    def __exit__(self, *arguments: object) -> None:
        self.over.set()
        for proxy in self.proxies.values():
            proxy.heal()
        try:
            super().__exit__(*arguments)
        finally:
            self._end_what_is_left()
            for proxy in self.proxies.values():
                proxy.close()
            if self.disk:
                kept = self.folder / "controller-kept"
                shutil.copytree(self.folder / "controller", kept, ignore=shutil.ignore_patterns("dask*"))
                subprocess.run(["umount", "-l", self.folder / "controller"], check=False)

    def _end_what_is_left(self) -> None:
        """After a failure nobody else would."""
        for process in psutil.process_iter():
            if (_safely(process.environ) or {}).get("GPUPOOL_SIMULATED") == str(self.simulated):
                _safely(process.kill)

    def wait_for_controller(self) -> None:
        """Wait until it answers, for as long as a busy machine may take."""
        wait_for(
            lambda: self._alive("controller") and self.said.get("pid") == self.pid("controller"),
            "a pool",
            PATIENCE,
        )

    def _mount(self) -> bool:
        """Put the controller's folder on a small disk, which root can; whether it is there."""
        folder = self.folder / "controller"
        folder.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", "none", folder]
        return os.geteuid() == 0 and not subprocess.run(command, check=False, capture_output=True).returncode

    # ------------------------------------------------------------------------------------------- processes

    def start(self) -> World:
        self.start_controller()
        for name in self.nodes:
            self._join(name)
            self.start_agent(name)
        self.wait_for_nodes(set(self.nodes))
        self._token = json.loads((self.folder / "controller" / "admin.json").read_text())["token"]
        self._context = ssl.create_default_context(cadata=self.said["ca"])
        self._url = self.said["url"]
        return self

    def start_controller(self, *more: str) -> None:
        """Start it and wait until it answers; agents may be away."""
        self._run("controller", "jupyter_gpupool.controller", ["--node-silence", str(SILENCE), *more])
        self.wait_for_controller()

    def _join(self, name: str) -> None:
        """Make a node a member before its agent runs, whose way to the controller leads over a proxy."""
        line = PoolProcesses.call(self, "POST", "/v1/tokens", {"kind": "agent"})["line"]
        folder = self.folder / name
        member = join(folder, line, name)
        proxy = self.proxies[name] = Proxy(int(member.comm.rpartition(":")[2]))
        said = json.loads((folder / FILE).read_text())
        (folder / FILE).write_text(json.dumps({**said, "comm": f"tls://127.0.0.1:{proxy.port}"}))

    def children(self, name: str, words: str) -> list[psutil.Process]:
        """The processes below an agent whose command line has these words."""
        with suppress(psutil.Error):
            found = psutil.Process(self.pid(name)).children(recursive=True)
            return [each for each in found if words in " ".join(_safely(each.cmdline) or ())]
        return []

    def lease_processes(self) -> list[tuple[psutil.Process, str, str]]:
        """Each process of a lease, with what it is: a scheduler, a host, or a worker; and the lease's id."""
        roots = {entry["pid"] for _, entry in self.tables()}
        found = []
        for each in psutil.process_iter():
            key = ((_safely(each.environ) or {}).get("GPUPOOL_MARK") or "").partition(":")[2].rstrip(".")
            lease = key.rpartition("/")[0]
            if not key or not _on_machine(each, self.simulated):
                continue
            kind = "host" if each.pid in roots else "worker"
            found.append((each, kind if "/" in key else "scheduler", lease if "/" in key else key))
        return found

    def node_processes(self, name: str) -> set[int]:
        """The PIDs of all processes that bear the mark of a node's agent, in their environment."""
        path = self.folder / name / "leases" / "leases.json"
        agent = json.loads(path.read_text())["agent"] if path.exists() else "?"
        found = set()
        for each in psutil.process_iter():
            if ((_safely(each.environ) or {}).get("GPUPOOL_MARK") or "").startswith(f"{agent}:"):
                found.add(each.pid)
        return found

    # --------------------------------------------------------------------------------------------- the disk

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leave no byte on the controller's disk."""
        filler = self.folder / "controller" / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(65536))
        try:
            yield
        finally:
            filler.unlink(missing_ok=True)

    @contextmanager
    def file_limit(self) -> Iterator[None]:
        """Let the controller's files grow no more; what it writes beyond that fails."""
        pid = self.pid("controller")
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    # --------------------------------------------------------------------------------------------- talking

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Ask again and again until there is an answer that is one; a full disk is no answer.

        Raises:
            NoAnswerError: There is none for very long.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self.ask_once(method, path, body, **headers)
            if answer is not None and answer.status_code < 500 and answer.status_code != 429:
                return answer
            time.sleep(0.2)
        raise NoAnswerError(f"{method} {path}")

    def ask_once(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response | None:
        """Ask once; None: no answer."""
        said = {
            "Authorization": f"Bearer {self._token}",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        try:
            return httpx.request(
                method, self._url + path, json=body, headers=said, verify=self._context, timeout=ANSWER
            )
        except (httpx.HTTPError, OSError):
            return None

    def everything(self) -> list[dict[str, Any]]:
        """All leases that the pool lists, ended ones included."""
        found: list[dict[str, Any]] = []
        after = ""
        while True:
            answer = self.ask("GET", f"/v1/leases?all=true&limit=500{after}").json()
            found += answer["leases"]
            if not answer["next"]:
                return found
            after = f"&after={answer['next']}"

    def settings(self) -> dict[str, Any]:
        """What the wishes of the record are in the pool now."""
        projects = self.ask("GET", "/v1/projects").json()["projects"]
        quota = {each["name"]: each["weight"] for each in projects}.get("chaos")
        devices = self.ask("GET", "/v1/devices").json()["devices"]
        cordons = {f"cordon {each['name']}": bool(each["cordoned"]) for each in devices}
        drills = {f"drill {each['name']}": each["verdict"] == "gone" for each in devices}
        return {"quota": quota, **cordons, **drills}

    def compare(self) -> None:
        """Hold the record against the pool and its machine; nobody confirms anything meanwhile."""
        with self.record.lock:
            there = self.on_devices()
            leases = self.everything()  # after what runs: a lease with processes is among them
            # Leases come page by page, and a part may be given on meanwhile: this is one answer.
            devices = self.ask("GET", "/v1/devices").json()["devices"]
            self.record.hold_against(leases, devices, self.settings())
            wanted = {each.name: each.gpus for each in self.record.asked.values()}
            milli = {each["id"]: round(1000 * min(1, wanted[each["name"]])) for each in leases}
            self.record.look_at_machine(there, milli)

    def on_devices(self) -> dict[str, set[str]]:
        """The leases whose processes have a context on each device, as the machine shows it."""
        found: dict[str, set[str]] = {}
        for use in uses(self.machine.state):
            environ = _safely(partial(_environ, use.pid)) or {}  # it may end, or be a zombie, meanwhile
            key = environ.get("GPUPOOL_MARK", "").partition(":")[2].rstrip(".")
            if key:
                found.setdefault(use.on, set()).add(key.rpartition("/")[0])
        return found


def _on_machine(process: psutil.Process, simulated: Path) -> bool:
    return (_safely(process.environ) or {}).get("GPUPOOL_SIMULATED") == str(simulated)


def _environ(pid: int) -> dict[str, str]:
    return psutil.Process(pid).environ()


def _safely(call: Any) -> Any:
    with suppress(psutil.Error, OSError):
        return call()
    return None


class User(threading.Thread):
    """Requests, gives back, extends, and changes quotas and cordons; remembers what was confirmed.

    Args:
        world: The pool.
        number: Which user this is; the first one also administers.
        seed: Of all that it decides.
        pause: Seconds between two wishes, at most.
    """

    def __init__(self, world: World, number: int, seed: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.world, self.number, self.pause = world, number, pause
        self.rng = random.Random(f"{seed}/{number}")
        self.mine: list[Asked] = []
        self.error: Exception | None = None
        self.counter = 0

    def run(self) -> None:
        try:
            while not self.world.over.is_set():
                self._wish()
                self.world.over.wait(self.rng.uniform(0.1, self.pause))
        except Exception as error:  # noqa: BLE001 - raised by whoever runs the users
            self.error = error
            self.world.over.set()

    def _wish(self) -> None:
        live = [each for each in self.mine if each.id and not each.releasing]
        wishes = [(self.request, 6 if len(live) < 3 else 1), (self.release, 5 if live else 0)]
        wishes += [(self.extend, 2 if live else 0), (self.again, 1 if live else 0)]
        wishes += [(self.set_quota, 2), (self.cordon, 2)] if self.number == 0 else []
        kinds, weights = zip(*wishes, strict=True)
        self.rng.choices(kinds, weights)[0]()

    def request(self) -> None:
        self.counter += 1
        key = f"{self.number}-{self.counter}"
        asked = Asked(key, f"c-{key}", self.rng.choice((0.5, 1, 1, 2, 6)))
        self.mine.append(asked)
        with self.world.record.lock:
            self.world.record.asked[key] = asked
        gives_up = self.rng.random() < 0.5
        self._post(asked, gives_up=gives_up)

    def _post(self, asked: Asked, *, gives_up: bool = False) -> None:
        """Ask with the request's key; with `gives_up`, take a refusal for want of disk as the last word."""
        body = {"gpus": asked.gpus, "name": asked.name, "time_limit": "1h", "cpus": 0.1, "memory": "500MB"}
        while True:
            once = {"Idempotency_Key": asked.key}
            answer = self.world.ask_once("POST", "/v1/requests", body, **once)
            if answer is not None and answer.status_code == 201:
                self._confirm(asked, answer.json())
                return
            if answer is not None and answer.json()["reason"] == "store_failed" and gives_up:
                with self.world.record.lock:
                    asked.refused = True
                return
            assert answer is None or answer.status_code in (429, 503), answer.text
            gives_up = gives_up and answer is not None  # without an answer it may be there
            if self.world.over.wait(0.2):
                return

    def _confirm(self, asked: Asked, lease: dict[str, Any]) -> None:
        with self.world.record.lock:
            if asked.id and asked.id != lease["id"]:
                self.world.record.find("doubled", asked.name, f"{asked.id} and {lease['id']} of one key")
            self.world.record.confirmed += not asked.id
            asked.id = lease["id"]

    def again(self) -> None:
        """Send the same once more, as a client does that has not got the answer."""
        live = [each for each in self.mine if each.id and not each.releasing]
        self._post(self.rng.choice(live))

    def release(self) -> None:
        asked = self.rng.choice([each for each in self.mine if each.id and not each.releasing])
        asked.releasing = True
        answer = self.world.ask("DELETE", f"/v1/leases/{asked.id}")
        with self.world.record.lock:
            asked.released = answer.status_code == 204
            if not asked.released:
                self.world.record.find("lost", asked.name, f"{asked.name}: {answer.text}")
            self.world.record.confirmed += asked.released

    def extend(self) -> None:
        asked = self.rng.choice([each for each in self.mine if each.id and not each.releasing])
        answer = self.world.ask("PATCH", f"/v1/leases/{asked.id}", {"extend": "1m"})
        if answer.status_code == 200:
            with self.world.record.lock:
                asked.ends_at = max(asked.ends_at, answer.json()["ends_at"] or 0.0)
                self.world.record.confirmed += 1

    def set_quota(self) -> None:
        weight = self.rng.randrange(1, 1000)
        projects = [{"name": "default", "members": ["*"]}, {"name": "chaos", "weight": weight}]
        self._set("quota", weight, "PUT", "/v1/projects", {"projects": projects})

    def cordon(self) -> None:
        name = self.rng.choice(["node-2/gpu0", "node-3/gpu0"])
        wish = self.world.record.wishes.get(f"cordon {name}")
        to = not (wish and wish.confirmed)
        body = {"action": "cordon" if to else "uncordon"}
        self._set(f"cordon {name}", to, "POST", f"/v1/health/{name}", body)

    def _set(self, name: str, value: Any, method: str, path: str, body: Any) -> None:
        record = self.world.record
        with record.lock:
            record.wishes.setdefault(name, Wish(None if name == "quota" else False)).asked = value
        answer = self.world.ask(method, path, body)
        with record.lock:
            if answer.status_code == 404:  # a GPU that has fallen off the bus is not there to be cordoned
                record.wishes[name].asked = None
                return
            assert answer.status_code < 400, answer.text
            record.wishes[name] = Wish(value)
            record.confirmed += 1


def free_again(world: World) -> bool:
    """Whether every GPU is free and no agent has a process on its list."""
    pool = world.ask("GET", "/v1/pool").json()
    return pool["gpus_free"] == sum(world.nodes.values()) and not world.tables()
