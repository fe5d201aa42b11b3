"""The line that a person sees while a request waits: place, reason, expected start, then what is starting.

Rule 1: nothing is shown for a wait that is over at once, and nothing stays after success.
Rule 2: a notebook's output is updated in place, a terminal's line is overwritten; where neither is there
        (a log file), a line is written when the words change, and no more often.
"""

from __future__ import annotations

import contextlib
import html
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from jupyter_gpupool import display

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from jupyter_gpupool._lease import AsyncLease, Lease

#: Seconds that a wait takes before it is shown.
AFTER_S = 0.35


class Progress:
    """Shows what a lease waits for; call it with the lease whenever there is news.

    Args:
        on: Whether to show anything.
        stream: Where to write when there is no notebook; standard error by default.
    """

    def __init__(self, on: bool = True, stream: TextIO | None = None) -> None:  # noqa: FBT001, FBT002
        self._on = on
        self._stream = stream or sys.stderr
        self._since = time.monotonic()
        self._last = ""
        self._screen: _Notebook | _Terminal | _Lines | None = None

    def __enter__(self) -> Self:
        return self

    def __call__(self, lease: Lease | AsyncLease) -> None:
        """Show what the lease waits for now."""
        if not self._on or time.monotonic() - self._since < AFTER_S:
            return
        words = f"Lease {lease.name or lease.id}: {display.waiting_words(lease.data)}"
        if words == self._last:
            return
        self._last = words
        self._screen = self._screen or _screen(self._stream)
        self._screen.show(words)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._screen is not None:
            self._screen.clear()


class Waiting:
    """Shows a line of words while something takes its time.

    Args:
        words: What is going on.
    """

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> None:
        self._screen = _screen(sys.stderr)
        self._screen.show(f"{self._words} …")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.clear()


def _screen(stream: TextIO) -> _Notebook | _Terminal | _Lines:
    if "ipykernel" in sys.modules:
        from IPython import get_ipython

        if getattr(get_ipython(), "kernel", None) is not None:
            return _Notebook()
    interactive = False
    with contextlib.suppress(ValueError):  # a closed stream
        interactive = stream.isatty()
    return _Terminal(stream) if interactive else _Lines(stream)


class _Notebook:
    """An output of the cell that is updated in place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, words: str) -> None:
        from IPython.display import display as show

        data = {"text/plain": words, "text/html": f"<span>⏳ {html.escape(words)}</span>"}
        if self._handle is None:
            self._handle = show(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def clear(self) -> None:
        self._handle.update({"text/plain": "", "text/html": ""}, raw=True)


class _Terminal:
    """One line that is written over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, words: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._stream.write("\r\x1b[K" + words[:width])
        self._stream.flush()

    def clear(self) -> None:
        self._stream.write("\r\x1b[K")
        self._stream.flush()


class _Lines:
    """A line for each change, its times left out, for they change all the while."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def show(self, words: str) -> None:
        settled = words.partition(", expected to start")[0]
        if settled != self._last:
            self._last = settled
            self._stream.write(words + "\n")
            self._stream.flush()

    def clear(self) -> None:
        """Lines that have been written stay."""
