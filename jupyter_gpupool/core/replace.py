"""Moving work off slices: a replacement first, then the drain, then the release.

Rule 1: a replacement goes before everything that waits, and is charged in the place of what it replaces.
Rule 2: it may use what is held for others only while its project stays within its quota.
Rule 3: where the device does not work any more and nothing is free, the slice is drained at once: the lease
        goes on with fewer, and what is missing is first in line.
Rule 4: a lease with surplus fills its gap with that, and wants no replacement.
Rule 5: a slice is replaced once, however many replacements fail: the next one is for the first of them.

Not its business: why something has to move (`nodes`), and what a lease gets at first (`give`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, claims, grants, placement, wants
from jupyter_gpupool.core.model import ANY, DrainMode, Notice, Slice, SliceState
from jupyter_gpupool.core.state import HOLDING, WORKING, Lease, Leaving

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Request
    from jupyter_gpupool.core.strokes import State


def leave(state: State, lease: Lease, slice_: Slice, leaving: Leaving) -> None:
    """Move the work of a slice elsewhere: grant, drain, release. Said again, the more urgent counts."""
    if slice_.state is SliceState.STOPPING:
        return
    known = lease.leaving.get(slice_.id)
    if known and (known.mode, -known.deadline) >= (leaving.mode, -leaving.deadline):
        return
    lease.leaving[slice_.id] = leaving
    state.at(leaving.deadline, "lease", lease.id)
    state.touch(lease)
    if slice_.state is SliceState.DRAINING:
        grants.order_drain(state, lease, slice_)
        return
    surplus = slice_.id in lease.extra
    if surplus:
        state.unserve(lease, slice_.id)
        state.place(lease)
    elif lease.state in HOLDING:
        want(state, lease, slice_, slice_.device, gone=False)
        replace_lease(state, lease)
    hopeless = leaving.mode is DrainMode.NOW and not replaced(lease, slice_.id)
    if hopeless or surplus or state.now >= leaving.deadline:
        drain(state, lease, slice_)


def want(state: State, lease: Lease, slice_: Slice, device: str, *, gone: bool = True) -> None:
    """Put a lost slice first in line for what becomes free; `device` is to be avoided."""
    ident = slice_.id
    if ident in lease.needs or ident in lease.extra or ident in lease.unserved:
        return
    if replaced(lease, ident) or _awaited(lease, ident):
        return
    if gone and slice_.replaces in lease.leaving and slice_.replaces not in lease.charges:
        # A replacement that failed: what it was to replace is still there and still to be replaced.
        lease.charges[slice_.replaces] = lease.charges.pop(ident)
        lease.meters[slice_.replaces] = lease.meters.pop(ident)
        ident = slice_.replaces
    spare = next((each for each in reversed(lease.extra) if each in [one.id for one in lease.live()]), None)
    if spare:
        promote(state, lease, ident, spare)
        return
    lease.needs[ident] = device
    state.needy[lease.id] = None
    state.stirred = True
    state.touch(lease)


def promote(state: State, lease: Lease, lost: str, spare: str) -> None:
    """Let a surplus slice take the place of one for sure."""
    charge = lease.charges[spare]
    lease.extra.pop(spare)
    if lost:
        state.unserve(lease, lost)
    state.tree.serve(state.leaf(lease.request), charge.model, charge.milli)
    state.place(lease)


def forgo(state: State, lease: Lease, ident: str) -> None:
    """Want no replacement any more."""
    lease.needs.pop(ident, None)
    if not lease.needs:
        state.needy.pop(lease.id, None)
    slice_ = lease.slices.get(ident)
    if slice_ is None:
        state.discharge(lease, ident)
    elif slice_.state not in WORKING:
        state.unserve(lease, ident)
    state.touch(lease)


def replaced(lease: Lease, ident: str) -> bool:
    """The slice has a replacement already, or its replacement has one."""
    heirs = [each for each in lease.slices.values() if each.replaces == ident]
    return any(each.state in WORKING or replaced(lease, each.id) for each in heirs)


def _awaited(lease: Lease, ident: str) -> bool:
    """A replacement of the slice, or of its replacement, is wanted itself."""
    heirs = [each.id for each in lease.slices.values() if each.replaces == ident]
    return any(each in lease.needs or _awaited(lease, each) for each in heirs)


def drain(state: State, lease: Lease, slice_: Slice) -> None:
    """Take a slice's worker out of its lease, with or without a replacement."""
    if slice_.state not in WORKING:
        return
    grants.drain(state, lease, slice_)
    if slice_.id in lease.needs:
        left, least = len(lease.live()), lease.request.min_count or lease.request.count
        goes = f"goes on with {left} of {lease.request.count} slices" if left >= least else "waits"
        sentence = f"{lease.request.name} {goes} until a replacement is free; it is first in line."
        state.tell(lease, Notice.SHRUNK, sentence)


