"""Actors that move with the work of a worker that leaves: those whose class has `checkpoint` and `restore`.

Rule 1: `actor.checkpoint()` returns the state, which must be picklable. `restore(state)` makes it anew: as a
        class method it returns the new actor; as a plain method it is called on an object that was made
        without `__init__`, as `__setstate__` is.
Rule 2: a call runs once. Those that have begun end before the checkpoint; those that come later wait until
        the actor has moved, and are passed on. Where it could not move they run where it is. The actors of a
        worker move together, since they may call one another.
Rule 3: who holds an actor keeps it: the scheduler finds the new worker for clients, and tells all workers.
        A client that calls workers directly (`direct_to_workers`) has to ask its future for the actor again.

Not its business: when a worker leaves, and what becomes of actors that stay (`drain`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from distributed.actor import Actor
from distributed.protocol import to_serialize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed.scheduler import Scheduler, TaskState, WorkerState

logger = logging.getLogger(__name__)

#: The scheduler's word to workers that an actor has moved.
MOVED = "gpupool-actor-moved"
#: How often an actor is tried to be moved; its checkpoint, or the other worker, may fail.
_TRIES = 3
#: Seconds for a call to arrive that was on its way to the old worker when its actor moved.
_LATE = 0.2


def can_move(actor: object) -> bool:
    """Whether an actor's class says how it is moved."""
    return all(callable(getattr(type(actor), name, None)) for name in ("checkpoint", "restore"))


def make_anew(kind: type, state: Any) -> Any:
    """Make an actor of a class from its state.

    Args:
        kind: The class; see rule 1 for its `restore`.
        state: What `checkpoint` returned.

    >>> class Counter:
    ...     def checkpoint(self): return self.n
    ...     def restore(self, state): self.n = state
    >>> make_anew(Counter, 3).n
    3
    """
    method = kind.restore  # type: ignore[attr-defined]  # as `can_move` has seen
    if getattr(method, "__self__", None) is kind or isinstance(vars(kind).get("restore"), staticmethod):
        return method(state)
    actor: Any = object.__new__(kind)
    method(actor, state)
    return actor


class WorkerActors:
    """The actors of one worker, those included that have moved away.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._calls: collections.Counter[Any] = collections.Counter()
        #: Key -> when it is known where it is; the answer is an address, or "": it stays.
        self._moves: dict[Any, asyncio.Future[str]] = {}
        #: Key of an actor that has moved -> the address of the worker that has it now.
        self._moved: dict[Any, str] = {}
        #: Calls that are held, run or are passed on.
        self._open = 0
        worker.handlers["gpupool_move_actors"] = self.move
        worker.handlers["gpupool_take_actor"] = self.take
        worker.handlers["gpupool_actor_calls"] = lambda: self._open
        worker.stream_handlers[MOVED] = self.note
        _follow_moves()

    def address(self, key: Any) -> str:
        """Where an actor is that has moved elsewhere; "" of all others."""
        return "" if (found := self.found(key)) == self._worker.address else found

    def found(self, key: Any) -> str:
        """Where an actor is that has moved at all, be it to here; "" of all others."""
        return self._moved.get(key, "")

    def note(self, key: Any, address: str) -> None:
        """Hear that an actor has moved."""
        self._moved[key] = address

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Count what has come in, until it is answered: the worker does not leave before."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def whereabouts(self, key: Any) -> str:
        """Wait while an actor moves; answer with where it is, or "": here."""
        if key in self._moves:
            await asyncio.shield(self._moves[key])
        return self.address(key)

    @contextlib.contextmanager
    def calling(self, key: Any) -> Iterator[None]:
        """Count a call while it runs."""
        self._calls[key] += 1
        try:
            yield
        finally:
            self._calls[key] -= 1

    async def pass_on(self, address: str, call: str, options: dict[str, Any]) -> dict[str, Any]:
        """Make a call on the worker that has the actor now, and return its answer."""
        said = dict(options)
        if call == "actor_execute":
            said["args"] = [to_serialize(each) for each in options.get("args") or ()]
            said["kwargs"] = {
                name: to_serialize(each) for name, each in (options.get("kwargs") or {}).items()
            }
        answer = await getattr(self._worker.rpc(address), call)(**said)
        return {
            name: to_serialize(value) if name in ("result", "exception") else value
            for name, value in answer.items()
        }

    async def move(self, plan: list[tuple[Any, str]]) -> list[tuple[Any, str, str]]:
        """Move actors to other workers.

        Args:
            plan: The key of each, and the address of its new worker.

        Returns:
            For each its key; "moved", "stays" (its class does not say how) or "failed"; and why.
        """
        actors = self._worker.state.actors
        movable = [key for key, _ in plan if can_move(actors.get(key)) and not self.address(key)]
        for key in movable:
            self._moves[key] = asyncio.get_running_loop().create_future()
        try:
            while any(self._calls[key] for key in movable):  # noqa: ASYNC110 - Dask has no event
                await asyncio.sleep(0.01)
            return [await self._move(key, to, movable) for key, to in plan]
        finally:
            for key in movable:
                self._moves.pop(key).set_result(self.address(key))

    async def _move(self, key: Any, to: str, movable: list[Any]) -> tuple[Any, str, str]:
        if self.address(key):
            return key, "moved", ""
        if key not in movable:
            return key, "stays", "its class has no checkpoint() and restore(state)"
        actor = self._worker.state.actors[key]
        try:
            state = await self._run(actor.checkpoint)
            packed = {"kind": to_serialize(type(actor)), "state": to_serialize(state)}
            answer = await self._worker.rpc(to).gpupool_take_actor(key=key, **packed)
        except Exception as error:
            logger.exception("the actor %s could not be moved to %s", key, to)
            return key, "failed", f"{type(error).__name__}: {error}"[:300]
        if answer["status"] == "OK":
            self._moved[key] = to
            return key, "moved", ""
        return key, "failed", answer["why"]

    async def take(self, key: Any, kind: type, state: Any) -> dict[str, str]:
        """Make an actor anew that another worker has handed over."""
        try:
            actor = await self._run(make_anew, kind, state)
        except Exception as error:
            logger.exception("the actor %s could not be made anew", key)
            return {"status": "error", "why": f"{type(error).__name__}: {error}"[:300]}
        worker = self._worker
        worker.state.actors[key] = actor
        worker.update_data({key: actor})  # a task of this key in memory; where it is one already, nothing
        if key in worker.data:
            del worker.data[key]  # it held the actor that was elsewhere
        self._moved[key] = worker.address
        return {"status": "OK"}

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a method of an actor's where its calls run."""
        if iscoroutinefunction(function):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker.executors["actor"], function, *arguments)


