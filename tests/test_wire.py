"""Nothing that a holder of the pool's own certificate sends is executed, by controller or agent."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import socket
import ssl
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import psutil
import pytest

from jupyter_gpupool import wire
from tests.pki import Pair, TestAuthority
from tests.pool_processes import PoolProcesses

#: A controller or an agent as Dask makes them, to see that the canaries can sing.
OPEN = """
import asyncio, json, sys
from distributed import Scheduler, Worker
from jupyter_gpupool import wire

role, address, pair = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

async def main():
    options = dict(protocol="tls", security=wire.security(**pair), dashboard_address="127.0.0.1:0")
    if role == "controller":
        server = Scheduler(host="127.0.0.1", port=0, dashboard=False, **options)
    else:
        server = Worker(address, host="tls://127.0.0.1", nthreads=1, name="node-1", memory_limit=0, **options)
    await server
    print(server.address, flush=True)
    await server.finished()

asyncio.run(main())
"""
WAIT = 20


class Bomb:
    """Whoever unpickles it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


class Closed:
    """The product's own controller and agent, and the certificate that the agent got when it joined."""

    mode = "closed"

    def __init__(self, folder: Path) -> None:
        self.pool = PoolProcesses(folder, {"node-1": 1}).start()
        member = json.loads((folder / "node-1" / "agent.json").read_text())
        self.pair = Pair(member["ca"], member["cert"], member["key"])
        agent = psutil.Process(self.pool.pid("node-1"))
        ports = [each.laddr.port for each in agent.net_connections() if each.status == psutil.CONN_LISTEN]
        assert len(ports) == 1, "the agent listens on its Dask port and on nothing else"
        self.addresses = {"controller": member["comm"], "agent": f"tls://127.0.0.1:{ports[0]}"}

    def alive(self, role: str) -> bool:
        return self.pool.running[{"agent": "node-1"}.get(role, role)].poll() is None


class Open:
    """A controller and an agent as Dask makes them."""

    mode = "open"

    def __init__(self, folder: Path) -> None:
        self.pair = TestAuthority().pair("node-1")
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.addresses: dict[str, str] = {}
        self._start("controller")
        self._start("agent")

    def _start(self, role: str) -> None:
        arguments = [role, self.addresses.get("controller", ""), json.dumps(vars(self.pair))]
        with (self.folder / f"{role}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", OPEN, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
            )
        self.processes[role] = process
        self.addresses[role] = process.stdout.readline().strip()
        assert self.addresses[role], (self.folder / f"{role}.log").read_text()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(WAIT)
            process.stdout.close()


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    hosts = Closed(tmp_path_factory.mktemp("closed"))
    with hosts.pool:
        yield hosts


async def _connect(hosts: Closed | Open, role: str):
    from distributed.comm import connect

    security = wire.security(**vars(hosts.pair))
    return await connect(hosts.addresses[role], timeout=WAIT, **security.get_connection_args("client"))


async def _send(hosts: Closed | Open, role: str, *messages: object) -> None:
    """Send the messages over one connection and wait until the server has answered or hung up."""
    comm = await _connect(hosts, role)
    try:
        for message in messages:
            await comm.write(message)
        await asyncio.wait_for(comm.read(), 3)
    except (OSError, TimeoutError):
        pass
    finally:
        comm.abort()


async def _send_frames(hosts: Closed | Open, role: str, *messages: list[bytes]) -> None:
    """Send frames as they are, past what Dask would make of a message."""
    from distributed import protocol

    comm = await _connect(hosts, role)
    original = protocol.dumps
    try:
        for frames in messages:
            protocol.dumps = lambda *_args, frames=frames, **_kwargs: frames
            await comm.write({})
        await asyncio.wait_for(comm.read(), 3)
    except (OSError, TimeoutError):
        pass
    finally:
        protocol.dumps = original
        comm.abort()


def _pickled_frame(hosts, role, bomb):
    from distributed.protocol import ToPickle

    return _send(hosts, role, {"op": "echo", "data": ToPickle(bomb)})


def _serialised_frame(hosts, role, bomb):
    from distributed.protocol import to_serialize

    return _send(hosts, role, {"op": "echo", "data": to_serialize(bomb)})


