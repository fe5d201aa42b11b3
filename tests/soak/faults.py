"""What can go wrong with a GPU, one row a kind: what is done to it, and what makes it whole again.

A fault is a row of `KINDS`; whether work has to leave the GPU is the row's too, so that the soak leaves room
for it to go to. Each gets the soak and a device's name.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_gpupool.driver.simulated.processes import uses

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.soak.__main__ import Soak

#: Seconds that a drain gets; tasks of the loads take a small part of it.
DEADLINE = 20
#: Seconds that the driver hangs.
HANGS = 3.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    name: str
    do: Callable[[Soak, str], None]
    #: Makes it good again, after a while; None: nothing is to be done.
    undo: Callable[[Soak, str], None] | None
    #: Work has to leave the GPU.
    out: bool = True


def _health(action: str, **more: object) -> Callable[[Soak, str], None]:
    def ask(soak: Soak, device: str) -> None:
        soak.pool.call("POST", f"/v1/health/{device}", {"action": action, "why": "soak", **more})

    return ask


def _whole(soak: Soak, device: str) -> None:
    """Reset it, and say that it is fit."""
    soak.machine.restore(device)
    soak.pool.undrill(device)


def _silently(soak: Soak, device: str) -> None:
    """Nobody is told; a worker's next task finds it."""
    soak.machine.lose(device, xid=0)


def _set(field: str, value: object) -> Callable[[Soak, str], None]:
    return lambda soak, device: soak.machine.set(device, field, value)


def _fail(xid: int) -> Callable[[Soak, str], None]:
    return lambda soak, device: soak.machine.fail(device, xid)


def _only_say(xid: int) -> Callable[[Soak, str], None]:
    return lambda soak, device: soak.machine.xid(device, xid)


def _stop_worker(soak: Soak, device: str) -> None:
    """Stop a process that is on the GPU, as a careless person does."""
    found = sorted(use.pid for use in uses(soak.machine.state) if use.on == device)
    for pid in found[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def _drain_node(soak: Soak, device: str) -> None:
    """Planned maintenance of the node that the GPU is in."""
    _health("drain", deadline=DEADLINE)(soak, soak.node_of(device))


def _undrain_node(soak: Soak, device: str) -> None:
    _health("undrain")(soak, soak.node_of(device))


def _hang(soak: Soak, device: str) -> None:
    soak.machine.hang(device, HANGS)


KINDS: tuple[Kind, ...] = (
    Kind("lost", lambda soak, device: soak.pool.drill(device, 79), _whole),
    Kind("lost without a word", _silently, _whole),
    Kind("lost, and its processes abort", lambda soak, device: soak.machine.lose(device, abort=True), _whole),
    Kind("not listed any more", lambda soak, device: soak.machine.lose(device, vanish=True), _whole),
    Kind("uncontained memory error", _fail(95), _whole),
    Kind("its processor does not answer", _fail(119), _whole),
    Kind("a reset is required", _set("reset_required", 1), _whole),
    Kind("a row cannot be remapped", _set("remap_failed", 1), _whole),
    Kind("the driver recommends to drain it", _set("recovery_action", 3), _whole),
    Kind("drained", _health("drain", deadline=DEADLINE), _health("undrain")),
    Kind("its node is drained", _drain_node, _undrain_node),
    Kind("contained memory error", _fail(94), _whole, out=False),
    Kind("a row is to be remapped", _set("remap_pending", 1), _whole, out=False),
    Kind("cordoned", _health("cordon"), _health("uncordon"), out=False),
    Kind("a stopped worker", _stop_worker, None, out=False),
    Kind("the driver hangs", _hang, None, out=False),
    Kind("clean-up messages", _only_say(45), None, out=False),
    Kind("a code that nobody agrees on", _only_say(109), None, out=False),
    Kind(
        "the monitor is refused",
        lambda soak, device: soak.machine.fail_next(device, code="NO_PERMISSION", times=3),
        None,
        out=False,
    ),
)
