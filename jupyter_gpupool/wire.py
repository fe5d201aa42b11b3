"""Between controller and agents: plain msgpack, a closed list of operations, reports that do arrive.

Rule 1: nothing that a peer sends is ever unpickled. Dask unpickles a frame before it looks a handler up, so
        whoever holds a certificate of the pool could run code; `close_comms` takes that away, in `main()` and
        never on import.
Rule 2: a server answers the operations of `ALLOWED` and no others, its streams included (`shut`).
Rule 3: a report is kept until the controller has acknowledged it, and is sent again after a reconnect
        (`Outbox`); one that arrives twice counts once (`Inbox`). Orders are idempotent by lease and slice and
        follow anew from the pool's state whenever an agent is back, so they need neither.

Used by `controller` and `node` only. Not its business: what a report or an order means.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable

#: One order, report or answer: plain data.
Message = dict[str, Any]

#: The operation that carries orders to an agent (`orders`) and reports to the controller (`reports`).
OP: Final = "gpupool"
#: The operation by which the controller acknowledges reports up to `seq`.
ACK: Final = "gpupool-ack"
#: What controller and agent say to one another; raised by one where a release changes it. Neighbours
#: understand each other, so that a pool is upgraded one machine after the other; others are told so and not
#: heard.
PROTOCOL: Final = 1
#: Common names in certificates: an agent takes orders from the controller and nobody else, and the controller
#: takes a node's reports from that node's agent.
CONTROLLER: Final = "gpupool controller comm"
AGENT: Final = "gpupool agent {name}"

#: Dask's settings for both kinds of process. They run no task: watching tasks would only cost idle time.
SETTINGS: Final[dict[str, Any]] = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "60s",
    "distributed.admin.system-monitor.log-length": 2,
    "distributed.admin.system-monitor.disk": False,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.cycle": "10s",
    "distributed.admin.log-length": 200,
    "distributed.admin.low-level-log-length": 100,
    "distributed.diagnostics.nvml": False,  # the reader process alone calls the driver
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.events-cleanup-delay": "1 minute",
    "distributed.scheduler.http.routes": [],
    "distributed.scheduler.worker-ttl": "10s",  # a machine that vanished without a word
    "distributed.scheduler.preload": [],  # a user's Dask configuration is for their leases, not for the pool
    "distributed.worker.preload": [],
    "distributed.worker.http.routes": [],
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.comm.timeouts.connect": "5s",
    "distributed.comm.timeouts.tcp": "12s",
    "distributed.comm.compression": False,
}
#: Seconds between two heartbeats of an agent.
HEARTBEAT: Final = 3
#: Dask's periodic callbacks that only matter where tasks run.
NEEDLESS: Final = (
    "idle-timeout",
    "no-workers-timeout",
    "find-missing",
    "shift_counters",
    "ticks",
    "worker-ttl",
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """The operations that a server answers: by themselves, and on a stream that has been set up."""

    handlers: frozenset[str]
    streams: frozenset[str]


ALLOWED: Final = {
    "controller": Allowed(
        frozenset({"register-worker", "heartbeat_worker"}),
        frozenset({"keep-alive", "log-event", "worker-status-change", OP}),
    ),
    # Dask's scheduler tells every worker when another one has left ("remove-worker"); here that does nothing.
    "agent": Allowed(frozenset(), frozenset({"close", "remove-worker", OP, ACK})),
}


class RefusedFrameError(EOFError):
    """A peer sent something other than plain msgpack; on an `EOFError` Dask drops the connection at once."""


class _AllBut(frozenset[str]):
    """The set of all operations but these: also blocks what is added to `handlers` later."""

    def __contains__(self, operation: object) -> bool:
        return not frozenset.__contains__(self, operation)


def close_comms() -> None:
    """Make this process unable to unpickle what a peer sends, for good; call it in `main()`, before any comm.

    Not on import: the children of a forkserver import the main module, and a lease's own cluster does pickle.
    """
    from distributed import core, protocol

    # `comm.utils.from_frames` calls `protocol.loads`, which is another name for `protocol.core.loads`
    protocol.loads = loads
    protocol.core.loads = loads
    # the answer to an RPC may carry a pickled exception inside plain bytes
    core.clean_exception = _plain_exception


def loads(frames: Any, deserialize: bool = True, deserializers: Any = None) -> Any:  # noqa: FBT001, FBT002, ARG001 - Dask's signature
    """Decode one message of plain msgpack.

    Raises:
        RefusedFrameError: More frames than one, a marker of Dask's for other data, or not msgpack at all.
    """
    if len(frames) != 1:
        raise RefusedFrameError(f"a message of {len(frames)} frames is not plain msgpack")
    try:
        return msgpack.loads(frames[0], object_hook=_plain, use_list=False, raw=False, strict_map_key=False)
    except RefusedFrameError:
        raise
    except Exception as error:
        raise RefusedFrameError(f"not plain msgpack: {error}") from error


def _plain(data: Message) -> Any:
    """Refuse the markers that make Dask build objects, whatever their value; sets are plain enough."""
    for marker in ("__Pickled__", "__Serialized__", "__Enum__"):
        if marker in data:
            raise RefusedFrameError(f"a message with {marker} is refused")
    if "__Set__" in data:
        return set(data["as-list"])
    return data


def _plain_exception(exception: Any, traceback: Any = None, **more: Any) -> tuple[Any, Any, Any]:  # noqa: ARG001 - Dask's signature
    """What `distributed.core.clean_exception` gives, from the text of the error alone."""
    error = RuntimeError(str(more.get("exception_text") or exception))
    return type(error), error, None


def shut(server: Any, role: str, streams: dict[str, Callable[..., Any]]) -> None:
    """Cut a Dask server down to the operations of `ALLOWED[role]`.

    Args:
        server: A Scheduler or Worker that does not listen yet. Dask looks its configuration key
            `blocked-handlers` up by class name, which a subclass silently misses; so the attributes are set.
        role: "controller" or "agent".
        streams: Our own stream operations.
    """
    allowed = ALLOWED[role]
    server.blocked_handlers = _AllBut(allowed.handlers)
    server.handlers = {name: each for name, each in server.handlers.items() if name in allowed.handlers}
    known = {**server.stream_handlers, "remove-worker": _nothing, **streams}
    server.stream_handlers = {name: each for name, each in known.items() if name in allowed.streams}


def quieten(server: Any) -> None:
    """Stop what Dask does periodically for tasks, before the server starts; the rest is in `SETTINGS`."""
    for name in NEEDLESS:
        server.periodic_callbacks.pop(name, None)


def _nothing(**_message: Any) -> None:
    """Take no notice."""


def security(ca: str, cert: str, key: str) -> Any:
    """Dask's TLS settings for one end of the pool's own level, from PEM texts or paths."""
    from distributed.security import Security

    return Security(
        require_encryption=True,
        tls_min_version=ssl.TLSVersion.TLSv1_3,
        tls_ca_file=ca,
        **{
            f"tls_{role}_{part}": text
            for role in ("scheduler", "worker", "client")
            for part, text in (("cert", cert), ("key", key))
        },
    )


def misunderstanding(node: str, speaks: int, mine: int | None = None) -> str:
    """Say why an agent that speaks that protocol is not understood here; "" where it is.

    >>> misunderstanding("node-1", 2, 1)
    ''
    >>> misunderstanding("node-1", 3, 1).partition(":")[0]
    "The agent of node-1 speaks version 3 of the pool's protocol and the controller version 1"
    """
    mine = PROTOCOL if mine is None else mine
    if abs(mine - speaks) <= 1:
        return ""
    older = "the controller" if speaks > mine else f"the agent of {node}"
    return (
        f"The agent of {node} speaks version {speaks} of the pool's protocol and the controller version "
        f"{mine}: upgrade jupyter-gpupool of {older} first; versions next to each other work together."
    )


def agent_name(node: str) -> str:
    """The common name in the certificate of a node's agent; a certificate holds 64 characters of it."""
    return AGENT.format(name=node)[:64]


