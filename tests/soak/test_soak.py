"""A tenth of `make soak`: GPU faults at random times under steady work."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import Soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_gpu_faults_at_random_times_cost_no_answer_and_leave_nothing_behind(own_folder):
    found = Soak(own_folder, seed=7).run(40)
    assert found["findings"] == []
    assert found["faults"] >= 5, found
    assert found["answers"] >= 30, found
