"""What many leases leave in the controller's memory: only what it is to remember of the last ones."""

from __future__ import annotations

import tracemalloc

import pytest

from tests.pool_helpers import World, node

#: So many leases at a time.
MANY = 30


@pytest.fixture
def trace():
    """Look at memory from some moment on."""
    yield tracemalloc.start
    tracemalloc.stop()


def test_the_text_of_a_snapshot_takes_little_more_memory_than_it_has_bytes(trace):
    """Made all at once it took many times as much, and left the controller's memory in pieces."""
    world = World(node("node-1"))
    for number in range(MANY):
        world.ask(f"lease-{number}", options='{"environment": {"preferred_python": "/usr/bin/python3"}}')
        world.release(f"lease-{number}")
    trace(1)
    text = world.pool.text()
    _, peak = tracemalloc.get_traced_memory()
    assert len(text) > 500 * MANY
    assert peak < 3 * len(text)
