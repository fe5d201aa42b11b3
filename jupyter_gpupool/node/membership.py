"""How a node becomes a member of a pool, and what it keeps of that: one file for its agent's eyes only.

Joining takes the line that `jupyter gpupool start` prints. The controller's certificate authority is fetched
from the URL in it and trusted only if its fingerprint is the line's; then the line's token, which works once,
is exchanged for a certificate of the node's own.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyter_gpupool.line import fingerprint, read_line

FILE = "agent.json"
#: A certificate's common name holds no longer one, and it stands in paths, addresses and Dask's names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
#: Seconds for each call to the controller.
TIMEOUT = 20


class JoinError(Exception):
    """The node could not join; one sentence that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What an agent needs to reach its controller."""

    #: The node's name in the pool.
    name: str
    #: The controller's address for people and for the HTTP API.
    url: str
    #: The controller's address for agents: "tls://host:port".
    comm: str
    #: PEM texts.
    ca: str
    cert: str
    key: str = field(repr=False)

    def credentials(self) -> dict[str, str]:
        """Return the TLS credentials by the names that `wire.security` takes."""
        return {"ca": self.ca, "cert": self.cert, "key": self.key}


def load(folder: Path) -> Membership:
    """Read what an earlier join has left in a folder.

    Raises:
        JoinError: There is nothing, or it is damaged.
    """
    path = folder / FILE
    try:
        return Membership(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise JoinError(
            f"This node has not joined a pool yet ({path} is not there): start it with the line that "
            "`jupyter gpupool start` prints."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise JoinError(
            f"{path} cannot be used ({error}): remove it and join anew with a new line."
        ) from error


def join(folder: Path, text: str, name: str) -> Membership:
    """Join a pool with the line `text` as node `name`, and keep the membership in `folder`.

    Raises:
        JoinError: The line is not one for agents, the name is none for a node, or the controller cannot be
            reached, is another one than the line says, or refuses.
    """
    try:
        line = read_line(text)
    except ValueError as error:
        raise JoinError(str(error)) from error
    if not NAME.fullmatch(name):
        raise JoinError(
            f"{name!r} cannot name a node: choose at most 50 letters, digits, dots, - and _ with --name."
        )
    if line.kind != "agent":
        raise JoinError("This line is for people: `jupyter gpupool login` takes it; an agent needs its own.")
    ca = _authority(line.url, line.ca_sha256)
    answer = _call(line.url, ca, "POST", "/v1/agents", {"token": line.token, "name": name})
    member = Membership(
        name=name, url=line.url, **{part: answer[part] for part in ("comm", "ca", "cert", "key")}
    )
    keep(folder, member)
    return member


def keep(folder: Path, member: Membership) -> None:
    """Write the membership, all at once, for this user's eyes only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=folder, prefix=FILE)  # made with mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(asdict(member), file)
    Path(part).replace(folder / FILE)


def _authority(url: str, expected: str) -> str:
    """Fetch the controller's certificate authority, which is worth nothing without the right fingerprint."""
    blind = ssl.create_default_context()
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE
    status, body = _exchange(url, blind, "GET", "/v1/ca.pem", None)
    try:
        pem = body.decode("ascii")
        found = fingerprint(pem)
    except ValueError:
        found = ""
    if status != http.client.OK or found != expected:
        raise JoinError(
            f"{url} is not the pool that made this line: its authority has another fingerprint. "
            "Copy a new line from `jupyter gpupool start`."
        )
    return pem


def _call(url: str, ca: str, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    context = ssl.create_default_context(cadata=ca)
    status, answer = _exchange(url, context, method, path, json.dumps(body).encode())
    try:
        data = json.loads(answer)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise JoinError(f"{url} does not answer like a pool: check the address.")
    if status >= http.client.BAD_REQUEST:
        said = " ".join(str(data.get(part) or "") for part in ("detail", "advice")).strip()
        raise JoinError(said or f"{url} refuses with status {status}.")
    return data


def _exchange(
    url: str, context: ssl.SSLContext, method: str, path: str, body: bytes | None
) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection(
        parts.hostname or "", parts.port or 443, timeout=TIMEOUT, context=context
    )
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        return response.status, response.read(2**20)
    except ssl.SSLCertVerificationError as error:
        raise JoinError(f"{url} shows a certificate of another pool: copy a new line.") from error
    except (OSError, http.client.HTTPException) as error:
        raise JoinError(
            f"{url} cannot be reached ({error}): check that the controller runs and is reachable from here."
        ) from error
    finally:
        connection.close()
