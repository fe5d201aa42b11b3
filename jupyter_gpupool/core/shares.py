"""Who is next: the tree of projects with its users as leaves, and the order of what waits.

Rule 1: users are the leaves; what a user has counts in every project above them.
Rule 2: a hard limit is never passed, by anybody in the tree, in any of its keys.

Not its business: where something goes (`placement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY, Amounts, Project, Reason, Refusal, UserShare

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jupyter_gpupool.core.state import Charge

#: Keys of limits that are no models: host CPUs (thousandths of a core) and host memory (bytes).
CPUS = "cpus"
MEMORY = "memory"


class Tenant:
    """A project or a user in the tree."""

    __slots__ = ("children", "held", "limit", "name", "parent", "quota", "tier", "user", "weight")

    def __init__(self, name: str, parent: Tenant | None, *, user: bool = False) -> None:
        """Hang a tenant below another; `Tree` gives it its numbers."""
        self.name = name
        self.parent = parent
        self.user = user
        self.children: dict[str, Tenant] = {}
        self.quota: dict[str, int] = {}
        self.limit: dict[str, int] = {}
        self.weight = 1
        self.tier = 0
        #: What is charged to it, by model, for `ANY` model, of host `CPUS` and `MEMORY`.
        self.held: dict[str, int] = {}

    def numbers(self, quota: Amounts, limit: Amounts, weight: int, tier: int) -> None:
        """Set what the configuration says."""
        self.quota, self.limit, self.weight, self.tier = dict(quota), dict(limit), weight, tier

    def path(self) -> Iterator[Tenant]:
        """This one and all above it, the root last."""
        here: Tenant | None = self
        while here is not None:
            yield here
            here = here.parent

    def charge(self, charge: Charge, sign: int) -> None:
        """Add a charge to this one and all above it, or take it off."""
        amounts = (
            (ANY, charge.milli),
            (charge.model, charge.milli),
            (CPUS, charge.cpus),
            (MEMORY, charge.memory),
        )
        for tenant in self.path():
            held = tenant.held
            for key, amount in amounts:
                held[key] = held.get(key, 0) + sign * amount


class Tree:
    """All projects and users."""

    def __init__(self, projects: tuple[Project, ...]) -> None:
        """Build the tree of a configuration that `check` has passed."""
        self.root = Tenant("", None)
        self.projects: dict[str, Project] = {project.name: project for project in projects}
        self.tenants: dict[str, Tenant] = {}
        self.users: dict[tuple[str, str], Tenant] = {}
        for project in projects:
            self._project(project.name)

    def _project(self, name: str) -> Tenant:
        if not name:
            return self.root
        if name in self.tenants:
            return self.tenants[name]
        project = self.projects.get(name)
        parent = self._project(project.parent) if project else self.root
        tenant = self.tenants[name] = parent.children["project:" + name] = Tenant(name, parent)
        if project:
            tenant.numbers(project.quota, project.limit, project.weight, project.tier)
            for each in project.users:
                self.user(name, each.name).numbers(each.quota, each.limit, each.weight, each.tier)
        return tenant

    def user(self, project: str, name: str) -> Tenant:
        """Find a user's leaf in a project; made when first asked for: weight 1, no quota, no limit."""
        leaf = self.users.get((project, name))
        if leaf is None:
            parent = self._project(project)
            leaf = self.users[project, name] = Tenant(name, parent, user=True)
            parent.children["user:" + name] = leaf
        return leaf

    def over_limit(self, leaf: Tenant, amounts: Iterable[tuple[str, int]], *, ever: bool) -> Refusal | None:
        """Say which hard limit these amounts would pass: with what is held now, or `ever`."""
        for tenant in leaf.path():
            for key, amount in amounts:
                most = tenant.limit.get(key)
                if most is not None and amount + (0 if ever else tenant.held.get(key, 0)) > most:
                    return _over(tenant, key, most, amount, ever=ever)
        return None


def _over(tenant: Tenant, key: str, most: int, amount: int, *, ever: bool) -> Refusal:
    who = f"{'user' if tenant.user else 'project'} {tenant.name}"
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


def check(projects: tuple[Project, ...], capacity: dict[str, int]) -> tuple[Refusal, ...]:
    """Say what is wrong with a tree of projects; () if nothing.

    Args:
        projects: The tree.
        capacity: Thousandths of GPUs of the pool, by model and for `ANY`; empty where no node has joined yet.
    """
    names = [project.name for project in projects]
    refusals = [
        _bad(f"Project {project.name} stands twice.") for project in projects if names.count(project.name) > 1
    ]
    refusals += [
        _bad(f"Project {project.name} is below {project.parent}, which is no project.")
        for project in projects
        if project.parent and project.parent not in names
    ]
    refusals += [
        _bad(f"Project {name!r} needs a name without a slash.") for name in names if not name or "/" in name
    ]
    refusals += [_bad(f"Project {each} is below itself.") for each in _circles(projects)]
    if not refusals:
        refusals = [*_sums(projects, capacity)]
    return tuple(refusals)


def _bad(sentence: str) -> Refusal:
    return Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, field="projects")


def _circles(projects: tuple[Project, ...]) -> list[str]:
    above = {project.name: project.parent for project in projects}
    found = []
    for name, parent in above.items():
        here, seen = parent, {name}
        while here and here not in seen:
            seen.add(here)
            here = above.get(here, "")
        if here == name:
            found.append(name)
    return found


def effective(projects: tuple[Project, ...]) -> dict[str, dict[str, int]]:
    """The quota of each project: as stated, else the sum of those right below it; "" is all projects' sum."""
    below: dict[str, list[Project]] = {}
    for project in projects:
        below.setdefault(project.parent, []).append(project)

    def quota(project: Project) -> dict[str, int]:
        summed = total(project.name, project.users)
        found[project.name] = dict(project.quota) or summed
        return found[project.name]

    def total(name: str, users: tuple[UserShare, ...]) -> dict[str, int]:
        summed: dict[str, int] = {}
        for part in [quota(each) for each in below.get(name, [])] + [dict(each.quota) for each in users]:
            for key, amount in part.items():
                summed[key] = summed.get(key, 0) + amount
        return summed

    found: dict[str, dict[str, int]] = {}
    found[""] = total("", ())
    return found


def _sums(projects: tuple[Project, ...], capacity: dict[str, int]) -> Iterator[Refusal]:
    """Quotas that sum above their parent's, or above the pool."""
    most = effective(projects)
    below: dict[str, dict[str, int]] = {}
    for project in projects:
        parts = [(project.parent, most[project.name])] + [
            (project.name, dict(each.quota)) for each in project.users
        ]
        for parent, quota in parts:
            total = below.setdefault(parent, {})
            for key, amount in quota.items():
                total[key] = total.get(key, 0) + amount
    if capacity:
        most[""] = capacity
    for parent, total in below.items():
        for key, amount in sorted(total.items()):
            bound = most[parent].get(key, most[parent].get(ANY, 0))
            if amount > bound:
                whose = f"of project {parent}" if parent else "of the pool"
                what = "GPUs" if key == ANY else key
                yield Refusal(
                    reason=Reason.QUOTA_SUM,
                    sentence=f"Quotas sum to {amount / 1000:g} {what}, above the {bound / 1000:g} {whose}.",
                    advice="Lower them, or raise what is above them.",
                    field="projects",
                )
