"""Figures for people: what everybody is served, deserves and has used.

Rule 1: what still runs counts up to now. Amounts are thousandths of a GPU, times milliseconds if used.
Rule 2: looking changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.ledger import Account
from jupyter_gpupool.core.model import ANY, encode

if TYPE_CHECKING:
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


def figures(state: State, now: int) -> dict[str, Any]:
    """All figures: by user, by project, by account of the ledger, and the latest reclaims."""
    accounts = running(state, now)
    state.tree.refresh()
    return {
        "capacity": dict(state.capacity),
        "users": [_row(state, each, now, accounts) for each in state.tree.users.values()],
        "projects": [_row(state, each, now, accounts) for each in state.tree.tenants.values()],
        "accounts": encode(accounts),
        "reclaims": state.ledger.count,
        "latest_reclaims": encode(state.ledger.reclaims[-100:]),
    }


def running(state: State, now: int) -> list[Account]:
    """The accounts of the ledger, with what has run since their meters started."""
    found = {key: _copy(each) for key, each in state.ledger.accounts.items()}
    for lease in state.leases.values():
        for ident, since in lease.meters.items():
            charge, request = lease.charges[ident], lease.request
            key = f"{request.project}/{request.user}/{charge.model}/{charge.kind}"
            account = found.setdefault(
                key,
                Account(user=request.user, project=request.project, model=charge.model, kind=charge.kind),
            )
            account.used += charge.milli * max(0, now - since)
            if lease.idle_since:
                account.idle += charge.milli * max(0, now - max(since, lease.idle_since))
    return [found[key] for key in sorted(found)]


def _copy(account: Account) -> Account:
    return Account(
        user=account.user,
        project=account.project,
        model=account.model,
        kind=account.kind,
        used=account.used,
        idle=account.idle,
        lost=account.lost,
    )


def _row(state: State, tenant: Tenant, now: int, accounts: list[Account]) -> dict[str, Any]:
    below = {leaf.project for leaf in _leaves(tenant)}
    mine = [
        each
        for each in accounts
        if each.project in below
        and (not tenant.user or (each.user, each.project) == (tenant.name, tenant.project))
    ]
    return {
        "user": tenant.name if tenant.user else "",
        "project": tenant.project,
        "served": tenant.served[ANY],
        "share": tenant.share[ANY],
        "held": tenant.held.get(ANY, 0),
        "demand": tenant.demand.get(ANY, 0),
        "waiting": tenant.waiting,
        "quota": dict(tenant.quota),
        "limit": dict(tenant.limit),
        "weight": tenant.weight,
        "tier": tenant.tier,
        "used": sum(each.used for each in mine),
        "idle": sum(each.idle for each in mine),
        "decayed": state.tree.worth(tenant, now),
    }


def _leaves(tenant: Tenant) -> list[Tenant]:
    if tenant.user:
        return [tenant]
    return [leaf for child in tenant.children.values() for leaf in _leaves(child)]
