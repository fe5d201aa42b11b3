"""What a cell on a lease shows, on its way to the notebook that it was written in.

Rule 1: order is kept between what Python prints and what it displays; what C code and other programs write to
        the process's own standard streams comes as soon as it is read.
Rule 2: a widget cannot live without its kernel; of one only the text is shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from typing import TYPE_CHECKING, Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher

if TYPE_CHECKING:
    from jupyter_gpupool.lease.shell_line import Line, Message

#: What only a kernel that has the other end of it can show.
_WIDGET = "application/vnd.jupyter.widget-view+json"
_STANDARD = ((1, "stdout"), (2, "stderr"))
#: Bytes that a pipe holds.
_PIPE = 2**16


class Stream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of a cell."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, line: Line, name: str, descriptor: int) -> None:
        super().__init__()
        self._line = line
        self.name = name
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Write a text."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._line.pid:  # a forked child has no thread that would say it
            os.write(self._descriptor, text.encode(self.encoding, self.errors))
        elif text:
            self._line.say({"say": "stream", "name": self.name, "text": text})
        return len(text)

    def writable(self) -> bool:
        """Say that it can be written to."""
        return True

    def isatty(self) -> bool:
        """Say that nobody sits at it."""
        return False

    def fileno(self) -> int:
        """Answer with the descriptor that other programs write to."""
        return self._descriptor


class Outside:
    """What C code and other programs write to this process's own standard streams.

    Args:
        line: To the host.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._lock = threading.Lock()
        #: Where what is no cell's is logged.
        self.log = os.dup(2)
        self._reading = {self._take_over(descriptor): name for descriptor, name in _STANDARD}
        sys.stdout, sys.stderr = (Stream(line, name, descriptor) for descriptor, name in _STANDARD)
        threading.Thread(target=self._watch, name="gpupool-out", daemon=True).start()

    def flush(self) -> None:
        """Say what has been written so far, before a cell is said to be done."""
        for descriptor in list(self._reading):
            self._pass_on(descriptor)

    def _take_over(self, descriptor: int) -> int:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.dup2(writing, descriptor)
        os.close(writing)
        return reading

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select(list(self._reading), [], [])
            for descriptor in ready:
                self._pass_on(descriptor)

    def _pass_on(self, descriptor: int) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            data = os.read(descriptor, _PIPE)
            if data:
                text = data.decode(errors="replace")
                self._line.say({"say": "stream", "name": self._reading[descriptor], "text": text})
            else:  # a cell has closed the other end
                self._reading.pop(descriptor, None)


class Publisher(DisplayPublisher):
    """What `display()` calls."""

    line: Line

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Show something."""
        self.line.say(
            {
                "say": "display",
                "data": shown(data),
                "metadata": metadata or {},
                "transient": transient or {},
                "update": update,
            }
        )

    def clear_output(self, wait: bool = False) -> None:  # noqa: FBT001, FBT002 - IPython's signature
        """Clear what the cell has shown."""
        self.line.say({"say": "clear", "wait": wait})


class Hook(DisplayHook):
    """What takes the value of a cell's last line."""

    line: Line
    #: The value is to be stored, not shown.
    silent = False

    def write_output_prompt(self) -> None:
        """Write nothing: the notebook numbers its own results."""

    def write_format_data(self, format_dict: Message, md_dict: Message | None = None) -> None:
        """Show the value."""
        if not self.silent:
            self.line.say({"say": "result", "data": shown(format_dict), "metadata": md_dict or {}})

    def finish_displayhook(self) -> None:
        """End showing."""
        self._is_active = False


def shown(data: Message) -> Message:
    """Leave out what cannot be shown at the other end, if anything else is left."""
    return {kind: each for kind, each in data.items() if kind != _WIDGET or len(data) == 1}
