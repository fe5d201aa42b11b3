"""`gpupool` within a cell on a lease: checkpoints of what must outlive the namespace, and a Dask client.

The copies are kept where the notebook runs, not here: this node may be what is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle

from jupyter_gpupool.lease.settings import security
from jupyter_gpupool.lease.shell_line import Message, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.lease.shell_line import Line


class Space:
    """What a cell on a lease has under the name `gpupool`."""

    def __init__(self, spec: dict[str, Any], line: Line, namespace: dict[str, Any]) -> None:
        self._spec = spec
        self._line = line
        self._namespace = namespace
        self._client: Any = None

    def checkpoint(self, **values: Any) -> None:
        """Keep copies of objects where the notebook runs, for when this namespace is lost.

        Args:
            values: What to keep, by name; it must be possible to pickle it. An older copy is replaced.

        Raises:
            OSError: There is no room for it, or nobody who could keep it.
        """
        if not values:
            raise TypeError("say what to keep: gpupool.checkpoint(model=model)")
        for name, value in values.items():
            for data, last in pieces(cloudpickle.dumps(value)):
                self._line.say(
                    {"say": "part", "kind": "checkpoint", "name": name, "data": data, "last": last}
                )
            self._answer("kept")

    def restore(self, *names: str) -> list[str]:
        """Bring back what was kept, as variables, and return their names.

        Args:
            names: Which; none: everything.

        Raises:
            OSError: It is not there.
        """
        self._line.say({"say": "want", "names": list(names)})
        found = list(self._answer("found")["names"])
        for name, data in gathered(self._line, len(found)):
            self._namespace[name] = cloudpickle.loads(data)
        return found

    def client(self) -> Any:
        """Return a Dask client of the whole lease; the same one each time."""
        from distributed import Client

        if self._client is None or self._client.status != "running":
            keys = security(self._spec["credentials"])
            self._client = Client(self._spec["scheduler"], security=keys, set_as_default=False)
        return self._client

    def _answer(self, wanted: str) -> Message:
        while True:
            answer = self._line.heard.get()
            if answer["do"] == "failed":
                raise OSError(answer["why"])
            if answer["do"] == wanted:
                return answer

    def __repr__(self) -> str:
        return (
            f"gpupool on slice {self._spec['slice']}: checkpoint(name=object), restore(), "
            "client() for the whole lease"
        )


def gathered(line: Line, count: int) -> Iterator[tuple[str, bytes]]:
    """Take values off the line, put together from their pieces.

    Args:
        line: To the host.
        count: How many.
    """
    for _ in range(count):
        data = bytearray()
        while True:
            message = line.heard.get()
            if message["do"] != "part":
                continue
            data += message["data"]
            if message["last"]:
                break
        yield message["name"], bytes(data)