def _serialised_in_one_frame(hosts, role, bomb):
    """A marker of value 0 builds a Serialized from inside the first frame; update-graph unpickles it."""
    graph = _graph({"__Serialized__": 0, "data": _serialized(bomb)})
    first = msgpack.dumps({"op": "connection_stream", "reply": False})
    return _send_frames(hosts, role, [first], [msgpack.dumps(graph, use_bin_type=True)])


def _pickled_in_handshake(hosts, role, bomb):
    """The very first message on a connection, before there are operations at all."""
    from distributed import protocol

    async def attack():
        original = protocol.dumps
        frames = original({"op": "echo", "data": protocol.ToPickle(bomb)})
        protocol.dumps = lambda *_args, **_kwargs: frames
        try:
            (await _connect(hosts, role)).abort()
        except (OSError, KeyError, ValueError, AttributeError):
            pass
        finally:
            protocol.dumps = original
        await _until(lambda: Path(bomb.path).exists() or hosts.mode == "closed")

    return attack()


async def _until(true) -> None:
    end = time.monotonic() + 3
    while not true() and time.monotonic() < end:  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.02)


def _enum_marker(hosts, role, bomb):
    """Not harmful by itself, but it imports a module and reads an attribute of the sender's choice."""
    data = {"__Enum__": True, "__module__": "distributed", "__name__": "Client", "name": "run"}
    return _send_frames(hosts, role, [msgpack.dumps({"op": "echo", "data": data})])


def _run(operation):
    def attack(hosts, role, bomb):
        function = pickle.dumps(bomb)
        return _send(
            hosts, role, {"op": operation, "function": function, "args": (), "kwargs": {}, "wait": True}
        )

    attack.__name__ = operation
    return attack


def _upload_file(hosts, role, bomb):
    code = f"import os; os.mkdir({bomb.path!r})"
    return _send(hosts, role, {"op": "upload_file", "filename": "canary.py", "data": code, "load": True})


def _serialized(bomb):
    from distributed.protocol import serialize

    header, frames = serialize(bomb, serializers=["pickle"])
    return header, [bytes(frame) for frame in frames]


def _graph(expression):
    return {
        "op": "update-graph",
        "expr_ser": expression,
        "keys": (),
        "span_metadata": {},
        "internal_priority": {},
        "submitting_task": None,
        "user_priority": 0,
        "actors": False,
        "fifo_timeout": 0,
        "code": (),
        "annotations": {},
        "stimulus_id": "canary",
        "client": "canary",
    }


def _worker_stream(hosts, role, bomb):
    """A worker's stream takes a client's operations unless it is cut."""
    hello = {
        "op": "register-worker",
        "reply": False,
        "address": "tls://127.0.0.1:9",
        "status": "running",
        "nthreads": 1,
        "name": f"canary-{time.monotonic_ns()}",
        "resolve_address": False,
        "now": time.time(),
        "resources": {},
        "memory_limit": 0,
        "metrics": METRICS,
        "services": {},
        "local_directory": "",
        "versions": {},
        "nanny": None,
        "extra": {},
        "stimulus_id": "canary",
        "server_id": "canary",
    }
    return _send(hosts, role, hello, *_work(bomb))


METRICS = {
    "bandwidth": {"total": 1, "workers": {}, "types": {}},
    "digests_total_since_heartbeat": {},
    "memory": 0,
    "spilled_bytes": {"memory": 0, "disk": 0},
    "managed_bytes": 0,
    "task_counts": {},
    "cpu": 0,
}


def _connection_stream(hosts, role, bomb):
    """`connection_stream` makes a stream of any connection."""
    return _send(hosts, role, {"op": "connection_stream", "reply": False}, *_work(bomb))


def _work(bomb):
    from distributed.protocol import to_serialize

    compute = {
        "op": "compute-task",
        "key": "canary",
        "run_id": 1,
        "run_spec": to_serialize(bomb),
        "who_has": {},
        "nbytes": {},
        "priority": [1],
        "resource_restrictions": {},
        "actor": False,
        "annotations": {},
        "span_id": None,
        "stimulus_id": "canary",
    }
    return _graph(to_serialize(bomb)), compute


