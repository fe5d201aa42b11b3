"""What the forkserver of a launcher loads before it forks: all that a lease's first second would load.

CUDA must not be initialised here: no context survives a fork.
"""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import multiprocessing.reduction
import ssl
from typing import Any

#: By name, as some need not be installed, and as a lease's rooms are nobody's to import.
PRELOADED = (
    "multiprocessing.popen_forkserver",
    "multiprocessing.synchronize",
    "tornado.platform.asyncio",
    "numpy",
    "pandas",
    "dask.array",
    "dask.dataframe",
    "distributed",
    "distributed.shuffle",
    "distributed.dashboard.scheduler",
    "distributed.dashboard.components.scheduler",
    "distributed.http.scheduler.prometheus",
    "distributed.http.scheduler.info",
    "distributed.http.scheduler.json",
    "distributed.http.health",
    "distributed.http.statics",
    "bokeh",
    "bokeh.application.handlers.document_lifecycle",
    "dask_cuda",
    "dask_cuda.initialize",
    "jupyter_gpupool.lease.process",
    "jupyter_gpupool.lease.scheduler",
    "jupyter_gpupool.lease.host",
    "jupyter_gpupool.node.lease_child",
)


def _load() -> None:
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # its own process will say so, in its own log
    # What dead workers leave behind is then below this process (`guard.orphans`).
    importlib.import_module("jupyter_gpupool.lease.process").take_in_orphans()
    outlive_clients(multiprocessing.reduction)
    _simulate()
    _warm_tls()
    _warm_versions()
    # What is loaded by now stays for good: let no collection in a forked process copy its pages.
    gc.collect()
    gc.freeze()


def outlive_clients(reduction: Any) -> None:
    """Let the forkserver survive who dies between its connection and its request.

    A host that is ended while it starts its worker does that. Before Python 3.14 the forkserver's loop takes
    an aborted connection for nothing, and ends at one without a request: with it goes the start of all whose
    host was forked from it.

    Args:
        reduction: `multiprocessing.reduction`, by whose function it reads a request.
    """
    read = reduction.recvfds

    @functools.wraps(read)
    def recvfds(*arguments: Any) -> Any:
        try:
            return read(*arguments)
        except EOFError as error:
            raise ConnectionAbortedError(errno.ECONNABORTED, "it is gone") from error

    reduction.recvfds = recvfds


def _warm_tls() -> None:
    """Do once what every TLS connection of tornado's would do first: load the system's certificates (60 ms).

    It holds no key. The name is private to tornado; should it go, only the time is lost.
    """
    netutil = importlib.import_module("tornado.netutil")
    getattr(netutil, "_client_ssl_defaults", ssl.create_default_context)()


def _warm_versions() -> None:
    """Read once what each process of a cluster tells the others: its packages and its machine."""
    importlib.import_module("jupyter_gpupool.versions").versions()
    try:
        from distributed.versions import get_versions
    except ImportError:
        return
    get_versions()


def _simulate() -> None:
    """Put the simulated driver beneath pynvml, where the pool is a simulated one."""
    try:
        from jupyter_gpupool.driver import simulated
    except ImportError:
        return
    if simulated.install():
        importlib.import_module("jupyter_gpupool.driver.simulated.tasks")


_load()
