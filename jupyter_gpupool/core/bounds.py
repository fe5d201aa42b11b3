"""Hard limits, for requests that have no place yet.

Rule 1: what a request leaves open counts as the most that it could be: its part of a node's CPUs and memory.
Rule 2: of the models that it leaves open, those are not used of which its user, or a project above, may not
        have as many as all of it. So wherever a place is found, it is within every limit.
Rule 3: the replacement of a slice may be of that one's model: it is charged in its place.

Not its business: what is charged where (`strokes`), and the sums (`tree`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jupyter_gpupool.core import counts, wants
from jupyter_gpupool.core.model import ANY
from jupyter_gpupool.core.tree import CPUS, MEMORY

if TYPE_CHECKING:
    from jupyter_gpupool.core.model import Refusal, Request
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


def amounts(request: Request, count: int, each: int) -> list[tuple[str, int]]:
    """What a request says that it will be charged: `count` slices of `each` thousandths of a GPU."""
    found = [(ANY, each * count), (CPUS, request.cpus * count), (MEMORY, request.memory * count)]
    if request.model and "|" not in request.model:
        found.append((request.model, each * count))
    return [(key, amount) for key, amount in found if amount]


def most(state: State, request: Request, count: int, each: int) -> list[tuple[str, int]]:
    """What a request may come to be charged at most, but for the models that it leaves open."""
    cpus, memory = counts.most_of_host(state.cluster, wants.want_of(request))
    said = [(key, amount) for key, amount in amounts(request, count, each) if key not in (CPUS, MEMORY)]
    return [*said, (CPUS, cpus * count), (MEMORY, memory * count)]


def reached(state: State, lease: Lease) -> Refusal | None:
    """Say which hard limit keeps a request waiting; None: none does."""
    leaf = state.leaf(lease.request)
    if not leaf.limited:
        return None
    request, count, each = lease.request, lease.sure, lease.estimate
    over = state.tree.over_limit(leaf, most(state, request, count, each), ever=False)
    if over or not _models_limited(leaf) or _open_models(state, leaf, request, count * each):
        return over
    return shut(state, request, count * each)


def never(state: State, request: Request, count: int, each: int) -> Refusal | None:
    """Say which hard limit a request passes by itself; None: it passes none."""
    leaf, milli = state.leaf(request), count * each
    over = state.tree.over_limit(leaf, amounts(request, count, each), ever=True)
    if over or not leaf.limited or _open_models(state, leaf, request, milli, ever=True):
        return over
    return state.tree.over_limit(leaf, [(key, milli) for key in models(state, request)], ever=True)


def shut(state: State, request: Request, milli: int) -> Refusal | None:
    """Say which limit shuts a request out of some of the models that it leaves open; None: none does."""
    every = [(key, milli) for key in models(state, request)]
    return state.tree.over_limit(state.leaf(request), every, ever=False)


def narrowed(state: State, request: Request, milli: int, keep: str = "", *, ever: bool = False) -> Request:
    """The request, for those models only of which so much is within the limits, or the model to keep.

    `ever`: whatever is held now.
    """
    leaf = state.leaf(request)
    if not leaf.limited or not _models_limited(leaf):
        return request
    every, open_ = models(state, request), _open_models(state, leaf, request, milli, ever=ever)
    fit = [each for each in every if each in open_ or each == keep]
    return request if fit in ([], every) else dataclasses.replace(request, model="|".join(fit))


def models(state: State, request: Request) -> list[str]:
    """The models that a request may be placed on."""
    return request.model.split("|") if request.model else sorted(state.cluster.models)


def _models_limited(leaf: Tenant) -> bool:
    return any(key not in (ANY, CPUS, MEMORY) for tenant in leaf.path() for key in tenant.limit)


def _open_models(
    state: State, leaf: Tenant, request: Request, milli: int, *, ever: bool = False
) -> list[str]:
    """Of the models that a request may be placed on, those of which so much more is within the limits."""
    over = state.tree.over_limit
    return [each for each in models(state, request) if not over(leaf, [(each, milli)], ever=ever)]
