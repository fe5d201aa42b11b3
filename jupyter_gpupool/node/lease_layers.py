"""Which layers keep a slice within its share: what its processes claim, and what the agent knows.

A claim can only be about the software in the slice's own process; what the node does is not its to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Layer, LayerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.node.lease_table import Entry

#: Layers within a process of the lease, of which it tells.
CLAIMED = (Layer.RMM, Layer.TORCH, Layer.CUPY)


class Layers:
    """The layers of all slices on a node.

    Args:
        report: Called with each report.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self._report = report
        self._known: dict[str, tuple[str, dict[str, str]]] = {}

    def claim(self, entry: Entry, said: str) -> None:
        """Take what a process says of its own layers: "rmm=on,torch=ready"."""
        for each in said.split(","):
            name, _, state = each.partition("=")
            if name in CLAIMED and state in set(LayerState):
                self._note(entry, name, state)
        self._say(entry.key)

    def know(self, entry: Entry, layer: Layer) -> None:
        """A layer of the node's own holds."""
        self._note(entry, layer, LayerState.ON)
        self._say(entry.key)

    def forget(self, key: str) -> None:
        """A slice is gone."""
        self._known.pop(key, None)

    def say_again(self) -> None:
        """Say everything: the controller may have been started anew."""
        for key in self._known:
            self._say(key)

    def _note(self, entry: Entry, layer: str, state: str) -> None:
        self._known.setdefault(entry.key, (entry.lease, {}))[1][str(layer)] = str(state)

    def _say(self, key: str) -> None:
        lease, states = self._known.get(key, ("", {}))
        if states:
            self._report({"report": "layers", "slice": key, "lease": lease, "layers": dict(states)})
