"""The state of the simulated machines: one JSON file that all their processes share.

Rule 1: it changes only under the lock and by an atomic rename, so a writer may be killed at any point.
Rule 2: reading costs one `stat`: the file's modification time is its version, and grows with each change.
Rule 3: what a process may write often (its memory) is not in it but in a file of its own, see `processes`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.driver.simulated import models

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: The variables that put a process onto a simulated node.
PATH, NODE = "GPUPOOL_SIMULATED", "GPUPOOL_SIMULATED_NODE"
#: NVML events that are kept for those who wait; older ones are lost, as with the real driver.
EVENTS_KEPT = 512
#: Below so many CPUs no device is bound to a part of them.
FEW_CPUS = 8


class State:
    """The shared state in the folder `path`; every process has its own object."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.file = self.path / "state.json"
        self._seen: tuple[tuple[int, int], dict[str, Any]] | None = None
        #: File of a process -> its version, and what was read of it; see `processes`.
        self.records: dict[str, tuple[tuple[int, int], tuple[int, dict[str, Any]]]] = {}

    def read(self) -> dict[str, Any]:
        """The present state; callers must not change it.

        Raises:
            FileNotFoundError: There is no simulated machine in this folder.
        """
        found = self.file.stat()
        version = (found.st_mtime_ns, found.st_ino)
        seen = self._seen
        if seen is None or seen[0] != version:
            seen = self._load()
        return seen[1]

    def _load(self) -> tuple[tuple[int, int], dict[str, Any]]:
        with self.file.open("rb") as stream:
            found = os.fstat(stream.fileno())
            seen = ((found.st_mtime_ns, found.st_ino), json.load(stream))
        self._seen = seen
        return seen

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep all other writers out; a killed holder lets go by itself."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        """Hand out the state to be changed, and publish it at the end of the block unless it raised."""
        with self.lock():
            (before, _), data = self._load()
            # What was handed out by read() stays as it was: parse once more next time.
            self._seen = None
            yield data
            self._publish(data, before)

    def _publish(self, data: dict[str, Any], before: int) -> None:
        draft = self.path / "state.tmp"  # one name is enough: the lock is held
        draft.unlink(missing_ok=True)  # left by a writer that was killed, perhaps of another user
        draft.write_text(json.dumps(data), encoding="utf-8")
        draft.chmod(0o644 if data.get("shared") else 0o600)
        version = max(time.time_ns(), before + 1)
        os.utime(draft, ns=(version, version))
        draft.replace(self.file)


def create(
    path: str | os.PathLike[str],
    nodes: Mapping[str, int | Sequence[str]] | None = None,
    *,
    wiring: str = "",
    shared: bool = False,
    replace: bool = False,
) -> State:
    """Make simulated machines in the folder `path`; where there are some already they stay as they are.

    Args:
        path: A folder, made when needed; only its owner can enter it.
        nodes: For each node the models of its GPUs, or just a number of H100-80GB (2 nodes of 4 unless said).
        wiring: NVLink between a node's GPUs: "switch", "mesh", "pairs" or "none"; as the model has it unless
            said.
        shared: Processes of other OS users use it too.
        replace: Make them anew where there are some already.

    Raises:
        ValueError: An unknown model or wiring.
    """
    state = State(path)
    data = _describe(state.path.resolve(), nodes or {"node-1": 4, "node-2": 4}, wiring)
    state.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    (state.path / "processes").mkdir(exist_ok=True, mode=0o700)
    with state.lock():
        if replace or not state.file.exists():
            data["shared"] = shared
            before = state.file.stat().st_mtime_ns if state.file.exists() else 0
            state._publish(data, before)  # noqa: SLF001 (the same module)
    if shared:
        _share(state.path)
    return state


def _share(path: Path) -> None:
    path.chmod(0o777)
    (path / "processes").chmod(0o1777)
    (path / "lock").chmod(0o666)


def _describe(path: Path, nodes: Mapping[str, int | Sequence[str]], wiring: str) -> dict[str, Any]:
    data: dict[str, Any] = {
        "driver": "580.65.06",
        "nodes": {},
        "devices": {},
        "events": [],
        "sequence": 0,
        "failures": [],
    }
    for node, wanted in nodes.items():
        kinds = [models.DEFAULT] * wanted if isinstance(wanted, int) else list(wanted)
        unknown = [kind for kind in kinds if kind not in models.MODELS]
        if unknown:
            raise ValueError(f"unknown model {unknown[0]!r}; there are {', '.join(models.MODELS)}")
        devices = [_device(path, node, index, kinds) for index in range(len(kinds))]
        _wire(devices, wiring)
        data["nodes"][node] = {"devices": [each["uuid"] for each in devices], "search_strict": False}
        data["devices"].update({each["uuid"]: each for each in devices})
    return data


def _device(path: Path, node: str, index: int, kinds: list[str]) -> dict[str, Any]:
    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"simulated:{path}/{node}/{index}")
    return {
        "uuid": f"GPU-{unique}",
        "node": node,
        "index": index,
        "model": kinds[index],
        "pci": f"00000000:{0x18 + 0x11 * index:02X}:00.0",
        "serial": str(1_650_000_000_000 + unique.int % 10**9),
        "numa": 2 * index // len(kinds),
        "links": [],
        # What has happened to it:
        "lost": False,
        "vanished": False,
        "reset_required": False,
        "hang_until": 0.0,
        "set": {},
        # CUDA contexts made in an earlier epoch are dead of `blow`.
        "epoch": 0,
        "blow": "",
        "aborts": False,
        "poisoned": {},
        "mig": False,
        "instances": [],
    }


def _wire(devices: list[dict[str, Any]], wiring: str) -> None:
    """Say for each NVLink of each device where it ends: a peer's UUID, "switch", or "" for nowhere."""
    for at, device in enumerate(devices):
        model = models.MODELS[device["model"]]
        how = wiring or model.wiring
        peers = [each["uuid"] for each in devices if each is not device]
        if how == "switch":
            ends = ["switch"] * model.links
        elif how == "mesh":
            ends = [peers[link * len(peers) // model.links] for link in range(model.links)] if peers else []
        elif how == "pairs":
            ends = [devices[at ^ 1]["uuid"]] * model.links if at ^ 1 < len(devices) else []
        elif how == "none":
            ends = []
        else:
            raise ValueError(f"unknown wiring {how!r}; there are switch, mesh, pairs and none")
        device["links"] = ends + [""] * (model.links - len(ends))


def environment(path: str | os.PathLike[str], node: str) -> dict[str, str]:
    """The variables that put a process, and all that it starts, onto this simulated node."""
    return {PATH: str(Path(path).resolve()), NODE: node}


def configured() -> tuple[str, str] | None:
    """Folder and node that this process's environment names, or None on a real machine."""
    path = os.environ.get(PATH, "")
    return (path, os.environ.get(NODE, "")) if path else None
