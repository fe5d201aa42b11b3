"""The judges of a node and of the pool: what each rule condemns, what it does not, and every way back."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpupool.core import history
from jupyter_gpupool.core.health import CONDEMNED, RULES, FindingKind, Judge, PoolJudge, Thresholds, concerned
from jupyter_gpupool.core.model import DAY, HOUR, MINUTE, SECOND, NvmlEvent, Reading, Verdict, decode, encode
from jupyter_gpupool.core.rules import Case
from jupyter_gpupool.core.xids import XIDS, XidClass, lookup

from .health_tables import PAGE, rendered
from .judging import SOUND, Bench, gpus

FINE, WATCH, RESTART, RETIRE, EVACUATE, GONE = Verdict


class TestSignals:
    """One sign each, on a GPU about which nothing else is known."""

    @pytest.mark.parametrize(
        ("signals", "verdict"),
        [
            pytest.param({}, FINE, id="a sound GPU is fine"),
            pytest.param({"error": "GPU_IS_LOST"}, GONE, id="a lost GPU is gone"),
            pytest.param({"error": "NVML_ERROR_GPU_IS_LOST"}, GONE, id="with the driver's prefix too"),
            pytest.param({"error": "RESET_REQUIRED"}, EVACUATE, id="a GPU that needs a reset is evacuated"),
            pytest.param({"recovery_action": 1}, EVACUATE, id="recovery action: reset"),
            pytest.param({"recovery_action": 2}, EVACUATE, id="recovery action: reboot the node"),
            pytest.param({"recovery_action": 3}, WATCH, id="recovery action: drain peer-to-peer"),
            pytest.param({"recovery_action": 4}, RETIRE, id="recovery action: drain, then reset"),
            pytest.param({"recovery_action": 5}, WATCH, id="recovery action: recover the IMEX domain"),
            pytest.param({"recovery_action": 6}, EVACUATE, id="recovery action: reset the bus"),
            pytest.param({"recovery_action": 7}, EVACUATE, id="recovery action: reboot the system"),
            pytest.param({"recovery_action": 99}, WATCH, id="a recovery action that nobody knows only warns"),
            pytest.param({"remap_failed": True}, RETIRE, id="a row that could not be remapped"),
            pytest.param({"remap_pending": True}, WATCH, id="a row that is remapped at the next reset"),
            pytest.param({"error": "IRQ_ISSUE"}, WATCH, id="the device answers with an odd error"),
            pytest.param({"error": "CORRUPTED_INFOROM"}, WATCH, id="a corrupted InfoROM"),
            pytest.param({"slowdown": 0x4}, FINE, id="the software power cap is normal at full load"),
            pytest.param({"temperature": 0}, FINE, id="a temperature that makes no sense says nothing"),
            pytest.param(
                {"ecc_uncorrected": 7}, FINE, id="old memory errors at the first look are the baseline"
            ),
            pytest.param({"nvlinks": (False,) * 18}, FINE, id="links that have never been up"),
            pytest.param({"pcie_width": 8}, FINE, id="a slot that has always been narrow"),
        ],
    )
    def test_the_first_reading(self, signals, verdict):
        bench = Bench()
        bench.read(0, **signals)
        assert bench.verdict(0) is verdict
        assert bench.verdict(1) is FINE

    @pytest.mark.parametrize("signal", list(SOUND))
    def test_what_the_driver_does_not_support_is_never_bad(self, signal):
        bench = Bench()
        bench.run(5 * MINUTE)
        bench.run(5 * MINUTE, gpu0={signal: None})
        assert bench.changes == []

    def test_new_uncorrected_memory_errors_retire_the_gpu_once_a_contained_one_had_time_to_explain_them(self):
        bench = Bench()
        bench.read(0)
        bench.read(0, ecc_uncorrected=1)
        assert bench.told(0) == []
        bench.wait(5 * SECOND)
        assert bench.told(0) == ["retire_soon"]

    @pytest.mark.parametrize("first", ["xid", "reading"])
    def test_a_memory_error_that_a_contained_one_explains_costs_one_process_only(self, first):
        bench = Bench()
        bench.read(0)
        bench.wait(15 * SECOND)
        if first == "xid":
            bench.xid(94)
        bench.read(0, ecc_uncorrected=1)
        if first == "reading":
            bench.xid(94)
        bench.run(MINUTE, gpu0={"ecc_uncorrected": 1})
        assert bench.worst(0) is RESTART

    def test_slowdowns_count_by_their_share_of_the_samples(self):
        bench = Bench()
        for sample in range(40):
            bench.wait(15 * SECOND)
            bench.read(0, slowdown=0x40 if sample % 2 else 0)
            bench.read(1, slowdown=0x8 if sample % 5 else 0)
        assert (bench.verdict(0), bench.verdict(1)) == (FINE, WATCH)
        assert "% of the readings of 10 minutes" in bench.judge.opinion(bench.name(1), bench.now).sentence

    def test_the_software_power_cap_at_full_load_is_no_slowdown(self):
        bench = Bench()
        bench.run(20 * MINUTE, gpu0={"slowdown": 0x4})
        assert bench.changes == []

    def test_one_slow_sample_says_nothing(self):
        bench = Bench()
        bench.read(0, slowdown=0x8)
        assert bench.verdict(0) is FINE

    def test_a_pcie_link_is_compared_with_its_own_best_and_must_stay_narrow(self):
        bench = Bench()
        bench.run(MINUTE)
        bench.run(30 * SECOND, gpu0={"pcie_width": 4})
        assert bench.verdict(0) is FINE
        bench.run(15 * SECOND, gpu0={"pcie_width": 4})
        assert bench.verdict(0) is WATCH
        bench.run(15 * SECOND)
        assert bench.verdict(0) is FINE

    def test_an_nvlink_that_was_up_and_stays_down_warns(self):
        bench = Bench()
        bench.run(MINUTE)
        bench.run(MINUTE, gpu0={"nvlinks": (True, True, False, True)})
        assert bench.rule(0) == "NVLink down"

    def test_links_of_a_gpu_in_mig_mode_read_as_down_and_mean_nothing(self):
        bench = Bench(mig=True)
        bench.run(MINUTE)
        bench.run(MINUTE, gpu0={"nvlinks": (False,) * 4})
        assert bench.changes == []

    def test_nvlink_errors_count_by_their_rate(self):
        bench = Bench()
        for hour in range(10):
            bench.wait(HOUR)
            bench.read(0, nvlink_errors=4 * hour)
            bench.read(1, nvlink_errors=6 * hour)
        assert (bench.worst(0), bench.worst(1)) == (FINE, WATCH)

    def test_a_gpu_that_the_driver_lists_no_more_is_gone(self):
        bench = Bench()
        bench.list(0, 1, 3)
        assert bench.told(2) == ["gone"]

    def test_a_gpu_that_the_driver_does_not_know_any_more_is_gone_while_it_knows_others(self):
        bench = Bench()
        bench.run(MINUTE)
        bench.read(2, error="GPU_NOT_FOUND")
        assert bench.told(2) == ["gone"]

    def test_a_driver_that_knows_no_gpu_at_all_condemns_none(self):
        bench = Bench(count=1)
        bench.run(MINUTE)
        bench.list()
        bench.read(0, error="GPU_NOT_FOUND")
        assert bench.changes == []
        assert {finding.about for finding in bench.findings} == {FindingKind.MONITOR}

    @pytest.mark.parametrize("name", ["remap_pending", "slow", "narrow", "link_down"])
    def test_what_the_sources_disagree_on_can_be_made_to_retire(self, name):
        bad = {
            "remap_pending": {"remap_pending": True},
            "slow": {"slowdown": 0x40},
            "narrow": {"pcie_width": 1},
            "link_down": {"nvlinks": (False,) * 4},
        }
        bench = Bench(Thresholds.parse({name: "retire_soon"}))
        bench.run(MINUTE)
        bench.run(10 * MINUTE, gpu0=bad[name])
        assert (bench.verdict(0), bench.verdict(1)) == (RETIRE, FINE)


class TestMonitor:
    """What goes wrong in reading is no word about a GPU."""

    @pytest.mark.parametrize(
        "error",
        [
            "NO_PERMISSION",
            "DRIVER_NOT_LOADED",
            "LIBRARY_NOT_FOUND",
            "FUNCTION_NOT_FOUND",
            "OPERATING_SYSTEM",
            "LIB_RM_VERSION_MISMATCH",
            "ARGUMENT_VERSION_MISMATCH",
            "UNKNOWN",
            "TIMEOUT",
            "UNINITIALIZED",
            "SOMETHING_NEW",
        ],
    )
    def test_an_error_of_the_monitor_or_the_container_condemns_nothing_and_is_told_once(self, error):
        bench = Bench()
        bench.run(MINUTE)
        bench.run(10 * MINUTE, gpu1={"error": error})
        assert bench.changes == []
        assert [(each.about, each.subject) for each in bench.findings] == [("monitor", bench.name(1))]

    def test_an_error_of_the_monitor_takes_nothing_back_either(self):
        bench = Bench()
        bench.read(0, error="GPU_IS_LOST")
        bench.read(0, error="UNKNOWN")
        assert bench.verdict(0) is GONE

    def test_readings_that_stopped_are_a_finding_and_no_verdict(self):
        bench = Bench()
        bench.run(MINUTE)
        for _ in range(10):
            bench.wait(10 * SECOND)
        assert bench.changes == []
        assert [(each.about, each.subject) for each in bench.findings] == [("monitor", "node-1")]
        assert "stopped 40 s ago" in bench.findings[0].sentence

    def test_one_gpu_that_hangs_in_its_call_is_named(self):
        bench = Bench()
        for _ in range(4):
            bench.wait(15 * SECOND)
            for gpu in (0, 1, 3):
                bench.read(gpu)
        assert [each.subject for each in bench.findings] == [bench.name(2)]
        assert bench.changes == []

    def test_silence_is_told_anew_after_readings_have_come_back(self):
        bench = Bench()
        for _ in range(2):
            bench.run(MINUTE)
            bench.wait(2 * MINUTE)
        assert len(bench.findings) == 2


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


class TestEvidence:
    """Every verdict says why, from what, and since when."""

    def test_it_has_the_rule_the_times_the_incidents_and_the_readings(self):
        bench = Bench()
        bench.read(0, temperature=61)
        bench.xid(79, by=["ana"])
        evidence = json.loads(bench.changes[-1].evidence)
        assert evidence["rule"] == "xid gone"
        assert evidence["since"] == evidence["incidents"][0]["first"] == bench.now
        assert evidence["incidents"][0]["labels"] == ["XID 79"]
        assert evidence["incidents"][0]["programs"] == ["ana"]
        assert evidence["readings"][0]["temperature"] == 61

    def test_it_does_not_say_whose_processes_run(self):
        bench = Bench()
        bench.read(0, error="", processes=((4711, 10**9),))
        bench.xid(79)
        assert "4711" not in bench.changes[-1].evidence

    def test_an_event_that_says_too_little_asks_for_a_reading(self):
        bench = Bench()
        assert bench.xid(154).poll == (bench.name(0),)
        assert bench.xid(63).poll == (bench.name(0),)
        assert bench.xid(106).poll == ()

    @pytest.mark.parametrize(
        ("code", "hardware"), [(94, True), (74, True), (95, True), (31, False), (109, False)]
    )
    def test_whether_the_hardware_has_failed_in_this_moment_can_be_asked(self, code, hardware):
        """For a task whose device stays: its error is the program's unless the driver says otherwise."""
        bench = Bench()
        bench.xid(code)
        device = bench.name(0)
        assert bench.judge.failed_just_now(device, bench.now + 5 * SECOND) is hardware
        assert not bench.judge.failed_just_now(device, bench.now + 6 * SECOND)
        assert not bench.judge.failed_just_now("GPU-other", bench.now)

    def test_opinions_are_what_a_controller_that_missed_them_is_told(self):
        bench = Bench()
        bench.xid(79, 1)
        bench.read(2, remap_pending=True)
        told = {each.device: each.verdict for each in bench.judge.opinions(bench.now)}
        assert told == {bench.name(1): GONE, bench.name(2): WATCH}

    def test_a_pool_that_only_observes_shows_what_it_sees_and_touches_nothing(self):
        bench = Bench(Thresholds(observe=1))
        bench.xid(79, 0)
        bench.xid(31, 1, by=["ann"])
        bench.xid(94, 2)
        bench.read(3, error="GPU_IS_LOST")
        assert [bench.verdict(gpu) for gpu in range(4)] == [WATCH] * 4
        assert bench.worst() is WATCH
        assert "fallen off the bus" in bench.changes[0].sentence
        assert not any(bench.judge.failed_just_now(bench.name(gpu), bench.now) for gpu in range(4))

    def test_every_rule_has_a_sentence_and_a_name_of_its_own(self):
        assert len({rule.name for rule in RULES}) == len(RULES)
        assert all(rule.says.endswith(".") for rule in RULES)

    def test_the_rules_are_ordered_from_worst_to_best(self):
        limits = Thresholds()
        case = Case(0, history.History(device="", name=""), limits)
        ranks = [history.rank(rule.judge(case)) for rule in RULES]
        assert ranks == sorted(ranks, reverse=True)


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


