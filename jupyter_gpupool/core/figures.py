"""Figures for people: what everybody is served, deserves and has used.

Rule 1: what still runs counts up to now. Amounts are thousandths of a GPU, times milliseconds if used.
Rule 2: looking changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.ledger import Account, Hours
from jupyter_gpupool.core.model import encode
from jupyter_gpupool.core.quotas import whole

if TYPE_CHECKING:
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


def figures(state: State, now: int) -> dict[str, Any]:
    """All figures: by user, by project, by account of the ledger, and the latest reclaims."""
    accounts = running(state, now)
    state.tree.refresh()
    sums = _sums(state, accounts, now)
    decay = state.tree.decay
    return {
        "capacity": dict(state.capacity),
        "users": [_row(state, each, now, sums) for each in state.tree.users.values()],
        "projects": [_row(state, each, now, sums) for each in state.tree.tenants.values()],
        "accounts": [{**encode(each), "decayed": decay.worth(each.kept, now)} for each in accounts],
        "reclaims": state.ledger.count,
        "latest_reclaims": encode(state.ledger.reclaims[-100:]),
    }


def running(state: State, now: int) -> list[Account]:
    """The accounts of the ledger, with what has run since their meters started."""
    found = {key: replace(each) for key, each in state.ledger.accounts.items()}
    decay = state.tree.decay
    for lease in state.leases.values():
        for ident, since in lease.meters.items():
            charge, request = lease.charges[ident], lease.request
            key = f"{request.project}/{request.user}/{charge.model}/{charge.kind}"
            account = found.setdefault(
                key,
                Account(user=request.user, project=request.project, model=charge.model, kind=charge.kind),
            )
            account.used += charge.milli * max(0, now - since)
            account.kept += charge.milli * max(0, decay.at(now) - decay.at(since))
            if lease.idle_since:
                account.idle += charge.milli * max(0, now - max(since, lease.idle_since))
    return [found[key] for key in sorted(found)]


def history(state: State, user: str, now: int) -> list[list[int]]:
    """What a person used by the hour: hour of the pool's clock, used, of that while idle; oldest first."""
    known = state.ledger.hours.get(user)
    hours = Hours(known.rows(now) if known else ())
    for lease in state.leases.values():
        for ident, since in lease.meters.items() if lease.request.user == user else ():
            milli = lease.charges[ident].milli
            hours.add(milli, since, now)
            if lease.idle_since:
                hours.add(milli, max(since, lease.idle_since), now, idle=True)
    return hours.rows(now)


def _sums(state: State, accounts: list[Account], now: int) -> dict[Tenant, dict[str, int]]:
    """What was used, idle, lost and kept below each tenant."""
    sums: dict[Tenant, dict[str, int]] = {}
    for each in accounts:
        for tenant in state.tree.user(each.project, each.user).path():
            total = sums.setdefault(tenant, {"used": 0, "idle": 0, "lost": 0, "decayed": 0})
            total["used"] += each.used
            total["idle"] += each.idle
            total["lost"] += each.lost
            total["decayed"] += state.tree.decay.worth(each.kept, now)
    return sums


def _row(state: State, tenant: Tenant, now: int, sums: dict[Tenant, dict[str, int]]) -> dict[str, Any]:
    return {
        "user": tenant.name if tenant.user else "",
        "project": tenant.project,
        "served": dict(tenant.served),
        "share": dict(tenant.share),
        "held": dict(tenant.held),
        "demand": dict(tenant.demand),
        "waiting": tenant.waiting,
        "quota": dict(tenant.quota),
        "sure": whole(tenant.sure),
        "limit": dict(tenant.limit),
        "weight": tenant.weight,
        "tier": tenant.tier,
        **sums.get(tenant, {"used": 0, "idle": 0, "lost": 0, "decayed": 0}),
        # What decides who is next: by the weights of models, and by the tenant's own.
        "charged": state.tree.worth(tenant, now) // max(1, tenant.weight),
    }
