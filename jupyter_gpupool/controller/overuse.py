"""Shares as their nodes see them: which layers hold, and who is told that a lease took too much.

Rule 1: none of it is a pool event: nothing is granted or taken by it, and after a restart the nodes say the
        layers anew.
Rule 2: a node speaks for its own slices and devices only.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.reports import BadReportError
from jupyter_gpupool.core.model import Layer, LayerState, Notice, Notify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.core.pool import Pool
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.wire import Message

#: What a layer guarantees, and how: by its name and state.
SENTENCES: dict[tuple[Layer, LayerState], str] = {
    (
        Layer.MIG,
        LayerState.ON,
    ): "the hardware keeps this instance's memory and compute apart from all others",
    (Layer.RMM, LayerState.ON): "what allocates through RMM gets an out-of-memory error at the share's end",
    (Layer.TORCH, LayerState.ON): "PyTorch gets an out-of-memory error at the share's end",
    (Layer.TORCH, LayerState.READY): "PyTorch is limited to the share as soon as it is imported",
    (Layer.TORCH, LayerState.FAILED): "PyTorch could not be limited, see the lease's logs",
    (Layer.CUPY, LayerState.ON): "CuPy gets an out-of-memory error at the share's end",
    (Layer.CUPY, LayerState.READY): "CuPy is limited to the share as soon as it is imported",
    (Layer.CUPY, LayerState.FAILED): "CuPy could not be limited, see the lease's logs",
    (
        Layer.MPS,
        LayerState.ON,
    ): "the driver limits each process's memory and compute; a crash of one"
    " can end your other shares on this node",
    (
        Layer.GUARD,
        LayerState.ON,
    ): "the node looks every few seconds: a slice above its share is warned,"
    " paused, then its process is ended",
}
#: What is said of a slice above its share, by the step; other steps are not worth a notice.
_STEPS = {
    "warned": "{name} has {used} of {device}, its share is {share}: free some, or its worker is paused and"
    " then started anew.",
    "ended": "{name} had {used} of {device}, its share is {share}: process {pid} was ended, and its worker"
    " starts anew.",
}
_STRAY = "{name} computed on {device}, of which it has nothing: process {pid} was ended."


class Overuse:
    """What nodes say of shares.

    Args:
        pool: The pool, to be read only.
        tell: Gives a notice to its user.
        wake: Says that what people see has changed.
    """

    def __init__(
        self, pool: Callable[[], Pool], tell: Callable[[Notify], None], wake: Callable[[], None]
    ) -> None:
        self._pool, self._tell, self._wake = pool, tell, wake
        #: By slice: layer -> its state.
        self._layers: dict[str, dict[str, str]] = {}
        #: Grows whenever a slice's layers change.
        self.revision = 0

    def layers(self, part: str) -> Mapping[str, str]:
        """Return the layers that hold on a slice, with their states."""
        return self._layers.get(part, {})

    def take_layers(self, node: str, report: Message) -> None:
        """Take which layers a slice has."""
        _, part = self._slice(node, report)
        known = {each for record in self._pool().leases.values() for each in record.slices}
        self._layers = {ident: each for ident, each in self._layers.items() if ident in known}
        said = report.get("layers")
        states = said if isinstance(said, dict) else {}
        now = {str(layer): str(states[layer]) for layer in Layer if (layer, states.get(layer)) in SENTENCES}
        if self._layers.get(part.id) != now:
            self._layers[part.id] = now
            self.revision += 1
            self._wake()

    def take_over(self, node: str, report: Message) -> None:
        """A slice has more than its share."""
        lease, part = self._slice(node, report)
        shape = _STEPS.get(str(report.get("step")))
        if shape is None:
            return
        numbers = {name: int(report.get(name) or 0) for name in ("used", "share", "pid")}
        self._say(lease, part.device, shape, numbers)

    def take_stray(self, node: str, report: Message) -> None:
        """A process of a lease was on a device of which the lease has nothing."""
        pool, device = self._pool(), str(report.get("device"))
        lease, record = pool.leases.get(str(report.get("lease"))), pool.devices.get(device)
        if lease is None or record is None or record.device.node != node:
            raise BadReportError(f"stray is not for {node} to say")
        self._say(lease, device, _STRAY, {"pid": int(report.get("pid") or 0)})

    def _slice(self, node: str, report: Message) -> tuple[Lease, Slice]:
        ident = str(report.get("slice"))
        lease = self._pool().leases.get(ident.rpartition("/")[0])
        part = lease.slices.get(ident) if lease else None
        if lease is None or part is None or part.node != node:
            raise BadReportError(f"{report.get('report')} of {ident} is not for {node} to say")
        return lease, part

    def _say(self, lease: Lease, device: str, shape: str, numbers: dict[str, int]) -> None:
        words: dict[str, Any] = {**numbers, "name": lease.request.name}
        words |= {name: f"{numbers[name] / 1e9:.4g} GB" for name in ("used", "share") if name in numbers}
        sentence = shape.format(**words, device=self._pool().device_name(device))
        data = json.dumps({**numbers, "device": device})
        self._tell(
            Notify(
                user=lease.request.user,
                notice=Notice.OVERUSE,
                lease=lease.id,
                sentence=sentence,
                data=data,
            )
        )


def shown(layers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return layers as people see them, each with what it guarantees."""
    there = [(layer, LayerState(layers[layer])) for layer in Layer if layer in layers]
    return [
        {"layer": layer.value, "state": state.value, "sentence": SENTENCES[layer, state]}
        for layer, state in there
    ]
