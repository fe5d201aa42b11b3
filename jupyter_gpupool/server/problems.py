"""How the endpoints say no: `application/problem+json`, with what the pool says passed on.

Rule 1: that the pool cannot be reached, or does not know this server's token, is 503: it is nothing that the
        browser could mend by logging in to Jupyter again.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from jupyter_gpupool._http import PoolError
from jupyter_gpupool.server.link import LOST

CONTENT_TYPE = "application/problem+json"
#: What Jupyter itself refuses, by status: a name, a sentence, and what to do.
REFUSED = {
    400: ("bad_request", "This is not a good request.", "Reload the page."),
    403: ("forbidden", "This Jupyter server does not let you do that.", "Log in, or ask who runs it."),
    404: ("not_found", "There is nothing at this address.", "docs/server.md lists what there is."),
    405: ("no_such_method", "That cannot be done here.", "docs/server.md lists what can."),
    415: ("not_json", "The body is not JSON.", "Send one JSON object."),
}
BROKEN = ("broken", "Something went wrong within the Jupyter server; its log has more.", "Try again.")


def no(status: int, reason: str, sentence: str, advice: str = "", field: str = "") -> PoolError:
    """Make a no of this server's own, to be raised in the way of the pool's."""
    error = PoolError(reason, sentence, advice, field)
    error.status = status
    return error


def of_pool(error: PoolError) -> dict[str, Any]:
    """Return the answer's JSON for what the pool says, or for why it says nothing."""
    status = error.status or HTTPStatus.SERVICE_UNAVAILABLE
    if error.reason in LOST:
        status = HTTPStatus.SERVICE_UNAVAILABLE
    body = problem(int(status), str(error.reason), error.sentence, error.advice, error.field)
    return {**body, "errors": error.errors} if error.errors else body


def of_status(status: int, sentence: str = "") -> dict[str, Any]:
    """Return the answer's JSON for what Jupyter or tornado refuse.

    Args:
        status: The HTTP status.
        sentence: Instead of the usual one.
    """
    reason, usual, advice = REFUSED.get(status, BROKEN)
    return problem(status, reason, sentence or usual, advice)


def problem(status: int, reason: str, sentence: str, advice: str = "", field: str = "") -> dict[str, Any]:
    """Return a problem as JSON; `message` is what JupyterLab shows."""
    return {
        "type": f"urn:gpupool:{reason}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "reason": reason,
        "detail": sentence,
        "sentence": sentence,
        "advice": advice,
        "field": field,
        "message": f"{sentence} {advice}".strip(),
    }
