"""What somebody on a pool's machines can reach of the pool, and of a lease that is not theirs: it is tried.

It runs as other OS users and in the workers of other leases, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

#: Seconds that each try may take.
WAIT = 5


def _context(keys):
    """TLS as an attacker sets it: whoever the other end is, it will do."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if keys:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(keys["key"] + keys["cert"])
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _comm(port, keys):
    """Dask's end of a connection speaks first, to whom it lets in."""
    bare = socket.create_connection(("127.0.0.1", port), WAIT)
    with bare, _context(keys).wrap_socket(bare) as secure:
        return bool(secure.recv(1))


def _http(url, keys):
    request = urllib.request.Request(url + "/status")
    if keys:
        request.add_header("X-GPUPool-Lease-Secret", keys["secret"])
    with urllib.request.urlopen(request, timeout=WAIT, context=_context(None)) as answer:
        return bool(answer.read(1))


def _page(port, _):
    """A server that has no page answers 404 to any address."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=WAIT) as answer:
        return bool(answer.read(1))


def _file(path, _):
    with Path(path).open("rb") as file:
        file.read(1)
    return True


def _socket(path, _):
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(WAIT)
        end.connect(path)
    return True


def _link(path, _):
    return bool(Path(path).readlink())


TRIES = {"comm": _comm, "http": _http, "page": _page, "file": _file, "socket": _socket, "link": _link}


def reach(targets, keys):
    """Try all targets; return for each "open", or "shut" and the error by which it was.

    Args:
        targets: Name -> pairs of the kind of a try and what it is tried on.
        keys: Of a lease of one's own, or None.
    """
    found = {}
    for name, tries in targets.items():
        found[name] = [_one(kind, where, keys) for kind, where in tries]
    return found


def _one(kind, where, keys):
    try:
        return "open" if TRIES[kind](where, keys) else "shut: it hung up"
    except (OSError, urllib.error.URLError) as error:
        return f"shut: {type(error).__name__} {error}"


def secrets_of_this_process():
    """Return whatever here could be a token of the pool: in the environment, and among the files at home."""
    found = [name for name, value in os.environ.items() if "gpupool_" in value]
    with contextlib.suppress(OSError):
        found += [str(path) for path in Path.home().iterdir() if "gpupool" in path.name]
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps(reach(asked["targets"], asked["keys"])))
