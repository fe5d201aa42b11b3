"""Does a tree of projects add up? Checked before it takes effect, and refused with the numbers.

Rule 1: quotas of siblings never sum above their parent's, nor above the pool: a guarantee can always be kept.
Rule 2: a project that states no quota has that of those below it together.
Rule 3: a quota for a model is a part of that for all models; where only models are named, their sum is it.

Not its business: what follows from a tree (`tree`, `shares`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool.core.model import ANY, Project, Reason, Refusal, UserShare

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


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
    refusals += [
        _bad(f"User {user.name} stands twice in project {project.name}.")
        for project in projects
        for user in project.users
        if [each.name for each in project.users].count(user.name) > 1
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
            for key, amount in {**part, ANY: whole(part)}.items():
                summed[key] = summed.get(key, 0) + amount
        return {key: amount for key, amount in summed.items() if amount}

    found: dict[str, dict[str, int]] = {}
    found[""] = total("", ())
    return found


def whole(quota: Mapping[str, int]) -> int:
    """What a quota guarantees of all models together."""
    return quota.get(ANY) or sum(quota.values())


def _sums(projects: tuple[Project, ...], capacity: dict[str, int]) -> Iterator[Refusal]:
    """Quotas that sum above their parent's, or above the pool: of all models together, and of each."""
    most = effective(projects)
    below: dict[str, list[Mapping[str, int]]] = {}
    for project in projects:
        below.setdefault(project.parent, []).append(most[project.name])
        below.setdefault(project.name, []).extend(dict(each.quota) for each in project.users)
    for parent, quotas in below.items():
        if parent:
            # A project that is guaranteed any GPUs may promise those of one model.
            yield from _above(f"of project {parent}", quotas, most[parent], most[parent].get(ANY, 0))
        elif capacity:
            yield from _above("of the pool", quotas, capacity, 0)
    stated: list[Project | UserShare] = [*projects, *(user for each in projects for user in each.users)]
    for name, quota in [(each.name, dict(each.quota)) for each in stated]:
        models = sum(amount for key, amount in quota.items() if key != ANY)
        if models > quota.get(ANY, models):
            yield _too_many(models, "GPUs of models", quota[ANY], f"of {name} in all")


def _above(
    whose: str, quotas: Sequence[Mapping[str, int]], bounds: Mapping[str, int], unnamed: int
) -> Iterator[Refusal]:
    sums = {ANY: (sum(whole(each) for each in quotas), whole(bounds))}
    for model in sorted({key for each in quotas for key in each} - {ANY}):
        sums[model] = (sum(each.get(model, 0) for each in quotas), bounds.get(model, unnamed))
    for key, (amount, bound) in sums.items():
        if amount > bound:
            yield _too_many(amount, "GPUs" if key == ANY else key, bound, whose)


def _too_many(amount: int, what: str, bound: int, whose: str) -> Refusal:
    return Refusal(
        reason=Reason.QUOTA_SUM,
        sentence=f"Quotas sum to {amount / 1000:g} {what}, above the {bound / 1000:g} {whose}.",
        advice="Lower them, or raise what is above them.",
        field="projects",
    )
