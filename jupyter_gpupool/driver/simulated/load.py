"""Put the simulated driver together: the library with all its tables of functions filled."""

from __future__ import annotations

from jupyter_gpupool.driver.simulated import events, instances, queries, topology
from jupyter_gpupool.driver.simulated.library import Library

#: Importing these enters their functions in the library's tables.
TABLES = (queries, topology, events, instances)


def library(path: str, node: str) -> Library:
    """The driver library of a simulated node, for this process."""
    return Library(path, node)
