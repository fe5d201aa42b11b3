"""The one line that lets an agent join a pool, or a person log in to it.

It is one word, so that it survives being copied: "gpupool:" and the URL-safe base64 of a JSON object with
the pool's URL, the SHA-256 fingerprint of its certificate authority, a token that works once, and what the
line is for. Whoever reads it fetches the authority's certificate from the URL and trusts it only if it has
that fingerprint; nothing is ever trusted for the asking.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import ssl
from typing import NamedTuple

PREFIX = "gpupool:"
#: What a line can be for.
KINDS = ("agent", "login")


class Line(NamedTuple):
    """What a line says."""

    url: str
    #: SHA-256 of the authority's certificate in DER form, as hexadecimal digits.
    ca_sha256: str
    token: str
    #: "agent" or "login".
    kind: str


def write_line(line: Line) -> str:
    """Return the line as one word."""
    return PREFIX + base64.urlsafe_b64encode(json.dumps(line._asdict()).encode()).decode().rstrip("=")


def read_line(text: str) -> Line:
    """Read a line.

    Raises:
        ValueError: It is none; the sentence says what to do.
    """
    word = "".join(text.split())
    body = word.removeprefix(PREFIX)
    try:
        data = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        line = Line(**{name: str(data[name]) for name in Line._fields})
    except (binascii.Error, ValueError, KeyError, TypeError):
        line = None
    if line is None or not word.startswith(PREFIX) or line.kind not in KINDS:
        raise ValueError(
            "This is not a line of a pool: copy the whole line that begins with gpupool: as `jupyter gpupool "
            "start` or `jupyter gpupool token new` printed it, in one piece."
        )
    return line


def fingerprint(ca: str) -> str:
    """Return the SHA-256 fingerprint of a certificate in PEM form, as hexadecimal digits."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(ca)).hexdigest()
