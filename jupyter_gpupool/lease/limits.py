"""Keeps a process of a share within it, by the libraries' own means: RMM, PyTorch, CuPy.

Rule 1: where RMM is installed its pool has a largest size, and CuPy and PyTorch allocate from it; without it
        each library is given its own limit. Whatever a library refuses is its own clear out-of-memory error.
Rule 2: a library is told when it is imported, and not before: importing PyTorch takes seconds.
Rule 3: what cannot be told is logged and said to the node; the program's import goes on.

A process that goes past these, with CUDA's own calls, is the node's business (`node.share_guard`).
Sources: rmm's manual ("Using RMM with third-party libraries"), PyTorch's `torch.cuda.memory`, CuPy's "Memory
Management".
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import MIB, Layer, LayerState
from jupyter_gpupool.lease.link import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

logger = logging.getLogger(__name__)

#: The variable that says how many bytes this process may allocate; none: it has no share to keep within.
LIMIT = "GPUPOOL_LIMIT"
#: Bytes with which RMM's pool begins: it grows as it is used.
FIRST = 256 * MIB
#: Bytes to which RMM aligns.
_ALIGNED = 256


def limit(environ: Mapping[str, str] = os.environ) -> int:
    """Answer with the bytes that this process may allocate on its GPU; 0: it has no share."""
    return int(environ.get(LIMIT) or 0)


def has(library: str) -> bool:
    """Whether a library is installed here; it is not imported."""
    with contextlib.suppress(ImportError, ValueError):
        return library in sys.modules or importlib.util.find_spec(library) is not None
    return False


def rmm_options(given: dict[str, Any], most: int) -> dict[str, Any]:
    """Answer with dask-cuda's options for a worker that may allocate so much.

    Args:
        given: What the request says; it can ask for less, never for more. A part (0.5) is one of the share.
        most: Bytes; 0: the worker has no share.

    >>> rmm_options({"rmm_pool_size": "1GB"}, 0)  # a whole GPU: as the request says
    {'rmm_pool_size': '1GB'}
    """
    if not most or not has(Layer.RMM):
        return given
    largest = _bytes(given.get("rmm_maximum_pool_size"), most, most)
    first = _bytes(given.get("rmm_pool_size"), largest, min(FIRST, largest))
    return {**given, "rmm_pool_size": first, "rmm_maximum_pool_size": largest}


def _bytes(said: Any, most: int, default: int) -> int:
    from dask.utils import parse_bytes

    size = default if said is None else said
    if isinstance(size, float) and size <= 1:
        size = size * most
    found: int = min(int(parse_bytes(size)), most)
    return found - found % _ALIGNED


def states(most: int) -> dict[str, str]:
    """Say which layers this Python environment has for a process that may allocate so much.

    Args:
        most: Bytes; 0: there is no share to keep within.
    """
    if not most:
        return {}
    found: dict[str, str] = {Layer.RMM: LayerState.ON} if has(Layer.RMM) else {}
    return found | {name: LayerState.READY for name in LIBRARIES if has(name)}


def written(layers: Mapping[str, str]) -> str:
    """Write layers as one text for the node: "rmm=on,torch=ready"."""
    return ",".join(f"{name}={state}" for name, state in layers.items())


# ---------------------------------------------------------------------------------------- when it is imported


def watch_imports() -> None:
    """Tell the libraries of this process their limit as they are imported; those that are loaded, now."""
    if not limit() or any(isinstance(each, _Finder) for each in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    for name in LIBRARIES:
        if name in sys.modules:
            hold(sys.modules[name])


class _Finder(MetaPathFinder):
    """Finds the libraries as ever, and has them told when their code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader) if spec.loader else None
                return spec
        return None


class _Loader(Loader):
    """A library's own loader, and then `hold`."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # From here on nobody can tell that there was another loader.
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        hold(module)


def hold(module: ModuleType) -> None:
    """Tell a library its limit, and say to the node how that went."""
    name = module.__name__
    try:
        done = LIBRARIES[name](module, limit())
    except Exception:
        logger.exception("%s could not be told the limit of this share", name)
        state = LayerState.FAILED
    else:
        logger.info("%s: %s", name, done)
        state = LayerState.ON
    _tell(name, state)


def _torch(torch: Any, most: int) -> str:
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch finds no GPU")
    if has(Layer.RMM):
        allocator = importlib.import_module("rmm.allocators.torch").rmm_torch_allocator
        torch.cuda.memory.change_current_allocator(allocator)
        return "it allocates from RMM's pool"
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / whole), 0)
    return f"it allocates at most {most} bytes"


def _cupy(cupy: Any, most: int) -> str:
    if has(Layer.RMM):
        cupy.cuda.set_allocator(importlib.import_module("rmm.allocators.cupy").rmm_cupy_allocator)
        return "it allocates from RMM's pool"
    cupy.get_default_memory_pool().set_limit(size=most)
    return f"it allocates at most {most} bytes"


#: What a library is told, by its name; the first argument is the module.
LIBRARIES: dict[str, Callable[[Any, int], str]] = {Layer.TORCH: _torch, Layer.CUPY: _cupy}


def _tell(name: str, state: LayerState) -> None:
    """Tell the node, in the thread of the import; nobody minds if there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(1.0)
        line.connect(os.environ.get("GPUPOOL_SOCKET", ""))
        line.sendall(encode({"report": "layers", "layers": written({name: state})}))
