"""Whose fault repeated errors are: the GPU's, or a program's that fails wherever it runs."""

from __future__ import annotations

import json

from jupyter_gpupool.core.health import CONDEMNED, concerned
from jupyter_gpupool.core.model import HOUR, MINUTE, SECOND, Verdict

from .judging import Bench

FINE, WATCH, RESTART, RETIRE, EVACUATE, GONE = Verdict


class TestPrograms:
    """Whose fault an application error is."""

    def test_one_program_gets_more_chances_on_one_gpu_than_two_do(self):
        bench = Bench()
        for _ in range(4):
            bench.xid(31, by=["ana"])
            bench.wait(MINUTE)
        assert bench.worst() is RESTART
        bench.xid(31, by=["ana"])
        assert bench.worst() is RETIRE

    def test_errors_of_programs_that_nobody_knows_are_counted_as_of_different_ones(self):
        bench = Bench()
        bench.xid(31)
        bench.wait(MINUTE)
        bench.xid(13)
        assert bench.verdict() is RETIRE

    def test_a_program_that_moves_and_fails_again_clears_the_gpu_that_it_came_from(self):
        """Moving is the test: the second GPU shows whose fault it was; no strike, no probation."""
        bench = Bench()
        for _ in range(5):
            bench.xid(31, 0, by=["ana"])
            bench.wait(MINUTE)
        assert bench.verdict(0) is RETIRE
        bench.xid(31, 1, by=["ana"])
        assert bench.verdict(0) not in CONDEMNED
        assert [each.subject for each in bench.findings if each.about == "program"] == ["ana"]
        seen = bench.judge.histories[bench.name(0)]
        assert (seen.strikes, seen.probation_until) == ([], 0)

    def test_a_spreading_program_does_not_hide_a_gpu_that_fails_under_others(self):
        bench = Bench()
        for gpu in range(3):
            bench.xid(31, gpu, by=["ana"])
        for program in ("ben", "cai"):
            bench.wait(MINUTE)
            bench.xid(31, 1, by=[program])
        assert [bench.worst(gpu) for gpu in range(3)] == [RESTART, RETIRE, RESTART]

    def test_two_leases_on_one_gpu_share_the_suspicion(self):
        """Where it may have been the same program each time, it gets that program's chances."""
        bench = Bench()
        bench.xid(31, by=["ana", "ben"])
        bench.wait(MINUTE)
        bench.xid(31, by=["ana", "cai"])
        assert bench.verdict() is RESTART

    def test_a_finding_about_a_program_is_told_once(self):
        bench = Bench()
        for _ in range(3):
            for gpu in range(3):
                bench.xid(13, gpu, by=["ana"])
                bench.wait(SECOND)
        assert len(bench.findings) == 1
        assert "node-1/gpu0, node-1/gpu1" in bench.findings[0].sentence

    def test_incidents_older_than_the_window_do_not_add_up(self):
        bench = Bench()
        for program in ("ana", "ben", "cai"):
            bench.xid(31, by=[program])
            bench.run(25 * HOUR, step=HOUR)
        assert bench.worst() is RESTART

    def test_one_fault_is_logged_many_times_and_counts_once(self):
        bench = Bench()
        for code in (13, 43, 13, 31, 13):
            bench.xid(code, by=["ana"])
            bench.wait(SECOND)
        assert bench.told() == ["restart_worker"]

    def test_a_storm_without_a_pause_is_not_one_incident_for_ever(self):
        bench = Bench()
        for _ in range(300):
            bench.xid(13)
            bench.wait(2 * SECOND)
        assert bench.worst() is RETIRE

    def test_every_incident_asks_for_its_own_restart(self):
        bench = Bench()
        bench.xid(31, by=["ana"])
        bench.wait(20 * SECOND)
        bench.xid(31, by=["ana"])
        assert bench.told() == ["restart_worker", "restart_worker"]

    def test_an_incident_that_another_gpu_explains_is_not_a_second_restart(self):
        bench = Bench()
        bench.xid(31, 0, by=["ana"])
        bench.wait(20 * SECOND)
        bench.xid(31, 1, by=["ana"])
        assert bench.told(0) == ["restart_worker"]

    def test_a_restart_turns_into_a_watch_and_then_into_fine(self):
        bench = Bench()
        bench.xid(31, by=["ana"])
        bench.run(3 * HOUR, step=MINUTE)
        assert bench.told() == ["restart_worker", "watch", "fine"]

    def test_an_event_names_the_mig_instance_that_it_concerns(self):
        bench = Bench(mig=True)
        change = bench.xid(13, by=["ana"], instance=3).changes[0]
        assert json.loads(change.evidence)["instance"] == 3
        assert concerned(3, [("a/0", 3), ("b/0", 4), ("c/0", -1)]) == ("a/0", "c/0")
        assert concerned(0xFFFFFFFF, [("a/0", 3), ("b/0", 4)]) == ("a/0", "b/0")
