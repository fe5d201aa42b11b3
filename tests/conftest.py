"""What tests share: an embedded pool of simulated GPUs, and a look for leaked processes at the end."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jupyter_gpupool import embedded
from jupyter_gpupool.client import Pool, PoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tests.leasing import Node

#: A variable that all processes of this test session have in their environment, or inherit a folder below of.
MARK = "TESTS_OF_GPUPOOL"
#: Seconds for the last processes to leave.
LEAVE_S = 15.0


#: The modules that take longest, which are begun first: no process is to be left with one of them at the end.
LONGEST_FIRST = (
    "test_embedded",
    "test_machine",
    "test_hub",
    "test_soak",
    "test_controller",
    "test_api_cases",
    "test_chaos",
    "test_adoption",
    "test_tour",
    "test_api_access",
    "test_lease_plugin",
    "test_examples",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long modules first; within a module, the order stays."""
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda each: rank.get(each.path.stem, len(rank)))


def pytest_configure() -> None:
    """Let tests interrupt themselves and what they start: a shell starts background jobs deaf to SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def session_folder() -> Iterator[Path]:
    """Keep everything that tests write in one folder, and find no process of ours left at the end.

    Whatever pool or configuration the person who runs the tests has, they neither see nor touch it.
    """
    folder = Path(tempfile.mkdtemp(prefix="gp-"))  # short: sockets live below it
    patch = pytest.MonkeyPatch()
    patch.setenv(MARK, str(folder))
    patch.setenv("JUPYTER_CONFIG_DIR", str(folder / "config"))
    patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    patch.setenv("IPYTHONDIR", str(folder / "ipython"))
    patch.setenv("GPUPOOL_DIR", str(folder / "pool"))
    for name in ("GPUPOOL_URL", "GPUPOOL_TOKEN", "GPUPOOL_CA"):
        patch.delenv(name, raising=False)
    yield folder
    left = leaked(str(folder))
    patch.undo()
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes are left: {left}"


def leaked(mark: str, seconds: float = LEAVE_S) -> list[str]:
    """Wait until no process bears the mark in its environment or command line; return those that still do."""
    end = time.monotonic() + seconds
    while (found := [_named(each) for each in _marked(mark)]) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes of this session, but for this one and what Python itself keeps for it."""
    me = psutil.Process()
    own = {me.pid, *(each.pid for each in me.parents())}
    kept = {each.pid for each in me.children() if "multiprocessing" in " ".join(_safely(each.cmdline) or ())}
    found = []
    for each in psutil.process_iter():
        if each.pid in own | kept or _safely(each.status) == psutil.STATUS_ZOMBIE:
            continue
        said = [*(_safely(each.environ) or {}).values(), *(_safely(each.cmdline) or ())]
        if any(mark in word for word in said):
            found.append(each)
    return found


def _safely(call):
    try:
        return call()
    except psutil.Error:
        return None


def _named(process: psutil.Process) -> str:
    return f"{process.pid} {' '.join(_safely(process.cmdline) or ())[:120]}"


@pytest.fixture(scope="session")
def shared_pool(session_folder: Path) -> Iterator[Pool]:
    """The embedded pool of this session: 2 nodes of 4 simulated H100-80GB, the product's own processes."""
    embedded.start(nodes={"node-1": 4, "node-2": 4})
    with ImpatientPool(start=False) as pool:
        yield pool
    embedded.stop()


class ImpatientPool(Pool):
    """A pool whose requests do not wait for ever, so that a test fails where it is wrong."""

    def request(self, *, timeout=60.0, **more):
        try:
            return super().request(timeout=timeout, **more)
        except PoolError:
            for lease in self.leases(ended=True)[-1:]:  # why, is what a failed test wants to show
                print(lease, *lease.logs())
            raise


@pytest.fixture
def pool(shared_pool: Pool) -> Iterator[Pool]:
    """The session's pool; whatever a test has requested or broken is released and repaired after it."""
    yield shared_pool
    for lease in shared_pool.leases(everybody=True):
        lease.release(wait=30)
    machine = embedded.machine()
    for device in machine.devices():
        said = machine.describe(device)
        if said["lost"] or said["set"] or said["poisoned"]:
            machine.restore(device)
    wait_until(lambda: shared_pool.status().gpus_free == 8)


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node of a module's own, without a controller; what the module calls `NODE` are its options."""
    from tests.leasing import Node

    node = Node(tmp_path_factory.mktemp("node"), **getattr(request.module, "NODE", {}))
    node.start()
    yield node
    node.stop()


@pytest.fixture
def own_folder(session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a pool of the test's own, which is ended after it."""
    folder = Path(tempfile.mkdtemp(prefix="p", dir=session_folder))
    monkeypatch.setenv("GPUPOOL_DIR", str(folder))
    yield folder
    embedded.stop()
    left = leaked(str(folder))
    assert not left, f"processes are left: {left}"


def not_shown(page: str, rows: Mapping[str, Iterable[object]]) -> list[str]:
    """Return those rows of a table that a page of the documentation does not have."""
    lines = (Path(__file__).parents[1] / "docs" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    wanted = [f"| {name} | {' | '.join(map(str, cells))} |" for name, cells in rows.items()]
    return [each for each in wanted if each not in lines]


def wait_until(so, seconds: float = 30.0) -> None:
    """Wait until something is so; fail where it is not in time."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, f"not so within {seconds:g} s"
        time.sleep(0.05)


def all_notices(get: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Read notices page by page: a pool that many tests share has more of them than one page holds.

    Args:
        get: Answers with the page after a number, as `GET /v1/notices` does.
    """
    told, after = [], 0
    while page := (answer := get(after))["notices"]:
        told, after = told + page, answer["next"]
    return told


def environment(**more: str) -> dict[str, str]:
    """Return the environment for a process that a test starts."""
    return {**os.environ, **more}
