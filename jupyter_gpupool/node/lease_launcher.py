"""The launcher process: owns a forkserver as one user and forks a lease's processes from it.

It takes an agent's JSON orders on the socket that it was started with, never anything pickled: an agent that
runs as root must not talk to a user's forkserver itself, as multiprocessing would hand root's resource
tracker to that user's code.

It ends when its agent is gone. What it has started lives on, and so does the forkserver: every process that
was forked from it holds the pipe that keeps it alive, so Nannies can still start workers anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
from multiprocessing import connection, forkserver
from typing import Any

from jupyter_gpupool.node import lease_child

_PRELOAD = "jupyter_gpupool.node.lease_warm"


class _Launcher:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._unread = b""
        self._context = multiprocessing.get_context("forkserver")
        #: The processes that run, by the descriptor that becomes readable when one has ended.
        self._running: dict[int, Any] = {}

    def warm(self, folder: str) -> None:
        """Start the forkserver and wait until it has loaded everything."""
        self._context.set_forkserver_preload([_PRELOAD])
        # multiprocessing keeps the forkserver's socket where temporary files are, and must not remove it when
        # this process ends: Nannies connect to it later.
        tempfile.tempdir = folder
        process = self._context.Process(target=lease_child.nothing)
        process.start()
        tempfile.tempdir = None
        process.join()
        self._say({"ready": True, "forkserver": getattr(_forkserver(), "_forkserver_pid", 0)})

    def serve(self) -> None:
        """Carry out orders until the agent is gone or says stop."""
        while True:
            for ready in connection.wait([self._line, *self._running]):
                if ready is self._line:
                    if not self._obey_all():
                        return
                else:
                    self._bury(int(ready))  # type: ignore[arg-type]

    def _obey_all(self) -> bool:
        data = self._line.recv(2**16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, order: dict[str, Any]) -> None:
        number = order.pop("number")
        order["spec"]["forkserver"] = reach()
        process = self._context.Process(target=lease_child.run, args=(order,))
        try:
            process.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent must hear of it
            self._say({"failed": number, "why": f"{type(error).__name__}: {error}"})
            return
        self._running[process.sentinel] = process
        self._say({"started": number, "pid": process.pid})

    def _bury(self, sentinel: int) -> None:
        process = self._running.pop(sentinel)
        process.join()
        self._say({"exited": process.pid, "code": process.exitcode})
        process.close()

    def _say(self, message: dict[str, Any]) -> None:
        self._line.sendall(json.dumps(message).encode() + b"\n")


def _forkserver() -> Any:
    return getattr(forkserver, "_forkserver", None)


def reach() -> dict[str, str]:
    """Say how a child reaches the forkserver that it was forked from; empty where that cannot be said."""
    key = getattr(_forkserver(), "_forkserver_authkey", None)
    address = getattr(_forkserver(), "_forkserver_address", None)
    return {"address": address or "", "authkey": key.hex() if key else ""}


def main() -> None:
    """Serve an agent; the arguments are the descriptor of the socket to it and a folder for other sockets."""
    line = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(line.fileno(), False)
    launcher = _Launcher(line)
    try:
        launcher.warm(sys.argv[2])
        launcher.serve()
    except OSError:
        pass  # the agent is gone
    # Not by returning: multiprocessing would wait for all that was started.
    os._exit(0)
