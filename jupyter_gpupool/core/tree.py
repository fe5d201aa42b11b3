"""The tree of projects with its users as leaves: what each is charged, wants, deserves and has used.

Rule 1: users are the leaves; what a user has or wants counts in every project above them.
Rule 2: `held` counts against hard limits, from the grant until the processes are gone. `served` counts for
        the shares: what is being taken back is no longer served, surplus of elastic leases never was.
Rule 3: a demand is what one waits for for sure, and what one has; a limit caps it, so that nothing is
        reserved for those who may not have it.
Rule 4: shares are worked out again only where a changed demand can change them (`Tenant.fill`).
Rule 5: `overs` holds those who are served above their share, `hungry` the users of whose requests one at
        least would stay within theirs.

Not its business: the arithmetic (`shares`), and which request is meant (`line`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY, WHOLE, Amounts, Project, Reason, Refusal
from jupyter_gpupool.core.quotas import effective, whole
from jupyter_gpupool.core.shares import Decay, Want, deserved

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jupyter_gpupool.core.line import Line
    from jupyter_gpupool.core.turns import Parted

#: Keys of limits that are no models: host CPUs (thousandths of a core) and host memory (bytes).
CPUS = "cpus"
MEMORY = "memory"


class Tenant:
    """A project or a user in the tree. All amounts are in thousandths of a GPU, by model and for `ANY`."""

    __slots__ = (
        "capped",
        "children",
        "demand",
        "excess",
        "held",
        "hungry",
        "limit",
        "limited",
        "line",
        "name",
        "parent",
        "parted",
        "place",
        "project",
        "quota",
        "rate",
        "served",
        "serves",
        "share",
        "sure",
        "tier",
        "usage",
        "user",
        "waiting",
        "weight",
    )

    def __init__(self, name: str, parent: Tenant | None, *, user: bool = False) -> None:
        """Hang a tenant below another; `Tree` gives it its numbers."""
        self.name = name
        self.parent = parent
        self.user = user
        self.project = parent.name if parent and user else name
        #: Its name among its siblings: projects first.
        self.place = f"{user:d}{name}"
        self.children: dict[str, Tenant] = {}
        #: As stated; and what it is guaranteed: as stated, else what those below it are together.
        self.quota: dict[str, int] = {}
        self.sure: dict[str, int] = {}
        self.limit: dict[str, int] = {}
        #: It, or somebody above it, has a hard limit.
        self.limited = False
        self.weight = 1
        self.tier = 0
        #: Charged against limits, by model, for `ANY`, and of host `CPUS` and `MEMORY`.
        self.held: dict[str, int] = {}
        #: What counts for its share; what it wants, and what of that its limit allows; what it deserves.
        self.served: dict[str, int] = {ANY: 0}
        self.demand: dict[str, int] = {}
        self.capped: dict[str, int] = {}
        self.share: dict[str, int] = {ANY: 0}
        #: Its part of the potential: its squared over-share of all GPUs, and those of single models together.
        self.excess = (0, 0)
        #: Users below it, or itself, of whose requests one at least would stay within their share.
        self.hungry = 0
        #: Decayed usage, less what the present rate would have used since the epoch (see `Tree.meter`).
        self.usage = 0
        self.rate = 0
        #: Requests that wait below it, and of a user: which.
        self.waiting = 0
        self.line: Line | None = None
        #: Of a user: how often what is served has changed, and what `turns.split` has found, by room.
        self.serves = 0
        self.parted: dict[int, Parted] = {}

    def path(self) -> Iterator[Tenant]:
        """This one and all above it, the root last."""
        here: Tenant | None = self
        while here is not None:
            yield here
            here = here.parent

    def title(self) -> str:
        """Its name, for people."""
        return f"{'user' if self.user else 'project'} {self.name}"

    def used(self, weight: int) -> int:
        """Decayed usage by weight; `weight` is the decay's at the time that it is to be charged up to."""
        return (self.usage + self.rate * weight) // max(1, self.weight)


