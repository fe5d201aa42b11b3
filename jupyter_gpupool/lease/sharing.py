"""A process that a forkserver has forked starts its own children from that forkserver too.

Python would have it start one of its own, which has to load everything anew: 2.3 s. The names with an
underscore are private to `multiprocessing`; nothing else here touches them, and a test tries this on each
Python that is supported.
"""

from __future__ import annotations

from multiprocessing import forkserver, resource_tracker
from typing import Any


def share_forkserver(given: dict[str, Any] | None) -> bool:
    """Use the forkserver that this process was forked from for its children too.

    The names with an underscore are private to `multiprocessing`: should one be missing, the answer is False
    and the caller starts its children plainly.

    Args:
        given: The forkserver's "address" and, from Python 3.14 on, its "authkey", or None.
    """
    server = getattr(forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    address = (given or {}).get("address") or getattr(server, "_forkserver_address", None)
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    if server is None or alive is None or not address or tracker is None:
        return False
    server._forkserver_address = address  # noqa: SLF001 - there is no public way
    if hasattr(server, "_forkserver_authkey"):
        if not (given or {}).get("authkey"):
            return False
        server._forkserver_authkey = bytes.fromhex((given or {})["authkey"])  # noqa: SLF001 - as above
    server.ensure_running = tracker.ensure_running
    return True
