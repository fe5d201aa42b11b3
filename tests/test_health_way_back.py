"""How a GPU that was taken out comes back, and when it does not."""

from __future__ import annotations

import pytest

from jupyter_gpupool.core.health import Thresholds
from jupyter_gpupool.core.model import DAY, HOUR, MINUTE, SECOND, Verdict, decode, encode

from .judging import Bench, gpus

FINE, WATCH, RESTART, RETIRE, EVACUATE, GONE = Verdict


class TestWayBack:
    """A GPU that was taken out can come back, on probation, unless it has been out too often."""

    @pytest.mark.parametrize(
        ("bad", "good"),
        [
            pytest.param({"error": "GPU_IS_LOST"}, {}, id="a lost GPU answers again"),
            pytest.param({"error": "RESET_REQUIRED"}, {}, id="a reset was required and was done"),
            pytest.param(
                {"recovery_action": 1}, {"recovery_action": 0}, id="nothing is recommended any more"
            ),
            pytest.param({"recovery_action": 4}, {"recovery_action": 0}, id="drained and reset"),
        ],
    )
    def test_a_reset_brings_it_back_on_probation(self, bad, good):
        bench = Bench()
        bench.read(0)
        bench.read(0, **bad)
        bench.wait(MINUTE)
        bench.read(0, **good)
        change = bench.changes[-1]
        assert (change.verdict, change.probation) == (FINE, True)
        assert "after a reset" in change.sentence

    def test_counters_that_fell_show_a_reset_that_no_reading_saw(self):
        bench = Bench()
        bench.read(0, ecc_uncorrected=3)
        bench.xid(95)
        bench.read(0, ecc_uncorrected=5)
        assert bench.verdict(0) is EVACUATE
        bench.read(0, ecc_uncorrected=0)
        assert (bench.verdict(0), bench.changes[-1].probation) == (FINE, True)

    def test_a_gpu_that_fell_off_the_bus_and_answers_has_been_reset(self):
        """One that answers in the same moment was read before it fell."""
        bench = Bench()
        bench.xid(79)
        bench.read(0)
        assert bench.verdict(0) is GONE
        bench.wait(15 * SECOND)
        bench.read(0)
        assert (bench.verdict(0), bench.changes[-1].probation) == (FINE, True)

    def test_good_readings_alone_bring_nothing_back(self):
        bench = Bench()
        bench.xid(95)
        bench.run(20 * HOUR, step=5 * MINUTE)
        assert bench.told(0) == ["evacuate"]

    def test_a_clean_period_does(self):
        bench = Bench()
        bench.xid(95)
        bench.run(25 * HOUR, step=5 * MINUTE)
        assert bench.told(0) == ["evacuate", "fine"]
        assert bench.changes[-1].probation

    def test_a_clean_period_needs_readings(self):
        bench = Bench()
        bench.xid(95)
        for _ in range(30):
            bench.wait(HOUR)
        assert bench.verdict(0) is EVACUATE

    def test_a_reboot_does_and_what_is_still_missing_stays_gone(self):
        bench = Bench()
        bench.xid(79, 0)
        bench.xid(79, 1)
        bench.wait(MINUTE)
        bench.list(0, 2, 3, boot="boot-2")
        assert [bench.verdict(gpu) for gpu in range(3)] == [FINE, GONE, FINE]

    def test_a_listing_that_does_not_say_which_boot_it_is_of_is_no_reboot_and_hides_none(self):
        bench = Bench()
        bench.xid(95)
        bench.list(0, 1, 2, 3, boot="")
        assert bench.verdict(0) is EVACUATE
        bench.list(0, 1, 2, 3, boot="boot-2")
        assert bench.verdict(0) is FINE

    def test_a_gpu_that_was_not_listed_comes_back_with_its_first_reading(self):
        bench = Bench()
        bench.list(0, 1, 3)
        bench.list(0, 1, 2, 3)
        assert bench.verdict(2) is GONE
        bench.read(2)
        assert (bench.verdict(2), bench.changes[-1].probation) == (FINE, True)

    def test_a_new_gpu_in_the_slot_of_an_old_one_starts_on_probation(self):
        bench = Bench()
        bench.xid(79, 2)
        fresh = gpus(4, mig=False)[2]
        fresh = decode(type(fresh), {**encode(fresh), "uuid": "GPU-fresh"})
        outcome = bench.judge.devices([*bench.listed[:2], fresh, bench.listed[3]], bench.now + MINUTE)
        assert [(each.device, each.verdict, each.probation) for each in outcome.changes] == [
            (bench.name(2), GONE, False),
            ("GPU-fresh", FINE, True),
        ]

    def test_what_a_reset_does_not_end_keeps_it_out(self):
        bench = Bench()
        bench.read(0, remap_failed=True)
        bench.read(0, error="RESET_REQUIRED", remap_failed=True)
        bench.read(0, remap_failed=True)
        assert bench.told(0) == ["retire_soon", "evacuate", "retire_soon"]

    def test_probation_ends(self):
        bench = Bench()
        bench.read(0, error="GPU_IS_LOST")
        bench.run(25 * HOUR, step=10 * MINUTE)
        assert [(change.verdict, change.probation) for change in bench.changes] == [
            (GONE, False),
            (FINE, True),
            (FINE, False),
        ]

    def test_on_probation_fewer_incidents_are_enough(self):
        bench = Bench()
        bench.read(0, error="GPU_IS_LOST")
        bench.read(0)
        for _ in range(2):
            bench.wait(MINUTE)
            bench.xid(94, by=["ana"])
        assert bench.verdict(0) is RETIRE

    def test_three_times_in_a_week_it_stays_out_until_a_person_says_so(self):
        bench = Bench()
        for _ in range(3):
            bench.read(0, error="GPU_IS_LOST")
            bench.wait(MINUTE)
            bench.read(0)
        assert bench.verdict(0) is RETIRE
        assert "3 times within a week" in bench.changes[-1].sentence
        bench.run(8 * DAY, step=HOUR)
        assert bench.verdict(0) is RETIRE
        bench.take(bench.judge.forgive(bench.name(0), bench.now))
        assert (bench.verdict(0), bench.changes[-1].probation) == (FINE, True)
        assert "a person's decision" in bench.changes[-1].sentence

    def test_three_times_in_a_month_are_not_three_times_in_a_week(self):
        bench = Bench()
        for _ in range(4):
            bench.read(0, error="GPU_IS_LOST")
            bench.run(4 * DAY, step=HOUR)
        assert bench.verdict(0) is FINE

    def test_the_strikes_can_be_switched_off(self):
        bench = Bench(Thresholds.parse({"strikes": 0}))
        for _ in range(10):
            bench.read(0, error="GPU_IS_LOST")
            bench.read(0)
        assert bench.verdict(0) is FINE

    def test_a_person_may_accept_a_sign_that_stays(self):
        bench = Bench()
        bench.read(0, remap_failed=True)
        bench.take(bench.judge.forgive(bench.name(0), bench.now))
        bench.run(MINUTE, gpu0={"remap_failed": True})
        assert bench.verdict(0) is FINE

    def test_a_person_cannot_talk_a_lost_gpu_back(self):
        bench = Bench()
        bench.read(0, error="GPU_IS_LOST")
        bench.take(bench.judge.forgive(bench.name(0), bench.now))
        assert bench.verdict(0) is GONE

    def test_a_verdict_does_not_get_milder_because_the_last_sign_was_milder(self):
        bench = Bench()
        bench.xid(95)
        bench.xid(31)
        bench.read(0, recovery_action=4)
        assert bench.told(0) == ["evacuate"]