class TestThresholds:
    """Configuration is checked where it is read."""

    @pytest.mark.parametrize(
        ("data", "says"),
        [
            ({"strike": 3}, "There is no health threshold 'strike'"),
            ({"strikes": -1}, "strikes is a whole number from 0 up"),
            ({"strikes": 1.5}, "strikes is a whole number from 0 up"),
            ({"slow": "bad"}, "slow is one of fine, watch"),
            ({"xids": {"109": "fatal"}}, "xids.109 is one of info, secondary"),
            ({"xids": [109]}, "xids maps codes to classes"),
        ],
    )
    def test_a_wrong_threshold_is_refused_with_what_is_allowed(self, data, says):
        with pytest.raises(ValueError, match=says):
            Thresholds.parse(data)


# ------------------------------------------------------------------------------------------------ properties

_APPLICATION = [code for code in XIDS if lookup(code).kind is XidClass.APPLICATION] + [45]
_MONITOR = ["NO_PERMISSION", "UNKNOWN", "LIB_RM_VERSION_MISMATCH", "DRIVER_NOT_LOADED", "OPERATING_SYSTEM"]
_GAPS = st.integers(0, 6 * HOUR)
_PROGRAMS = st.lists(st.sampled_from(["ana", "ben", "cai"]), max_size=2)


