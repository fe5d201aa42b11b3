"""A short attack; `make chaos` is the long one."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_nothing_confirmed_is_lost_in_a_short_attack(tmp_path):
    found = run(tmp_path, seed=5, seconds=15, users=3, pause=1.0)
    assert found["findings"] == []
    assert found["faults"] >= 5, found
    assert found["confirmed"] >= 10, found