class Tree:
    """All projects and users."""

    def __init__(self, projects: tuple[Project, ...], decay: Decay) -> None:
        """Build the tree of a configuration that `quotas.check` has passed."""
        self.decay = decay
        self.root = Tenant("", None)
        self.projects: dict[str, Project] = {project.name: project for project in projects}
        self._sure = effective(projects)
        self.tenants: dict[str, Tenant] = {}
        self.users: dict[tuple[str, str], Tenant] = {}
        #: Tenants served above their share, and users that want something within theirs.
        self.overs: dict[Tenant, None] = {}
        self.hungry: dict[Tenant, None] = {}
        self._potential = (0, 0)
        #: What each lease has been counted to want.
        self.asked: dict[str, tuple[tuple[str, int], ...]] = {}
        #: Tenants whose children's shares are to be given out anew.
        self.stale: dict[Tenant, None] = {}
        #: Grows with each change of what is served or deserved, and of usage.
        self.mark = 0
        self.metered = 0
        for project in projects:
            self.project(project.name)

    def project(self, name: str) -> Tenant:
        """Find a project; made when first asked for: one that is gone may still be charged."""
        if not name:
            return self.root
        if name in self.tenants:
            return self.tenants[name]
        project = self.projects.get(name)
        parent = self.project(project.parent) if project else self.root
        tenant = self.tenants[name] = parent.children["project:" + name] = Tenant(name, parent)
        tenant.share = dict.fromkeys(self.root.share, 0)
        if project:
            _number(tenant, project.quota, project.limit, project.weight, project.tier)
            tenant.sure = self._sure[name]
            for each in project.users:
                _number(self.user(name, each.name), each.quota, each.limit, each.weight, each.tier)
        return tenant

    def user(self, project: str, name: str) -> Tenant:
        """Find a user's leaf in a project; made when first asked for: weight 1, no quota, no limit."""
        leaf = self.users.get((project, name))
        if leaf is None:
            parent = self.project(project)
            leaf = self.users[project, name] = Tenant(name, parent, user=True)
            leaf.share = dict.fromkeys(self.root.share, 0)
            leaf.limited = parent.limited
            parent.children["user:" + name] = leaf
        return leaf

    def everybody(self) -> list[Tenant]:
        """All tenants, those above before those below."""
        found = [self.root]
        for tenant in found:
            found += tenant.children.values()
        return found

    # ----------------------------------------------------------------------------------------- charges

    def hold(self, leaf: Tenant, amounts: Iterable[tuple[str, int]], sign: int) -> None:
        """Charge amounts against limits, or take them off."""
        for tenant in leaf.path():
            held = tenant.held
            for key, amount in amounts:
                held[key] = held.get(key, 0) + sign * amount

    def serve(self, leaf: Tenant, model: str, milli: int) -> None:
        """Count an amount of a model as served to a user, or no longer (below zero)."""
        self.mark += 1
        leaf.serves += 1
        for tenant in leaf.path():
            served = tenant.served
            served[ANY] += milli
            served[model] = served.get(model, 0) + milli
            self._weigh(tenant)
        self.review(leaf)

    def _weigh(self, tenant: Tenant) -> None:
        """Note whether, and how far, a tenant is served above its share."""
        served, share = tenant.served, tenant.share
        over, models = max(0, served[ANY] - share[ANY]), 0
        if len(share) > 1:
            models = sum(max(0, served.get(key, 0) - most) ** 2 for key, most in share.items() if key != ANY)
        if tenant.parent is not None and (over or models):
            self.overs[tenant] = None
        else:
            self.overs.pop(tenant, None)
        if (over * over, models) != tenant.excess:
            (total, single), (before, singly) = self._potential, tenant.excess
            self._potential = (total + over * over - before, single + models - singly)
            tenant.excess = (over * over, models)

    def review(self, leaf: Tenant) -> None:
        """Note whether one of a user's requests at least would stay within its share."""
        room = leaf.share[ANY] - leaf.served[ANY]
        hungry = leaf.line is not None and bool(leaf.line.shapes) and leaf.line.least <= room
        if hungry == bool(leaf.hungry):
            return
        for tenant in leaf.path():
            tenant.hungry += 1 if hungry else -1
        if hungry:
            self.hungry[leaf] = None
        else:
            del self.hungry[leaf]

    def meter(self, leaf: Tenant, rate: int, now: int) -> None:
        """Let usage run at a higher rate from now on, or a lower one (below zero)."""
        self.metered += 1
        shift = rate * self.decay.at(now)
        for tenant in leaf.path():
            tenant.usage -= shift
            tenant.rate += rate

    def worth(self, tenant: Tenant, now: int) -> int:
        """Decayed usage at `now`: thousandths of a GPU times the weight of its model, times milliseconds."""
        return self.decay.worth(tenant.usage + tenant.rate * self.decay.at(now), now)

    def use(self, tenant: Tenant, amount: int, now: int) -> None:
        """Set the decayed usage that a tenant has at `now`; its rate is known already."""
        self.metered += 1
        tenant.usage = self.decay.kept(amount, now) - tenant.rate * self.decay.at(now)

    def renew(self) -> int:
        """Begin a new epoch of the decay; returns by how many bits to shift what is kept elsewhere."""
        self.metered += 1
        bits = self.decay.renew()
        for tenant in self.everybody():
            tenant.usage >>= bits
        return bits

    def over_limit(self, leaf: Tenant, amounts: Iterable[tuple[str, int]], *, ever: bool) -> Refusal | None:
        """Say which hard limit these amounts would pass: with what is held now, or `ever`."""
        for tenant in leaf.path():
            for key, amount in amounts if tenant.limit else ():
                most = tenant.limit.get(key)
                if most is not None and amount + (0 if ever else tenant.held.get(key, 0)) > most:
                    return _over(tenant, key, most, amount, ever=ever)
        return None

    # ------------------------------------------------------------------------------------------ shares

    def ask(self, leaf: Tenant, lease: str, amounts: tuple[tuple[str, int], ...]) -> None:
        """Count what one of a user's leases wants, in place of what it wanted before."""
        deltas = dict(amounts)
        for key, amount in self.asked.pop(lease, ()):
            deltas[key] = deltas.get(key, 0) - amount
        for key, delta in deltas.items():
            if delta:
                self._ask(leaf, key, delta)
        if amounts:
            self.asked[lease] = amounts

    def _ask(self, leaf: Tenant, key: str, delta: int) -> None:
        for tenant in leaf.path():
            tenant.demand[key] = demand = tenant.demand.get(key, 0) + delta
            before = tenant.capped.get(key, 0)
            after = tenant.capped[key] = min(demand, tenant.limit.get(key, demand))
            share = tenant.share.get(key)
            if tenant.parent is None or before == after:
                return
            saturated = share is not None and before > share and after > share
            if share is not None and not (saturated and (before - after) % WHOLE == 0):
                # Who wants more than they deserve, before and after, changes nobody's share, nor its unit.
                self.stale[tenant.parent] = None
            delta = after - before

    def capacity(self, amounts: dict[str, int]) -> None:
        """Say what there is to give out, by model and for `ANY`; models count where there are several."""
        models = sorted(key for key, amount in amounts.items() if key != ANY and amount)
        keys = [ANY, *models] if len(models) > 1 else [ANY]
        if keys != list(self.root.share):
            for tenant in self.everybody():
                tenant.share = {key: tenant.share.get(key, 0) for key in keys}
                self._weigh(tenant)
        self.root.share = {key: amounts.get(key, 0) for key in keys}
        self._weigh(self.root)
        self.stale[self.root] = None

    def refresh(self) -> None:
        """Give out anew the shares that may have changed."""
        while self.stale:
            tenant = next(iter(self.stale))
            above = tenant.parent
            while above is not None:
                # Those above first: what they get is what there is to give out below.
                tenant = above if above in self.stale else tenant
                above = above.parent
            del self.stale[tenant]
            self._fill(tenant)

    def _fill(self, tenant: Tenant) -> None:
        children = list(tenant.children.values())
        for key, total in tenant.share.items():
            wants = [each for each in children if each.capped.get(key, 0) or each.share.get(key, 0)]
            shares = deserved(total, [want(each, key) for each in wants])
            for each, share in zip(wants, shares, strict=True):
                if each.share[key] != share:
                    self._set_share(each, key, share)

    def _set_share(self, tenant: Tenant, key: str, share: int) -> None:
        tenant.share[key] = share
        self.mark += 1
        if tenant.children:
            self.stale[tenant] = None
        self._weigh(tenant)
        if tenant.user:
            self.review(tenant)

    def potential(self) -> tuple[int, int]:
        """The squared over-shares of everybody together: of all GPUs, then of single models."""
        return self._potential


