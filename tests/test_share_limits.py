"""What a share's processes are told: their libraries' limits, and MPS among one owner's leases only.

The stand-ins for rmm, PyTorch and CuPy have just the calls that are made; their real ones need a GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap

import pytest

from jupyter_gpupool.core.model import GB, GIB, MIB, WHOLE, Device, Instance, Slice
from jupyter_gpupool.lease import limits
from jupyter_gpupool.node import mps
from jupyter_gpupool.node.launch import LaunchError
from jupyter_gpupool.node.lease_table import Entry
from jupyter_gpupool.node.overhead import CONTEXT, LIBRARIES, Overheads
from jupyter_gpupool.node.share_limits import ShareLimits

MODULES = {
    "torch/__init__.py": """
        from types import SimpleNamespace as N
        told = []
        cuda = N(
            is_available=lambda: {available},
            get_device_properties=lambda _: N(total_memory=80 * 2**30),
            set_per_process_memory_fraction=lambda part, device: told.append((part, device)),
            memory=N(change_current_allocator=told.append),
        )
    """,
    "cupy/__init__.py": """
        from types import SimpleNamespace as N
        told = []
        cuda = N(set_allocator=told.append)
        def get_default_memory_pool():
            return N(set_limit=lambda *, size: told.append(size))
    """,
    "rmm/__init__.py": "",
    "rmm/allocators/__init__.py": "",
    "rmm/allocators/torch.py": "rmm_torch_allocator = 'rmm for torch'",
    "rmm/allocators/cupy.py": "rmm_cupy_allocator = 'rmm for cupy'",
}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install stand-ins of libraries for this test; gives the function that does it."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(limits.LIMIT, str(20 * GIB))

    def install(*libraries, available=True):
        for name, code in MODULES.items():
            if name.partition("/")[0] in libraries:
                path = tmp_path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(textwrap.dedent(code).replace("{available}", str(available)))
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("torch", "cupy", "rmm"):
            del sys.modules[name]


# --- the libraries of a worker


def test_a_library_is_told_its_limit_when_it_is_imported_and_not_before(install):
    install("torch", "cupy")
    limits.watch_imports()
    assert not {"torch", "cupy"} & set(sys.modules)
    torch, cupy = importlib.import_module("torch"), importlib.import_module("cupy")
    assert torch.told == [(0.25, 0)]
    assert cupy.told == [20 * GIB]


def test_with_rmm_the_libraries_allocate_from_its_pool(install):
    install("torch", "cupy", "rmm")
    limits.watch_imports()
    assert importlib.import_module("torch").told == ["rmm for torch"]
    assert importlib.import_module("cupy").told == ["rmm for cupy"]


def test_a_library_that_is_loaded_already_is_told_at_once_and_only_once(install):
    install("cupy")
    cupy = importlib.import_module("cupy")
    limits.watch_imports()
    limits.watch_imports()
    assert cupy.told == [20 * GIB]


def test_a_library_that_cannot_be_limited_is_imported_all_the_same_and_that_is_said(install, monkeypatch):
    said = []
    monkeypatch.setattr(limits, "_tell", lambda name, state: said.append((name, state)))
    install("torch", "cupy", available=False)
    limits.watch_imports()
    assert importlib.import_module("torch").told == []
    importlib.import_module("cupy")
    assert said == [("torch", "failed"), ("cupy", "on")]


def test_a_process_that_has_no_share_is_told_nothing(install, monkeypatch):
    monkeypatch.delenv(limits.LIMIT)
    install("torch", "rmm")
    limits.watch_imports()
    assert importlib.import_module("torch").told == []
    assert limits.states(0) == {}
    assert limits.rmm_options({"rmm_async": True}, 0) == {"rmm_async": True}


def test_what_an_environment_has_is_said_before_anything_is_imported(install):
    install("torch", "rmm")
    assert limits.written(limits.states(1)) == "rmm=on,torch=ready"
    assert not {"torch", "rmm"} & set(sys.modules)


@pytest.mark.parametrize(
    ("given", "first", "largest"),
    [
        ({}, limits.FIRST, 20 * GIB),
        ({"rmm_pool_size": 0.5}, 10 * GIB, 20 * GIB),
        ({"rmm_pool_size": "50GiB"}, 20 * GIB, 20 * GIB),
        ({"rmm_maximum_pool_size": 40 * GIB}, limits.FIRST, 20 * GIB),
        ({"rmm_maximum_pool_size": "100MiB"}, 100 * MIB, 100 * MIB),
        ({"rmm_pool_size": "8GiB", "rmm_maximum_pool_size": "4GiB"}, 4 * GIB, 4 * GIB),
    ],
    ids=["nothing", "a part of the share", "more than the share", "a larger end", "a smaller end", "both"],
)
def test_a_request_can_ask_for_a_smaller_pool_and_never_for_a_larger_one(install, given, first, largest):
    install("rmm")
    options = limits.rmm_options(given, 20 * GIB)
    assert (options["rmm_pool_size"], options["rmm_maximum_pool_size"]) == (first, largest)


# --- what the node says


def part(**more):
    return Slice(id="L1/0", lease="L1", device="g0", node="n", **{"milli": 250, "vram": 20 * GIB, **more})


def shares(tmp_path):
    device = Device(uuid="g0", node="n", index=0, model="H100-80GB", memory=80 * GIB)
    return ShareLimits(tmp_path / "overheads.json", {"g0": device}.get)


def test_a_share_may_allocate_what_is_left_beside_context_and_libraries(tmp_path):
    told = shares(tmp_path).limits(Entry("L1/0", "L1", "ann"), part(), ())
    left = 20 * GIB - CONTEXT - LIBRARIES
    assert told["GPUPOOL_LIMIT"] == str(left)
    assert told["XLA_PYTHON_CLIENT_MEM_FRACTION"] == f"{left / (80 * GIB):.4f}"


@pytest.mark.parametrize(
    "whole",
    [{"milli": WHOLE}, {"instance": Instance(profile="1g.10gb", start=0, size=1)}],
    ids=["a whole GPU", "a MIG instance"],
)
def test_what_is_no_share_is_told_nothing(tmp_path, whole):
    assert shares(tmp_path).limits(Entry("L1/0", "L1", "ann"), part(**whole), ()) == {}


def test_a_share_without_room_for_data_is_not_started(tmp_path):
    with pytest.raises(
        LaunchError, match=r"its share of 0\.5 GB has no room for data.*ask for at least 0\.91 GB"
    ):
        shares(tmp_path).limits(Entry("L1/0", "L1", "ann"), part(vram=GB // 2), ())


def test_a_context_is_measured_once_it_is_the_same_twice_and_remembered(tmp_path):
    measured = Overheads(tmp_path / "o.json")
    for used in (10 * MIB, 10 * MIB, 300 * MIB, 520 * MIB):
        measured.see("H100-80GB", "L1/0", used)
    assert measured.of("H100-80GB") == CONTEXT + LIBRARIES, "half a context is none"
    for used in (520 * MIB, 30 * GIB, 30 * GIB):
        measured.see("H100-80GB", "L1/0", used)
    again = Overheads(tmp_path / "o.json")
    assert again.of("H100-80GB") == 520 * MIB + LIBRARIES
    assert again.of("T4-16GB") == CONTEXT + LIBRARIES


@pytest.mark.parametrize("text", ["", "[]", '{"a": {}}', "5"])
def test_a_damaged_memory_of_measurements_begins_anew(tmp_path, text):
    (tmp_path / "o.json").write_text(text)
    assert Overheads(tmp_path / "o.json").of("a") == CONTEXT + LIBRARIES


# --- MPS


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """What shows that NVIDIA's daemon runs: its pipe, and the PID of a process that lives."""
    (tmp_path / "mps").mkdir()
    os.mkfifo(tmp_path / "mps" / "control")
    (tmp_path / "mps" / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    return tmp_path / "mps"


def test_mps_limits_the_shares_of_one_owner_and_keeps_everybody_else_away(tmp_path, daemon):
    limits_ = shares(tmp_path)
    first, second, other = (Entry(f"L{n}/0", f"L{n}", user) for n, user in enumerate(("ann", "ann", "ben")))
    told = limits_.limits(first, part(), [first])
    assert told["CUDA_MPS_PIPE_DIRECTORY"] == str(daemon)
    assert told["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert limits_.limits(second, part(), [first, second])["CUDA_MPS_PIPE_DIRECTORY"] == str(daemon)
    away = limits_.limits(other, part(), [first, second, other])
    assert not os.path.exists(away["CUDA_MPS_PIPE_DIRECTORY"])  # noqa: PTH110 - a text is what there is
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in away
    assert (first.mps, second.mps, other.mps) == (True, True, False)


def test_a_whole_gpu_is_kept_away_from_mps(tmp_path, daemon):
    whole = Entry("L1/0", "L1", "ann")
    assert shares(tmp_path).limits(whole, part(milli=WHOLE), [whole]) == mps.away()
    assert not whole.mps


def test_a_daemon_that_has_ended_is_none(daemon):
    assert mps.daemon() == str(daemon)
    (daemon / "nvidia-cuda-mps-control.pid").write_text(str(2**22 + 1))
    assert mps.daemon() == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_daemon_that_somebody_else_may_have_put_up_is_none(daemon):
    os.chown(daemon, 2**16 - 3, -1)
    assert mps.daemon() == ""
