"""The host process of one slice: `dask_cuda.CUDAWorker` with its Nanny, and no other GPU in sight.

It is started together with its lease's scheduler; the worker waits for that one's address only to register.

It forks its worker from the launcher's forkserver, whose child it is; one of its own would cost 2.3 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

import dask

from jupyter_gpupool.core.faults import Fault, is_hardware
from jupyter_gpupool.core.model import Verdict
from jupyter_gpupool.lease import limits, pulse
from jupyter_gpupool.lease.early import Early
from jupyter_gpupool.lease.link import Link, ask
from jupyter_gpupool.lease.settings import PATIENCE, SETTINGS, security
from jupyter_gpupool.lease.sharing import share_forkserver
from jupyter_gpupool.lease.shell_host import CellServer
from jupyter_gpupool.lease.worker import LeaseWorker, StartError

if TYPE_CHECKING:
    from collections.abc import Coroutine

logger = logging.getLogger(__name__)

#: What a request may say in its options for dask-cuda, by the names of `CUDAWorker`.
OPTIONS = (
    "device_memory_limit",
    "enable_cudf_spill",
    "cudf_spill_stats",
    "rmm_pool_size",
    "rmm_maximum_pool_size",
    "rmm_managed_memory",
    "rmm_async",
    "rmm_allocator_external_lib_list",
    "rmm_release_threshold",
    "rmm_log_directory",
    "rmm_track_allocations",
    "enable_tcp_over_ucx",
    "enable_infiniband",
    "enable_nvlink",
    "enable_rdmacm",
    "pre_import",
)
#: Seconds in which the end of a worker is told to its host.
_SOON = 1.0
#: Seconds a worker has to close before its host kills it.
_CLOSE = 5


def main(spec: dict[str, Any]) -> None:
    """Run the worker of one slice until it is ended.

    Args:
        spec: As `node.lease_specs.worker_spec` writes it.
    """
    dask.config.set(SETTINGS)
    # A Nanny hands these to its worker, which is the forkserver's child and has another environment.
    dask.config.set({"distributed.nanny.environ": {**_NANNY, **spec["environ"]}})
    if not share_forkserver(spec.get("forkserver")):
        dask.config.set({"distributed.worker.multiprocessing-method": "spawn"})
    asyncio.run(_serve(spec))


#: Dask's own defaults for a worker's environment, which `distributed.nanny.environ` would otherwise replace.
_NANNY: dict[str, str] = {"RAPIDS_NO_INITIALIZE": "True"}


async def _serve(spec: dict[str, Any]) -> None:
    host = _Host(spec)
    link = Link(spec["socket"], host.state, host.obey, alone=host.stop, alone_s=spec["alone"])
    link.start()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, host.stop)
    try:
        await host.run(link)
    finally:
        await link.close()


class _Host:
    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._stopped = asyncio.Event()
        self._scheduler: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._know(spec["scheduler"])
        self._state: dict[str, Any] = {"report": "starting", "slice": spec["slice"]}
        self._nanny: Any = None
        self._tasks: set[asyncio.Task[Any]] = set()
        #: A reading is on its way to the worker; one that is busy is told the next one.
        self._showing = False

    def state(self) -> dict[str, Any]:
        return self._state

    def stop(self) -> None:
        self._stopped.set()

    def _know(self, scheduler: str) -> None:
        if scheduler and not self._scheduler.done():
            self._scheduler.set_result(scheduler)

    def obey(self, order: dict[str, Any]) -> None:
        """Carry out an agent's order."""
        name = order.get("order")
        if name == "stop":
            self.stop()
        elif name == "scheduler":
            self._know(str(order["address"]))
        elif name == "restart" and self._nanny is not None:
            self._do(self._restart(str(order.get("why", "restart"))))
        elif name in ("hold", "go_on") and self._nanny is not None:
            self._do(self._hold(hold=name == "hold"))
        elif name == "reading" and self._nanny is not None and not self._showing:
            self._do(self._show(order.get("figures") or {}))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hold(self, *, hold: bool) -> None:
        """Have the worker take no further task, or go on; one that does not answer is ended soon enough."""
        with contextlib.suppress(OSError, TimeoutError):
            worker = self._nanny.rpc(self._nanny.worker_address)
            await asyncio.wait_for(worker.gpupool_hold(hold=hold), PATIENCE)

    async def _show(self, figures: dict[str, Any]) -> None:
        self._showing = True
        try:
            worker = self._nanny.rpc(self._nanny.worker_address)
            await asyncio.wait_for(worker.gpupool_reading(figures=figures), PATIENCE)
        except (OSError, TimeoutError, ValueError):
            pass  # there is no worker now, or it is busy
        finally:
            self._showing = False

    async def _restart(self, why: str) -> None:
        """Have the worker start anew after what it runs; one that does not answer is restarted by force."""
        try:
            worker = self._nanny.rpc(self._nanny.worker_address)
            await asyncio.wait_for(worker.gpupool_restart(why=why), PATIENCE)
        except (OSError, TimeoutError):
            await self._nanny.restart(reason=why)

    async def run(self, link: Link) -> None:
        """Start the worker, say so, and stay until it ends or is to end."""
        try:
            _open_driver(self._spec["driver"])
            cluster = make_cluster(self._spec)
            self._nanny = cluster.nannies[0]
            self._watch_exits(self._nanny)
            stopped = asyncio.create_task(self._stopped.wait())
            if not await _first(self._started(cluster), stopped):
                return  # it is to end before it has begun
        except Exception as error:
            logger.exception("the slice's worker did not start")
            self._say(link, {"report": "failed", "why": words(true_error(error))})
            await asyncio.sleep(0.2)
            raise SystemExit(1) from error
        # The worker was perhaps started before its scheduler had an address; the shell's client needs one.
        cells = CellServer(self._nanny, {**self._spec, "scheduler": await self._scheduler})
        layers = limits.written(limits.states(limits.limit(self._spec["environ"])))
        self._say(link, {"report": "started", "worker": self._nanny.worker_address, "layers": layers})
        watches = [asyncio.create_task(each) for each in self._watches()]
        await _first(cluster.finished(), stopped)
        for watch in watches:
            watch.cancel()
        with contextlib.suppress(Exception):
            await asyncio.gather(cells.close(), cluster.close(timeout=_CLOSE))

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        def pid() -> int | None:
            found: int | None = self._nanny.pid
            return found

        hung_s = self._spec["hung"]
        watches = [pulse.watch_stopped(pid, self._replace)]
        if hung_s:
            watches.append(pulse.watch_hanging(pid, self._ask_worker, self._end_hanging, hung_s))
        return watches

    async def _ask_worker(self) -> None:
        address = self._nanny.worker_address
        if address is None:
            raise OSError("there is no worker now")
        await self._nanny.rpc(address).echo(data=b"")

    async def _end_hanging(self, why: str) -> bool:
        """Kill a worker that hangs, unless its GPU is at work; it counts as one that died.

        So the node is asked once more whose fault it was: a program that hangs again and again ends like one
        that kills its workers, and a GPU that has failed is held against nobody.
        """
        hangs = self._nanny.pid
        question = {"report": "suspect", "slice": self._spec["slice"], "error": why}
        answer = await ask(self._spec["socket"], question, PATIENCE) or {}
        if answer.get("busy"):
            return False
        if hangs is None or self._nanny.pid != hangs:
            return True  # it has ended meanwhile, and another one is not to blame
        logger.warning("the worker is killed, and another one started: %s", why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(hangs, signal.SIGKILL)
        return True

    async def _started(self, cluster: Any) -> None:
        """Start the worker; it registers as soon as its scheduler is known."""
        early = [Early(nanny, self._scheduler) for nanny in cluster.nannies]
        watched = [asyncio.create_task(each.failed.wait()) for each in early]
        started = asyncio.ensure_future(cluster)
        try:
            await asyncio.wait([started, *watched], return_when=asyncio.FIRST_COMPLETED)
            # Dask's own says only that it did not start; of a worker that did not wait its cause knows more.
            reason = next((why for each in early if (why := each.reason())), None)
            error = started.exception() if started.done() else None
            if error is not None and reason is None:
                reason = error.__cause__ or error
            if reason is not None:
                raise reason
        finally:
            for each in (started, *watched):
                each.cancel()

    async def _replace(self, why: str) -> None:
        """Start another worker on the same GPU in place of one that cannot be asked; nobody is blamed."""
        logger.warning("the worker is started anew: %s", why)
        with contextlib.suppress(OSError, TimeoutError):
            told = self._nanny.scheduler.gpupool_spoilt(part=self._spec["slice"], key=None, why=why)
            await asyncio.wait_for(told, PATIENCE)
        await self._nanny.kill(timeout=1, reason=why)  # and its Nanny starts the next one

    def _say(self, link: Link, report: dict[str, Any]) -> None:
        self._state = {**report, "slice": self._spec["slice"]}
        link.send(self._state)

    def _watch_exits(self, nanny: Any) -> None:
        """Ask the node's verdict when a worker has died, before another one starts on the same GPU."""
        restart = nanny._on_worker_exit  # noqa: SLF001 - a Nanny has no public hook for it
        exits = itertools.count(1)
        last = 0

        async def on_exit(exitcode: int) -> None:
            nonlocal last
            if nanny.status.name == "init":
                return  # it is being started, and that sees to it
            mine = last = next(exits)
            if nanny.status.name == "running" and not self._stopped.is_set():
                await self._judge_death(nanny, exitcode)
                if nanny.is_alive():
                    return  # it was killed for a restart, and the next one has begun meanwhile
            await restart(exitcode)
            if nanny.is_alive():
                return
            await asyncio.sleep(_SOON)  # the next one may have died at once: then its own exit is seen to
            if mine == last and not nanny.is_alive() and not self._stopped.is_set():
                # Its forkserver may be gone. A host without a worker would hold its GPU for nothing.
                logger.error("no worker could be started again: this host ends, for another to be started")
                os._exit(1)  # a Nanny that failed to start a worker cannot be closed either

        nanny._on_worker_exit = on_exit  # noqa: SLF001 - as above

    async def _judge_death(self, nanny: Any, exitcode: int) -> None:
        hardware = False
        if exitcode != 0:
            question = {"report": "suspect", "slice": self._spec["slice"], "error": f"exit status {exitcode}"}
            answer = await ask(self._spec["socket"], question, PATIENCE) or {}
            hardware = is_hardware(Fault.HARDWARE, Verdict(answer.get("verdict", Verdict.FINE)))
            if hardware:
                logger.warning("the worker is not started again: %s", answer.get("sentence", ""))
                nanny.close_gracefully(reason="device-failed")
        with contextlib.suppress(OSError, TimeoutError):
            told = nanny.scheduler.gpupool_death(part=self._spec["slice"], hardware=hardware)
            await asyncio.wait_for(told, PATIENCE)


def _open_driver(prepare: str) -> None:
    """Open NVML in this process, by a function of the driver's room ("module:function") that says why not."""
    module, _, function = prepare.partition(":")
    if reason := getattr(importlib.import_module(module), function)():
        logger.warning("this slice's host starts without NVML: %s", reason)


def words(error: BaseException) -> str:
    """Say what a lease's owner reads of an error."""
    return str(error) if isinstance(error, StartError) else f"{type(error).__name__}: {error}"


def true_error(error: BaseException) -> BaseException:
    """Return the NVML error behind an exception, where there is one.

    dask-cuda answers one with a ValueError about the device's name, and that with a TypeError of its own: it
    formats a UUID as a number.

    Args:
        error: What was raised.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:  # causes may go round in a circle
        if type(link).__name__.startswith("NVMLError"):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return error


async def _first(work: Coroutine[Any, Any, None], stopped: asyncio.Task[Any]) -> bool:
    """Wait for some work, and give it up where the end comes first; False then."""
    task = asyncio.create_task(work)
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        return False
    await task
    return True


def _nowhere(spec: dict[str, Any]) -> str:
    """Stand for the scheduler's address while that is not known; a worker takes its protocol from it."""
    protocol = spec["options"].get("protocol") or ("tls" if spec["credentials"] else "tcp")
    return f"{protocol}://0.0.0.0:0"


def make_cluster(spec: dict[str, Any]) -> Any:
    """Make, and not yet start, the `CUDAWorker` of one slice.

    Args:
        spec: As `main` takes it; its scheduler may not be known yet.
    """
    from dask_cuda import CUDAWorker
    from distributed.nanny import WorkerProcess

    WorkerProcess._init_msg_interval = 0.002  # noqa: SLF001 - 50 ms of polling is a quarter of a warm start
    os.environ["CUDA_VISIBLE_DEVICES"] = spec["device"]
    given = {name: value for name, value in spec["options"].items() if name in OPTIONS}
    environment = spec["options"].get("environment") or {}
    given.setdefault("pre_import", environment.get("pre_import"))
    most = limits.limit(spec["environ"])
    given = limits.rmm_options(given, most)
    # dask-cuda's defaults would take the whole node's memory and 80 % of the whole GPU's.
    given.setdefault("device_memory_limit", int((most or spec["vram"]) * 0.8))
    cluster = CUDAWorker(
        spec["scheduler"] or _nowhere(spec),
        host=spec["address"],
        name=spec["slice"],
        nthreads=int(spec["options"].get("threads_per_worker", 1)),
        memory_limit=spec["memory"],
        local_directory=spec["directory"],
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        security=security(spec["credentials"]),
        worker_class=LeaseWorker,
        preload=list(spec["preload"]),
        **given,
    )
    if spec["ports"]:
        first, last = spec["ports"]
        for nanny in cluster.nannies:
            # CUDAWorker gives each of its workers one port of a range; a whole node shares this one.
            nanny._start_port = nanny.worker_kwargs["port"] = f"{first}:{last}"  # noqa: SLF001 - as said
    return cluster