def _event(device: str, now: int, code: int) -> NvmlEvent:
    return NvmlEvent(device=device, now=now, kind="xid", xid=code)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["xid", "read", "lost", "monitor", "tick", "ecc"]),
        st.integers(0, 2),
        st.sampled_from([13, 31, 43, 45, 63, 74, 79, 94, 95, 109, 154, 999]),
        _GAPS,
        _PROGRAMS,
    ),
    max_size=60,
)


def _play(judge: Judge, steps, now: int = 0):
    """Drive a judge, and give everything that it told."""
    told, ecc = [], 0
    for kind, gpu, code, gap, programs in steps:
        now += gap
        device = f"GPU-node-1-{gpu}"
        ecc += kind == "ecc"
        error = {"lost": "GPU_IS_LOST", "monitor": "UNKNOWN"}.get(kind, "")
        if kind == "xid":
            outcome = judge.event(_event(device, now, code), programs)
        elif kind == "tick":
            outcome = judge.tick(now)
        else:
            outcome = judge.reading(Reading(device=device, now=now, error=error, ecc_uncorrected=ecc))
        told += [*outcome.changes, *outcome.findings]
    return told


def _fresh() -> Judge:
    judge = Judge("node-1")
    judge.devices(gpus(3), 0)
    return judge


@given(
    code=st.sampled_from(_APPLICATION),
    programs=_PROGRAMS,
    instance=st.integers(-1, 6),
    gaps=st.lists(_GAPS, max_size=10),
)
@settings(deadline=None, max_examples=50)
def test_one_application_error_never_takes_a_gpu_out(code, programs, instance, gaps):
    """Whatever the code, the program, the instance and the time that passes with sound readings."""
    bench = Bench()
    bench.xid(code, by=programs, instance=instance)
    for gap in gaps:
        bench.run(min(gap, HOUR), step=20 * MINUTE)
    assert bench.worst() not in CONDEMNED


