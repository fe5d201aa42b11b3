"""A reclaim that is being thought through; nothing has changed yet.

Rule 1: a plan may be committed only if the potential strictly drops: the sum of squared over-shares, of all
        GPUs first, then of single models; where neither changes, the surplus that is taken.

Not its business: who is picked (`victims`), and whether that is enough (`fits`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY

if TYPE_CHECKING:
    from jupyter_gpupool.core.cluster import Part
    from jupyter_gpupool.core.line import Shape
    from jupyter_gpupool.core.model import Slice
    from jupyter_gpupool.core.state import Lease
    from jupyter_gpupool.core.strokes import State
    from jupyter_gpupool.core.tree import Tenant


@dataclass(slots=True)
class Pick:
    """What one lease gives back."""

    lease: Lease
    leaf: Tenant
    slices: tuple[Slice, ...]
    #: All of it: the lease is suspended. Otherwise surplus.
    whole: bool
    #: What its user is served less, in thousandths of a GPU, by model and for `ANY`; nothing for surplus.
    served: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """Who is to give back for one request."""

    state: State
    lease: Lease
    leaf: Tenant
    shape: Shape
    #: Who is over their share and has something that can be taken now, by who is above them.
    overs: dict[Tenant, list[Tenant]]
    #: Of each user the leases that can be taken, the one that loses least last; for all plans of a moment.
    ranked: dict[Tenant, list[Lease]]
    picks: list[Pick] = field(default_factory=list)
    #: What is taken from each tenant by the picks, by model and for `ANY`.
    taken: dict[Tenant, dict[str, int]] = field(default_factory=dict)
    #: How far each is over its share after the picks so far, as far as asked.
    known: dict[Tenant, int] = field(default_factory=dict)
    #: Of each user the leases that have not been looked at yet.
    left: dict[Tenant, list[Lease]] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The one model that the request names, where that matters for shares; else empty."""
        model = self.lease.request.model
        return model if model in self.leaf.share else ""

    def take(self, pick: Pick, sign: int = 1) -> None:
        """Count a pick, or count it no longer."""
        for tenant in pick.leaf.path():
            self.known.pop(tenant, None)
            taken = self.taken.setdefault(tenant, {})
            for key, milli in pick.served.items():
                taken[key] = taken.get(key, 0) + sign * milli

    def excess(self, tenant: Tenant, key: str) -> int:
        """How far a tenant is above its share of a model, or of all, after the picks so far."""
        return tenant.served.get(key, 0) - self.taken.get(tenant, {}).get(key, 0) - tenant.share.get(key, 0)

    def over(self, tenant: Tenant) -> int:
        """How far a tenant is above its share of all GPUs, or of the model that the request names."""
        over = self.known.get(tenant)
        if over is None:
            over = self.excess(tenant, ANY)
            self.known[tenant] = over = max(over, self.excess(tenant, self.model)) if self.model else over
        return over

    def room(self, tenant: Tenant) -> int:
        """How much more a tenant may be served within its share of all, and of the model that is named."""
        room = -self.excess(tenant, ANY)
        return min(room, -self.excess(tenant, self.model)) if self.model else room

    def allowed(self, parts: tuple[Part, ...]) -> bool:
        """With everything counted, all stay within their shares, and the potential strictly drops."""
        gets: dict[str, int] = {}
        for part in parts:
            for key in (ANY, self.state.model_of(part.device)):
                gets[key] = gets.get(key, 0) + part.milli
        if self.room(self.leaf) < gets[ANY]:
            return False
        for tenant in [*self.leaf.path()][1:-1]:
            grows = gets[ANY] - self.taken.get(tenant, {}).get(ANY, 0)
            if grows > 0 and self.room(tenant) < gets[ANY]:
                return False
        before, after = self.potentials(gets)
        surplus = not any(pick.whole for pick in self.picks)
        return after < before or (after == before and surplus)

    def potentials(self, gets: dict[str, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """The part of the potential that the reclaim changes, before and after it: of all, and of models."""
        mine = dict.fromkeys(self.leaf.path())
        sums = [[0, 0], [0, 0]]
        for tenant in dict.fromkeys([*self.taken, *mine]):
            for key, share in tenant.share.items():
                before = tenant.served.get(key, 0) - share
                after = self.excess(tenant, key) + (gets.get(key, 0) if tenant in mine else 0)
                place = 0 if key == ANY else 1
                sums[0][place] += max(0, before) ** 2
                sums[1][place] += max(0, after) ** 2
        return (sums[0][0], sums[0][1]), (sums[1][0], sums[1][1])
