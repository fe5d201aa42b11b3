"""What a process takes of a GPU's memory beside its own data, by model of GPU: measured, with a start value.

Rule 1: what a worker may allocate is its share less this; else a full pool would be above the share.
Rule 2: a CUDA context's size is the least that a worker of this node was seen with twice in a row: whatever
        it allocates comes on top, so nobody's code can make it smaller than it is.

Strategy: the start value is above what data-centre GPUs were seen to need; a measured one replaces it for the
next worker.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

#: Bytes of a CUDA context before any was measured, and what libraries load beside it (cuBLAS's workspaces,
#: kernels that are loaded when they are first called).
CONTEXT, LIBRARIES = 600 * MIB, 200 * MIB
#: Bytes that a context has at least and at most: less is one that is still being made, more is no context.
_LEAST, _MOST = 128 * MIB, 2 * GIB


class Overheads:
    """What was measured on this node.

    Args:
        path: Where it is kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._measured: dict[str, int] = {}
        self._last: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            said = json.loads(path.read_text(encoding="utf-8"))
            self._measured = {str(model): int(size) for model, size in said.items()}

    def of(self, model: str) -> int:
        """Answer with the bytes that a worker on a GPU of this model needs beside its data."""
        return self._measured.get(model, CONTEXT) + LIBRARIES

    def see(self, model: str, part: str, used: int) -> None:
        """Take note of what the only process of a slice has.

        Args:
            model: The GPU's.
            part: The slice's id.
            used: Bytes.
        """
        before, self._last[part] = self._last.get(part), used
        known = self._measured.get(model, _MOST + 1)
        if model and before == used and _LEAST <= used < known:
            self._measured[model] = used
            with contextlib.suppress(OSError):  # it is measured again
                self._path.write_text(json.dumps(self._measured), encoding="utf-8")

    def forget(self, part: str) -> None:
        """A slice is gone."""
        self._last.pop(part, None)
