"""People whom a JupyterHub knows: their Hub token is asked about at the Hub itself.

Rule 1: the token must be one for this service: it has the scope `access:services!service=NAME`. Else whoever
        gets hold of a person's token for something else could be that person here.
Rule 2: what the Hub says is good for a few seconds, so that revoking there ends access here, and many calls
        of a server are one of the Hub's.
Rule 3: no token is kept or logged: the memory has hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from typing import Any

from tornado.httpclient import HTTPError, HTTPRequest
from tornado.simple_httpclient import SimpleAsyncHTTPClient

from jupyter_gpupool.controller.auth import PREFIX, SCOPES, Person, valid_user
from jupyter_gpupool.controller.problems import Problem, Trouble

logger = logging.getLogger(__name__)
#: For so many seconds what the Hub said of a token is good.
FRESH_S = 10.0
#: Seconds for the Hub's answer.
ANSWER_S = 10.0
#: Tokens that are remembered; who asks with ever new ones cannot fill the memory.
KEPT = 10_000


class Hub:
    """A JupyterHub.

    Args:
        url: Of its API, such as http://127.0.0.1:8081/hub/api.
        service: The name that the pool has among its services.
        fresh_s: For so many seconds an answer is good.
    """

    def __init__(self, url: str, service: str = PREFIX, fresh_s: float = FRESH_S) -> None:
        self._url = url.rstrip("/")
        self._service = service
        self._fresh_s = fresh_s
        self._client: SimpleAsyncHTTPClient | None = None
        self._known: dict[bytes, tuple[float, asyncio.Task[Person | None]]] = {}

    async def verify(self, text: str) -> Person | None:
        """Return the person whose token it is, or None.

        Raises:
            Problem: The Hub does not answer.
        """
        if not text or not text.isascii() or not text.isprintable() or text.startswith(PREFIX + "_"):
            return None
        key, now = hashlib.sha256(text.encode()).digest(), time.monotonic()
        until, task = self._known.get(key, (0.0, None))
        if task is None or now > until or (task.done() and task.exception() is not None):
            self._tidy(now)
            task = asyncio.ensure_future(self._ask(text))
            self._known[key] = (now + self._fresh_s, task)
        return await asyncio.shield(task)

    def knows(self, text: str) -> bool:
        """Return whether a token was somebody's when the Hub was last asked about it."""
        _, task = self._known.get(hashlib.sha256(text.encode()).digest(), (0.0, None))
        said = task is not None and task.done() and not task.cancelled() and task.exception() is None
        return task is not None and said and task.result() is not None

    def _tidy(self, now: float) -> None:
        if len(self._known) >= KEPT:
            self._known = {key: known for key, known in self._known.items() if known[0] > now}
        while len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]

    async def _ask(self, text: str) -> Person | None:
        if self._client is None:
            self._client = SimpleAsyncHTTPClient(force_instance=True)
        request = HTTPRequest(
            f"{self._url}/user",
            headers={"Authorization": f"token {text}", "Accept": "application/json"},
            request_timeout=ANSWER_S,
            connect_timeout=ANSWER_S,
            follow_redirects=False,
        )
        try:
            response = await self._client.fetch(request, raise_error=False)
            if response.code in (401, 403):
                return None
            said = json.loads(response.body or b"null") if response.code == 200 else response.code
        except (OSError, HTTPError, ValueError) as error:  # refused, silent, not JSON
            said = error
        if not isinstance(said, dict):
            logger.warning("the JupyterHub at %s does not say whose a token is: %s", self._url, said)
            raise Problem(
                Trouble.TIMED_OUT,
                "The pool cannot ask the JupyterHub who you are.",
                "Try again, or tell the pool's administrator.",
                headers={"Retry-After": "5"},
            )
        return self._person(said)

    def _person(self, said: dict[str, Any]) -> Person | None:
        user, scopes = str(said.get("name", "")), said.get("scopes") or ()
        for_us = {"access:services", f"access:services!service={self._service}"}
        if said.get("kind") != "user" or not valid_user(user) or not for_us & set(scopes):
            return None
        most = len(SCOPES) if said.get("admin") else SCOPES.index("admin")
        groups = tuple(sorted(str(each) for each in said.get("groups") or ()))
        return Person(user=user, scopes=frozenset(SCOPES[:most]), groups=groups, token="hub")  # noqa: S106

    def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            self._client.close()
