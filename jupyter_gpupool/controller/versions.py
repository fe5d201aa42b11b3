"""Which protocol each node's agent spoke last: a controller that would not understand it does not start.

An agent that is not understood counts as silent, and what runs on its node would be given up after a while.
So a controller that is two versions ahead of a node with leases says so before anything is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool import wire

if TYPE_CHECKING:
    from jupyter_gpupool.controller.store import Store
    from jupyter_gpupool.core.pool import Pool

#: Its name among the store's facts.
FACT = "speaks"


def note(store: Store, node: str, speaks: int) -> None:
    """Remember what a node's agent speaks.

    Raises:
        StoreError: It is not remembered.
    """
    known = store.get(FACT, {})
    if known.get(node) != speaks:
        store.put(FACT, {**known, node: speaks})


def objection(store: Store, pool: Pool) -> str:
    """Say why a controller of this version must not start on this pool; "" where it may."""
    busy = {slice_.node for lease in pool.leases.values() for slice_ in lease.slices.values()}
    known = store.get(FACT, {})
    found = (wire.misunderstanding(node, known[node]) for node in sorted(busy & set(known)))
    sentence = next(filter(None, found), "")
    return f"{sentence} Leases run there; --any-agents starts all the same." if sentence else ""
