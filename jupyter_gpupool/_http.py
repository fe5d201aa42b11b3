"""The way to a pool: HTTPS calls with the pool's certificate authority pinned; errors are one sentence each.

Rule 1: what to say is written once, as *steps*: a generator that yields `Call`s and is sent their answers.
        `Connection` runs steps with blocking calls, `AsyncConnection` with `await`.
Rule 2: whatever goes wrong on the way is thrown into the steps as a `PoolError`, Ctrl-C and cancellation as
        they are, so that steps can take back what they have asked for.
Rule 3: httpx is imported at the first call only: it alone costs a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import numbers
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from jupyter_gpupool.core.model import Reason

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
#: A pool that has answered before may be restarting: for so many seconds a call is tried again.
PATIENCE_S = 20.0
#: Seconds for an answer, on top of what a long poll asks the pool to wait.
ANSWER_S = 30.0
CONNECT_S = 5.0


#: Where an address is from that is given in a call, as sentences name it.
HERE = "the arguments of Pool()"


class Trouble(StrEnum):
    """What can go wrong on the way to a pool, beside the pool's own `Reason`s."""

    UNREACHABLE = "unreachable"
    NOT_A_POOL = "not_a_pool"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - the name of an error
    WRONG_CERTIFICATE = "wrong_certificate"
    BAD_CONFIG = "bad_config"
    TIMED_OUT = "timed_out"
    NOT_STARTED = "not_started"
    NOT_SIMULATED = "not_simulated"
    BAD_LINE = "bad_line"
    LEASE_OVER = "lease_over"
    CUDA_INITIALISED = "cuda_initialised"
    NOT_LINUX = "not_linux"


