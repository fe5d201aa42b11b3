"""Parts on their way from one lease to another: committed, held, granted or given up.

Rule 1: from the commitment on, the claimant is served and charged, and the victims are not: nobody is taken
        from twice for one wish.
Rule 2: a freed part is held for its claimant, and becomes free for all when the claim is over.
Rule 3: a claim that cannot be fulfilled in time is given up, and its request waits on in its old place.

Not its business: who gives back (`reclaim`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, grants, lives, placement
from jupyter_gpupool.core.ledger import Reclaim, Victim
from jupyter_gpupool.core.model import ANY, GB, MINUTE, SECOND, DrainMode, Notice
from jupyter_gpupool.core.state import WORKING, Claim, Lease, Leaving, gpus
from jupyter_gpupool.core.strokes import limits
from jupyter_gpupool.core.tree import apart

if TYPE_CHECKING:
    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.core.plan import Pick, Plan
    from jupyter_gpupool.core.strokes import State


def commit(plan: Plan, parts: tuple[Part, ...]) -> None:
    """Let the picks of a plan give back, and hold what is free already for the claimant."""
    state, lease = plan.state, plan.lease
    before = state.tree.potential()
    deadline = state.now + state.defaults.grace
    awaited = _awaited(plan, parts)
    claim = Claim(since=state.now, until=deadline + state.defaults.hold, parts=parts, awaited=awaited)
    lease.claim = claim
    state.awaited.update(dict.fromkeys(awaited, lease.id))
    _hold_free(state, lease, awaited)
    victims = tuple(_take(plan, picks, deadline) for picks in _by_lease(plan))
    claim.charges = tuple(state.price(part) for part in parts)
    _count(state, lease, 1)
    state.place(lease)
    lease.why = f"others give back {gpus(sum(part.milli for part in parts))} for it"
    state.at(claim.until, "claim", lease.id)
    state.touch(lease)
    # It stands in nobody's way any more: who was held up by its reservation may start.
    state.stirred = True
    state.ledger.note(_record(plan, parts, victims, before))


def _record(
    plan: Plan, parts: tuple[Part, ...], victims: tuple[Victim, ...], before: tuple[int, int]
) -> Reclaim:
    state, leaf, request = plan.state, plan.leaf, plan.lease.request
    return Reclaim(
        now=state.now,
        lease=plan.lease.id,
        user=request.user,
        project=request.project,
        milli=sum(part.milli for part in parts),
        served=leaf.served[ANY],
        share=leaf.share[ANY],
        victims=victims,
        before=before,
        after=state.tree.potential(),
        number=state.ledger.count + 1,
    )


def _by_lease(plan: Plan) -> list[list[Pick]]:
    """The picks of each lease, in the order in which the leases were picked first."""
    found: dict[str, list[Pick]] = {}
    for pick in plan.picks:
        found.setdefault(pick.lease.id, []).append(pick)
    return list(found.values())


def _awaited(plan: Plan, parts: tuple[Part, ...]) -> dict[str, str]:
    """The victims' slices on devices, or nodes, that the claimant is to get."""
    devices = {part.device for part in parts}
    nodes = {part.node for part in parts if not part.device}
    slices = [each for pick in plan.picks for each in pick.slices]
    return {each.id: each.device for each in slices if each.device in devices or each.node in nodes}


def _hold_free(state: State, lease: Lease, awaited: dict[str, str]) -> None:
    """Hold those parts of the claim that are free already."""
    assert lease.claim is not None
    given = set(awaited.values())
    for number, part in enumerate(lease.claim.parts):
        if part.device not in given:
            state.hold(lease, str(number), part)


def _take(plan: Plan, picks: list[Pick], deadline: int) -> Victim:
    """Let one lease give back: its owner is told at once, its running tasks may finish up to the deadline."""
    state, lease, number = plan.state, picks[0].lease, plan.state.ledger.count + 1
    slices, whole = [each for pick in picks for each in pick.slices], any(pick.whole for pick in picks)
    victim, why = _victim(plan, picks[0], slices, whole=whole), _why(plan, picks[0], whole=whole)
    held = [list(each) for each in lease.holds] if whole else []
    said = {"for": plan.lease.id, "deadline": deadline, "slices": [each.id for each in slices], "lost": held}
    state.tell(lease, Notice.RECLAIM, _told(state, lease, victim, why), json.dumps(said))
    lease.taken_at = state.now
    if whole:
        lives.suspend(state, lease, deadline, why, number)
        return victim
    for slice_ in slices:
        shrink(state, lease, slice_.id, deadline, why, reclaim=number)
    state.place(lease)
    return victim


def _victim(plan: Plan, pick: Pick, slices: list[Slice], *, whole: bool) -> Victim:
    lease, (_, theirs) = pick.lease, apart(plan.leaf, pick.leaf)
    return Victim(
        lease=lease.id,
        user=lease.request.user,
        project=lease.request.project,
        slices=len(slices),
        milli=sum(each.milli for each in slices),
        whole=whole,
        ran=lease.ran + plan.state.now - lease.granted_at,
        of=theirs.title(),
        served=theirs.served[ANY],
        share=theirs.share[ANY],
    )


