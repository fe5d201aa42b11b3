"""Let simulated faults hurt the tasks, results and actors of a real Dask worker.

Tasks here run on the CPU and keep results in host memory. On a real GPU they would run, and lie, on the
device; so in a worker on a simulated one every task, actor call and transfer of a result goes through the
context first.

It hooks into functions of `distributed.worker`, most of them private, for this process only;
`tests/test_simulated_faults.py` drives a real `dask_cuda.CUDAWorker` through each and fails when one of them
moves.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from jupyter_gpupool.driver.simulated import cuda

if TYPE_CHECKING:
    from collections.abc import Callable

_attached = False
#: This coroutine answers a peer or client that asks for results.
_transfers: ContextVar[bool] = ContextVar("transfers", default=False)


class Guarded:
    """A task that uses the device: its context is looked at before and after, as its kernels would."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def __call__(self, data: dict[Any, Any]) -> Any:
        """Run the task; what it computed on a device that is lost meanwhile is lost too."""
        cuda.check()
        result = self.task(data)
        if self.task.is_coro:
            return self._finish(result)
        cuda.check()
        return result

    async def _finish(self, result: Any) -> Any:
        value = await result
        cuda.check()
        return value


class Unreadable:
    """What is left of a result whose device is lost: copying it to the host raises the CUDA error."""

    def __init__(self, error: cuda.CUDARuntimeError) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


class Device:
    """Stands for `cuda.core.Device` in dask-cuda's preload, which only makes a context with it."""

    def set_current(self) -> None:
        """Make the context.

        Raises:
            CUDARuntimeError: The device does not work.
        """
        cuda.check()


def attach(worker: Any) -> None:
    """Hook into this process, and into a Dask worker in it."""
    _attach_process()
    # Its table of handlers was made with the method from before.
    worker.handlers["get_data"] = worker.get_data


def _attach_process() -> None:
    global _attached  # noqa: PLW0603 (the hooks are the process's)
    if _attached:
        return
    _attached = True
    import dask_cuda.initialize
    import distributed.worker as module

    module._run_task_simple = _guard_task(module._run_task_simple)  # noqa: SLF001 (see the module's docstring)
    module._run_task_async = _guard_task(module._run_task_async)  # noqa: SLF001
    module._run_actor = _guard_call(module._run_actor)  # noqa: SLF001
    module.to_serialize = _guard_result(module.to_serialize)
    module.Worker.get_data = _guard_transfer(module.Worker.get_data)
    dask_cuda.initialize.Device = Device


def _guard_task(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def guarded(task: Any, *arguments: Any) -> Any:
        return run(Guarded(task), *arguments)

    return guarded


def _guard_call(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def guarded(*arguments: Any) -> Any:
        cuda.check()
        result = run(*arguments)
        cuda.check()
        return result

    return guarded


def _guard_transfer(get_data: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_data)
    async def guarded(*arguments: Any, **options: Any) -> Any:
        token = _transfers.set(True)
        try:
            return await get_data(*arguments, **options)
        finally:
            _transfers.reset(token)

    return guarded


def _guard_result(to_serialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to_serialize)
    def guarded(value: Any) -> Any:
        if not _transfers.get():
            return to_serialize(value)  # what a call out of band returns lies on the host
        try:
            cuda.check()
        except cuda.CUDARuntimeError as error:
            return to_serialize(Unreadable(error))
        return to_serialize(value)

    return guarded
