"""Why: the reasons of a wait, the place in the queue, and when it should end.

Rule 1: whatever waits has a reason with a name, a place, and a start if the time limits of what runs allow
        one.
Rule 2: the reasons come in the order in which they are met: limit, order, placement, reservation.
Rule 3: looking changes nothing. A dry run puts the request into the queue, looks, and takes it out again.

Not its business: how any of this is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, elastic, forecast, give, placement, reclaim, submit, turns, whynot
from jupyter_gpupool.core.model import ANY, MINUTE, WHOLE, LeaseState, Reason, Refusal, Request
from jupyter_gpupool.core.state import WAITING, Lease, gpus
from jupyter_gpupool.core.tree import apart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.reserve import Reservation
    from jupyter_gpupool.core.state import Claim
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


#: Reasons to wait that are about room: there may be some for something else.
LACKING = (Reason.NO_ROOM, Reason.NO_MIG_ROOM, Reason.NO_CPUS, Reason.NO_HOST_MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a lease or request is where it is."""

    #: It would start now.
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
    if lease.state not in WAITING:
        return _runs(lease)
    if lease.claim:
        return _claims(state, lease, lease.claim, now)
    return _waits(state, lease)


def _runs(lease: Lease) -> Explanation:
    stands = "being suspended" if lease.suspending else lease.state
    word = f"{lease.request.name} is {stands}" + (f": {lease.why}" if lease.why else "") + "."
    return Explanation(starts_now=False, place=0, expected_start=0, reasons=(), sentences=(word,))


def _claims(state: State, lease: Lease, claim: Claim, now: int) -> Explanation:
    """Others give back for it."""
    until = claim.until - state.defaults.hold
    told = f"{lease.why[0].upper()}{lease.why[1:]}, {_at_the_latest(until - now)}."
    reason = Refusal(reason=Reason.RECLAIMING, sentence=told)
    place = [*state.claims].index(lease.id) + 1
    return Explanation(
        starts_now=False, place=place, expected_start=until, reasons=(reason,), sentences=(told,)
    )


def _waits(state: State, lease: Lease) -> Explanation:
    ahead = before(state, lease)
    book = elastic.heads(state).resolve()
    reasons = tuple(_reasons(state, lease, ahead, book))
    start = _start(state, lease, ahead, book, reasons)
    reasons = tuple(_or_wait(each, start - state.now) for each in reasons)
    words = tuple(each.sentence for each in reasons)
    if lease.state is LeaseState.SUSPENDED and lease.why:
        words = (f"{lease.request.name} was suspended: {lease.why}.", *words)
    place = len(state.claims) + len(ahead) + 1
    return Explanation(starts_now=False, place=place, expected_start=start, reasons=reasons, sentences=words)


def order(state: State) -> Iterator[Lease]:
    """Everything that waits in the queue, the next one first."""
    for leaf in turns.order(state):
        for _, ident in leaf.line.all() if leaf.line else ():
            yield state.leases[ident]


def places(state: State, most: int) -> list[str]:
    """The ids of what waits, the next one first: those for whom others give back, then the queue."""
    return list(islice(chain(state.claims, (each.id for each in order(state))), most))


def before(state: State, lease: Lease) -> list[Lease]:
    """What waits ahead of a request."""
    ahead: list[Lease] = []
    for each in order(state):
        if each is lease:
            break
        ahead.append(each)
    return ahead


def queue(state: State) -> list[tuple[str, int]]:
    """All that waits, the next one first, with the time at which each should start (0: not known)."""
    leases = list(order(state))
    kept = {each.lease.id: each.start for each in elastic.heads(state).resolve()}
    starts = forecast.starts(state, leases)
    return [(each.id, kept.get(each.id, starts[each.id])) for each in leases]


def _start(
    state: State,
    lease: Lease,
    ahead: list[Lease],
    book: list[Reservation],
    reasons: tuple[Refusal, ...],
) -> int:
    if [each.reason for each in reasons] == [Reason.AT_LIMIT]:
        return forecast.within_limit(state, lease)
    kept = {each.lease.id: each.start for each in book}
    return kept.get(lease.id) or forecast.starts(state, [*ahead, lease])[lease.id]


def _or_wait(refusal: Refusal, left: int) -> Refusal:
    """Add to the nearest thing that would start now how long it takes to get what was asked for."""
    if refusal.reason not in LACKING or left <= 0:
        return refusal
    wait = f"wait about {_about(left)}."
    nearest = refusal.advice.removesuffix(".")
    return replace(refusal, advice=f"{nearest}, or {wait}" if nearest else wait.capitalize())


def _at_the_latest(left: int) -> str:
    """By when something is to have happened, in so many milliseconds.

    >>> _at_the_latest(61_000), _at_the_latest(0)
    ('in 2 min at the latest', 'any moment now')
    """
    return f"in {-(-left // MINUTE)} min at the latest" if left > 0 else "any moment now"


