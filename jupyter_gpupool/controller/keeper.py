"""The pool and its journal: every pool event is on the disk before anything that follows from it is done.

Rule 1: what could not be written has not happened: the pool is as it was, and whoever asked is told.
Rule 2: the last snapshot and the events after it give an equal pool. An event that the pool stumbles over
        stumbles again at each replay, in the same way; it never keeps a controller from starting.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from jupyter_gpupool import service
from jupyter_gpupool.controller.records import Ran, StoreError
from jupyter_gpupool.core.model import Notice, Notify, Tick
from jupyter_gpupool.core.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jupyter_gpupool.controller.clock import Clock
    from jupyter_gpupool.controller.store import Heard, Once, Store
    from jupyter_gpupool.core.model import Instruction, PoolEvent

logger = logging.getLogger(__name__)

#: A snapshot is taken after so many pool events, so that a restart replays no more than that.
SNAPSHOT_AFTER = 1000


class Keeper:
    """Keeps the pool.

    Args:
        store: The journal.
        clock: The pool's clock.
        follow: Called with each pool event that has been journaled and what follows from it; never raises.
    """

    def __init__(
        self, store: Store, clock: Clock, follow: Callable[[PoolEvent, list[Instruction]], None]
    ) -> None:
        self._store = store
        self._clock = clock
        self._follow = follow
        self.pool = self._load()

    def _load(self) -> Pool:
        """Make the pool that the journal tells of, and say again what it told people."""
        state, _ = self._store.restore()
        pool = Pool.restore(state) if state is not None else Pool()
        self._keep_notices(pool, [(seq, _handle(pool, event)) for seq, event in self._store.replay()])
        return pool

    def submit(
        self, event: PoolEvent, once: Once | None = None, heard: Heard | None = None
    ) -> list[Instruction]:
        """Journal a pool event, let the pool handle it, have done what follows, and return that.

        Args:
            event: What has happened.
            once: The idempotency key that came with it.
            heard: The agent's report that it was.

        Raises:
            StoreError: It could not be journaled; nothing has changed.
        """
        seq = self._store.append(event, once, heard)
        instructions = _handle(self.pool, event)
        self._done(seq, event, instructions)
        return instructions

    def tick(self) -> None:
        """Let the pool see that time has passed. Only a tick from which something follows is journaled."""
        event, due = Tick(now=self._clock.now()), self.pool.next_time()
        if due is None or due > event.now:
            return
        version = self.pool.version
        instructions = _handle(self.pool, event)
        if not instructions and self.pool.version == version:
            return
        try:
            seq = self._store.append(event)
        except StoreError:
            # The pool is ahead of its journal: go back to what the journal says.
            logger.exception("A tick could not be journaled; the pool is read back from the journal.")
            self.pool = self._load()
            return
        self._done(seq, event, instructions)

    def compact(self) -> None:
        """Take a snapshot where a restart would have much to replay."""
        if self._store.since_snapshot >= SNAPSHOT_AFTER:
            self._store.snapshot(self.pool.text())
            service.give_memory_back()

    def _done(self, seq: int, event: PoolEvent, instructions: list[Instruction]) -> None:
        self._keep_notices(self.pool, [(seq, instructions)])
        self._follow(event, instructions)

    def _keep_notices(self, pool: Pool, followed: list[tuple[int, list[Instruction]]]) -> None:
        said = [(seq, [each for each in out if isinstance(each, Notify)]) for seq, out in followed]
        try:
            self._store.add_all_notices(said)
            ended = [each.lease for _, out in said for each in out if each.notice is Notice.ENDED]
            if ended:
                self._store.keep_ran(self._ran(pool, ended))
        except StoreError:  # they are said again when the journal is replayed
            logger.exception("Notices could not be kept.")

    def _ran(self, pool: Pool, ended: list[str]) -> Iterator[Ran]:
        """What has run of some leases that have ended."""
        for lease in filter(None, map(pool.leases.get, ended)):
            if lease.ran > 0:
                request, when = lease.request, self._clock.wall(lease.request.arrived)
                seconds = lease.ran / 1000
                yield Ran(lease.id, when, seconds, lease.milli, request.project, request.user)


def _handle(pool: Pool, event: PoolEvent) -> list[Instruction]:
    """Let the pool handle an event; a fault in the rules must not stop the controller, nor each start."""
    try:
        return pool.handle(event)
    except Exception:
        logger.exception("The pool could not handle %s.", event)
        return []
