"""What is given to those who wait, front of the queue first.

Rule 1: a grant is exact and whole: all slices of a request at once, or none.
Rule 2: the queue goes by `turns`: first what stays within the shares, less served first, level by level;
        then by each user's own order.
Rule 3: who is at a hard limit is passed over and holds up nobody.
Rule 4: the first blocked of each user, up to K of them, get reservations; others pass only if they delay
        none.

Not its business: taking back (`reclaim`), and replacements (`replace`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, grants, placement, turns
from jupyter_gpupool.core.reserve import Book, count_free

if TYPE_CHECKING:
    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.line import Shape
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


def give(state: State) -> None:
    """Grant all that can be granted now."""
    while True:
        found = next_grant(state)
        if not found:
            return
        grants.grant(state, *found)


def next_grant(state: State) -> tuple[Lease, tuple[Part, ...]] | None:
    """The first in the queue that can start, and where."""
    open_ = may_fit(state)
    if not open_:
        return None
    state.tree.refresh()
    round_ = _Round(state, open_, Book(state))
    for leaf, heads in turns.turns(state):
        found = round_.first_of(leaf, heads)
        if found:
            return found
        if round_.over():
            return None
    return None


@dataclass(slots=True)
class _Round:
    """One walk along the queue."""

    state: State
    #: Shapes for which there may be room.
    open_: dict[Shape, None]
    book: Book
    #: Users whose first blocked request is in the book.
    seen: dict[Tenant, None] = field(default_factory=dict)
    #: Only those shapes are open that may pass so many heads.
    sifted: int = 0

    def over(self) -> bool:
        """Nobody further back can start."""
        if self.book.blocked and not self.state.defaults.passing:
            return True
        if self.sifted != self.book.count:
            self.open_ = self.book.passing(self.open_)
            self.sifted = self.book.count
        return not self.open_

    def first_of(self, leaf: Tenant, heads: list[turns.Head]) -> tuple[Lease, tuple[Part, ...]] | None:
        """The first of a user's requests that can start; its first that cannot becomes a blocked head."""
        state, book = self.state, self.book
        if book.full and not any(shape in self.open_ for _, _, shape in heads):
            return None
        passing = state.defaults.passing
        for _, ident, shape in heads:
            hopeful = shape in self.open_ and shape.base.failed != state.freed
            if passing and not hopeful and leaf in self.seen:
                continue
            lease = state.leases[ident]
            if at_limit(state, leaf, lease):
                if not passing:
                    break
                continue
            parts = book.place(lease, shape.base, shape.limit) if hopeful else None
            if parts:
                return lease, parts
            if leaf not in self.seen:
                self.seen[leaf] = None
                book.block(lease, shape)
            if not passing:
                break
        return None


def may_fit(state: State) -> dict[Shape, None]:
    """The shapes for which, at a quick look, there could be room."""
    found: dict[Shape, None] = {}
    for kind in state.waiting.kinds.values():
        free = count_free(state, kind) if kind.whole else 0
        for base in kind.bases if free or not kind.whole else ():
            if base.failed != state.freed and (
                base.count <= free
                if base.plain or base.together
                else placement.may_fit(base.request, kind.want, state.cluster, base.count)
            ):
                found.update(base.shapes)
    return found


def at_limit(state: State, leaf: Tenant, lease: Lease) -> bool:
    """Whether a hard limit keeps a request waiting."""
    return leaf.limited and bounds.reached(state, lease) is not None