def apart(one: Tenant, other: Tenant) -> tuple[Tenant, Tenant]:
    """Find the siblings under which two users stand."""
    for mine, theirs in zip([*one.path()][::-1], [*other.path()][::-1], strict=False):
        if mine is not theirs:
            return mine, theirs
    return one, other


def want(tenant: Tenant, key: str) -> Want:
    """What a tenant wants of its parent's share."""
    quota = whole(tenant.sure) if key == ANY else tenant.sure.get(key, 0)
    return Want(tenant.place, quota, tenant.capped.get(key, 0), tenant.weight, tenant.tier)


def _number(tenant: Tenant, quota: Amounts, limit: Amounts, weight: int, tier: int) -> None:
    tenant.quota, tenant.limit, tenant.weight, tenant.tier = dict(quota), dict(limit), weight, tier
    tenant.sure = tenant.quota
    tenant.limited = bool(limit) or (tenant.parent is not None and tenant.parent.limited)


def _over(tenant: Tenant, key: str, most: int, amount: int, *, ever: bool) -> Refusal:
    who = tenant.title()
    unit = {CPUS: " CPUs", MEMORY: " bytes of host memory", ANY: " GPUs"}.get(key, f" {key}")
    limit, asked, held = (_count(key, each) for each in (most, amount, tenant.held.get(key, 0)))
    if ever:
        sentence = f"The limit of {who} is {limit}{unit}; this asks for {asked}."
        return Refusal(
            reason=Reason.OVER_LIMIT,
            sentence=sentence,
            advice=f"Ask for at most {limit}{unit}.",
            field="gpus",
        )
    sentence = f"{who} has {held} of at most {limit}{unit}; {asked} more would be over it."
    return Refusal(
        reason=Reason.AT_LIMIT, sentence=sentence[0].upper() + sentence[1:], advice="Release a lease first."
    )


def _count(key: str, amount: int) -> str:
    return str(amount) if key == MEMORY else f"{amount / 1000:g}"
