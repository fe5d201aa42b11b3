"""What every process of a lease sets in Dask's configuration, and why.

An idle lease must cost next to nothing, a GPU that hangs must not hang Dask, and nothing may listen that
nobody needs.
"""

from __future__ import annotations

from typing import Any

#: Dask configuration of a lease's scheduler, hosts and workers. It wins over the user's own files: each line
#: is here because the pool depends on it.
SETTINGS: dict[str, Any] = {
    # Dask's own NVML polling stalls a worker, and keeps a Nanny from restarting one, when a GPU is lost.
    "distributed.diagnostics.nvml": False,
    # Fork a worker from the launcher's forkserver rather than start a Python of its own (2.3 s).
    "distributed.worker.multiprocessing-method": "forkserver",
    # Dask would take a worker that is busy in C code for a dead one; the host and the agent look (`pulse`).
    "distributed.scheduler.worker-ttl": None,
    # Tasks wait for a replacement as long as it takes; they never fail because no worker is there.
    "distributed.scheduler.no-workers-timeout": None,
    # Nothing but the scheduler's dashboard serves HTTP, and that has no proxy to workers.
    "distributed.worker.http.routes": [],
    "distributed.scheduler.http.routes": [
        "distributed.http.scheduler.prometheus",
        "distributed.http.scheduler.info",
        "distributed.http.scheduler.json",
        "distributed.http.health",
        "distributed.http.statics",
    ],
    # What an idle process does all the time: Dask's defaults (20 ms, 500 ms, 10 ms, 100 ms) cost 5 % of a
    # core.
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.worker.profile.interval": "100ms",
    "distributed.worker.profile.cycle": "5s",
    "distributed.worker.memory.monitor-interval": "200ms",
}

#: Seconds that a task's error is held back until the node's verdict.
PATIENCE = 2.5
#: Between two heartbeats of a worker, in milliseconds; Dask's half a second is for clusters of another kind.
HEARTBEAT = 2000


def security(credentials: dict[str, str] | None) -> Any:
    """Make Dask's security object of a lease's own credentials, which all sides present.

    Args:
        credentials: PEM texts under "ca", "cert" and "key"; empty or None: no TLS.
    """
    from distributed.security import Security

    if not credentials:
        return Security()
    fields: dict[str, Any] = {"tls_ca_file": credentials["ca"]}
    for role in ("scheduler", "worker", "client"):
        fields[f"tls_{role}_cert"] = credentials["cert"]
        fields[f"tls_{role}_key"] = credentials["key"]
    return Security(require_encryption=True, **fields)
