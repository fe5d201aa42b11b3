"""`Lease` and `AsyncLease`: what a granted request has become, and how to compute on it.

Rule 1: a lease object is a look at the pool's lease: `refresh()` looks again, and a second object is as good.
Rule 2: a Dask client that was made through a lease is closed when the lease is released in this process,
        else it would try to reach a scheduler that is gone.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from jupyter_gpupool import _steps as steps
from jupyter_gpupool import display, tables
from jupyter_gpupool._attach import take, this_process
from jupyter_gpupool._http import PoolError, Trouble
from jupyter_gpupool.core.model import FAREWELL, LeaseState
from jupyter_gpupool.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    import distributed

    from jupyter_gpupool.client import AsyncPool, Pool

T = TypeVar("T")
logger = logging.getLogger(__name__)
#: Why a lease may have no scheduler just now: it was lost and is started anew. Seconds to wait for that.
ANEW, ANEW_S = ("not_ready", Trouble.UNREACHABLE), 60.0
#: Seconds for which a client of a lease holds back what it sends, for more to come.
BATCH_S = 0.002
#: The open Dask clients of this process, by the lease's id.
_clients: dict[str, weakref.WeakSet[Any]] = {}


def _take_leave(client: weakref.ref[Any], name: str, event: tuple[float, dict[str, Any]]) -> None:
    """Say that a lease has ended, and close its client: Dask's would try to reach it for half a minute."""
    alive, why = client(), event[1].get("ended")
    logger.warning("Lease %s has ended%s. Its client is closed.", name, f": {why}" if why else "")
    if alive is not None and alive.status in ("running", "connecting"):
        alive.status = "closing"  # as `close` says first, and it does not connect again
        alive.futures.clear()  # they have been cancelled with the reason, and keep it
        # `close` would end its event loop too, and with it the answers of futures that somebody still has.
        alive.loop.add_callback(alive._close, fast=True)  # noqa: SLF001 - no public word for that


def _tidy_up() -> None:
    """End the event loops of clients whose leases have ended, when another lease is used."""
    for ident, clients in list(_clients.items()):
        for client in [each for each in clients if each.status == "closed" and not each.asynchronous]:
            client._loop_runner.stop()  # noqa: SLF001 - `close` does nothing any more
            clients.discard(client)
        if not clients:
            del _clients[ident]


class _Said(Generic[T]):
    """An attribute that is what the pool says under the same name."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, lease: None, owner: type) -> Self: ...
    @overload
    def __get__(self, lease: _Lease, owner: type) -> T: ...
    def __get__(self, lease: _Lease | None, owner: type) -> Any:
        return self if lease is None else lease.data.get(self._name)


@dataclass(frozen=True, slots=True)
class LeaseSlice:
    """A slice of a lease as its owner sees it."""

    id: str
    #: The device's UUID, and its name for people ("node-1/gpu0").
    device: str
    device_name: str
    node: str
    model: str
    #: Thousandths of a GPU, and bytes of its memory.
    milli: int
    vram: int
    state: str
    #: The MIG profile, where it is an instance.
    profile: str = ""


class _Lease:
    """What the blocking and the asynchronous lease have in common: what the pool has said of it."""

    id = _Said[str]("Its identifier, the same as its request's.")
    name = _Said[str]("Its name among its owner's leases.")
    user = _Said[str]("Its owner.")
    project = _Said[str]("The project that pays.")
    why = _Said[str]("The last reason given for its state.")
    gpus = _Said[float]("How many GPUs it has or wants.")
    granted_at = _Said["float | None"]("When it was granted, in seconds since the epoch.")
    started_at = _Said["float | None"]("When it could first be used, in seconds since the epoch.")
    ends_at = _Said["float | None"]("When its time limit ends it, in seconds since the epoch.")
    place = _Said["int | None"]("Its place in the queue while it is pending.")
    expected_start = _Said["float | None"]("When it should start, in seconds since the epoch.")
    preemptible = _Said[bool]("Whether it may be taken back for others.")
    simulated = _Said[bool]("Whether its GPUs are simulated.")
    notes = _Said[list[str]]("What its owner was told about it lately.")

    def __init__(self, data: steps.LeaseData) -> None:
        #: What the pool said, as its HTTP API writes it.
        self.data = data

    @property
    def state(self) -> LeaseState:
        """Where it stands."""
        return LeaseState(self.data["state"])

    @property
    def slices(self) -> tuple[LeaseSlice, ...]:
        """The slices that it has."""
        known = [each.name for each in fields(LeaseSlice)]
        return tuple(
            LeaseSlice(**{name: piece[name] for name in known if piece.get(name) is not None})
            for piece in self.data["slices"]
        )

    def _attached(self, answer: dict[str, Any]) -> tables.Said:
        """Say which devices this process has got, by what people call them as far as that is known here."""
        known = {each.device: each.device_name for each in self.slices}
        names = [known.get(each, each) for each in answer["devices"]]
        return tables.Said({**answer, "lease": self.name, "names": names}, display.attached_words)

    def __repr__(self) -> str:
        return display.lease_words(self.data)

    def _repr_html_(self) -> str:
        return display.lease_html(self.data)

    def _open_client(self) -> Any:
        """Return an open Dask client of this process on this lease, if there is one."""
        alive = (client for client in _clients.get(self.id, ()) if client.status == "running")
        return next(alive, None)

    def _new_client(self, connection: dict[str, Any], **options: Any) -> Any:
        import distributed

        _tidy_up()
        security = steps.security(connection)
        client = distributed.Client(connection["address"], security=security, **options)
        _clients.setdefault(self.id, weakref.WeakSet()).add(client)
        client.subscribe_topic(FAREWELL, functools.partial(_take_leave, weakref.ref(client), self.name))
        return client

    async def _compare(self, client: Any) -> None:
        """Say what is another in the workers' environment than here, before it makes the first task fail."""
        from jupyter_gpupool._environment import tell

        _hasten(client.scheduler_comm)
        await tell(client.scheduler, self.id, self.name)

    def _no_answer(self, error: Exception) -> PoolError:
        return PoolError(
            Trouble.UNREACHABLE,
            f"The scheduler of lease {self.name} does not answer ({error}).",
            f"`jupyter gpupool logs {self.name}` shows what it wrote.",
        )


