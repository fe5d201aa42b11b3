"""The versions that both sides of a lease must share: what is pickled on one is unpickled on the other."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version

#: Besides Python itself.
PACKAGES = ("dask", "distributed")


def versions() -> dict[str, str]:
    """Return those of this process, by name.

    >>> sorted(versions())
    ['dask', 'distributed', 'python']
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