def _plugin(hosts, role, bomb):
    more = {
        "controller": {"op": "register_scheduler_plugin", "idempotent": False},
        "agent": {"op": "plugin-add"},
    }
    return _send(hosts, role, {"plugin": pickle.dumps(bomb), "name": "canary", **more[role]})


CANARIES = [
    _pickled_frame,
    _serialised_frame,
    _serialised_in_one_frame,
    _pickled_in_handshake,
    _enum_marker,
    _run("run"),
    _run("run_function"),
    _run("run_coroutine"),
    _upload_file,
    _worker_stream,
    _connection_stream,
    _plugin,
]
#: What does run on servers as Dask makes them; so the canaries can sing.
SINGS = [
    ("controller", _pickled_frame),
    ("controller", _serialised_frame),
    ("controller", _serialised_in_one_frame),
    ("controller", _pickled_in_handshake),
    ("controller", _run("run_function")),
    ("controller", _connection_stream),
    ("controller", _plugin),
    ("agent", _pickled_frame),
    ("agent", _serialised_frame),
    ("agent", _pickled_in_handshake),
    ("agent", _run("run")),
    ("agent", _run("run_coroutine")),
    ("agent", _upload_file),
    ("agent", _worker_stream),
    ("agent", _connection_stream),
    ("agent", _plugin),
]


async def _answers(hosts: Closed | Open, role: str) -> bool:
    comm = await _connect(hosts, role)
    comm.abort()
    return True


@pytest.mark.parametrize("role", ["controller", "agent"])
@pytest.mark.parametrize("canary", CANARIES, ids=lambda each: each.__name__.strip("_"))
def test_nothing_that_a_certificate_holder_sends_is_executed(closed, tmp_path, role, canary):
    bomb = Bomb(tmp_path / "executed")
    asyncio.run(canary(closed, role, bomb))
    assert not (tmp_path / "executed").exists()
    assert closed.alive(role), "the process is alive after it"
    assert asyncio.run(_answers(closed, role))


# ------------------------------------------------------------------------------------- random frames

FUZZ_SEED, FUZZ_CASES = 20_260_802, 60


def noise(chance: random.Random, bomb: Bomb) -> bytes:
    """Bytes as somebody may send them: random, lengths that lie, good messages that are cut or bent."""
    from distributed.protocol import ToPickle, dumps

    good = b"".join(bytes(frame) for frame in dumps({"op": "register-worker", "data": ToPickle(bomb)}))
    packed = struct.pack("<Q", len(good)) + good
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 200))
    if kind == 1:  # how long the message is, and then less of it
        return struct.pack("<QQ", chance.randrange(2**16), chance.randrange(2**10)) + good
    if kind == 2:  # a promise of very much
        return struct.pack("<Q", chance.choice([2**31, 2**40, 2**63, 2**64 - 1])) + chance.randbytes(30)
    if kind == 3:
        return packed[: chance.randrange(1, len(packed))]
    if kind == 4:
        bent = bytearray(packed)
        bent[chance.randrange(len(bent))] ^= 1 << chance.randrange(8)
        return bytes(bent)
    return struct.pack("<Q", len(good)) * chance.randrange(1, 4) + pickle.dumps(bomb)


def _context(pair: Pair | None) -> ssl.SSLContext:
    """TLS of somebody who takes whatever the other end is, with the pool's certificate or without any."""
    if pair is not None:
        context = wire.security(**vars(pair)).get_connection_args("client")["ssl_context"]
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _throw(port: int, context: ssl.SSLContext | None, data: bytes) -> None:
    """Send bytes, with TLS or bare, and hang up when the other end does or after a moment."""
    try:
        end = socket.create_connection(("127.0.0.1", port), WAIT)
        end.settimeout(0.05)
        with end if context is None else context.wrap_socket(end) as said:
            said.sendall(data)
            while said.recv(4096):
                pass
    except OSError:
        pass


