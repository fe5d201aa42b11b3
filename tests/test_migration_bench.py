"""The bench of migrations is worth something: where nothing is moved, it finds work that is lost."""

from __future__ import annotations

import pytest

from tests.bench import migration

pytestmark = pytest.mark.slow


def test_with_migration_switched_off_the_bench_finds_lost_tasks_and_no_migration(own_folder, monkeypatch):
    monkeypatch.setattr(migration, "WAIT_S", 10.0)
    monkeypatch.setattr(migration, "MOVE_S", 3.0)
    migration.configure(own_folder, observe=True)
    found = migration.measured(1, "gone", seed=1)
    assert found["count"] == 0
    assert found["tasks_lost"] > 0
    assert found["first_task_p95_s"] is None