@given(errors=st.lists(st.tuples(st.sampled_from(_MONITOR), st.integers(0, 3), _GAPS), max_size=30))
@settings(deadline=None, max_examples=50)
def test_errors_of_the_monitor_never_take_a_gpu_out(errors):
    bench = Bench()
    bench.run(MINUTE)
    for error, gpu, gap in errors:
        bench.wait(gap)
        bench.read(gpu, error=error)
    assert bench.changes == []


@given(steps=_STEPS)
@settings(deadline=None, max_examples=50)
def test_the_same_inputs_give_the_same_verdicts(steps):
    assert _play(_fresh(), steps) == _play(_fresh(), steps)


@given(steps=_STEPS, cut=st.integers(0, 60))
@settings(deadline=None, max_examples=50)
def test_a_judge_that_was_restarted_goes_on_as_if_it_had_not(steps, cut):
    """Its snapshot goes through JSON, as in a file."""
    whole, parted = _fresh(), _fresh()
    told = _play(parted, steps[:cut])
    again = Judge.restore(json.loads(json.dumps(parted.snapshot())))
    told += _play(again, steps[cut:], now=sum(step[3] for step in steps[:cut]))
    # The count of memory errors begins anew in `_play`; only runs without it are comparable.
    if not any(step[0] == "ecc" for step in steps[:cut]):
        assert told == _play(whole, steps)
        assert again.snapshot() == whole.snapshot()