def _why(plan: Plan, pick: Pick, *, whole: bool) -> str:
    mine, other = apart(plan.leaf, pick.leaf)
    above = f"and {other.title()} above its ({gpus(other.share[ANY])})" if whole else "and surplus goes first"
    return f"{mine.title()} is below its share ({gpus(mine.share[ANY])}) {above}"


def _told(state: State, lease: Lease, victim: Victim, why: str) -> str:
    """Tell an owner what is taken, when and why, and what is lost by it."""
    name, wait = lease.request.name, _span(state.defaults.grace)
    if not victim.whole:
        return f"{name} gives back {gpus(victim.milli)} of surplus in {wait}: {why}."
    return (
        f"{name} will be suspended in {wait}: {why}. Running tasks may finish until then;"
        f" queued tasks stay, finished results are computed again; {_lost(lease)}."
    )


def _span(milliseconds: int) -> str:
    return f"{milliseconds / MINUTE:g} min" if milliseconds >= MINUTE else f"{milliseconds / SECOND:g} s"


def _lost(lease: Lease) -> str:
    """Name what a lease loses for good with its workers, with its size."""
    if not lease.holds_count:
        return "scattered data and actors are lost; it has none now"
    named = ", ".join(f"{name} ({_size(size)})" for name, size in lease.holds)
    more = lease.holds_count - len(lease.holds)
    rest = f" and {more} more" if more > 0 else ""
    return f"scattered data and actors are lost, {_size(lease.holds_size)} in all: {named}{rest}"


def _size(size: int) -> str:
    return f"{size / GB:.3g} GB" if size >= GB // 10 else f"{size / 1_000_000:.3g} MB"


def shrink(state: State, lease: Lease, ident: str, deadline: int, why: str, *, reclaim: int = 0) -> None:
    """Take one slice out of a lease that goes on without it."""
    state.unserve(lease, ident)
    slice_: Slice | None = lease.slices[ident]
    while slice_:
        # With a replacement goes what it was to replace.
        lease.leaving[slice_.id] = Leaving(mode=DrainMode.FINISH, deadline=deadline, why=why, reclaim=reclaim)
        grants.drain(state, lease, slice_)
        slice_ = lease.slices.get(slice_.replaces)
        slice_ = slice_ if slice_ and slice_.state in WORKING else None


def _count(state: State, lease: Lease, sign: int) -> None:
    """Serve and charge a claimant in advance, or no longer."""
    assert lease.claim is not None
    leaf = state.leaf(lease.request)
    for charge in lease.claim.charges:
        state.tree.hold(leaf, limits(charge), sign)
        state.tree.serve(leaf, charge.model, sign * charge.milli)


def fulfil(state: State) -> None:
    """Grant the claims whose parts have all come free."""
    for ident in [ident for ident in state.claims if ident in state.ready] if state.ready else ():
        lease = state.leases[ident]
        if lease.claim and not lease.claim.awaited:
            _fulfil(state, lease)


def _fulfil(state: State, lease: Lease) -> None:
    claim = lease.claim
    assert claim is not None
    with state.cluster.trying():
        for key in claim.held:
            if state.cluster.taken(key):  # else its device is gone
                state.cluster.release(key)
        found = _parts(state, lease, claim)
    drop(state, lease)
    if found:
        grants.grant(state, lease, found)


def _parts(state: State, lease: Lease, claim: Claim) -> tuple[Part, ...] | None:
    """The parts as planned, or a place among what is held and free."""
    with state.cluster.trying():
        try:
            for number, part in enumerate(claim.parts):
                state.cluster.hold(f"{lease.id}?{number}", lease.id, part)
        except (ValueError, KeyError):  # not free after all, or gone
            pass
        else:
            if not any(state.barred(part.node, part.device) for part in claim.parts):
                return claim.parts
    asked = bounds.narrowed(state, lease.request, lease.milli)
    found = placement.place(asked, state.cluster, count=lease.sure)
    return found.parts if isinstance(found, placement.Placement) else None


def drop(state: State, lease: Lease) -> None:
    """End a claim: what is held is free, and the request waits as before."""
    claim = lease.claim
    if claim is None:
        return
    for key in claim.held:
        if state.cluster.taken(key):
            state.cluster.release(key)
    for ident in claim.awaited:
        state.awaited.pop(ident, None)
    _count(state, lease, -1)
    lease.claim = None
    lease.why = ""
    state.place(lease)
    state.touch(lease)
    state.stir()


def due(state: State, ident: str) -> None:
    """What was to be given back has not come in time."""
    lease = state.leases.get(ident)
    if lease and lease.claim and state.now >= lease.claim.until:
        drop(state, lease)
