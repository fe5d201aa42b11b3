"""The launcher process: owns a forkserver as one user and forks a lease's processes from it.

It takes an agent's JSON orders on the socket that it was started with, never anything pickled: an agent that
runs as root must not talk to a user's forkserver itself, as multiprocessing would hand root's resource
tracker to that user's code.

A few processes are forked already and wait to hear what they are to be: to fork one of 280 MB, and to touch
its pages for the first time, would be a part of each lease's start.

It ends when its agent is gone, and so do those that wait. What it has started lives on, and so does the
forkserver: every process that was forked from it holds the pipe that keeps it alive, so Nannies can still
start workers anew.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from multiprocessing import connection, forkserver
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.node import lease_child

if TYPE_CHECKING:
    from collections.abc import Callable

_PRELOAD = "jupyter_gpupool.node.lease_warm"
#: Processes that wait for an order: a lease's scheduler and the host of its first slice.
SPARES = 2
#: Seconds without an order after which those that were taken are replaced: not while others are started.
QUIET = 0.25


class _Launcher:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._unread = b""
        self._context = multiprocessing.get_context("forkserver")
        #: The PID of the forkserver that the agent knows.
        self._said: int | None = None
        #: The processes that run, by the descriptor that becomes readable when one has ended.
        self._running: dict[int, Any] = {}
        #: The processes that wait, and the pipe on which each waits.
        self._spare: list[tuple[Any, connection.Connection]] = []

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
        self._say_ready()

    def _say_ready(self) -> None:
        """Say which forkserver there is, where that has not been said."""
        server = getattr(_forkserver(), "_forkserver_pid", 0)
        if server != self._said:
            self._said = server
            self._say({"ready": True, "forkserver": server})

    def serve(self) -> None:
        """Carry out orders until the agent is gone or says stop."""
        while True:
            ready_ones = connection.wait([self._line, *self._running], None if self._has_spares() else QUIET)
            if not ready_ones:
                self._fork_spares()
            for ready in ready_ones:
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
        try:
            forkserver.ensure_running()  # another one where it has died: those that wait would not notice
            self._say_ready()
            order["spec"]["forkserver"] = reach()
            process = self._from_spare(order) or self._fork(lease_child.run, order)
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent must hear of it
            self._say({"failed": number, "why": f"{type(error).__name__}: {error}"})
            return
        self._running[process.sentinel] = process
        self._say({"started": number, "pid": process.pid})

    def _fork(self, target: Callable[[Any], None], argument: object) -> Any:
        process = self._context.Process(target=target, args=(argument,))
        process.start()
        return process

    def _from_spare(self, order: dict[str, Any]) -> Any:
        """Let a process that waits carry out an order; None where none is left alive."""
        while self._spare:
            process, pipe = self._spare.pop(0)
            with pipe, contextlib.suppress(OSError):
                pipe.send_bytes(json.dumps(order).encode())
                return process
            process.join()
        return None

    def _has_spares(self) -> bool:
        return len(self._spare) >= SPARES

    def _fork_spares(self) -> None:
        """Fork those that are missing; where that fails the next order will say why."""
        while not self._has_spares():
            reader, writer = self._context.Pipe(duplex=False)
            try:
                self._spare.append((self._fork(lease_child.wait, reader), writer))
            except Exception:  # noqa: BLE001 - whatever it is
                writer.close()
                return
            finally:
                reader.close()

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
