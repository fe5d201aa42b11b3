"""What takes longer than minutes; `make soak` runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


def bench(name: str, *options: str) -> dict[str, Any]:
    """Run a bench, and return what it has found."""
    command = [sys.executable, "-m", f"tests.bench.{name}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7000, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)  # its figures are for people: `-s` shows them
    return found


def test_two_thousand_leases_leave_nothing_behind():
    found = bench("leaks", "--cycles", "2000")
    assert found["cycles"] == 2000
    assert found["rss_growth_percent"] <= 5, found
    for name in ("processes", "fds", "threads", "files"):
        assert found[name] <= 0.05 * found["before"][name], found


def test_a_killed_controller_takes_a_thousand_leases_back():
    """The bench waits until all of them are active again, their agents connected, three times over."""
    assert bench("restart", "--leases", "1000")["leases"] == 1000


def test_the_controller_answers_and_others_compute_beside_a_graph_of_a_million_tasks():
    found = bench("neighbour", "--tasks", "1000000", "--at-most", "900")
    assert found["failed"] == 0, found
    assert found["known"] >= 1_000_000, found
    assert found["done"] > 0, found
    assert min(found["asked"]) >= 100, found