def _follow_moves() -> None:
    """Let what tasks and actors of this process hold find actors that have moved.

    The attribute is private to Dask; should it go, only these have to be asked for again.
    """
    if "_address" not in vars(Actor):
        Actor._address = property(_find, _keep)  # noqa: SLF001 - as said


def _find(actor: Any) -> str:
    moved = getattr(vars(actor).get("_worker"), "actors", None)
    found = moved.found(actor.key) if isinstance(moved, WorkerActors) else ""
    return found or str(vars(actor)["_address"])


def _keep(actor: Any, address: str) -> None:
    vars(actor)["_address"] = address


def holder(task: TaskState) -> WorkerState | None:
    """Return the worker on which an actor lives; others may have the means to call it."""
    return next((each for each in task.who_has or () if task in each.actors), None)


class ActorMoves:
    """Moves the actors of a worker that leaves, as far as their classes say how.

    Args:
        scheduler: The lease's.
        worker: The worker that leaves.
    """

    def __init__(self, scheduler: Any, worker: WorkerState) -> None:
        self._scheduler: Scheduler = scheduler
        self._rpc: Any = scheduler.rpc
        self._worker = worker
        self._moving: asyncio.Task[None] | None = None
        self._failed: collections.Counter[Any] = collections.Counter()
        #: Keys of actors that cannot be moved, and why.
        self.stay: dict[Any, str] = {}
        #: Calls that the scheduler passes on for clients, by worker.
        self._proxied: collections.Counter[str] = scheduler.proxied

    def run_once(self) -> None:
        """Begin to move what is there; where no other worker is, later."""
        if self.under_way():
            return
        if plan := self._plan():
            self._moving = asyncio.create_task(self._move(plan))

    def _plan(self) -> dict[TaskState, WorkerState]:
        """Choose for each actor that may move the worker that stays and has the fewest."""
        staying = [each for each in self._scheduler.running if each is not self._worker]
        many = collections.Counter({each: len(each.actors) for each in staying})
        plan: dict[TaskState, WorkerState] = {}
        for task in self._worker.actors if staying else ():
            if task.state == "memory" and task.key not in self.stay:
                plan[task] = min(staying, key=lambda each: (many[each], each.nbytes, each.address))
                many[plan[task]] += 1
        return plan

    def under_way(self) -> bool:
        """Whether an actor is moving, or a call to one that has moved is still to be passed on."""
        return self._moving is not None and not self._moving.done()

    def stop(self) -> None:
        """Wait for no move any more."""
        if self._moving is not None:
            self._moving.cancel()

    async def _move(self, plan: dict[TaskState, WorkerState]) -> None:
        worker = self._rpc(self._worker.address)
        try:
            pairs = [(task.key, target.address) for task, target in plan.items()]
            answers = await worker.gpupool_move_actors(plan=pairs)
        except OSError as error:
            answers = [(task.key, "failed", str(error)) for task in plan]
        said = {key: (what, why) for key, what, why in answers}
        for task, target in plan.items():
            what, why = said[task.key]
            if what == "moved":
                self._settle(task, target)
                continue
            self._failed[task.key] += 1
            if what == "stays" or self._failed[task.key] >= _TRIES:
                self.stay[task.key] = why
        with contextlib.suppress(OSError):
            await asyncio.sleep(_LATE)
            address = self._worker.address
            while self._proxied[address] or await worker.gpupool_actor_calls():  # noqa: ASYNC110 - as above
                await asyncio.sleep(_LATE)

    def _settle(self, task: TaskState, target: WorkerState) -> None:
        """Note where an actor is now, unless nobody wants it any more or the target has gone meanwhile."""
        scheduler, old = self._scheduler, self._worker
        stimulus = f"gpupool-actor-{time.time()}"
        gone = scheduler.workers.get(target.address) is not target
        if scheduler.tasks.get(task.key) is not task or task not in old.actors or gone:
            return
        if target not in (task.who_has or ()):
            scheduler.add_replica(task, target)
        target.actors.add(task)
        old.actors.discard(task)
        scheduler.remove_replica(task, old)
        free = {"op": "free-keys", "keys": [task.key], "stimulus_id": stimulus}
        scheduler.worker_send(old.address, free)
        for address in scheduler.workers:
            scheduler.worker_send(address, {"op": MOVED, "key": task.key, "address": target.address})
        logger.info("the actor %s has moved from %s to %s", task.key, old.name, target.name)
