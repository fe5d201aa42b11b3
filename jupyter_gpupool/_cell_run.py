"""One cell on its way: sent to the shells of a lease, and what they say shown here.

Rule 1: an interrupt is taken note of, and heeded between two messages: raised wherever it hits it would lose
        one, the end of the cell or a piece of a value.
Rule 2: a second one that comes before the first is heeded is raised, and hangs up: a cell whose notebook
        hangs up is stopped, whatever holds up the notebook.

Not its business: which lease and which slices (`cells`), and how they are reached (`_cells`).
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_gpupool import checkpoint

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from jupyter_gpupool._cells import Message, Way

#: Seconds after which an interrupt that nobody answers ends the connection.
PATIENCE = 15.0
#: Seconds between two looks at whether a connection was cut, while nothing is said.
LOOK = 0.5


@dataclass(frozen=True)
class Target:
    """A slice on which the cell runs."""

    place: int
    way: Way
    device: str


@dataclass
class Run:
    """One cell on one or more slices."""

    shell: Any
    lease: str
    targets: list[Target]
    sent: dict[str, bytes]
    #: By place: why the namespace is gone, and the errors of the cell.
    lost: dict[int, str] = field(default_factory=dict)
    errors: dict[int, Message] = field(default_factory=dict)
    #: It was interrupted here; nobody has answered to that.
    stopped: bool = False
    asleep: bool = False

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Way, Message]] = queue.SimpleQueue()
        self._open = {target.way: target for target in self.targets}
        self._places = {target.way: target.place for target in self.targets}
        self._parts: dict[tuple[str, str, int], bytearray] = {}
        self._copies: dict[tuple[int, str], checkpoint.Writer] = {}
        self._began: set[tuple[int, str]] = set()
        #: Tells its end from that of a cell before it.
        self._name = secrets.token_hex(4)
        #: There is an interrupt that is not heeded yet; when the last one that nobody answers is given up.
        self._pressed = False
        self._given_up = 0.0

    def go(self, order: Message) -> None:
        """Run it and show what it shows, until it has ended everywhere."""
        try:
            with _interrupts(self._press):
                self._send(order)
                while self._open:
                    if self._pressed:
                        self._interrupt()
                    self._take()
                self.stopped = self.stopped or self._pressed
        except BaseException:
            self._hang_up()
            raise
        finally:
            for writer in self._copies.values():
                writer.abandon()

    def _press(self) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
        self._inbox.put((self.targets[0].way, {"say": "pressed"}))  # whoever waits for words wakes up

    def _send(self, order: Message) -> None:
        for target in self.targets:
            target.way.inbox = self._inbox
            target.way.send({**order, "cell": self._name, "shell": target.way.hello["shell"]})

    def _interrupt(self) -> None:
        self.stopped = True
        self._given_up = self._given_up or time.monotonic() + PATIENCE
        for way in list(self._open):
            way.send({"do": "interrupt"})
        self._pressed = False

    def _hang_up(self) -> None:
        for way in list(self._open):
            way.close()

    def _take(self) -> None:
        try:
            way, message = self._inbox.get(timeout=LOOK)
        except queue.Empty:
            for way in [way for way in self._open if not way.is_open]:
                self._on_cut(way, {})
            if self._given_up and time.monotonic() > self._given_up:
                self.asleep = True
                self._open.clear()
            return
        _HANDLERS.get(message["say"], Run._on_other)(self, way, message)

    # ------------------------------------------------------------------------------------ what the shell says

    def _on_stream(self, way: Way, message: Message) -> None:
        stream = sys.stderr if message["name"] == "stderr" else sys.stdout
        stream.write(self._labelled(way, message["name"], message["text"]))
        stream.flush()

    def _on_display(self, way: Way, message: Message) -> None:
        self._label(way)
        shown = {name: message[name] for name in ("data", "metadata", "transient", "update")}
        self.shell.display_pub.publish(**shown)

    def _on_clear(self, _: Way, message: Message) -> None:
        self.shell.display_pub.clear_output(message["wait"])

    def _on_result(self, way: Way, message: Message) -> None:
        self._label(way)
        self.shell.displayhook(_Shown(message["data"], message["metadata"]))

    def _on_error(self, way: Way, message: Message) -> None:
        self.errors[self._places[way]] = message

    def _on_waits(self, _: Way, __: Message) -> None:
        print("Another cell runs there; this one is next.", file=sys.stderr)  # noqa: T201 - beside the cell's own

    def _on_begins(self, way: Way, _: Message) -> None:
        for name, data in self.sent.items():
            for start in range(0, max(len(data), 1), checkpoint.PIECE):
                if self._pressed:
                    return  # the cell will wait for the rest when it is interrupted
                end = start + checkpoint.PIECE
                piece = {"name": name, "data": data[start:end], "last": end >= len(data)}
                way.send({"do": "part", **piece})

    def _on_hello(self, way: Way, message: Message) -> None:
        way.hello = message

    def _on_done(self, way: Way, message: Message) -> None:
        if message.get("cell", self._name) != self._name:
            return
        if "fault" not in message:  # else what became of the namespace is said next
            self._open.pop(way, None)

    def _on_lost(self, way: Way, message: Message) -> None:
        self.lost[self._places[way]] = message["why"]
        self._open.pop(way, None)
        way.close()

    def _on_cut(self, way: Way, _: Message) -> None:
        if way in self._open:
            self.lost[self._places[way]] = "its slice was taken from the lease while the cell ran"
            self._open.pop(way)

    def _on_other(self, way: Way, message: Message) -> None:
        """Leave alone what a newer shell says."""

    # ----------------------------------------------------------------------------------- values over and back

    def _on_part(self, way: Way, message: Message) -> None:
        place, name = self._places[way], message["name"]
        if message["kind"] == "checkpoint":
            self._keep(way, place, message)
            return
        self._parts.setdefault((message["kind"], name, place), bytearray()).extend(message["data"])

    def _keep(self, way: Way, place: int, message: Message) -> None:
        key = (place, message["name"])
        try:
            if key not in self._copies:
                self._copies[key] = checkpoint.Writer(self.lease, *key)
            self._copies[key].add(message["data"], last=message["last"])
        except (OSError, ValueError) as error:
            if key in self._copies:
                self._copies.pop(key).abandon()
            if message["last"]:
                way.send({"do": "failed", "why": f"the checkpoint could not be written: {error}"})
            return
        if message["last"]:
            del self._copies[key]
            way.send({"do": "kept"})

    def _on_want(self, way: Way, message: Message) -> None:
        place = self._places[way]
        there = checkpoint.kept(self.lease, place)
        names = message["names"] or list(there)
        missing = [name for name in names if name not in there]
        if missing or not names:
            known = ", ".join(there) or "nothing"
            why = f"there is no checkpoint of {', '.join(missing) or 'anything'}; kept is {known}"
            way.send({"do": "failed", "why": why})
            return
        way.send({"do": "found", "names": names})
        for name in names:
            for data, last in checkpoint.pieces(self.lease, place, name):
                if self._pressed:
                    return
                way.send({"do": "part", "name": name, "data": data, "last": last})

    def values(self, args: Namespace) -> dict[str, Any]:
        """Return what has come back: from one slice the values, from several lists in their order."""
        wanted = [("fetch", name) for name in args.fetch] + ([("out", args.out)] if args.out else [])
        found = {}
        for kind, name in wanted:
            each = [_unpickled(name, self._parts[kind, name, target.place]) for target in self.targets]
            found[name] = each if len(self.targets) > 1 else each[0]
        return found

    # ------------------------------------------------------------------------------------------------- labels

    def _labelled(self, way: Way, name: str, text: str) -> str:
        """Put the slice's number before each line, where there are several."""
        if len(self.targets) == 1:
            return text
        key = (self._places[way], name)
        label = f"[{key[0]}] "
        lines = text.splitlines(keepends=True)
        marked = [label + line for line in lines]
        if key in self._began:
            marked[0] = lines[0]
        (self._began.discard if text.endswith("\n") else self._began.add)(key)
        return "".join(marked)

    def _label(self, way: Way) -> None:
        if len(self.targets) > 1:
            print(f"[{self._places[way]}]")  # noqa: T201 - before what the slice shows


_HANDLERS = {
    name.removeprefix("_on_"): handler for name, handler in vars(Run).items() if name.startswith("_on_")
}


@contextlib.contextmanager
def _interrupts(note: Callable[[], None]) -> Iterator[None]:
    """Have interrupts noted, in the thread that hears them; where they are ignored they stay so."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: note())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Shown:
    """The value of a cell on a lease as it looks; the value itself has stayed there (`--out` fetches it)."""

    def __init__(self, data: Message, metadata: Message) -> None:
        self._data, self._metadata = data, metadata

    def _repr_mimebundle_(self, **_: Any) -> tuple[Message, Message]:
        return self._data, self._metadata

    def __repr__(self) -> str:
        return str(self._data.get("text/plain", ""))


def _unpickled(name: str, data: bytearray) -> Any:
    import cloudpickle

    from jupyter_gpupool._http import PoolError

    try:
        return cloudpickle.loads(data)
    except Exception as error:
        sentence = f"{name} has come back but cannot be read here ({type(error).__name__}: {error})."
        raise PoolError(
            "unreadable", sentence, "This notebook's environment lacks what it is made of."
        ) from error
