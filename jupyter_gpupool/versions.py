"""The versions that both sides of a lease must share: what is pickled on one is unpickled on the other."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Besides Python itself.
PACKAGES = ("dask", "distributed")

#: Under which name a worker says in Dask's own words about itself what it has; see `_environment.tell`.
ENVIRONMENT = "gpupool_environment"


@functools.cache
def versions() -> Mapping[str, str]:
    """Return those of this process, by name.

    >>> sorted(versions())
    ['dask', 'distributed', 'python']
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return MappingProxyType(found)
