"""How anyone talks to a pool: `Pool` and `Lease`, `AsyncPool` and `AsyncLease`, and `GPUPoolCluster`.

    pool = Pool()                       # $GPUPOOL_URL, the configuration file, or the embedded pool here
    lease = pool.request(gpus=2)        # waits for the grant; Ctrl-C withdraws
    client = lease.client()             # a plain distributed.Client

Rule 1: nothing is decided here; what is said to the pool is in `_steps`, how it gets there in `_http`.
Rule 2: whatever goes wrong is a `PoolError`: one sentence that says what to do.
Rule 3: `distributed` is imported when a client is asked for, not before; importing this module costs little.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from jupyter_gpupool import _steps as steps
from jupyter_gpupool import display, tables
from jupyter_gpupool._environment import with_wishes
from jupyter_gpupool._find import find
from jupyter_gpupool._http import (
    HERE,
    Address,
    AsyncConnection,
    Call,
    Connection,
    PoolError,
    Steps,
    Trouble,
    get,
)
from jupyter_gpupool._lease import AsyncLease, Lease
from jupyter_gpupool.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self, Unpack

    from jupyter_gpupool.cluster import GPUPoolCluster

T = TypeVar("T")
#: What an administrator says of a project; the rest of what the pool says of one follows.
CONFIGURED = (
    *("name", "parent", "quota", "limit", "weight", "tier", "users", "members"),
    *("default_time", "max_time"),
)
__all__ = ["AsyncLease", "AsyncPool", "GPUPoolCluster", "Lease", "Pool", "PoolError", "Trouble"]


class RequestOptions(TypedDict, total=False):
    """What can be asked for; all of it is optional, and the pool's own defaults hold for the rest."""

    #: GPUs for sure: 2 whole ones, or 0.5 of one.
    gpus: float | str
    #: The most that the lease may grow to while nobody else needs them.
    max_gpus: int
    #: What the lease may shrink to when a GPU fails and there is no other.
    min_gpus: int
    #: Memory of a share of one GPU ("20GB"), or a MIG profile by name ("1g.10gb").
    vram: str
    mig: str
    #: A share that is a MIG instance, whatever its profile.
    isolated: bool
    #: Who pays, and which GPUs: the model's short name ("H100-80GB"), and what each must have.
    project: str
    model: str
    min_vram: str
    same_node: bool
    nvlink: bool
    node: str
    exclude: list[str]
    #: Rather on many nodes than on few; and whether shares of this lease may sit on one GPU.
    spread: bool
    same_device: bool
    #: "2h", "30m" or seconds.
    time_limit: str | float
    idle_timeout: str | float
    #: An interactive lease within its quota is never taken back; any other, and a preemptible one, may be.
    #: From a notebook's kernel requests are interactive unless they say otherwise.
    interactive: bool
    preemptible: bool
    #: Among one's own requests; higher first.
    priority: int
    name: str
    #: CPUs and host memory of each worker ("64GB").
    cpus: float
    memory: str
    #: `python`, `variables`, `pre_import`, `working_directory` of the workers.
    environment: dict[str, Any]
    #: dask-cuda's own, such as `rmm_pool_size`.
    options: dict[str, Any]


class _Pool:
    """What the blocking and the asynchronous pool have in common: where it is, and how that is said."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        ca: str | None = None,
        *,
        start: bool = True,
        source: str = HERE,
    ) -> None:
        self.address: Address = find(url, token, ca, start=start, source=source)
        self._reach()

    def _reach(self) -> None:
        """Make the connection; nothing is said over it yet."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """The address of the pool's HTTP API."""
        return self.address.url

    def __repr__(self) -> str:
        return f"{type(self).__name__} at {self.url} (from {self.address.source})"


