"""After every event: give whatever can be given, until nothing more follows.

Rule 1: replacements first, then claims that have come together, then the queue, then reclaims, and at last
        growth.
Rule 2: nothing is looked at while nothing has become free or wanted, and no share is to be given out anew.

Not its business: each of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core import claims, elastic, give, reclaim, replace

if TYPE_CHECKING:
    from jupyter_gpupool.core.strokes import State


def settle(state: State) -> None:
    """Give what can be given now."""
    while state.stirred:
        state.stirred = False
        if state.tree.decay.stale(state.now):
            state.ledger.renew(state.tree.renew())
        replace.replace_missing(state)
        claims.fulfil(state)
        give.give(state)
        reclaim.run(state)
        if state.elastic:
            elastic.grow(state)


def wake(state: State, _ident: str) -> None:
    """Who was protected may be no longer."""
    if state.wake_at and state.now >= state.wake_at:
        state.wake_at = 0
        state.stirred = True
        state.version += 1
