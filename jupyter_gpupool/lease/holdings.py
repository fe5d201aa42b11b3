"""What a lease would lose for good if it were suspended: scattered data and actors.

Everything else can be computed again. The pool names these in the notice before it takes the lease's GPUs,
and counts them as work that is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tornado.ioloop import PeriodicCallback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Milliseconds between two looks.
_LOOK = 1_000
#: So many are named, the largest, with so many characters of each.
_NAMED, _LONGEST = 10, 100


class Holdings:
    """Says what a lease holds that cannot be computed again, whenever that has changed.

    Args:
        scheduler: The lease's.
        say: Called with a report.
    """

    def __init__(self, scheduler: Any, say: Callable[[dict[str, Any]], None]) -> None:
        self._scheduler = scheduler
        self._say = say
        #: Keys of scattered data; what is gone by now is dropped at the next look.
        self._scattered: dict[Any, None] = {}
        self._told = (0, 0)
        self._callback = PeriodicCallback(self.look, _LOOK)

    def start(self) -> None:
        """Begin to look."""
        self._callback.start()

    def stop(self) -> None:
        """End looking."""
        self._callback.stop()

    def note(self, keys: Iterable[Any]) -> None:
        """Note that data has come from outside."""
        self._scattered.update(dict.fromkeys(keys))

    def look(self) -> None:
        """Look at what there is, and say so where it has changed."""
        found = {task.key: max(0, task.nbytes) for task in self._held()}
        told = (len(found), sum(found.values()))
        if told != self._told:
            self._told = told
            self._say({"report": "holds", **self.state(found)})

    def state(self, found: dict[Any, int] | None = None) -> dict[str, Any]:
        """Say what there is: the largest, their number and their size."""
        held = {task.key: max(0, task.nbytes) for task in self._held()} if found is None else found
        largest = sorted(held.items(), key=lambda each: (-each[1], str(each[0])))[:_NAMED]
        parts = [[str(key)[:_LONGEST], size] for key, size in largest]
        return {"parts": parts, "count": len(held), "size": sum(held.values())}

    def _held(self) -> Iterator[Any]:
        tasks = self._scheduler.tasks
        for key in list(self._scattered):
            task = tasks.get(key)
            if task is None or task.run_spec or not task.who_has:
                del self._scattered[key]
            else:
                yield task
        for worker in self._scheduler.workers.values():
            yield from (task for task in worker.actors if task.who_has)
