"""Taking a request in: is it one that the pool could ever grant?

Rule 1: what can never be granted is refused at once, with the reason and what would work.
Rule 2: what can be granted some day waits.

Not its business: when it starts (`grants`).
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING

from jupyter_gpupool.core import bounds, counts, extend, placement, wants
from jupyter_gpupool.core.line import fields
from jupyter_gpupool.core.model import (
    ANY,
    HOUR,
    WHOLE,
    Project,
    Reason,
    Refusal,
    RefuseRequest,
    Request,
)
from jupyter_gpupool.core.state import Lease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_gpupool.core.model import RequestSubmitted
    from jupyter_gpupool.core.strokes import State


def on_submitted(state: State, event: RequestSubmitted) -> None:
    """A person asks for a lease."""
    request = complete(state, event.request)
    refusals = refuse(state, request)
    if refusals:
        state.emit(RefuseRequest, lease=request.id, refusals=refusals)
        return
    state.cluster.demand.observe(request)
    lease = state.leases[request.id] = make(state, request)
    state.names[request.user, request.name] = lease.id
    state.place(lease)
    state.touch(lease)


def make(state: State, request: Request) -> Lease:
    """Make the record of a completed request."""
    most = max(request.count, request.max_count)
    return Lease(request=request, sure=request.count, wanted=most, estimate=estimate(state, request))


def estimate(state: State, request: Request) -> int:
    """Thousandths of a GPU that one slice will be charged, as far as is known before it has a place."""
    if not (request.vram or request.mig or request.isolated):
        return request.milli
    return counts.most_charged(state.cluster, wants.want_of(request))


def complete(state: State, request: Request) -> Request:
    """Fill in what the request leaves to the pool: project, time limit, arrival."""
    project = request.project or next(
        (each.name for each in state.projects if member(each, request.user, request.groups)), ""
    )
    known = state.tree.projects.get(project)
    limit = request.time_limit or (known.default_time if known else 0) or state.defaults.time_limit
    arrived = request.arrived or state.now
    if (project, limit, arrived) == (request.project, request.time_limit, request.arrived):
        return request
    return dataclasses.replace(request, project=project, time_limit=limit, arrived=arrived)


def member(project: Project, user: str, groups: tuple[str, ...] = ()) -> bool:
    """The user, of these groups, may use the project."""
    names = (ANY, user, *(f"@{group}" for group in groups))
    return any(name in project.members for name in names) or any(each.name == user for each in project.users)


def refuse(state: State, request: Request) -> tuple[Refusal, ...]:
    """Say why a completed request can never be granted; () if it can."""
    return tuple(_wrong(request)) or tuple(_not_allowed(state, request)) or _never(state, request)


def _wrong(request: Request) -> Iterator[Refusal]:
    most = request.max_count or request.count
    rules = (
        (not request.id or not request.user, "user", "A request needs an id and a user."),
        (request.count < 1, "gpus", f"{request.count} GPUs cannot be had; ask for at least one."),
        (not 0 <= request.milli <= WHOLE, "gpus", "One slice is more than nothing and at most one GPU."),
        (
            not (request.milli or request.vram or request.mig or request.isolated),
            "gpus",
            "0 of a GPU cannot be had; ask for a share (gpus=0.5, or vram) or for whole GPUs.",
        ),
        (most < request.count, "max_gpus", f"At most {most} is below {request.count}, the least."),
        (
            not 0 <= request.min_count <= request.count,
            "min_gpus",
            "min_gpus is at most gpus, and not negative.",
        ),
        (request.vram < 0 or request.min_vram < 0, "vram", "Memory cannot be negative."),
        (request.cpus < 0 or request.memory < 0, "cpus", "CPUs and memory of the host cannot be negative."),
        (request.time_limit < 0, "time_limit", "A time limit cannot be negative."),
    )
    for wrong, name, sentence in rules:
        if wrong:
            yield Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, field=name)


def _not_allowed(state: State, request: Request) -> Iterator[Refusal]:
    project = state.tree.projects.get(request.project)
    if project is None:
        there = ", ".join(sorted(state.tree.projects)) or "none"
        yield Refusal(
            reason=Reason.UNKNOWN_PROJECT,
            sentence=f"There is no project {request.project!r}.",
            advice=f"The projects are: {there}.",
            field="project",
        )
        return
    if not member(project, request.user, request.groups):
        mine = [each.name for each in state.projects if member(each, request.user, request.groups)]
        yield Refusal(
            reason=Reason.NOT_A_MEMBER,
            sentence=f"{request.user} is no member of project {project.name}.",
            advice=f"Ask its administrator, or use one of yours: {', '.join(mine) or 'none'}.",
            field="project",
        )
    known = state.leases.get(request.id)
    named = state.names.get((request.user, request.name))
    if known or named:
        yield Refusal(
            reason=Reason.NAME_TAKEN,
            sentence=f"{request.user} has a lease {request.name} already.",
            advice="Use it, release it, or take another name.",
            field="name",
        )
    most = extend.max_time(state, project.name)
    if request.time_limit > most:
        yield Refusal(
            reason=Reason.TIME_LIMIT,
            sentence=f"{request.time_limit / HOUR:g} hours are more than the {most / HOUR:g} allowed.",
            advice=f"Ask for at most {most / HOUR:g} hours; a running lease can be extended.",
            field="time_limit",
        )


def _never(state: State, request: Request) -> tuple[Refusal, ...]:
    each = estimate(state, request)
    over = bounds.never(state, request, request.count, each)
    if over:
        return (over,)
    request = bounds.narrowed(state, request, request.count * each, ever=True)
    # What a node's coming or going may change is asked once for all requests of a shape.
    memo, key = state.cluster.memo, ("ever", request.count, fields(request))
    if key not in memo:
        memo[key] = placement.feasible_ever(request, state.cluster)
    return typing.cast("tuple[Refusal, ...]", memo[key])
