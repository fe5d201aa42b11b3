"""The line between a slice's host and its shell: messages with their length before them, over a socket pair.

Rule 1: nothing pickled is read here. What a cell sends or fetches passes as bytes, in pieces, so that neither
        side needs room for all of it.
Rule 2: the main thread of the shell never touches the socket: an interrupt may hit it anywhere, and half a
        message would end the line. It holds no lock either while it says something, for the handler of
        the interrupt says something too.
Rule 3: C code may keep the thread that speaks from running. What the host must have heard before such code
        begins is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

Message = dict[str, Any]

#: Bytes of one piece of a value that goes over or back.
PIECE = 2**22
#: How many messages, and how many large ones (bytes), wait to be said before who says more has to wait.
_MANY, _FEW, _LARGE = 1000, 4, 2**20
#: Seconds in which what is printed is put together.
_TOGETHER = 0.01
#: Seconds between two looks at whether something has been said.
_MOMENT = 0.001
_LENGTH = 4


def pack(message: Message) -> bytes:
    """Write a message; what has no form on the wire goes as its text.

    >>> pack({"a": 2**70}) == pack({"a": str(2**70)})
    True
    """
    try:
        body = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError):
        body = msgpack.packb(_plain(message))
    return len(body).to_bytes(_LENGTH, "big") + bytes(body)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    small = isinstance(value, int) and -(2**63) <= value < 2**63
    return value if small or value is None or isinstance(value, float | bytes | bool) else str(value)


def unpack(body: bytes) -> Message:
    """Read a message."""
    message: Message = msgpack.unpackb(body, strict_map_key=False)
    return message


async def read(reader: asyncio.StreamReader) -> Message | None:
    """Read the next message; None when the other side is gone."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


def pieces(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Cut a value into pieces; with each goes whether it is the last."""
    for start in range(0, max(len(data), 1), PIECE):
        yield data[start : start + PIECE], start + PIECE >= len(data)


class Line:
    """The shell's end: says and hears in threads of its own."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.pid = os.getpid()
        #: What the host has said.
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._unsaid: queue.SimpleQueue[Message] = queue.SimpleQueue()
        #: Messages (their `id`) that somebody waits to be on their way.
        self._awaited: set[int] = set()
        for work in (self._listen, self._speak):
            threading.Thread(target=work, name="gpupool-line", daemon=True).start()

    def say(self, message: Message) -> None:
        """Say something to the host; waits, and can be interrupted, while too much has not been heard yet."""
        self._unsaid.put(message)
        large = any(len(each) > _LARGE for each in message.values() if isinstance(each, str | bytes))
        while self._unsaid.qsize() > (_FEW if large else _MANY):
            time.sleep(_MOMENT)

    def tell(self, message: Message, seconds: float = math.inf) -> None:
        """Say something and wait until it is on its way, or for so many seconds; much may be before it."""
        self._awaited.add(id(message))
        self._unsaid.put(message)
        end = time.monotonic() + seconds
        while id(message) in self._awaited and time.monotonic() < end:
            time.sleep(_MOMENT)

    def _speak(self) -> None:
        while True:
            together = _together(self._unsaid)
            for message in together:
                try:
                    self._line.sendall(pack(message))
                except OSError:
                    _end()
                    return
                self._awaited.discard(id(message))
            if together[-1]["say"] == "stream":
                time.sleep(_TOGETHER)

    def _listen(self) -> None:
        stream = self._line.makefile("rb")
        while head := stream.read(_LENGTH):
            self.heard.put(unpack(stream.read(int.from_bytes(head, "big"))))
        _end()


def _end() -> None:
    """The host is gone, and with it whoever could use this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def _together(unsaid: queue.SimpleQueue[Message]) -> list[Message]:
    """Wait for something and take out all that waits, with what was printed in a row put together."""
    taken = [unsaid.get()]
    texts: list[str] = []
    with contextlib.suppress(queue.Empty):
        while True:
            message, last = unsaid.get_nowait(), taken[-1]
            if message["say"] == last["say"] == "stream" and message["name"] == last["name"]:
                texts.append(message["text"])
                continue
            _close(taken, texts)
            taken.append(message)
    _close(taken, texts)
    return taken


def _close(taken: list[Message], texts: list[str]) -> None:
    if texts:
        taken[-1] = {**taken[-1], "text": "".join([taken[-1]["text"], *texts])}
        texts.clear()
