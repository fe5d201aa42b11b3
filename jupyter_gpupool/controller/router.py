"""What a route of the API is: one row that the server obeys and that OpenAPI describes.

Rule 1: a route that is not in the tables does not exist, and what its row says is what the server checks: who
        may call it, its parameters, its body, how long it may take. Handlers check nothing of that again.
Rule 2: a handler is given a `Call` and returns an `Answer`, or raises `Problem`. It knows nothing of tornado.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.fields import Field, Wrong, shown
from jupyter_gpupool.controller.problems import Problem
from jupyter_gpupool.core.model import Reason, Refusal, RefuseRequest
from jupyter_gpupool.core.pool import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from jupyter_gpupool.controller.auth import Person
    from jupyter_gpupool.controller.face import ControllerFace
    from jupyter_gpupool.controller.store import Once
    from jupyter_gpupool.controller.waiters import Waiters
    from jupyter_gpupool.core.model import PoolEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request for a route, with all that the route's row asks to be checked."""

    controller: ControllerFace
    #: Who is asking; nobody where the route is open to all.
    person: Person | None
    #: Address of the other end.
    peer: str
    #: What stands for `{name}` in the path.
    path: Mapping[str, str]
    #: The query's parameters, read; those not given are not there.
    query: Mapping[str, Any]
    #: The body's JSON; None where the route has no body.
    body: Any
    #: Headers, by names in lower case.
    headers: Mapping[str, str]
    #: Where people reach the API.
    url: str
    #: What the server's handlers remember from call to call.
    memory: dict[str, Any]
    #: By which a handler waits for news.
    waiters: Waiters

    @property
    def asker(self) -> Person:
        """Who is asking, where the route is not open to all."""
        assert self.person is not None
        return self.person


@dataclass(frozen=True, slots=True)
class Answer:
    """What a handler answers: JSON, or text where it is a text."""

    data: Any
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A row of the tables."""

    method: str
    #: With `{name}` for one segment of the path, `{name+}` for the rest of it.
    path: str
    handler: Callable[[Call], Awaitable[Answer]]
    about: str
    #: "read", "use" or "admin"; empty: open to all, and then limited by the address it comes from.
    scope: str = "read"
    #: The query's parameters.
    query: Mapping[str, Field] = field(default_factory=dict)
    #: Name of the schema of the body; empty: there is none.
    body: str = ""
    #: Name of the schema of the answer, by status; empty: no body.
    answers: Mapping[int, str] = field(default_factory=dict)
    #: Statuses of the problems that it can end in, beyond those of every route.
    problems: tuple[int, ...] = ()
    #: Seconds that it may take, beyond what a long poll asks for.
    seconds: float = 30.0
    #: Whether `Idempotency-Key` means something to it.
    once: bool = False


def read_query(route: Route, given: Mapping[str, list[str]]) -> dict[str, Any]:
    """Read the query's parameters by the route's row.

    Raises:
        Problem: One is unknown, given twice or wrong.
    """
    said: dict[str, Any] = {}
    for name, values in given.items():
        if name not in route.query:
            near = difflib.get_close_matches(name, route.query, n=1)
            advice = f"Did you mean {near[0]}?" if near else _known(route)
            raise _bad(f"There is no parameter {shown(name)} here.", advice, name)
        if len(values) > 1:
            raise _bad(f"The parameter {name} is given {len(values)} times.", "Give it once.", name)
        try:
            said[name] = route.query[name].read(values[0])
        except Wrong as no:
            raise _bad(no.sentence, no.advice, name) from None
    return said


def _known(route: Route) -> str:
    return f"There are: {', '.join(sorted(route.query))}." if route.query else "It takes none."


def _bad(sentence: str, advice: str, name: str) -> Problem:
    return Problem(Reason.BAD_REQUEST, sentence, advice, field=name[:100])


def cause(call: Call) -> str:
    """Name who causes a pool event, for the journal."""
    return f"{call.asker.user}, token {call.asker.token}"


def submit(call: Call, event: PoolEvent, once: Once | None = None) -> list[Refusal]:
    """Hand a pool event to the controller and return what the pool refuses.

    Raises:
        StoreError: It could not be journaled; nothing has changed.
    """
    if type(event) not in HANDLERS:  # the API may know of something before the pool does
        name = type(event).__name__
        return [Refusal(reason=Reason.BAD_REQUEST, sentence=f"This pool cannot do that yet ({name}).")]
    orders = call.controller.submit(event, once)
    return [no for each in orders if isinstance(each, RefuseRequest) for no in each.refusals]


def accepted(call: Call, event: PoolEvent, once: Once | None = None) -> None:
    """Hand a pool event to the controller.

    Args:
        call: What it follows from.
        event: It.
        once: The idempotency key that came with it; one that is refused can be used again.

    Raises:
        Problem: The pool refuses it.
        StoreError: It could not be journaled; nothing has changed.
    """
    refusals = submit(call, event, once)
    if refusals:
        if once:
            call.controller.store.forget_key(once.user, once.key)
        raise Problem.refused(refusals)
