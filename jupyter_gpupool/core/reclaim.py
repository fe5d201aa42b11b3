"""Who gives back, for whom.

Rule 1: only for a request with which its user stays within their deserved share, and every project of
        theirs within its own, or not above what it is served already.
Rule 2: `victims` says who gives back, `fits` how many of them it takes, `plan` whether it may be done: only
        if the potential strictly drops. So with demands, quotas and devices fixed, reclaims come to an end.
Rule 3: what is freed is held for the claimant, for a while (`claims`).
Rule 4: where all that could be taken is still protected, the pool looks again when the first is not.

Not its business: how a lease is suspended (`lives`), and the order of the queue (`give`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, claims, give, turns, victims
from jupyter_gpupool.core.fits import Ahead, Counted, Placed
from jupyter_gpupool.core.model import ANY
from jupyter_gpupool.core.plan import Plan
from jupyter_gpupool.core.state import Lease
from jupyter_gpupool.core.tree import Tenant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.line import Kind, Shape
    from jupyter_gpupool.core.reserve import Book
    from jupyter_gpupool.core.strokes import State


#: Who is over their share and has something that can be taken now, by who is above them.
Able = dict[Tenant, list[Tenant]]
#: Of each user, as far as asked, the leases that can be taken; see `Plan.ranked`.
Ranked = dict[Tenant, list[Lease]]


def run(state: State) -> None:
    """Let those above their share give back for those below."""
    ranked: Ranked = {}
    state.tree.refresh()
    while (state.tree.overs or state.elastic) and state.tree.hungry:
        if not _one(state, ranked):
            return
        state.tree.refresh()


def _one(state: State, ranked: Ranked) -> bool:
    """Find the first in the queue for whom others can give back, and let them."""
    if not any(any(_within(state, leaf)) for leaf in state.tree.hungry):
        return False
    able = victims.able(state)
    if able and _first(state, able, ranked):
        return True
    wake = victims.next_able(state)
    if _sooner(state, wake):
        state.wake_at = wake
        state.at(wake, "wake", "")
    return False


def _first(state: State, able: Able, ranked: Ranked) -> bool:
    """Let those who are able give back for the first in the queue for whom that is enough."""
    ahead = Ahead(state)
    surplus = state.capacity[ANY] if state.elastic else 0
    for leaf, most in _claimants(state, able, state.tree.root, surplus):
        hopeless: dict[Kind, int] = {}
        for _, _, shape, lease in _within(state, leaf):
            base = shape.base
            if shape.total > most or (base.plain and base.count >= hopeless.get(base.kind, base.count + 1)):
                continue  # nobody could give back so much; or a smaller one was not to be had
            plan = Plan(state, lease, leaf, shape, able, ranked)
            parts = think(plan, ahead.of(leaf))
            if parts:
                claims.commit(plan, parts)
                _forget(ranked, plan)
                return True
            if base.plain:
                hopeless[base.kind] = base.count
    return False


def _forget(ranked: Ranked, plan: Plan) -> None:
    """Rank the leases anew of those who have given back, and of all where the quotas of several count."""
    if any(pick.lease.request.interactive for pick in plan.picks):
        ranked.clear()
    for pick in plan.picks:
        ranked.pop(pick.leaf, None)


def _claimants(state: State, able: Able, above: Tenant, most: int) -> Iterator[tuple[Tenant, int]]:
    """The users for whom somebody could give back, in the order of the queue, and how much at most.

    Somebody can where a sibling is over its share, as far as there is room in one's own; anybody can while
    there is surplus.
    """
    over = [each for each in able.get(above, ()) if each in state.tree.overs]
    hungry = [each for each in above.children.values() if each.hungry]
    for tenant in sorted(hungry, key=turns.ranks_of(state).standing):
        reach = max(most, _room(tenant) if any(each is not tenant for each in over) else 0)
        if tenant.user and reach > 0:
            yield tenant, reach
        elif reach > 0 or tenant in able:
            yield from _claimants(state, able, tenant, reach)


def preview(state: State, lease: Lease) -> tuple[str, ...]:
    """The names of the leases that would give back for a waiting request, now; () if none would do."""
    leaf = state.leaf(lease.request)
    state.tree.refresh()
    able = victims.able(state)
    for _, ident, shape, _ in _within(state, leaf) if able else ():
        plan = Plan(state, lease, leaf, shape, able, {})
        if ident == lease.id and think(plan, Ahead(state).of(leaf)):
            return tuple(pick.lease.request.name for pick in plan.picks)
    return ()


def _room(leaf: Tenant) -> int:
    """How much more a user may be served within their own share."""
    return leaf.share[ANY] - leaf.served[ANY]


def _within(state: State, leaf: Tenant) -> Iterator[tuple[int, str, Shape, Lease]]:
    """A user's requests that keep them within their share and may go now, one of each shape."""
    room = _room(leaf)
    if leaf.line is None or leaf.line.least > room:
        return
    heads, _ = turns.split(state, leaf, room)
    for rank, ident, shape in heads:
        lease = state.leases[ident]
        if shape.total <= room and not give.at_limit(state, leaf, lease):
            yield rank, ident, shape, lease


def _sooner(state: State, when: int) -> bool:
    """Whether the pool is to look again at a time, and would not do so by then."""
    return bool(when) and (not state.wake_at or when < state.wake_at or state.wake_at <= state.now)


def think(plan: Plan, ahead: Book) -> tuple[Part, ...] | None:
    """Pick who gives back, as few as will do; the parts that the request then gets, or None."""
    state, request, base = plan.state, plan.lease.request, plan.shape.base
    counted = base.plain and bounds.narrowed(state, request, plan.shape.total) is request
    fits = Counted(plan, ahead) if counted else Placed(plan, ahead)
    for pick in victims.candidates(plan, fits.useful):
        plan.picks.append(pick)
        plan.take(pick)
        if fits.enough():
            break
    if not plan.picks or not fits.enough(last=True):
        return None
    parts = fits.put_back()
    return parts if parts and plan.picks and plan.allowed(parts) else None
