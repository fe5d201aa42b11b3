"""What a node's judge makes of signs, of the monitor's errors, and of thresholds; what its evidence says."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from jupyter_gpupool.core import history
from jupyter_gpupool.core.health import RULES, FindingKind, Judge, Thresholds
from jupyter_gpupool.core.model import HOUR, MINUTE, SECOND, Verdict
from jupyter_gpupool.core.rules import Case

from .health_tables import PAGE, rendered
from .judging import SOUND, Bench

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