def _about(left: int) -> str:
    """Milliseconds in words, as exactly as such a forecast is worth.

    >>> _about(38 * 60_000), _about(3 * 3_600_000 + 1), _about(1)
    ('40 min', '4 h', '1 min')
    """
    minutes = -(-left // MINUTE)
    if minutes > 120:
        return f"{-(-minutes // 60)} h"
    return f"{minutes if minutes <= 10 else -(-minutes // 5) * 5} min"


def _reasons(state: State, lease: Lease, ahead: list[Lease], book: list[Reservation]) -> Iterator[Refusal]:
    leaf = state.leaf(lease.request)
    if not state.cluster.nodes:
        yield Refusal(reason=Reason.NO_NODES, sentence="No node has joined the pool yet.")
        return
    over = bounds.reached(state, lease)
    if over:
        yield over
        return
    if ahead:
        yield _behind(state, leaf, lease, ahead)
    request = bounds.narrowed(state, lease.request, lease.milli)
    found = placement.place(request, state.cluster, count=lease.sure)
    if isinstance(found, placement.NoPlacement):
        if shut := request is not lease.request and bounds.shut(state, lease.request, lease.milli):
            yield shut
        yield whynot.in_sum(request, state.cluster, count=lease.sure)
    elif kept := [each for each in book if each.lease is not lease]:
        yield _reserved(state, kept[0])
    elif not ahead:
        yield Refusal(reason=Reason.BEHIND, sentence="It is its turn: it starts with the next event.")


def _behind(state: State, leaf: Tenant, lease: Lease, ahead: list[Lease]) -> Refusal:
    """Who is ahead, and why."""
    first = ahead[0]
    theirs = state.leaf(first.request)
    count = "1 request is" if len(ahead) == 1 else f"{len(ahead)} requests are"
    if theirs is leaf:
        return Refusal(
            reason=Reason.BEHIND, sentence=f"{count} ahead of it, first your own {first.request.name}."
        )
    why = _less_served(*apart(leaf, theirs))
    advice = "" if lease.milli <= WHOLE else "A request for fewer GPUs may start earlier."
    return Refusal(reason=Reason.BEHIND, sentence=f"{count} ahead of it: {why}.", advice=advice)


def _less_served(mine: Tenant, other: Tenant) -> str:
    """Why another tenant comes before one's own sibling of it."""
    full, theirs_full = (each.served[ANY] >= each.share[ANY] for each in (mine, other))
    if full is theirs_full:
        return f"{other.title()} has used less lately than {mine.title()}"
    if full:
        below = f"{other.title()} is below its share ({_served(other)})"
        return f"{below}, {mine.title()} is not ({_served(mine)})"
    return f"{mine.title()} is below its share ({_served(mine)}), but waits behind its own requests"


def _served(tenant: Tenant) -> str:
    """What a tenant is served of its share, or above it."""
    served, share = tenant.served[ANY], tenant.share[ANY]
    if served > share:
        return f"{gpus(_hundredths(served))}, {gpus(_hundredths(served - share))} more"
    return f"{_hundredths(served) / WHOLE:g} of {gpus(_hundredths(share))}"


def _hundredths(milli: int) -> int:
    """Round to hundredths of a GPU: more is noise in a sentence; what is less than one stays."""
    return round(milli, -1) or milli


def _reserved(state: State, kept: Reservation) -> Refusal:
    who, left = f"{kept.lease.request.user}'s {kept.lease.request.name}", kept.start - state.now
    # Rounded down: what ends a moment after the head's start would delay it, and may not pass.
    short = max(0, left // MINUTE)
    return Refusal(
        reason=Reason.RESERVED,
        sentence=f"What is free is kept for {who}, which is to start {_at_the_latest(left)}.",
        advice=f"A time limit of at most {short} min could start now." if short else "",
        field="time_limit",
    )


# ---------------------------------------------------------------------------------------------- dry run


def would(state: State, request: Request, now: int) -> Explanation:
    """Explain what would become of a request if it were asked for now."""
    whole = submit.complete(state, request)
    refusals = submit.refuse(state, whole)
    if refusals:
        words = tuple(each.sentence for each in refusals)
        return Explanation(starts_now=False, place=0, expected_start=0, reasons=refusals, sentences=words)
    if whole.id in state.leases:
        whole = replace(whole, id=f"{whole.id}?")
    lease = submit.make(state, whole)
    kept = (state.now, state.version, state.stirred)
    state.now = max(state.now, now)
    state.leases[lease.id] = lease
    try:
        state.place(lease)
        return _would(state, lease, now)
    finally:
        lease.state = LeaseState.ENDED
        state.place(lease)
        state.tree.refresh()
        del state.leases[lease.id]
        state.now, state.version, state.stirred = kept


def _would(state: State, lease: Lease, now: int) -> Explanation:
    found = give.next_grant(state)
    if found and found[0] is lease:
        names = ", ".join(dict.fromkeys(state.device_name(part.device) for part in found[1]))
        told = f"It would start now, on {names}."
        return Explanation(starts_now=True, place=0, expected_start=now, reasons=(), sentences=(told,))
    victims = reclaim.preview(state, lease)
    if victims:
        start = state.now + state.defaults.grace
        told = f"Others above their share would give back for it: {', '.join(victims)}."
        reason = Refusal(reason=Reason.RECLAIMING, sentence=told)
        return Explanation(
            starts_now=False, place=1, expected_start=start, reasons=(reason,), sentences=(told,)
        )
    return explain(state, lease, now)