def peer_name(comm: Any) -> str:
    """The common name in the certificate of a comm's other end, or "" where it has none."""
    subject = (comm.extra_info.get("peercert") or {}).get("subject", ())
    return next((value for part in subject for name, value in part if name == "commonName"), "")


@dataclass(slots=True)
class Outbox:
    """The reports of one agent that the controller has not yet acknowledged, oldest first."""

    #: Tells this life of the agent from others, so that its sequence numbers are not mistaken for older ones.
    boot: str
    #: Hands messages to the connection, which may be down: then they are lost and `resend` follows.
    send: Callable[[list[Message]], None]
    _next: int = 1
    _kept: OrderedDict[int, Message] = field(default_factory=OrderedDict)

    def put(self, report: Message) -> None:
        """Send a report, and keep it until it is acknowledged."""
        numbered = {**report, "seq": self._next, "boot": self.boot}
        self._kept[self._next] = numbered
        self._next += 1
        self.send([numbered])

    def tell(self, report: Message) -> None:
        """Send a report that is worth nothing later: a reading, or the answer to a question."""
        self.send([{**report, "seq": 0, "boot": self.boot}])

    def acknowledge(self, seq: int) -> None:
        """Forget the reports up to `seq`."""
        while self._kept and next(iter(self._kept)) <= seq:
            self._kept.popitem(last=False)

    def resend(self) -> None:
        """Send all that is kept, after a reconnect."""
        if self._kept:
            self.send(list(self._kept.values()))

    @property
    def first(self) -> int:
        """The number of the oldest report that is kept; 0: none."""
        return next(iter(self._kept), 0)

    def __len__(self) -> int:
        return len(self._kept)


@dataclass(slots=True)
class Inbox:
    """How far the controller has the reports of each agent's present life."""

    #: By node: the life, and the number of its last report that has been dealt with.
    _last: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: The report that was begun and not taken: until it is, those after it are early.
    _owed: dict[str, tuple[str, int]] = field(default_factory=dict)

    def is_new(self, node: str, report: Message) -> bool:
        """Whether a report has not been here before; those with `seq` 0 are always new."""
        seq, boot = number(report)
        known, last = self._last.get(node, ("", 0))
        return seq == 0 or known != boot or seq > last

    def is_early(self, node: str, report: Message) -> bool:
        """Whether a report must wait for one before it that could not be taken when it came."""
        seq, boot = number(report)
        owed, missing = self._owed.get(node, ("", 0))
        return owed == boot and seq > missing

    def begin(self, node: str, report: Message) -> None:
        """Remember that a report is being dealt with: until it is done, nothing after it counts."""
        seq, boot = number(report)
        if seq:
            self._owed[node] = (boot, seq)

    def done(self, node: str, report: Message) -> int:
        """Remember that a report has been dealt with, and return the number to acknowledge; 0: none."""
        seq, boot = number(report)
        if seq:
            self._owed.pop(node, None)
        if seq and self.is_new(node, report):
            self._last[node] = (boot, seq)
        return seq


def number(report: Message) -> tuple[int, str]:
    """Return a report's number, 0 where it has none, and the life of the agent that sent it."""
    seq = report.get("seq", 0)
    return (seq if isinstance(seq, int) else 0), str(report.get("boot", ""))
