"""What the forkserver of a launcher loads before it forks: all that a lease's first second would load.

CUDA must not be initialised here: no context survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import ssl

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
    _simulate()
    # The first context of a process initialises OpenSSL; this one holds no key.
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # What is loaded by now stays for good: let no collection in a forked process copy its pages.
    gc.collect()
    gc.freeze()


def _simulate() -> None:
    """Put the simulated driver beneath pynvml, where the pool is a simulated one."""
    try:
        from jupyter_gpupool.driver import simulated
    except ImportError:
        return
    if simulated.install():
        importlib.import_module("jupyter_gpupool.driver.simulated.tasks")


_load()
