"""Logging in by a line: the pool's authority is pinned by its fingerprint, then the token is exchanged.

Rule 1: what answers is trusted for nothing before its certificate authority has the fingerprint in the line.
"""

from __future__ import annotations

import ssl
from typing import Any

from jupyter_gpupool._http import Address, Call, Connection, PoolError, Trouble, not_a_pool, on_the_way
from jupyter_gpupool.line import fingerprint, read_line

SOURCE = "the login line"


def login(text: str) -> tuple[Address, str]:
    """Exchange a login line for a lasting token; return the pool's address with it, and who one is there.

    Raises:
        PoolError: It is no such line, was used already, or another pool answers.
    """
    try:
        line = read_line(text)
    except ValueError as error:
        raise PoolError(Trouble.BAD_LINE, str(error)) from error
    if line.kind != "login":
        raise PoolError(
            Trouble.BAD_LINE,
            "This line is for machines with GPUs: `jupyter gpupool agent` takes it.",
            "Ask the pool's administrator for one to log in with.",
        )
    address = Address(url=line.url, source=SOURCE)
    ca = authority(address, line.ca_sha256)
    pinned = Address(url=line.url, ca=ca, source=SOURCE)
    call = Call(
        method="POST", path="/v1/login", body={"token": line.token}, expects="token", repeatable=False
    )
    connection = Connection(pinned)
    try:
        answer: dict[str, Any] = connection.send(call)
    finally:
        connection.close()
    return Address(url=line.url, token=answer["token"], ca=ca, source=SOURCE), str(answer["user"])


def authority(address: Address, expected: str) -> str:
    """Fetch a pool's certificate authority (PEM text) and hold it against the fingerprint that is known.

    Raises:
        PoolError: It is another pool's, or no pool answers.
    """
    import httpx

    blind = ssl.create_default_context()
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE
    with on_the_way(address), httpx.Client(verify=blind, timeout=20) as client:
        response = client.get(f"{address.url}/v1/ca.pem")
    try:
        found = fingerprint(response.text)
    except ValueError:
        raise not_a_pool(address) from None
    if response.status_code != httpx.codes.OK or found != expected:
        raise PoolError(
            Trouble.WRONG_CERTIFICATE,
            f"What answers at {address.url} is not the pool that made this line.",
            "Ask the pool's administrator for a new one.",
        )
    return response.text