def _hasten(stream: Any) -> None:
    """Have what a person submits leave at once: Dask holds a client's messages back for up to 10 ms.

    Its schedulers and workers wait 2 ms for more to come. The two attributes are not documented.

    Args:
        stream: A client's `BatchedSend` to its scheduler, in whose event loop this runs.
    """
    stream.interval, stream.next_deadline = BATCH_S, None


class Lease(_Lease):
    """A granted request, or one that waits: what it has, and how to compute on it.

    As a context manager it is released at the end.
    """

    def __init__(self, pool: Pool, data: steps.LeaseData) -> None:
        super().__init__(data)
        self._pool = pool

    def client(self, **options: Any) -> distributed.Client:
        """Return a plain `distributed.Client` of the lease's cluster; it is closed with the lease.

        Without options, a client that is open already is returned again.

        Args:
            options: Those of `distributed.Client`.

        Raises:
            PoolError: The lease has ended, is not yours, or its scheduler does not answer.
        """
        already = None if options else self._open_client()
        if already is not None:
            return already
        if self.state in steps.WAITING:
            self.wait()
        try:
            return self._connect(**options)
        except PoolError as error:
            if error.reason not in ANEW:
                raise
        self.refresh().wait(ANEW_S)
        return self._connect(**options)

    def _connect(self, **options: Any) -> distributed.Client:
        connection = self._pool.carry_out(steps.connection(self.data))
        try:
            client = self._new_client(connection, **options)
        except OSError as error:
            raise self._no_answer(error) from error
        if not client.asynchronous:
            client.sync(self._compare, client)
        return client

    def wait(self, timeout: float | None = None, on_wait: Callable[[Lease], object] | None = None) -> Self:
        """Wait until the lease can be used; Ctrl-C ends the wait only.

        Args:
            timeout: Seconds to wait at most.
            on_wait: Called with the lease whenever there is news; by default a line shows it.

        Raises:
            PoolError: The lease has ended, or the time is over.
        """
        with Progress(on_wait is None) as progress:
            told = on_wait or progress
            usable = steps.usable(self.data, timeout, lambda data: told(Lease(self._pool, data)))
            self.data = self._pool.carry_out(usable)
        return self

    def refresh(self) -> Self:
        """Look again."""
        self.data = self._pool.carry_out(steps.changed(self.data, 0.0))
        return self

    def release(self, wait: float = 0.0) -> None:
        """Give the lease back, or withdraw it while it is pending; its clients are closed first.

        Args:
            wait: Seconds to wait at most until all that it had is free; 0: not at all.

        Raises:
            PoolError: It is not yours, has not ended after `wait` seconds, or that is no number of seconds.
        """
        patience = steps.patience(wait or None, "wait")
        self._close_clients()
        self._pool.carry_out(steps.release(self.id))
        left = steps.ended(self.data, patience) if patience else steps.changed(self.data, 0.0)
        self.data = self._pool.carry_out(left)

    def extend(self, by: str | float = "1h") -> Self:
        """Ask for more time, on top of the present limit: "1h", "30m" or seconds.

        Raises:
            PoolError: It would be too long, or delay others who wait; the sentence says what can be had.
        """
        return self._patch({"extend": by})

    def keep(self) -> Self:
        """Say that an idle lease is still needed."""
        return self._patch({"keep": True})

    def scale(self, gpus: int) -> Self:
        """Grow or shrink an elastic lease to at most so many GPUs."""
        return self._patch({"gpus": gpus})

    def share(self, *users: str, restart: bool = False) -> Self:
        """Let exactly these other people use the lease; what they run on it runs as you.

        Who has had its keys is shut out again only by a restart on new ones, on the same number of GPUs.

        Args:
            users: Their names; none: nobody but you.
            restart: Restart its scheduler and workers on new keys. What it computes and holds is lost, and
                clients of it in this process are closed: take a new one with `client()`.

        Raises:
            PoolError: Somebody who has its keys would be shut out without a restart; nothing has changed.
        """
        shared = self._pool.carry_out(steps.share(self.id, users, restart=restart))
        if restart:
            self._close_clients()
        self.data = shared
        return self

    def _close_clients(self) -> None:
        for client in list(_clients.pop(self.id, ())):
            if not client.asynchronous:  # closing that one is for its own event loop
                client.close()

    def attach(self) -> tables.Said:
        """Have this process see the lease's devices, and count as the lease's.

        From then on CUDA_VISIBLE_DEVICES is the lease's devices on this machine. When the lease ends, a
        process that still uses them is ended with it.

        Raises:
            PoolError: CUDA is initialised here already, the devices are on another machine, or the lease is
                not yours.
        """
        answer = self._pool.carry_out(steps.attach(self.id, this_process(self.name)))
        take(answer)
        return self._attached(answer)

    def logs(self) -> tables.Logs:
        """Return what the lease's scheduler and workers wrote, the errors of a start that failed included."""
        return tables.Logs(self._pool.carry_out(steps.logs(self.id)))

    def explain(self) -> tables.Said:
        """Say why it waits, or why it is as it is."""
        answer = self._pool.carry_out(steps.read(steps.lease_path(self.id, "explain"), "sentences"))
        return tables.Said(answer, display.explanation_words)

    def _patch(self, change: dict[str, Any]) -> Self:
        self.data = self._pool.carry_out(steps.patch(self.id, change))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class AsyncLease(_Lease):
    """A lease, for code that awaits: the same as `Lease`, with `await` before each call."""

    def __init__(self, pool: AsyncPool, data: steps.LeaseData) -> None:
        super().__init__(data)
        self._pool = pool

    async def client(self, **options: Any) -> distributed.Client:
        """Return an asynchronous `distributed.Client` of the lease's cluster. See `Lease.client`."""
        already = None if options else self._open_client()
        if already is not None:
            return already
        if self.state in steps.WAITING:
            await self.wait()
        try:
            return await self._connect(**options)
        except PoolError as error:
            if error.reason not in ANEW:
                raise
        await (await self.refresh()).wait(ANEW_S)
        return await self._connect(**options)

    async def _connect(self, **options: Any) -> distributed.Client:
        connection = await self._pool.carry_out(steps.connection(self.data))
        try:
            client = await self._new_client(connection, **{"asynchronous": True, **options})
        except OSError as error:
            raise self._no_answer(error) from error
        await self._compare(client)
        return client

    async def wait(self, timeout: float | None = None) -> Self:  # noqa: ASYNC109 - the error says why it waited
        """Wait until the lease can be used. See `Lease.wait`."""
        self.data = await self._pool.carry_out(steps.usable(self.data, timeout, lambda _: None))
        return self

    async def refresh(self) -> Self:
        """Look again."""
        self.data = await self._pool.carry_out(steps.changed(self.data, 0.0))
        return self

    async def release(self, wait: float = 0.0) -> None:
        """Give the lease back, or withdraw it while it is pending. See `Lease.release`."""
        patience = steps.patience(wait or None, "wait")
        await self._close_clients()
        await self._pool.carry_out(steps.release(self.id))
        left = steps.ended(self.data, patience) if patience else steps.changed(self.data, 0.0)
        self.data = await self._pool.carry_out(left)

    async def extend(self, by: str | float = "1h") -> Self:
        """Ask for more time, on top of the present limit. See `Lease.extend`."""
        return await self._patch({"extend": by})

    async def keep(self) -> Self:
        """Say that an idle lease is still needed."""
        return await self._patch({"keep": True})

    async def scale(self, gpus: int) -> Self:
        """Grow or shrink an elastic lease to at most so many GPUs."""
        return await self._patch({"gpus": gpus})

    async def share(self, *users: str, restart: bool = False) -> Self:
        """Let exactly these other people use the lease. See `Lease.share`."""
        shared = await self._pool.carry_out(steps.share(self.id, users, restart=restart))
        if restart:
            await self._close_clients()
        self.data = shared
        return self

    async def _close_clients(self) -> None:
        for client in list(_clients.pop(self.id, ())):
            if client.asynchronous:
                await client.close()

    async def attach(self) -> tables.Said:
        """Have this process see the lease's devices, and count as the lease's. See `Lease.attach`."""
        answer = await self._pool.carry_out(steps.attach(self.id, this_process(self.name)))
        take(answer)
        return self._attached(answer)

    async def logs(self) -> tables.Logs:
        """Return what the lease's scheduler and workers wrote."""
        return tables.Logs(await self._pool.carry_out(steps.logs(self.id)))

    async def explain(self) -> tables.Said:
        """Say why it waits, or why it is as it is."""
        answer = await self._pool.carry_out(steps.read(steps.lease_path(self.id, "explain"), "sentences"))
        return tables.Said(answer, display.explanation_words)

    async def _patch(self, change: dict[str, Any]) -> Self:
        self.data = await self._pool.carry_out(steps.patch(self.id, change))
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
