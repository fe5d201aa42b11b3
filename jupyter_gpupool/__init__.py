"""Share a pool of GPUs from notebooks.

    from jupyter_gpupool import Pool

    with Pool() as pool, pool.request(gpus=2) as lease:
        client = lease.client()             # a plain distributed.Client

In a notebook `%load_ext jupyter_gpupool`, then `%gpupool help`; in a terminal `jupyter gpupool --help`.

How people talk to a pool:

    client      Pool, Lease, AsyncPool; cluster: GPUPoolCluster
    embedded    this user's own pool on this machine
    magic, cli  the faces; commands: the words that they share; display, progress: how it looks
    server      the Jupyter server extension, to which the sidebar talks

What a pool is made of:

    core        the rules: who is next, where, is it fit, and the machine that holds the pool's state
    controller  the pool's Dask scheduler, its HTTP API and its journal
    node        the agent of a machine with GPUs
    lease       what runs in a lease's own Dask cluster
    driver      the NVML boundary, and the simulated GPUs beneath it

Rule 1: importing this package costs nothing, for Dask imports it in places where Jupyter is not installed:
        what is named here is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpupool.client import AsyncLease, AsyncPool, Lease, Pool, PoolError
    from jupyter_gpupool.cluster import GPUPoolCluster

__version__ = "0.1.0"
__all__ = [
    "AsyncLease",
    "AsyncPool",
    "GPUPoolCluster",
    "Lease",
    "Pool",
    "PoolError",
    "load_ipython_extension",
    "unload_ipython_extension",
]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Make `%gpupool` known to an IPython shell."""
    from jupyter_gpupool import magic

    magic.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take `%gpupool` out of an IPython shell again; leases stay."""
    from jupyter_gpupool import magic

    magic.unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Tell JupyterLab where the built sidebar is."""
    return [{"src": "labextension", "dest": "jupyter-gpupool"}]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Tell a Jupyter server what to load; the package's configuration file enables it."""
    from jupyter_gpupool.server.app import GPUPoolServer

    return [{"module": "jupyter_gpupool", "app": GPUPoolServer}]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from jupyter_gpupool import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
