"""What is said to a pool for each thing that a person can want of it, once for `Pool` and `AsyncPool`.

Rule 1: these are generators: they yield calls and are sent answers, and know neither sockets nor event loops.
Rule 2: a request whose wait ends without a grant (Ctrl-C, cancellation, a time-out, an error) is withdrawn:
        nobody would use what is granted later.
Rule 3: no rule about leases is here. What may be had, and why not, the pool says.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any

from jupyter_gpupool._http import Call, PoolError, Steps, Trouble, get
from jupyter_gpupool.core.model import LeaseState, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: What the pool says of a lease, as its API writes it.
LeaseData = dict[str, Any]
#: States of a lease in which nobody can compute on it yet.
WAITING = (LeaseState.PENDING, LeaseState.STARTING)
#: Seconds that the first long polls of a wait ask for, so that the first word comes soon; then the last.
POLLS_S = (0.4, 1.0, 2.0, 5.0, 10.0)


def lease_path(lease: str, part: str = "") -> str:
    """Return the API's path of a lease, or of a part of it such as "logs"."""
    return f"/v1/leases/{lease}" + (f"/{part}" if part else "")


def request(
    what: Mapping[str, Any],
    *,
    wait: bool,
    timeout: float | None,
    on_wait: Callable[[LeaseData], object],
) -> Steps[LeaseData]:
    """Ask for a lease and, with `wait`, wait until it can be used.

    Raises:
        PoolError: The pool says no, the lease did not start, or `timeout` (seconds) has passed.
    """
    timeout = patience(timeout)
    ask = Call(
        method="POST",
        path="/v1/requests",
        body={name: value for name, value in what.items() if value is not None},
        headers={"Idempotency-Key": uuid.uuid4().hex},
        expects="id",
    )
    asked: LeaseData = {}
    try:
        asked = yield ask
        return (yield from usable(asked, timeout, on_wait)) if wait else asked
    except PoolError as error:
        if asked and error.reason != Trouble.LEASE_OVER:
            yield from _withdraw(asked)
        raise
    except GeneratorExit:
        raise  # nobody is left to carry calls out
    except BaseException:
        with contextlib.suppress(PoolError):
            # Whether the pool has the request is unknown: asked again by the same key, it says which it is.
            yield from _withdraw(asked or (yield ask))
        raise


def patience(seconds: Any, field: str = "timeout") -> float | None:
    """Read how long to wait; None: as long as it takes.

    Raises:
        PoolError: It is no number of seconds above zero.

    >>> patience("2.5"), patience(None)
    (2.5, None)
    """
    if seconds is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(seconds, bool) and float(seconds) > 0:
            return float(seconds)
    raise PoolError(
        Reason.BAD_REQUEST,
        f"{field}={seconds!r} is not a number of seconds above zero.",
        "Give one, such as 300.",
        field,
    )


def _withdraw(lease: LeaseData) -> Steps[None]:
    with contextlib.suppress(PoolError):
        yield Call(method="DELETE", path=lease_path(lease["id"]))


def usable(
    lease: LeaseData, timeout: float | None, on_wait: Callable[[LeaseData], object]
) -> Steps[LeaseData]:
    """Wait until a lease can be used; `on_wait` is told what the pool says of it meanwhile.

    Raises:
        PoolError: It has ended, or `timeout` (seconds) has passed.
    """
    timeout = patience(timeout)
    end = None if timeout is None else time.monotonic() + timeout
    polls = 0
    while lease["state"] in WAITING:
        on_wait(lease)
        left = POLLS_S[min(polls, len(POLLS_S) - 1)]
        if end is not None:
            left = min(left, end - time.monotonic())
            if left <= 0:
                raise PoolError(Trouble.TIMED_OUT, _timed_out(lease, timeout or 0.0))
        lease = yield from changed(lease, left)
        polls += 1
    if is_over(lease):  # it could not be started, or was released
        raise over(lease)
    return lease


def is_over(lease: Mapping[str, Any]) -> bool:
    """Return whether a lease has ended or is ending for good; one that is being suspended goes on later."""
    ending = lease["state"] == LeaseState.DRAINING and not lease.get("suspending")
    return bool(ending or lease["state"] == LeaseState.ENDED)


def changed(lease: LeaseData, wait: float) -> Steps[LeaseData]:
    """Read a lease anew as soon as it changes, or after `wait` seconds."""
    answer: LeaseData = yield Call(
        method="GET",
        path=lease_path(lease["id"]),
        params={"wait": f"{wait:.3f}", "version": str(lease["version"])},
        wait=wait,
        expects="state",
    )
    return answer


def ended(lease: LeaseData, timeout: float) -> Steps[LeaseData]:
    """Wait until a lease has ended and all that it had is free.

    Raises:
        PoolError: `timeout` (seconds) has passed.
    """
    end = time.monotonic() + timeout
    while lease["state"] != LeaseState.ENDED:
        left = min(10.0, end - time.monotonic())
        if left <= 0:
            sentence = f"{_called(lease)} is still ending after {timeout:.0f} s: {lease['why']}"
            raise PoolError(Trouble.TIMED_OUT, sentence)
        lease = yield from changed(lease, left)
    return lease


def release(lease: str) -> Steps[None]:
    """Give a lease back, or withdraw a request; one that has ended already is fine."""
    try:
        yield Call(method="DELETE", path=lease_path(lease))
    except PoolError as error:
        if error.reason != Reason.LEASE_OVER:
            raise


