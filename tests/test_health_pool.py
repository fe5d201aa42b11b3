"""What only the whole pool can judge: programs on several nodes, and too many condemned at once."""

from __future__ import annotations

import json

import pytest

from jupyter_gpupool.core.health import CONDEMNED, PoolJudge
from jupyter_gpupool.core.model import HOUR, MINUTE, SECOND, Verdict, decode, encode

from .judging import Bench

FINE, WATCH, RESTART, RETIRE, EVACUATE, GONE = Verdict


class TestPool:
    """What only the whole pool can judge."""

    def condemn(self, judge: PoolJudge, device: str, now: int, devices: int = 8, verdict: Verdict = GONE):
        bench = Bench(count=1)
        change = bench.xid(79).changes[0]
        data = {**encode(change), "device": device, "now": now, "verdict": verdict.value}
        return judge.take("node-1", decode(type(change), data), devices)

    def test_a_verdict_passes_as_it_is(self):
        change = Bench().xid(79).changes[0]
        outcome = PoolJudge().take("node-1", change, 8)
        assert (outcome.changes, outcome.findings, outcome.blamed) == ((change,), (), ())

    def test_more_than_half_of_the_pool_within_five_minutes_stops_and_asks(self):
        judge = PoolJudge()
        passed = [self.condemn(judge, f"GPU-{n}", n * SECOND).changes[0].verdict for n in range(6)]
        assert passed == [GONE] * 4 + [WATCH] * 2
        assert list(judge.held) == ["GPU-4", "GPU-5"]

    def test_it_is_told_once_and_says_what_to_do(self):
        judge = PoolJudge()
        findings = [each for n in range(8) for each in self.condemn(judge, f"GPU-{n}", n).findings]
        assert [(each.about, each.subject) for each in findings] == [("pool", "pool")]
        assert "find the cause" in findings[0].sentence

    def test_half_of_the_pool_over_hours_does_not_stop_it(self):
        judge = PoolJudge()
        passed = [self.condemn(judge, f"GPU-{n}", n * HOUR).changes[0].verdict for n in range(8)]
        assert passed == [GONE] * 8

    def test_gpus_that_came_back_do_not_count(self):
        judge = PoolJudge()
        for n in range(20):
            outcome = self.condemn(judge, f"GPU-{n % 2}", n)
            assert outcome.changes[0].verdict is GONE
            self.condemn(judge, f"GPU-{n % 2}", n, verdict=FINE)

    def test_the_only_gpu_of_a_pool_may_be_condemned(self):
        assert self.condemn(PoolJudge(), "GPU-0", 0, devices=1).changes[0].verdict is GONE

    def test_a_worse_verdict_on_a_condemned_gpu_passes_while_it_is_stopped(self):
        judge = PoolJudge()
        for n in range(5):
            self.condemn(judge, f"GPU-{n}", n, verdict=RETIRE)
        assert self.condemn(judge, "GPU-0", 9).changes[0].verdict is GONE

    @pytest.mark.parametrize("go_on", [True, False])
    def test_a_person_lets_the_held_verdicts_be_carried_out_or_drops_them(self, go_on):
        judge = PoolJudge()
        for n in range(6):
            self.condemn(judge, f"GPU-{n}", n)
        first = judge.decide(["GPU-0", "GPU-4"], 10, go_on=go_on)
        assert judge.stopped, "one is still held"
        outcome = judge.decide(["GPU-5"], 10, go_on=go_on)
        told = [each.device for each in first.changes + outcome.changes]
        assert told == (["GPU-4", "GPU-5"] if go_on else [])
        assert self.condemn(judge, "GPU-7", 20).changes[0].verdict is GONE

    def test_a_held_gpu_that_comes_back_is_not_held_any_more(self):
        judge = PoolJudge()
        for n in range(6):
            self.condemn(judge, f"GPU-{n}", n)
        self.condemn(judge, "GPU-5", 7, verdict=FINE)
        assert list(judge.held) == ["GPU-4"]
        self.condemn(judge, "GPU-4", 8, verdict=FINE)
        assert not judge.stopped

    def test_a_program_that_fails_on_several_nodes_is_at_fault(self):
        judge, blamed, findings = PoolJudge(), [], []
        for node in ("node-1", "node-2"):
            outcome = judge.take(node, Bench(node=node).xid(31, by=["ana"]).changes[0], 8)
            blamed += outcome.blamed
            findings += outcome.findings
        assert blamed == ["ana"]
        assert [(each.about, each.subject) for each in findings] == [("program", "ana")]

    def test_a_gpu_that_was_retired_for_that_program_only_is_let_off_by_its_node(self):
        bench, pool = Bench(), PoolJudge()
        for _ in range(5):
            for change in bench.xid(31, by=["ana"]).changes:
                pool.take("node-1", change, 8)
            bench.wait(MINUTE)
        assert bench.verdict(0) is RETIRE
        other = Bench(node="node-2").xid(31, by=["ana"]).changes[0]
        for program in pool.take("node-2", other, 8).blamed:
            bench.take(bench.judge.blame(program, bench.now))
        assert bench.verdict(0) not in CONDEMNED

    def test_a_retirement_for_a_program_that_is_known_to_spread_does_not_reach_the_pool(self):
        bench, pool = Bench(), PoolJudge()
        pool.take("node-2", Bench(node="node-2").xid(31, by=["ana"]).changes[0], 8)
        passed = []
        for _ in range(5):
            for change in bench.xid(31, by=["ana"]).changes:
                passed += pool.take("node-1", change, 8).changes
            bench.wait(MINUTE)
        assert [each.verdict for each in passed] == [RESTART] * 5

    def test_its_state_survives_a_restart(self):
        judge = PoolJudge()
        judge.take("node-2", Bench(node="node-2").xid(31, by=["ana"]).changes[0], 8)
        for n in range(6):
            self.condemn(judge, f"GPU-{n}", n)
        data = json.loads(json.dumps(judge.snapshot()))
        assert PoolJudge.restore(data).snapshot() == judge.snapshot()
        assert list(PoolJudge.restore(data).held) == ["GPU-4", "GPU-5"]
