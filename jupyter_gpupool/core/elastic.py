"""Elastic leases: surplus slices come when nobody waits for them, and go first.

Rule 1: a lease grows by what nobody who waits can use: after every grant, and without delaying a reservation.
Rule 2: less served users grow first; of a user's leases, the one with the least surplus.
Rule 3: surplus is never anybody's share: it counts against limits and usage, not against `served`.
Rule 4: an owner may ask for fewer slices at any time; the youngest go, gracefully.

Not its business: how surplus is taken back for others (`reclaim`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, claims, give, grants, lives, placement, replace, turns, wants
from jupyter_gpupool.core.line import Base, Kind
from jupyter_gpupool.core.model import WHOLE, Notice, Reason
from jupyter_gpupool.core.reserve import Book, count_free
from jupyter_gpupool.core.state import HOLDING, WAITING, Lease, gpus
from jupyter_gpupool.core.strokes import grows

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import LeaseScaled
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


def grow(state: State) -> None:
    """Let elastic leases grow into what nobody else can use."""
    while True:
        leases = [state.leases[ident] for ident in state.elastic]
        able = [each for each in leases if grows(each) and _may_grow(state, each)]
        if not able:
            return
        weight = state.tree.decay.at(state.now + state.defaults.charged_ahead)
        able.sort(key=lambda each: _rank(state, each, weight))
        book = heads(state)
        if not any(_grow(state, lease, book) for lease in able):
            return


def _may_grow(state: State, lease: Lease) -> bool:
    """A quick look at whether there could be room, and whether a limit stands against it."""
    base = _one(state, lease)
    if base.plain or base.together:
        if not count_free(state, base.kind):
            return False
    elif not placement.may_fit(base.request, base.kind.want, state.cluster, 1):
        return False
    leaf = state.leaf(lease.request)
    if not leaf.limited:
        return True
    wanted = bounds.most(state, lease.request, 1, lease.estimate)
    return state.tree.over_limit(leaf, wanted, ever=False) is None


def _one(state: State, lease: Lease) -> Base:
    """One more slice of a lease."""
    want = wants.want_of(lease.request)
    known = state.waiting.kinds.get(want)
    bare = not (lease.request.vram or want.instance or lease.request.cpus or lease.request.memory)
    kind = known or Kind(want, whole=bare and lease.request.milli == WHOLE)
    return Base((), kind, lease.request, 1, lease.estimate)


def _rank(state: State, lease: Lease, weight: int) -> tuple[object, ...]:
    leaf = state.leaf(lease.request)
    standing = [(each.used(weight), each.name) for each in [*leaf.path()][-2::-1]]
    return (standing, len(lease.extra), lease.request.arrived, lease.id)


def heads(state: State) -> Book:
    """The reservations of the first blocked heads of the whole queue."""
    book = Book(state)
    seen: dict[Tenant, None] = {}
    for leaf, heads in turns.turns(state):
        for _, ident, shape in heads if leaf not in seen else ():
            if not give.at_limit(state, leaf, state.leases[ident]):
                seen[leaf] = None
                book.block(state.leases[ident], shape)
                break
        if book.full:
            break
    return book


def _grow(state: State, lease: Lease, book: Book) -> bool:
    """Give a lease one more slice, if there is room for it."""
    base = _one(state, lease)
    parts = book.place(lease, base, max(1, lease.ends_at - state.now), have=lease.live())
    if not parts:
        return False
    fresh = grants.new_slice(state, lease, parts[0], extra=True)
    state.place(lease)
    grants.add_slice(state, lease, fresh)
    state.tell(
        lease, Notice.GROWN, f"{lease.request.name} grows by {gpus(fresh.milli)} that nobody needs now."
    )
    return True


def on_scaled(state: State, event: LeaseScaled) -> None:
    """Its owner wants so many slices at most from now on."""
    lease = lives.find(state, event.lease)
    if lease is None:
        return
    if event.count < (1 if lease.state in WAITING or lease.suspending else 0):
        sentence = f"{lease.request.name} cannot be scaled to {event.count} slices while it waits."
        lives.refuse(state, lease.id, Reason.BAD_REQUEST, sentence, "Give at least 1, or release it.")
        return
    drop = lease.claim is not None and event.count < lease.sure
    lease.wanted, lease.sure = event.count, min(lease.sure, event.count)
    if drop:
        claims.drop(state, lease)
    if lease.state in HOLDING:
        _let_go(state, lease)
    state.place(lease)
    state.stirred = True
    state.touch(lease)


def _let_go(state: State, lease: Lease) -> None:
    """Give back what is above the number wanted: what is missing first, then surplus, then the youngest."""
    over = len(lease.live()) + len(lease.needs) - lease.wanted
    deadline = state.now + state.defaults.drain_deadline
    fewer = "its owner wants fewer"
    for ident in list(lease.needs)[: max(0, over)]:
        replace.forgo(state, lease, ident)
        if ident in lease.slices:
            claims.shrink(state, lease, ident, deadline, fewer)
        over -= 1
    live = [each.id for each in lease.live()]
    ranked = sorted(live, key=lambda each: (each not in lease.extra, -live.index(each)))
    for ident in ranked[: max(0, over)]:
        claims.shrink(state, lease, ident, deadline, fewer)
    # What was surplus may now be all that there is: the oldest are the sure ones.
    while lease.extra and len(lease.live()) - len(lease.extra) < lease.sure:
        replace.promote(state, lease, "", next(iter(lease.extra)))
