"""Why: the reasons of a wait, the place in the queue, and when it should end.

Rule 1: whatever waits has a reason with a name, and a place.
Rule 2: looking changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_gpupool.core import grants, placement, submit, whynot
from jupyter_gpupool.core.model import LeaseState, Reason, Refusal, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jupyter_gpupool.core.state import Lease, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a lease or request is where it is."""

    #: It runs, or would start now.
    starts_now: bool
    #: Place among all that waits, from 1; 0: it does not wait.
    place: int
    #: When it should start by the time limits of what runs; 0: not known.
    expected_start: int
    #: Why it waits or is refused, the first one first.
    reasons: tuple[Refusal, ...]
    #: The same and more, for people.
    sentences: tuple[str, ...]


def explain(state: State, lease: Lease, now: int) -> Explanation:
    """Explain a lease or request of the pool."""
    del now
    if lease.state not in (LeaseState.PENDING, LeaseState.SUSPENDED):
        word = f"{lease.request.name} is {lease.state}" + (f": {lease.why}" if lease.why else "") + "."
        return Explanation(starts_now=False, place=0, expected_start=0, reasons=(), sentences=(word,))
    ahead = [each for each in order(state) if each is not lease]
    place = order(state).index(lease) + 1
    return _waiting(state, lease.request, place, ahead[: place - 1])


def order(state: State) -> list[Lease]:
    """Everything that waits, the next one first."""
    return sorted(
        (state.leases[each] for each in state.waiting), key=lambda each: (each.request.arrived, each.id)
    )


def would(state: State, request: Request, now: int) -> Explanation:
    """Explain what would become of a request if it were asked for now."""
    del now
    whole = submit.complete(state, request)
    refusals = submit.refuse(state, whole)
    if refusals:
        words = tuple(each.sentence for each in refusals)
        return Explanation(starts_now=False, place=0, expected_start=0, reasons=refusals, sentences=words)
    ahead = order(state)
    return _waiting(state, whole, len(ahead) + 1, ahead)


def _waiting(state: State, request: Request, place: int, ahead: Sequence[Lease]) -> Explanation:
    leaf = state.tree.user(request.project, request.user)
    over = state.tree.over_limit(leaf, grants.amounts(request, request.count), ever=False)
    reasons = [over] if over else []
    found = placement.place(request, state.cluster)
    if isinstance(found, placement.NoPlacement):
        reasons.append(whynot.in_sum(request, state.cluster))
    starts = not reasons
    start = 0 if starts or over else expected_start(state, request)
    if ahead and not starts:
        told = f"{len(ahead)} other request{'s are' if len(ahead) > 1 else ' is'} before it."
        reasons.append(Refusal(reason=Reason.BEHIND, sentence=told))
    return Explanation(
        starts_now=starts,
        place=0 if starts else place,
        expected_start=start,
        reasons=tuple(reasons),
        sentences=tuple(each.sentence for each in reasons),
    )


def expected_start(state: State, request: Request) -> int:
    """When there is room if every lease runs up to its time limit and nothing else starts; 0: never."""
    running = [each for each in state.leases.values() if each.slices and each.ends_at]
    with state.cluster.trying():
        for lease in sorted(running, key=lambda each: (each.ends_at, each.id)):
            for ident in lease.slices:
                state.cluster.release(ident)
            if isinstance(placement.place(request, state.cluster), placement.Placement):
                return lease.ends_at
    return 0