def replace_missing(state: State) -> None:
    """Give replacements to those who wait for one, longest waiting first."""
    for ident in list(state.needy):
        replace_lease(state, state.leases[ident])


def replace_lease(state: State, lease: Lease) -> None:
    """Give a lease what it lost, as far as there is room."""
    for ident, device in list(lease.needs.items()):
        found = _find(state, lease, ident, device)
        if found is None:
            continue
        del lease.needs[ident]
        fresh = grants.new_slice(state, lease, found.parts[0], replaces=ident)
        state.place(lease)
        grants.add_slice(state, lease, fresh)
        if device:  # else no work moves: all that the slice had is gone
            state.tell(lease, Notice.MIGRATING, _moves(state, lease, device, fresh.device))
    if not lease.needs:
        state.needy.pop(lease.id, None)


def _moves(state: State, lease: Lease, old: str, new: str) -> str:
    """Say where work goes, and what is wrong where it was."""
    record = state.devices.get(old)
    gone = f" from {state.device_name(old)}" if record else ""
    node = state.nodes[record.device.node].cordoned if record else ""
    why = (record.cordoned or node or record.sentence).rstrip(".") if record else ""
    return f"{lease.request.name}: work moves{gone} to {state.device_name(new)}{f' ({why})' if why else ''}."


def _find(state: State, lease: Lease, ident: str, device: str) -> placement.Placement | None:
    """A place for one more slice: elsewhere if possible; if there is none, on what is held for others."""
    have = [each for each in lease.live() if each.id != ident]
    known = lease.charges.get(ident)
    asked = bounds.narrowed(state, lease.request, lease.estimate, keep=known.model if known else "")
    free = placement.may_fit(lease.request, wants.want_of(lease.request), state.cluster, 1)
    tries: list[tuple[Request, list[str]]] = [(avoiding(asked, device), []), (asked, [])] if free else []
    if state.claims and _within_quota(state, lease):
        tries.append((asked, list(state.claims)))
    for request, allow in tries:
        found = placement.place(request, state.cluster, count=1, have=have, allow=allow)
        if isinstance(found, placement.Placement):
            for holder in allow:
                _take_from(state, holder, found)
            return found
    return None


def _within_quota(state: State, lease: Lease) -> bool:
    """Its project is served within its quota, the missing slice included."""
    stated = [tenant for tenant in state.leaf(lease.request).path() if tenant.quota]
    quotas = [(tenant, tenant.quota.get(ANY, sum(tenant.quota.values()))) for tenant in stated]
    return bool(quotas) and all(tenant.served[ANY] <= quota for tenant, quota in quotas)


def _take_from(state: State, holder: str, found: placement.Placement) -> None:
    """End the claim whose held part is used."""
    claimant = state.leases[holder]
    used = {part.device for part in found.parts}
    if claimant.claim and any(part.device in used for part in claimant.claim.held.values()):
        claims.drop(state, claimant)


def avoiding(request: Request, device: str) -> Request:
    """The same request, elsewhere."""
    return dataclasses.replace(request, exclude=(*request.exclude, device)) if device else request