def patch(lease: str, change: Mapping[str, Any], **params: str) -> Steps[LeaseData]:
    """Change a lease: its time, its size, who shares it, or that it is still needed."""
    answer: LeaseData = yield Call(
        method="PATCH",
        path=lease_path(lease),
        body=change,
        params=params,
        headers={"Idempotency-Key": uuid.uuid4().hex},  # so that an extension can be said again
        expects="id",
        repeatable=not params,
    )
    return answer


def share(lease: str, users: Sequence[str], *, restart: bool) -> Steps[LeaseData]:
    """Let exactly these others use a lease; with `restart`, on new keys."""
    return patch(lease, {"share": list(users)}, **({"restart": "true"} if restart else {}))


def read(path: str, expects: str = "") -> Steps[dict[str, Any]]:
    """Read what the API has at `path`."""
    answer: dict[str, Any] = yield get(path, expects)
    return answer


def trial(what: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """Ask what would come of a request, without making it."""
    answer: dict[str, Any] = yield Call(
        method="POST",
        path="/v1/requests",
        params={"dry_run": "true"},
        body={name: value for name, value in what.items() if value is not None},
        expects="starts_now",
    )
    return answer


def connection(lease: LeaseData) -> Steps[dict[str, Any]]:
    """Read how to reach a lease's scheduler: address and credentials.

    Raises:
        PoolError: It has ended, or may not be used by this person.
    """
    try:
        answer: dict[str, Any] = yield get(lease_path(lease["id"], "connection"), "address")
    except PoolError as error:
        if error.reason != Reason.LEASE_OVER:
            raise
        raise over((yield from changed(lease, 0.0))) from None
    return answer


def attach(lease: str, process: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """Have a process count as a lease's, and read which devices it is to see.

    Raises:
        PoolError: It is on another machine, or not its owner's.
    """
    answer: dict[str, Any] = yield Call(
        method="POST", path=lease_path(lease, "attach"), body=process, expects="devices"
    )
    return answer


def security(connection: Mapping[str, Any]) -> Any:
    """Make Dask's TLS settings of what `connection` has read."""
    import distributed

    return distributed.Security(
        tls_ca_file=connection["ca"],
        tls_client_cert=connection["cert"],
        tls_client_key=connection["key"],
        require_encryption=True,
    )


def logs(lease: str) -> Steps[dict[str, str]]:
    """Read what a lease's processes wrote, by the process's name."""
    answer = yield get(lease_path(lease, "logs"), "logs")
    return {each["name"]: each["text"] for each in answer["logs"]}


def leases(*, everybody: bool, ended: bool) -> Steps[list[LeaseData]]:
    """Read one's own leases, or everybody's as far as one may see them; with `ended` those that are over."""
    asked = {"all": "true"} if everybody else {}
    found: dict[str, LeaseData] = {}
    while True:  # a page at a time, the newest first: who has many that are over may have old ones that live
        answer = yield get("/v1/leases", "leases", **asked)
        found |= {each["id"]: each for each in answer["leases"]}
        if not answer["next"]:
            return [each for each in found.values() if ended or each["state"] != LeaseState.ENDED]
        asked["after"] = answer["next"]


def lease_named(name: str) -> Steps[LeaseData]:
    """Find one of one's own leases by its name or id; the newest where several had the name.

    Raises:
        PoolError: There is none.
    """
    own = yield from leases(everybody=False, ended=True)
    for lease in own:
        if lease["id"] == name:
            return lease
    alike = [lease for lease in own if lease["name"] == name]
    if alike:
        return min(alike, key=lambda lease: lease["state"] == LeaseState.ENDED)
    with contextlib.suppress(PoolError):  # one that somebody shares, or an administrator's look at another's
        shared: LeaseData = yield get(lease_path(name), "id")
        return shared
    names = ", ".join(lease["name"] for lease in own if lease["state"] != LeaseState.ENDED)
    raise PoolError(
        Reason.UNKNOWN_LEASE,
        f"You have no lease {name!r}.",
        f"You have: {names}." if names else "You have none; request one first.",
    )


def only_lease() -> Steps[LeaseData]:
    """Find the one lease that a person has.

    Raises:
        PoolError: There is none, or there are several.
    """
    found = yield from leases(everybody=False, ended=False)
    own = [lease for lease in found if not is_over(lease)]
    if len(own) == 1:
        return own[0]
    if not own:
        raise PoolError(Reason.UNKNOWN_LEASE, "You have no lease.", "Request one first.")
    names = ", ".join(lease["name"] for lease in own)
    raise PoolError(Reason.UNKNOWN_LEASE, f"You have {len(own)} leases.", f"Say which: {names}.")


# ------------------------------------------------------------------------------------------------------ words


def over(lease: LeaseData) -> PoolError:
    """Say that a lease has ended, and why."""
    advice = "Request a new one."
    if not lease.get("started_at") and lease.get("granted_at"):
        advice = f"`jupyter gpupool logs {lease['id']}` shows what its processes wrote."
    return PoolError(Trouble.LEASE_OVER, f"{_called(lease)} has ended: {sentence(lease['why'])}", advice)


def _timed_out(lease: LeaseData, timeout: float) -> str:
    waits = lease["why"] or "the pool gives no reason"
    return f"{_called(lease)} got nothing within {timeout:g} s and is withdrawn: {sentence(waits)}"


def _called(lease: LeaseData) -> str:
    return f"Lease {lease['name'] or lease['id']}"


def sentence(words: str) -> str:
    """End words with a full stop."""
    words = words.strip()
    return words if not words or words[-1] in ".!?" else words + "."
