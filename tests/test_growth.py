"""What many leases leave in the controller's memory: only what it is to remember of the last ones."""

from __future__ import annotations

import gc
import tracemalloc
import types
from collections import Counter, deque
from typing import Any

import pytest

from tests.controller_kit import running
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


@pytest.mark.asyncio
async def test_nothing_is_kept_of_a_lease_that_is_forgotten(tmp_path, monkeypatch):
    """No container of the package's that the controller can reach has an item for each."""
    for name in ("strokes.KEEP_ENDED", "strokes.KEEP_TIMERS", "columns._LOG"):  # whatever is kept is bounded
        monkeypatch.setattr(f"jupyter_gpupool.core.{name}", 4)
    async with running(tmp_path) as kit:
        kept = []
        for _ in range(3):
            for _ in range(MANY):
                lease = await kit.ask(gpus=1, time_limit="1h")
                await kit.call("ann", "GET", f"/v1/leases/{lease['id']}")
                await kit.call("ann", "DELETE", f"/v1/leases/{lease['id']}")
            kept.append(items(kit.controller))
        _, before, after = kept
    ours = {name: n - before[name] for name, n in after.items() if name.startswith("jupyter_gpupool")}
    assert len(ours) > 10
    assert {name: n for name, n in ours.items() if n > MANY / 2} == {}


#: What leads out of the controller: into the interpreter, its event loop, this test.
ELSEWHERE = (type, types.ModuleType, types.FunctionType, types.FrameType, types.CoroutineType)


def items(root: Any) -> Counter[str]:
    """Count what is in containers that can be reached, by whose they are."""
    gc.collect()
    found: Counter[str] = Counter()
    seen, new = {id(root)}, [(root, "")]
    while new:
        each, owner = new.pop()
        if isinstance(each, dict | list | set | deque):
            found[owner] += len(each)
        else:
            owner = f"{type(each).__module__}.{type(each).__qualname__}"
        for below in gc.get_referents(each):
            if id(below) not in seen and gc.is_tracked(below) and not isinstance(below, ELSEWHERE):
                seen.add(id(below))
                new.append((below, owner))
    return found