@pytest.mark.parametrize("role", ["controller", "agent"])
@pytest.mark.parametrize("how", ["with the pool's certificate", "without one", "without TLS"])
def test_random_and_truncated_frames_end_nothing_and_nothing_of_them_is_executed(closed, tmp_path, role, how):
    chance, bomb = random.Random(f"{FUZZ_SEED} {role} {how}"), Bomb(tmp_path / "executed")
    pair = closed.pair if how.startswith("with the") else None
    context = None if how == "without TLS" else _context(pair)
    port = int(closed.addresses[role].rpartition(":")[2])
    process = psutil.Process(closed.pool.pid("controller" if role == "controller" else "node-1"))
    before = process.memory_info()
    for _ in range(FUZZ_CASES):
        _throw(port, context, noise(chance, bomb))
    assert not (tmp_path / "executed").exists()
    assert closed.alive(role), "the process is alive after it"
    assert asyncio.run(_answers(closed, role))
    assert process.memory_info().rss - before.rss < 200e6, "promises of very long messages take no memory"


def test_after_all_that_the_node_is_still_in_the_pool(closed):
    closed.pool.wait_for_nodes({"node-1"})


def test_the_canaries_sing_where_the_servers_are_not_closed(tmp_path):
    hosts = Open(tmp_path)
    try:
        for number, (role, canary) in enumerate(SINGS):
            path = tmp_path / f"executed-{number}"
            asyncio.run(canary(hosts, role, Bomb(path)))
            assert path.exists(), (role, canary.__name__)
    finally:
        hosts.close()


def test_an_error_answer_is_never_unpickled(tmp_path):
    """Dask's RPC clients unpickle the exception of an answer from plain bytes."""
    exception, text = pickle.dumps(Bomb(tmp_path / "executed")), "it said no"
    _, error, _ = wire._plain_exception(exception, None, exception_text=text)
    assert str(error) == text
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "data",
    [{}, {"a": (1, 2.5, None, True, b"x", "y")}, {"set": {1, 2}}, {1: {"deep": ((),)}}],
    ids=["empty", "every plain type", "a set", "keys that are not text"],
)
def test_plain_data_passes(data):
    from distributed.protocol import dumps

    assert wire.loads(dumps(data)) == data


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgpack.dumps({}), b"more"],
        [msgpack.dumps({"a": [{"b": {"__Pickled__": 0}}]})],
        [msgpack.dumps({"__Serialized__": None})],
        [msgpack.dumps({"__Enum__": True})],
        [msgpack.dumps({"__Set__": True})],
        [b"\x91" * 100_000],
    ],
    ids=[
        "none",
        "empty",
        "not msgpack",
        "two frames",
        "deep marker",
        "marker of no value",
        "enum",
        "a set of nothing",
        "deep nesting",
    ],
)
def test_anything_else_is_refused_as_a_lost_connection(frames):
    with pytest.raises(wire.RefusedFrameError):
        wire.loads(frames)


def _take(inbox, reports):
    """What the controller does with reports: deal with the new ones, in order."""
    fresh = []
    for report in reports:
        if inbox.is_new("node-1", report):
            fresh.append(report["report"])
            inbox.done("node-1", report)
    return fresh


def test_reports_stay_until_they_are_acknowledged_and_count_once():
    sent: list[dict] = []
    outbox, inbox = wire.Outbox("boot-1", sent.extend), wire.Inbox()
    for name in ("a", "b", "c"):
        outbox.put({"report": name})
    assert _take(inbox, sent) == ["a", "b", "c"]
    outbox.acknowledge(2)
    assert (len(outbox), outbox.first) == (1, 3)
    sent.clear()
    outbox.put({"report": "d"})
    outbox.resend()
    assert [each["report"] for each in sent] == ["d", "c", "d"]
    assert _take(inbox, [sent[1], sent[2], sent[0]]) == ["d"]


def test_an_agent_that_starts_anew_counts_from_one_again():
    inbox = wire.Inbox()
    for boot in ("first", "second"):
        report = {"report": "x", "seq": 1, "boot": boot}
        assert _take(inbox, [report, report]) == ["x"]


def test_a_reading_is_always_new_and_never_kept():
    sent: list[dict] = []
    outbox, inbox = wire.Outbox("boot-1", sent.extend), wire.Inbox()
    outbox.tell({"report": "readings"})
    assert (len(outbox), outbox.first) == (0, 0)
    assert _take(inbox, sent * 2) == ["readings", "readings"]