@given(steps=_STEPS)
@settings(deadline=None, max_examples=50)
def test_only_changes_are_told(steps):
    """Two verdicts in a row on one device differ, unless they ask for another restart."""
    last = {}
    for change in _play(_fresh(), steps):
        if hasattr(change, "verdict"):
            rule = json.loads(change.evidence)["rule"]
            now = (change.verdict, rule, change.probation)
            assert last.get(change.device) != now or change.verdict is RESTART
            last[change.device] = now


def test_a_flood_of_one_kind_washes_nothing_of_another_away():
    bench = Bench()
    for _ in range(4):
        bench.xid(74)
        bench.wait(MINUTE)
    for _ in range(100):
        bench.xid(109)
        bench.wait(10 * SECOND)
    bench.xid(74)
    assert bench.verdict(0) is RETIRE


def test_history_is_bounded_however_often_the_driver_speaks():
    bench = Bench(count=1)
    sizes = []
    for turn in range(4_000):
        bench.xid((13, 31, 63, 74, 94, 109, turn % 200)[turn % 7], by=[f"lease-{turn}"], instance=turn % 5)
        bench.read(0, ecc_uncorrected=turn, nvlink_errors=turn, slowdown=turn % 2 * 8)
        bench.wait(7 * SECOND)
        if turn % 1_000 == 999:
            sizes.append(len(json.dumps(bench.judge.snapshot())))
            assert len(bench.changes[-1].evidence) < 16_000
    assert sizes[-1] < 120_000
    assert sizes[-1] < 1.1 * sizes[1]


def test_a_snapshot_of_another_version_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="start without it"):
        Judge.restore({"version": 0})


def test_the_page_about_health_has_the_rules_and_numbers_of_the_code():
    """Write them anew with `python -m tests.health_tables`."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page)


def test_every_threshold_says_what_it_is_and_where_it_comes_from():
    for each in fields(Thresholds):
        assert each.metadata["says"]
        assert each.metadata["source"]
