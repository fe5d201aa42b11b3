"""What takes longer than minutes; `make soak` runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


def test_two_thousand_leases_leave_nothing_behind():
    command = [sys.executable, "-m", "tests.bench.leaks", "--cycles", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=7000, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cycles"] == 2000
    assert found["rss_growth_percent"] <= 5, found
    for name in ("processes", "fds", "threads", "files"):
        assert found[name] <= 0.05 * found["before"][name], found
