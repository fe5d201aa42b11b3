"""How the API says no: `application/problem+json` with a name, a sentence and what to do.

Rule 1: a no of the pool keeps its `Reason`; one of the API itself is a `Trouble`. Both lists are closed.
Rule 2: which status a name goes with is one table.
Rule 3: what is nobody's fault but ours is logged in full and told in one sentence without any of it.
"""

from __future__ import annotations

from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Reason, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTENT_TYPE = "application/problem+json"


class Trouble(StrEnum):
    """Why the API itself says no."""

    WRONG_TOKEN = "wrong_token"  # noqa: S105 - the name of an error
    NOT_ALLOWED = "not_allowed"
    NOT_FOUND = "not_found"
    NO_SUCH_METHOD = "no_such_method"
    NOT_READY = "not_ready"
    KEY_REUSED = "key_reused"
    NEEDS_RESTART = "needs_restart"
    CANNOT_ATTACH = "cannot_attach"
    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    TOO_MANY_REQUESTS = "too_many_requests"
    TIMED_OUT = "timed_out"
    BROKEN = "broken"


#: Names that do not go with 400.
STATUS: dict[str, HTTPStatus] = {
    Reason.UNKNOWN_LEASE: HTTPStatus.NOT_FOUND,
    Reason.NOT_A_MEMBER: HTTPStatus.FORBIDDEN,
    Reason.OVER_LIMIT: HTTPStatus.FORBIDDEN,
    Reason.NOT_YOURS: HTTPStatus.FORBIDDEN,
    Reason.ONE_USER_ONLY: HTTPStatus.FORBIDDEN,
    Reason.NAME_TAKEN: HTTPStatus.CONFLICT,
    Reason.DELAYS_RESERVATION: HTTPStatus.CONFLICT,
    Reason.LEASE_OVER: HTTPStatus.CONFLICT,
    Reason.STORE_FAILED: HTTPStatus.SERVICE_UNAVAILABLE,
    Trouble.WRONG_TOKEN: HTTPStatus.UNAUTHORIZED,
    Trouble.NOT_ALLOWED: HTTPStatus.FORBIDDEN,
    Trouble.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Trouble.NO_SUCH_METHOD: HTTPStatus.METHOD_NOT_ALLOWED,
    Trouble.NOT_READY: HTTPStatus.CONFLICT,
    Trouble.KEY_REUSED: HTTPStatus.CONFLICT,
    Trouble.NEEDS_RESTART: HTTPStatus.CONFLICT,
    Trouble.CANNOT_ATTACH: HTTPStatus.CONFLICT,
    Trouble.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Trouble.NOT_JSON: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    Trouble.TOO_MANY_REQUESTS: HTTPStatus.TOO_MANY_REQUESTS,
    Trouble.TIMED_OUT: HTTPStatus.SERVICE_UNAVAILABLE,
    Trouble.BROKEN: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Problem(Exception):  # noqa: N818 - most of these are answers, not failures
    """A no, on its way to whoever asked.

    Args:
        reason: Its name, from one of the two closed lists.
        sentence: One sentence for a person.
        advice: What to do next.
        field: The field of the request that caused it.
        headers: More headers of the answer.
    """

    def __init__(
        self,
        reason: Reason | Trouble,
        sentence: str,
        advice: str = "",
        *,
        field: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence
        self.advice = advice
        self.field = field
        self.headers = dict(headers or {})
        #: All that is wrong, where it is more than one thing.
        self.errors: tuple[Refusal, ...] = ()

    @classmethod
    def refused(cls, refusals: Iterable[Refusal]) -> Problem:
        """Make one of the pool's refusals; the first gives it its name."""
        every = tuple(refusals)
        first = every[0]
        problem = cls(first.reason, first.sentence, first.advice, field=first.field)
        problem.errors = every
        return problem

    @property
    def status(self) -> HTTPStatus:
        """The HTTP status that goes with the reason."""
        return STATUS.get(self.reason, HTTPStatus.BAD_REQUEST)

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        data: dict[str, Any] = {
            "type": f"urn:gpupool:{self.reason}",
            "title": self.status.phrase,
            "status": int(self.status),
            "detail": self.sentence,
            "reason": str(self.reason),
            "advice": self.advice,
            "field": self.field,
        }
        if len(self.errors) > 1:
            data["errors"] = [
                {"reason": str(no.reason), "sentence": no.sentence, "advice": no.advice, "field": no.field}
                for no in self.errors
            ]
        return data


def unknown_lease(lease: str) -> Problem:
    """Say that there is no such lease; another person's looks the same."""
    return Problem(
        Reason.UNKNOWN_LEASE, f"You have no lease {lease}.", "`jupyter gpupool status` lists your leases."
    )
