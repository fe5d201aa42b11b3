"""The line between a slice's host and its shell: what is said arrives, whatever interrupts who says it."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading

from jupyter_gpupool.lease import shell_line
from jupyter_gpupool.lease.shell_line import Line, pack, unpack
from tests.conftest import wait_until


def test_anything_that_a_cell_may_show_has_a_form_on_the_wire():
    odd = {"say": "x", "a": 2**70, "b": "\ud800", "c": {1: (1, 2.5)}, "d": object, "e": b"\0", "f": None}
    back = unpack(pack(odd)[4:])
    assert back["a"] == str(2**70)
    assert back["b"] == "\\ud800"
    assert back["c"] == {1: [1, 2.5]}
    assert back["e"] == b"\0"


def test_what_is_said_while_an_interrupt_says_something_arrives(monkeypatch):
    ended = []

    monkeypatch.setattr(shell_line, "_end", lambda: ended.append(True))
    ours, theirs = socket.socketpair()
    line = Line(theirs)
    heard = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(ours, heard), daemon=True).start()
    interrupts = []

    def on_interrupt(*_):
        interrupts.append(True)
        line.tell({"say": "interrupted"}, 0.01)

    before = signal.signal(signal.SIGVTALRM, on_interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    said = 0
    try:
        while len(interrupts) < 50:
            line.say({"say": "number", "number": said})
            said += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    line.tell({"say": "last"})
    arrived = list(iter(lambda: heard.get(timeout=20), {"say": "last"}))
    assert [each["number"] for each in arrived if each["say"] == "number"] == list(range(said))
    assert arrived.count({"say": "interrupted"}) == len(interrupts)
    assert not line._awaited
    ours.shutdown(socket.SHUT_RDWR)
    line.say({"say": "nothing"})
    wait_until(lambda: len(ended) == 2, 10)  # both threads
    ours.close()
    theirs.close()


def test_an_interrupt_waits_no_longer_than_it_may_while_nothing_is_heard(monkeypatch):
    """The host is stopped, say, or the machine too busy for it, and the line is full."""
    ended = []
    monkeypatch.setattr(shell_line, "_end", lambda: ended.append(True))
    ours, theirs = socket.socketpair()
    line = Line(theirs)
    line.say({"say": "display", "data": "x" * shell_line.PIECE})
    wait_until(lambda: not line._unsaid.qsize(), 10)  # it is on its way, and nobody reads it
    for _ in range(2 * shell_line._MANY):
        line._unsaid.put({"say": "clear"})
    handler = threading.Thread(target=line.tell, args=({"say": "interrupted"}, 0.05), daemon=True)
    handler.start()
    handler.join(10)
    assert not handler.is_alive()
    heard = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(ours, heard), daemon=True).start()
    assert {"say": "interrupted"} in iter(lambda: heard.get(timeout=20), None)
    ours.shutdown(socket.SHUT_RDWR)
    line.say({"say": "nothing"})
    wait_until(lambda: len(ended) == 2, 10)  # both threads
    ours.close()
    theirs.close()


def _hear(line, heard):
    stream = line.makefile("rb")
    with contextlib.suppress(OSError):
        while head := stream.read(4):
            heard.put(unpack(stream.read(int.from_bytes(head, "big"))))