class PoolError(Exception):
    """A no, or a failure, in one sentence, with what to do next.

    Args:
        reason: Its name: a `core.model.Reason` where the pool says no, else a `Trouble`.
        sentence: One sentence for a person, with the numbers.
        advice: What to do next; empty where nothing helps.
        field: The field of the request that caused it, where there is one.
    """

    def __init__(self, reason: str, sentence: str, advice: str = "", field: str = "") -> None:
        super().__init__(reason, sentence, advice, field)
        self.reason = reason
        self.sentence = sentence
        self.advice = advice
        self.field = field
        #: The status of the pool's answer; 0: it did not answer.
        self.status = 0
        #: All that is wrong, as the pool says it, where it is more than one thing.
        self.errors: list[dict[str, str]] = []

    def __str__(self) -> str:
        return f"{self.sentence} {self.advice}".strip()

    def _render_traceback_(self) -> list[str]:
        """Have IPython show the sentence: what is wrong is never in the lines of this package."""
        return [f"\x1b[31mGPUPool\x1b[0m: {self}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a pool is and how to get in."""

    url: str
    token: str = field(default="", repr=False)
    #: The certificate authority of the pool (PEM text); empty: those that this computer trusts.
    ca: str = field(default="", repr=False)
    #: Where the address was found, for error sentences.
    source: str = HERE
    #: Says why there is no pool any more at all, where that can be known; else "".
    over: Callable[[], str] = field(default=str, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the pool's HTTP API."""

    method: str
    path: str
    #: A key that the answer must have; without it something else than a pool answers.
    expects: str = ""
    body: Mapping[str, Any] | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Seconds that the pool is asked to hold the answer back (a long poll).
    wait: float = 0.0
    #: Whether it does no harm when it arrives twice.
    repeatable: bool = True


#: What is to be said to a pool, and in the end what comes of it.
Steps = Generator[Call, Any, T]


def get(path: str, expects: str = "", **params: str) -> Call:
    """Make the call that reads `path`."""
    return Call(method="GET", path=path, expects=expects, params=params)


def _is_address(url: Any) -> bool:
    """Whether a pool could be at this address: HTTPS, a host, and nothing that only other servers take.

    >>> _is_address("https://head-node:8790"), _is_address("head-node"), _is_address("https://head-node:x")
    (True, False, False)
    """
    try:
        parts = urlsplit(url)
        return (
            parts.scheme == "https" and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except (ValueError, TypeError, AttributeError):
        return False


class _Way:
    """What the blocking and the asynchronous connection have in common."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._reached = False
        self._client: Any = None
        if not _is_address(address.url):
            raise PoolError(
                Trouble.BAD_CONFIG,
                f"{address.url!r} (from {address.source}) is not the address of a pool.",
                "It looks like https://head-node:8790; `jupyter gpupool start` prints it.",
            )
        if not (address.token.isascii() and address.token.isprintable()):
            raise PoolError(
                Trouble.WRONG_TOKEN,
                f"What {address.source} says is not a token: it has characters that no token has.",
                "Log in with a line of the pool: `jupyter gpupool login LINE`.",
            )

    def _options(self) -> dict[str, Any]:
        import httpx

        parts = urlsplit(self.address.url)
        return {
            "base_url": self.address.url,
            "verify": trust(self.address),
            "headers": {"Authorization": f"Bearer {self.address.token}"} if self.address.token else {},
            "timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            # A proxy cannot reach this machine's own loopback.
            "trust_env": parts.hostname not in ("127.0.0.1", "localhost", "::1"),
        }

    def _request(self, client: Any, call: Call) -> httpx.Request:
        import httpx

        timeout = httpx.Timeout(ANSWER_S + call.wait, connect=CONNECT_S)
        request: httpx.Request = client.build_request(
            call.method,
            call.path,
            json=sayable(call.body),
            params=call.params or None,
            headers=dict(call.headers),
            timeout=timeout,
        )
        return request

    def _pause(self, call: Call, error: PoolError, tries: int, since: float) -> float:
        """Say after how many seconds to try again, or raise the error."""
        if error.reason == Trouble.UNREACHABLE and (why := self.address.over()):
            raise PoolError(Trouble.NOT_STARTED, why, START) from error
        again = error.reason == Trouble.UNREACHABLE and self._reached and call.repeatable
        if not again or time.monotonic() - since > PATIENCE_S:
            raise error
        return float(min(0.1 * 2**tries, 1.0))

    def _read(self, call: Call, response: httpx.Response) -> Any:
        answer = read(self.address, call, response)
        self._reached = True
        return answer


class Connection(_Way):
    """Blocking calls to one pool; safe to use from several threads."""

    def run(self, steps: Steps[T]) -> T:
        """Carry steps out and return what comes of them."""
        try:
            call = next(steps)
            while True:
                try:
                    answer = self.send(call)
                except BaseException as error:  # noqa: BLE001 - Ctrl-C too: the steps decide
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    def send(self, call: Call) -> Any:
        """Make one call and return its answer's JSON (`None` where there is none)."""
        import httpx

        if self._client is None:
            self._client = httpx.Client(**self._options())
        since, tries = time.monotonic(), 0
        while True:
            try:
                with on_the_way(self.address):
                    return self._read(call, self._client.send(self._request(self._client, call)))
            except PoolError as error:
                time.sleep(self._pause(call, error, tries, since))
                tries += 1

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class AsyncConnection(_Way):
    """Calls to one pool within one event loop."""

    async def run(self, steps: Steps[T]) -> T:
        """Carry steps out and return what comes of them."""
        try:
            call = next(steps)
            while True:
                try:
                    answer = await self.send(call)
                except BaseException as error:  # noqa: BLE001 - cancellation too: the steps decide
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    async def send(self, call: Call) -> Any:
        """Make one call and return its answer's JSON (`None` where there is none)."""
        import httpx

        if self._client is None:
            self._client = httpx.AsyncClient(**self._options())
        since, tries = time.monotonic(), 0
        while True:
            try:
                with on_the_way(self.address):
                    return self._read(call, await self._client.send(self._request(self._client, call)))
            except PoolError as error:
                await asyncio.sleep(self._pause(call, error, tries, since))
                tries += 1

    async def close(self) -> None:
        """Close what is open; the next call opens it again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def load() -> None:
    """Import what a first call would: it takes a tenth of a second, which an event loop has not."""
    import httpx  # noqa: F401


def trust(address: Address) -> ssl.SSLContext:
    """Make the TLS settings that trust the pool's own certificate authority and no other.

    Raises:
        PoolError: The certificate is not one.
    """
    try:
        return ssl.create_default_context(cadata=address.ca or None)
    except (ssl.SSLError, ValueError) as error:
        raise PoolError(
            Trouble.BAD_CONFIG,
            f"The certificate of the pool's authority (from {address.source}) cannot be read.",
            "Log in again with a new line: `jupyter gpupool login LINE`.",
        ) from error


# ------------------------------------------------------------------------------------------ what can go wrong

#: What to do where no pool runs on this machine.
START = "Start one with `jupyter gpupool start`."
_OUR_OWN = "Start one with `jupyter gpupool start`, or correct the address in {source}."


def sayable(value: Any) -> Any:
    """Return a value as JSON can say it; what it has no word for goes as text, for the pool to refuse.

    >>> from fractions import Fraction
    >>> sayable({"gpus": Fraction(1, 2), "max_gpus": float("nan"), "exclude": {"node-1"}})
    {'gpus': 0.5, 'max_gpus': 'nan', 'exclude': ['node-1']}
    """
    if isinstance(value, Mapping):
        return {str(name): sayable(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [sayable(each) for each in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    return str(value)


@contextlib.contextmanager
def on_the_way(address: Address) -> Generator[None, None, None]:
    """Turn what httpx raises into `PoolError`s."""
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise _translated(address, error) from error
    except httpx.InvalidURL as error:
        raise PoolError(
            Trouble.BAD_CONFIG, f"{address.url!r} (from {address.source}) is no address."
        ) from error


def _translated(address: Address, error: httpx.HTTPError) -> PoolError:
    words = str(error)
    for mark, make in _BY_MARK:
        if mark in words:
            return make(address)
    return _unreachable(address, words or type(error).__name__)


def _unreachable(address: Address, words: str) -> PoolError:
    return PoolError(
        Trouble.UNREACHABLE,
        f"No pool answers at {address.url} ({words.strip('. ')}).",
        _OUR_OWN.format(source=address.source),
    )


def not_a_pool(address: Address) -> PoolError:
    """Say that something answers, but not a pool."""
    return PoolError(
        Trouble.NOT_A_POOL,
        f"Something else than a GPU pool answers at {address.url}.",
        f"Correct the address in {address.source}; `jupyter gpupool start` prints that of its pool.",
    )


def _wrong_certificate(address: Address) -> PoolError:
    if not address.ca:
        return PoolError(
            Trouble.WRONG_CERTIFICATE,
            f"What answers at {address.url} (from {address.source}) has an unknown certificate.",
            "Log in with a line of the pool, `jupyter gpupool login LINE`, or name its CA in $GPUPOOL_CA.",
        )
    return PoolError(
        Trouble.WRONG_CERTIFICATE,
        f"What answers at {address.url} does not show the certificate of the pool in {address.source}.",
        "If the pool was set up anew, ask its administrator for a line and run `jupyter gpupool login LINE`.",
    )


def _wrong_token(address: Address) -> PoolError:
    return PoolError(
        Trouble.WRONG_TOKEN,
        f"The pool at {address.url} does not accept the token from {address.source}.",
        "Ask its administrator for a line and run `jupyter gpupool login LINE`.",
    )


_BY_MARK: tuple[tuple[str, Callable[[Address], PoolError]], ...] = (
    ("CERTIFICATE_VERIFY_FAILED", _wrong_certificate),
    ("WRONG_VERSION_NUMBER", not_a_pool),
    ("UNEXPECTED_EOF", not_a_pool),
    ("record layer failure", not_a_pool),
    ("illegal request line", not_a_pool),
    ("illegal status line", not_a_pool),
)


def read(address: Address, call: Call, response: httpx.Response) -> Any:
    """Return the JSON of a good answer, or raise what the pool says is wrong."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if response.status_code == 204:
        return None
    if response.status_code == 503 and kind != "application/problem+json":
        raise _unreachable(address, "it is not ready")
    if kind not in ("application/json", "application/problem+json"):
        raise not_a_pool(address)
    try:
        answer = response.json()
    except ValueError as error:
        raise not_a_pool(address) from error
    if response.is_error:
        raise _problem(address, response.status_code, kind, answer)
    if call.expects and (not isinstance(answer, dict) or call.expects not in answer):
        raise not_a_pool(address)
    return answer


def _problem(address: Address, status: int, kind: str, answer: Any) -> PoolError:
    if kind != "application/problem+json" or not isinstance(answer, dict):
        return not_a_pool(address)
    if status == 401 and address.token:
        return _wrong_token(address)
    error = PoolError(
        str(answer.get("reason") or Reason.BAD_REQUEST),
        str(answer.get("detail") or answer.get("title") or f"The pool answers {status}."),
        str(answer.get("advice") or ""),
        str(answer.get("field") or ""),
    )
    error.status, error.errors = status, list(answer.get("errors") or ())
    return error