class Pool(_Pool):
    """A pool of GPUs.

    Args:
        url: Its address; by default $GPUPOOL_URL, else that of the configuration file, else the embedded pool
            of this user on this machine.
        token: The token that the pool knows you by; by default $GPUPOOL_TOKEN.
        ca: The pool's certificate authority, as a path or as PEM text; by default $GPUPOOL_CA.
        start: Whether to start the embedded pool where there is no other.
        source: Where `url` is from, as sentences name it.

    Raises:
        PoolError: There is no pool, or it does not let you in.
    """

    def _reach(self) -> None:
        self._connection = Connection(self.address)

    def carry_out(self, what: Steps[T]) -> T:
        """Say to the pool what is to be said, and return what comes of it."""
        return self._connection.run(what)

    def get(self, path: str, **params: str) -> Any:
        """Read any path of the pool's HTTP API, such as "/v1/queue", as JSON."""
        return self._connection.send(get(path, "", **params))

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Make any call of the pool's HTTP API and return its answer's JSON."""
        return self._connection.send(Call(method=method, path=path, body=body, repeatable=False))

    def request(
        self,
        *,
        wait: bool = True,
        timeout: float | None = None,
        on_wait: Callable[[Lease], object] | None = None,
        **what: Unpack[RequestOptions],
    ) -> Lease:
        """Ask for GPUs and wait until they can be used; Ctrl-C meanwhile withdraws the request.

        Args:
            wait: Whether to wait; else the pending lease is returned at once.
            timeout: Seconds after which the request is withdrawn; by default it waits as long as it takes.
            on_wait: Called with the lease whenever there is news; by default a line shows it.
            what: What to ask for, see `RequestOptions`; `gpus=1` where nothing is said.

        Raises:
            PoolError: The pool says no, the lease did not start, or the time is over.
        """
        if wait:
            threading.Thread(target=_warm_up, name="gpupool-import", daemon=True).start()
        with Progress(on_wait is None) as progress:
            told = on_wait or progress
            asked = steps.request(
                with_wishes(from_here(what)),
                wait=wait,
                timeout=timeout,
                on_wait=lambda data: told(Lease(self, data)),
            )
            return Lease(self, self.carry_out(asked))

    def trial(self, **what: Unpack[RequestOptions]) -> tables.Said:
        """Say whether a request would start now, else when and why, without asking for anything.

        Raises:
            PoolError: It would be refused.
        """
        return tables.Said(self.carry_out(steps.trial(from_here(what))), display.trial_words)

    def leases(self, *, everybody: bool = False, ended: bool = False) -> list[Lease]:
        """List your leases and pending requests, or everybody's.

        Args:
            everybody: Those of others too, as far as you may see them.
            ended: Those that have ended too.
        """
        found = self.carry_out(steps.leases(everybody=everybody, ended=ended))
        return display.lease_rows((Lease(self, data) for data in found), everybody=everybody)

    def lease(self, name: str | None = None) -> Lease:
        """Find one of your leases by its name or id; without one, the only lease that you have.

        Raises:
            PoolError: There is none, or there are several.
        """
        return Lease(self, self.carry_out(steps.lease_named(name) if name else steps.only_lease()))

    def devices(self) -> list[Any]:
        """List the pool's devices, with what is on them and how they are."""
        return display.device_rows(self.carry_out(steps.read("/v1/devices", "devices")))

    def status(self) -> tables.Said:
        """Say what the pool is and how it stands."""
        return tables.Said(self.carry_out(steps.read("/v1/pool", "gpus")), display.pool_words)

    def overview(self) -> display.Overview:
        """Say what the pool is, with its devices and your leases."""
        return display.Overview(self.status(), self.devices(), self.leases())

    def queue(self) -> list[Any]:
        """List who waits, in the order in which they are next."""
        return display.queue_rows(self.carry_out(steps.read("/v1/queue")))

    def projects(self) -> list[Any]:
        """List the projects with their quotas and what they use."""
        return display.project_rows(self.carry_out(steps.read("/v1/projects")))

    def usage(self) -> list[Any]:
        """List who has, deserves and has used how much."""
        return display.usage_rows(self.carry_out(steps.read("/v1/usage")))

    def ledger(self) -> list[Any]:
        """List the GPU-seconds by user, project, model and kind of slice."""
        return display.ledger_rows(self.carry_out(steps.read("/v1/usage", "accounts")))

    def history(self) -> list[Any]:
        """List your GPU hours by day, as far back as the pool keeps them."""
        return display.history_rows(self.carry_out(steps.read("/v1/history")))

    def reclaims(self) -> list[Any]:
        """List what was taken back lately: for whom, from whom, by which numbers, at which cost."""
        return display.reclaim_rows(self.carry_out(steps.read("/v1/reclaims", "reclaims")))

    def explain(self, name: str | None = None) -> tables.Said:
        """Say why one of your requests waits, or why a lease is as it is."""
        lease = self.lease(name)
        return lease.explain()

    def set_projects(
        self, projects: list[dict[str, Any]] | None = None, defaults: dict[str, Any] | None = None
    ) -> list[Any]:
        """Put a new tree of projects, or other defaults, in place of the present ones. For administrators.

        Args:
            projects: All of them: `name`, and what is wanted of `parent`, `quota`, `limit`, `weight`, `tier`,
                `users`, `members`, `default_time`, `max_time`; None: they stay as they are.
            defaults: Numbers for the whole pool, such as `grace` or `model_weights`; those not named are as
                built in; None: they stay as they are.

        Raises:
            PoolError: You are no administrator of the pool, or they do not add up; nothing has changed then.
        """
        said = {"projects": projects, "defaults": defaults}
        body = {name: value for name, value in said.items() if value is not None}
        return display.project_rows(self.call("PUT", "/v1/projects", body))

    def configuration(self) -> dict[str, Any]:
        """Return the tree of projects and the defaults as `set_projects` takes them. For administrators.

        Raises:
            PoolError: You are no administrator of the pool.
        """
        found = self.carry_out(steps.read("/v1/projects", "defaults"))
        if any("members" not in each for each in found["projects"]):
            raise PoolError(
                "not_allowed",
                "Only administrators see who is in which project.",
                "Ask an administrator of the pool.",
            )
        projects = [{name: each[name] for name in CONFIGURED} for each in found["projects"]]
        return {"projects": projects, "defaults": found["defaults"]}

    def consolidate(self, *, dry_run: bool = False) -> tables.Rows:
        """Move small slices together, so that whole GPUs come free. For administrators.

        Only shares and MIG instances of elastic and idle leases that lose nothing move, and only where all of
        a GPU's slices have a place at once.

        Args:
            dry_run: Only say what would move.

        Raises:
            PoolError: You are no administrator of the pool, or nothing can be moved that would free a GPU.
        """
        return display.move_rows(self.call("POST", "/v1/consolidate", {"dry_run": dry_run}))

    def drill(self, device: str, xid: int = 79) -> str:
        """Break a device, to see that work carries on: with XID 79 it falls off the bus.

        On a pool of simulated GPUs the simulated driver does it. On real ones only the reader is told so, and
        the GPU stays well. For administrators.

        Returns:
            The device's name: "gpu3" may be said of any node's.

        Raises:
            PoolError: You are no administrator of the pool, or there is no such device.
        """
        return self._order(device, {"action": "drill", "xid": xid})

    def undrill(self, device: str) -> str:
        """End a drill: the device is whole again. For administrators.

        Returns:
            The device's name.

        Raises:
            PoolError: You are no administrator of the pool, or there is no such device.
        """
        return self._order(device, {"action": "undrill"})

    def _order(self, target: str, said: dict[str, Any]) -> str:
        """Say something of a device or node; return its name (a controller of before says nothing)."""
        return str((self.call("POST", f"/v1/health/{target}", said) or {}).get("name", target))

    def close(self) -> None:
        """Close the connections to the pool; leases stay."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _repr_html_(self) -> str:
        try:
            return self.status()._repr_html_()
        except PoolError as error:
            return tables.html_line(str(error))


class AsyncPool(_Pool):
    """A pool of GPUs, for code that awaits: the same as `Pool`, with `await` before each call."""

    def _reach(self) -> None:
        self._connection = AsyncConnection(self.address)

    async def carry_out(self, what: Steps[T]) -> T:
        """Say to the pool what is to be said, and return what comes of it."""
        return await self._connection.run(what)

    async def get(self, path: str, **params: str) -> Any:
        """Read any path of the pool's HTTP API as JSON."""
        return await self._connection.send(get(path, "", **params))

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Make any call of the pool's HTTP API and return its answer's JSON."""
        return await self._connection.send(Call(method=method, path=path, body=body, repeatable=False))

    async def request(
        self,
        *,
        wait: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109 - it withdraws the request, and says why it waited
        on_wait: Callable[[AsyncLease], object] | None = None,
        **what: Unpack[RequestOptions],
    ) -> AsyncLease:
        """Ask for GPUs and wait until they can be used; cancellation withdraws. See `Pool.request`."""

        def told(data: steps.LeaseData) -> None:
            if on_wait is not None:
                on_wait(AsyncLease(self, data))

        asked = steps.request(with_wishes(from_here(what)), wait=wait, timeout=timeout, on_wait=told)
        return AsyncLease(self, await self.carry_out(asked))

    async def trial(self, **what: Unpack[RequestOptions]) -> tables.Said:
        """Say whether a request would start now, else when and why. See `Pool.trial`."""
        return tables.Said(await self.carry_out(steps.trial(from_here(what))), display.trial_words)

    async def leases(self, *, everybody: bool = False, ended: bool = False) -> list[AsyncLease]:
        """List your leases and pending requests, or everybody's. See `Pool.leases`."""
        found = await self.carry_out(steps.leases(everybody=everybody, ended=ended))
        return display.lease_rows((AsyncLease(self, data) for data in found), everybody=everybody)

    async def lease(self, name: str | None = None) -> AsyncLease:
        """Find one of your leases by its name or id; without one, the only lease that you have."""
        return AsyncLease(self, await self.carry_out(steps.lease_named(name) if name else steps.only_lease()))

    async def devices(self) -> list[Any]:
        """List the pool's devices, with what is on them and how they are."""
        return display.device_rows(await self.carry_out(steps.read("/v1/devices", "devices")))

    async def status(self) -> tables.Said:
        """Say what the pool is and how it stands."""
        return tables.Said(await self.carry_out(steps.read("/v1/pool", "gpus")), display.pool_words)

    async def explain(self, name: str | None = None) -> tables.Said:
        """Say why one of your requests waits, or why a lease is as it is."""
        return await (await self.lease(name)).explain()

    async def close(self) -> None:
        """Close the connections to the pool; leases stay."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def from_here(what: RequestOptions) -> RequestOptions:
    """Add what a request has by where it is made: from a notebook's kernel it is interactive."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel") and "interactive" not in what and not what.get("preemptible"):
        return {**what, "interactive": True}
    return what


def _warm_up() -> None:
    """Import what `Lease.client` needs while the pool works on the request."""
    with contextlib.suppress(Exception):  # `Lease.client` will say it better
        import distributed  # noqa: F401


def __getattr__(name: str) -> Any:
    if name == "GPUPoolCluster":  # its base class is distributed's
        from jupyter_gpupool.cluster import GPUPoolCluster

        return GPUPoolCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
