"""Where leases' schedulers run: on the head node, and where that is lost, on another one.

Rule 1: a scheduler moves only off a node that the pool has declared lost: on a silent one it may compute on.
Rule 2: its keys say where it is to run before anything is started there, so that the node that comes back
        ends the old one (`hearing`), whatever happened in between.
Rule 3: a head node that is back takes new leases again; those that have moved stay where they are.

Not its business: what a lease whose scheduler is lost goes through (`core.lives`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import LeaseFailed, LeaseFreed
from jupyter_gpupool.core.state import NodeState, SchedulerState

if TYPE_CHECKING:
    from jupyter_gpupool.controller.machine import Controller


class Homes:
    """Finds new homes for the schedulers of lost nodes.

    Args:
        controller: Whose leases they are.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def look(self) -> None:
        """Move what is at home on a lost node; to be called each second.

        Raises:
            StoreError: It could not be written; the next look goes on from there.
        """
        nodes = self._controller.pool.nodes
        lost = {name for name, record in nodes.items() if record.state is NodeState.LOST}
        if not lost or not self._settle_head(lost):
            return
        there = [each for each in self._controller.pool.leases.values() if not each.ended_at]
        moved = [self._move(each.id, each.scheduler, lost) for each in there]
        if any(moved):
            self._controller.again(self._controller.keys.head)

    def _settle_head(self, lost: set[str]) -> bool:
        """Say whether there is a node for schedulers; where the head is lost, choose one that is there."""
        keys = self._controller.keys
        if keys.head in lost:
            found = (name for name in self._controller.agents.nodes if name not in lost)
            keys.note_head(next(found, keys.head))
        return bool(keys.head) and keys.head not in lost

    def _move(self, lease: str, scheduler: SchedulerState, lost: set[str]) -> bool:
        """Move one lease's scheduler if it is lost; return whether it is to be started now."""
        controller, now = self._controller, self._controller.clock.now()
        home = controller.keys.placed(lease) if scheduler is not SchedulerState.NONE else ""
        if home not in lost:
            return False
        why = f"{home}, where it ran, is lost"
        if scheduler is SchedulerState.ENDING:
            controller.submit(LeaseFreed(now=now, cause=why, lease=lease))
            return False
        controller.keys.move(lease)
        if scheduler is SchedulerState.UP:
            controller.submit(LeaseFailed(now=now, cause=why, lease=lease, why=why))
        return True
