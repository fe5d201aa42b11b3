"""`GPUPoolCluster`: a lease as a `distributed.deploy.Cluster`, for whatever takes one of those.

    cluster = GPUPoolCluster(gpus=1, max_gpus=8)
    client = Client(cluster)
    cluster.adapt(maximum=8)

Rule 1: it is a lease with Dask's clothes on. What it may grow to, and which worker goes, the pool decides.
Rule 2: the lease that it has requested ends with it; one that it was given does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.core import Status, rpc
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster

from jupyter_gpupool import _steps as steps
from jupyter_gpupool._environment import tell
from jupyter_gpupool.client import AsyncPool, Pool, PoolError, RequestOptions
from jupyter_gpupool.core.model import Reason
from jupyter_gpupool.progress import Progress

if TYPE_CHECKING:
    from typing import Unpack

    from jupyter_gpupool._lease import AsyncLease, Lease


class PoolAdaptive(Adaptive):
    """Dask's rule of how many workers are wanted; how to get there is the pool's.

    Between what the lease has for sure and the most that it may grow to. More than the pool gives now stays
    wanted, and comes when nobody else needs it.
    """

    async def scale_down(self, workers: Any) -> None:
        """Want fewer; the pool takes the slices back, data moved first."""
        await self.cluster._scale(max(1, len(self.plan) - len(workers)))  # noqa: SLF001 - one thing in two classes


def _check(pool: object, lease: object, what: RequestOptions) -> None:
    """Find what cannot be meant before anything is asked for."""
    if not isinstance(pool, Pool | None):
        sentence = f"GPUPoolCluster takes a Pool first, not {pool!r}."
        advice = "Say what is wanted by name: GPUPoolCluster(gpus=2), or GPUPoolCluster(Pool(url), gpus=2)."
        raise PoolError(Reason.BAD_REQUEST, sentence, advice, "pool")
    if lease is not None and what:
        sentence = f"A lease that is there already is as it is: {', '.join(what)} cannot be asked for."
        raise PoolError(Reason.BAD_REQUEST, sentence, "Leave out either that or lease.", next(iter(what)))


class GPUPoolCluster(Cluster):
    """A lease as a Dask cluster.

    Args:
        pool: The pool; by default as `Pool()` finds it.
        lease: A lease that is there already, by name or id, to be used instead of requesting one.
        asynchronous: Whether it is used from within an event loop, with `await`.
        loop: Dask's.
        timeout: Seconds after which a request is withdrawn; by default it waits as long as it takes.
        what: What to ask for, see `RequestOptions`.

    Raises:
        PoolError: The pool says no, or the time is over.
    """

    _name = "GPUPoolCluster"

    def __init__(
        self,
        pool: Pool | None = None,
        lease: str | Lease | None = None,
        *,
        asynchronous: bool = False,
        loop: Any = None,
        timeout: float | None = None,
        **what: Unpack[RequestOptions],
    ) -> None:
        _check(pool, lease, what)
        super().__init__(
            asynchronous=asynchronous, loop=loop, quiet=True, name=str(what.get("name") or "gpupool")
        )
        address = (pool or Pool()).address
        self._pool = AsyncPool(address.url, address.token, address.ca, source=address.source)
        self._given = lease if lease is None or isinstance(lease, str) else lease.id
        self._timeout = timeout
        self._what = what
        self._lease: AsyncLease | None = None
        self.security: Any = None
        #: How many workers are wanted.
        self._wanted = 0
        if not self.called_from_running_loop:
            self._loop_runner.start()
            self.sync(self._start)

    def __await__(self) -> Any:
        async def started() -> GPUPoolCluster:
            if self.status == Status.created:
                await self._start()
            return self

        return started().__await__()

    async def _start(self) -> None:
        self.status = Status.starting
        try:
            await self._connect()
            await super()._start()
        except BaseException:
            await self._close()
            raise

    async def _connect(self) -> None:
        if self._given:
            self._lease = await self._pool.lease(self._given)
            await self._lease.wait(self._timeout)
        else:
            with Progress() as progress:
                self._lease = await self._pool.request(timeout=self._timeout, on_wait=progress, **self._what)
        connection = await self._pool.carry_out(steps.connection(self._lease.data))
        self.security = steps.security(connection)
        self.name = self._lease.name
        self._wanted = self._lease.data["wanted"]
        arguments = self.security.get_connection_args("client")
        self.scheduler_comm = rpc(connection["address"], connection_args=arguments)
        await tell(self.scheduler_comm, self._lease.id, self._lease.name)

    @property
    def lease(self) -> AsyncLease | None:
        """The lease that it is; None before it has one, and after it was closed."""
        return self._lease

    @property
    def pool(self) -> Pool:
        """The pool that the lease is of."""
        address = self._pool.address
        return Pool(address.url, address.token, address.ca, source=address.source)

    async def _close(self) -> None:
        await super()._close()
        lease, self._lease = self._lease, None
        if lease is not None and not self._given:
            await lease.release()
        await self._pool.close()

    def scale(self, n: int) -> Any:
        """Want `n` workers from now on: as many GPUs, as far as the lease is elastic (`max_gpus`).

        Raises:
            PoolError: The lease cannot have so many.
        """
        return self.sync(self._scale, n)

    async def _scale(self, n: int) -> None:
        assert self._lease is not None
        if n != self._wanted:
            await self._lease.scale(n)
            self._wanted = n

    def adapt(self, Adaptive: type[Adaptive] = PoolAdaptive, **kwargs: Any) -> Adaptive:  # noqa: N803 - Dask's name
        """Let the number of workers follow the work.

        Args:
            Adaptive: Dask's rule, or another one.
            kwargs: Those of Dask's `Adaptive`; unless said otherwise, `minimum` is what the lease has for
                sure, `maximum` the most that it was requested to grow to.
        """
        assert self._lease is not None
        sure, asked = self._lease.data["sure"], self._lease.data["requested"]
        most = asked.get("max_gpus") or sure  # not what is wanted now: `scale` may have said less
        return super().adapt(Adaptive=Adaptive, **{"minimum": sure, "maximum": max(sure, most), **kwargs})

    @property
    def plan(self) -> set[str]:
        """Names of the workers that are there or awaited."""
        there: set[str] = self.observed
        return there | {f"awaited-{n}" for n in range(self._wanted - len(there))}

    @property
    def requested(self) -> set[str]:
        """The same: what is wanted has been asked for."""
        return self.plan
