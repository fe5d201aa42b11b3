"""Incidents that really happened to systems like this one, and what each has taught.

Where an incident is one of the driver's answers, it is played on a simulated driver through the real reader
and the real judge. Where it is one of hours and days, it is played on a judge whose time the test moves.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time

import pytest

from jupyter_gpupool.core.faults import Fault, classify_error, is_hardware, needs_restart
from jupyter_gpupool.core.health import CONDEMNED, Judge, PoolJudge, Thresholds, concerned
from jupyter_gpupool.core.history import rank
from jupyter_gpupool.core.model import DAY, HOUR, MINUTE, SECOND, Verdict
from jupyter_gpupool.driver import simulated
from jupyter_gpupool.node.reader import Reader

from .judging import Bench

NODE = "node-1"
GPUS = 8


class Room:
    """A simulated machine of eight GPUs, the real reader in a loop of its own, and a judge that listens."""

    def __init__(self, path):
        simulated.create(path, {NODE: GPUS})
        self.machine = simulated.Machine(path)
        self.judge = Judge(NODE)
        self.lock = threading.Lock()
        self.changes, self.findings, self.silences, self.events = [], [], [], []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.reader = self._run(self._start())

    async def _start(self):
        reader = Reader(
            os.environ | simulated.environment(self.machine.state.path, NODE),
            node=NODE,
            interval_s=0.2,
            silence_s=1.5,
            on_devices=lambda devices: self._take("devices", devices, self.now()),
            on_readings=lambda readings: [self._take("reading", each) for each in readings],
            on_event=lambda event: (self.events.append(event), self._take("event", event, ["ana"])),
            on_silence=self.silences.append,
        )
        await reader.start()
        return reader

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def _take(self, what, *arguments):
        with self.lock:
            outcome = getattr(self.judge, what)(*arguments)
            self.changes += outcome.changes
            self.findings += outcome.findings

    async def _poll(self):
        return await self.reader.poll()

    def poll(self):
        """Let the driver be read twice, so that a reading from before is not mistaken for one from after."""
        self._run(self._poll())
        self._run(self._poll())

    def fresh(self):
        """Make everything whole, and know nothing."""
        self.machine.heal()
        for gpu in range(GPUS):
            self.machine.restore(f"gpu{gpu}")
        self.poll()
        time.sleep(0.1)
        with self.lock:
            self.judge = Judge(NODE, Thresholds.parse({"silence": 1500}))
            for told in (self.changes, self.findings, self.silences, self.events):
                told.clear()
        self._take("devices", self.reader.devices, self.now())
        self.poll()
        return self

    def name(self, gpu: int) -> str:
        return self.machine.find(f"gpu{gpu}")

    def verdict(self, gpu: int) -> Verdict:
        with self.lock:
            return self.judge.opinion(self.name(gpu), self.now()).verdict

    def verdicts(self) -> list[str]:
        return [self.verdict(gpu).value for gpu in range(GPUS)]

    def worst(self) -> Verdict:
        return max((each.verdict for each in self.changes), key=rank, default=Verdict.FINE)

    def until(self, what, limit: float = 15):
        end = time.monotonic() + limit
        while not (found := what()):
            assert time.monotonic() < end, (self.changes, self.findings, self.silences)
            time.sleep(0.02)
        return found

    def heard(self, count: int):
        """Wait until so many NVML events have come, and judge what the driver says after them."""
        self.until(lambda: len(self.events) >= count)
        self.poll()

    def close(self):
        self._run(self.reader.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(scope="module")
def machine_room(tmp_path_factory):
    room = Room(tmp_path_factory.mktemp("room") / "machines")
    yield room
    room.close()


@pytest.fixture
def room(machine_room):
    return machine_room.fresh()


# -------------------------------------------------------------------- false alarms: what must condemn nothing


def test_01_a_clean_up_message_after_each_ended_process_condemns_no_rack(room):
    """XID 45 follows every kill of a busy process. Taken for fatal it once flagged 77 sound machines."""
    for gpu in range(GPUS):
        room.machine.xid(f"gpu{gpu}", 45)
    room.heard(GPUS)
    assert room.changes == []


def test_02_a_program_s_page_fault_needs_no_person_to_undo_it():
    """XID 31 once cordoned a machine until somebody came by; here it ends with a restarted worker."""
    bench = Bench()
    bench.xid(31, by=["ana"])
    bench.run(3 * HOUR, step=5 * MINUTE)
    assert bench.told() == ["restart_worker", "watch", "fine"]


def test_03_a_link_message_whose_severity_cannot_be_seen_is_not_taken_for_the_worst(room):
    """XID 145 may be harmless; only its sub-code says so, and NVML does not give it."""
    room.machine.xid("gpu2", 145)
    room.heard(1)
    assert room.verdicts() == ["fine", "fine", "watch", *["fine"] * 5]


def test_04_a_code_that_half_of_the_world_ignores_is_shown_and_takes_nothing_away(room):
    """XID 69 (and 68, 109…): some systems ignore it, some drain for it."""
    for code in (68, 69, 109):
        room.machine.xid("gpu0", code)
    room.heard(3)
    assert room.verdict(0) is Verdict.WATCH


def test_05_a_container_that_lost_its_devices_has_sound_gpus(room):
    """After the container runtime is reloaded every call answers "unknown error". That is the container's."""
    room.machine.fail_next(NODE, code="UNKNOWN", times=-1)
    room.until(lambda: any(each.name == "UNKNOWN" for each in room.silences))
    room.machine.heal()
    room.poll()
    assert room.changes == []


def test_06_a_link_that_the_model_does_not_have_is_not_a_failed_link(room):
    """An older GPU has 12 of the 18 links that may be asked for; another shows none at all while it works."""
    room.machine.set("gpu0", "nvlinks_down", [])
    bench = Bench()
    for gpu, links in ((0, (True,) * 12), (1, (False,) * 18), (2, ()), (3, None)):
        for _ in range(5):
            bench.wait(15 * SECOND)
            bench.read(gpu, nvlinks=links)
    room.poll()
    assert bench.changes == room.changes == []


def test_07_a_temperature_margin_that_makes_no_sense_is_no_overheating(room):
    for value in (0, -3, 255):
        room.machine.set("gpu0", "temperature", value)
        room.poll()
    assert room.changes == []


def test_08_a_warning_ends_when_its_reason_does_not_when_a_log_is_rotated():
    """A machine once stayed drained until its kernel log was rotated, since the old line was found again."""
    bench = Bench()
    bench.xid(109)
    bench.run(3 * HOUR, step=5 * MINUTE)
    assert bench.told() == ["watch", "fine"]


def test_09_a_remapped_row_is_what_the_spare_rows_are_for(room):
    """XID 63 alone is harmless; whether the row could be replaced is in NVML's flags."""
    room.machine.fail("gpu1", 63)
    room.heard(1)
    assert room.verdict(1) is Verdict.WATCH
    room.machine.set("gpu1", "remap_failed", 1)
    room.poll()
    assert room.verdict(1) is Verdict.RETIRE_SOON


def test_10_one_retried_link_error_does_not_cost_two_gpus(room):
    """Both ends of a link report it, and most such errors are retried well or meet idle GPUs."""
    room.machine.xid("gpu0", 74)
    room.machine.xid("gpu1", 74)
    room.heard(2)
    assert room.worst() is Verdict.WATCH


def test_11_a_driver_upgraded_under_a_running_monitor_makes_no_gpu_bad(room):
    """Library and kernel module differ until the monitor is restarted."""
    room.machine.fail_next(NODE, code="LIB_RM_VERSION_MISMATCH", times=-1)
    room.until(lambda: any(each.name == "LIB_RM_VERSION_MISMATCH" for each in room.silences))
    assert room.changes == []


def test_12_no_gpu_in_sight_while_the_device_files_are_there_is_a_finding(room):
    """The driver listed no device although there were some; nobody's work may be moved for that."""
    room._take("devices", [], room.now())
    room.poll()
    assert room.changes == []
    assert [each.about for each in room.findings] == ["monitor"]


# ---------------------------------------------------------------------------------- missed: what must be seen


def test_13_the_driver_s_own_advice_counts_when_everything_else_looks_healthy(room):
    """A health check once said "healthy" while the driver recommended a reset."""
    room.machine.set("gpu3", "recovery_action", 1)
    room.poll()
    assert room.verdicts()[3] == "evacuate"


@pytest.mark.parametrize("vanish", [False, True], ids=["it answers that it is lost", "it is not listed"])
def test_14_a_gpu_may_fall_off_the_bus_without_a_word(room, vanish):
    """There was only a line in the kernel log, which a user's process cannot read."""
    room.machine.lose("gpu5", xid=0, vanish=vanish)
    room.until(lambda: room.verdict(5) is Verdict.GONE)
    assert room.verdicts() == [*["fine"] * 5, "gone", "fine", "fine"]


def test_15_a_monitor_that_hangs_is_noticed_and_its_fault_is_reported_when_it_is_back(room):
    """A hanging monitor was restarted 49 times, and the fault behind it was never told."""
    room.machine.hang("gpu4", 60)
    room.until(lambda: any(each.device == room.name(4) for each in room.silences))
    assert room.changes == []
    room.machine.lose("gpu4", xid=0)
    room.machine.heal()
    room.until(lambda: room.verdict(4) is Verdict.GONE)


def test_16_a_whole_device_event_reaches_every_mig_instance_on_it(room):
    """Siblings once missed it, because there was one entry for the parent."""
    slices = [("ana/0", 1), ("ben/0", 2), ("cai/0", 5)]
    room.machine.xid("gpu0", 95)
    room.machine.xid("gpu1", 13, gpu_instance=2)
    room.heard(2)
    instances = {each.device: json.loads(each.evidence)["incidents"][0]["instance"] for each in room.changes}
    assert concerned(instances[room.name(0)], slices) == ("ana/0", "ben/0", "cai/0")
    assert concerned(instances[room.name(1)], slices) == ("ben/0",)


def test_17_a_monitor_that_dies_of_a_lost_gpu_takes_nothing_with_it(room):
    """A tool crashed on the lost GPU and with it went the sight of all the others."""
    room.machine.lose("gpu6", xid=0)
    room.until(lambda: room.verdict(6) is Verdict.GONE)
    process = room.reader._process
    os.kill(process.pid, signal.SIGSEGV)
    room.until(lambda: room.reader._process is not process)
    room.machine.fail("gpu7", 95)
    room.until(lambda: room.verdict(7) is Verdict.EVACUATE)
    assert room.verdicts() == [*["fine"] * 6, "gone", "evacuate"]


def test_18_the_number_of_a_gpu_is_not_its_name():
    """After a reboot index 0 was another GPU, and the wrong one was treated."""
    bench = Bench()
    bench.xid(95, 2)
    shuffled = [bench.listed[gpu] for gpu in (2, 0, 1, 3)]
    renumbered = [type(each)(**{**_fields(each), "index": at}) for at, each in enumerate(shuffled)]
    bench.take(bench.judge.devices(renumbered, bench.now))
    assert [bench.verdict(gpu) for gpu in range(4)].index(Verdict.EVACUATE) == 2
    assert bench.judge.histories[bench.name(2)].name == "node-1/gpu0"


def _fields(device):
    return {name: getattr(device, name) for name in type(device).__slots__}


# ----------------------------------------------------------------------------------- no way back, or too easy


def test_19_unhealthy_is_not_for_ever(room):
    """A GPU once counted as bad until the monitor was restarted, although it had been reset."""
    room.machine.fail("gpu2", 79)
    room.until(lambda: room.verdict(2) is Verdict.GONE)
    room.poll()
    room.machine.restore("gpu2")
    room.until(lambda: room.verdict(2) is Verdict.FINE)
    assert room.changes[-1].probation


def test_20_the_end_of_one_repair_does_not_cancel_the_next_fault(room):
    """Finishing a drain once cleared a quarantine that had begun in the meantime."""
    room.machine.fail("gpu2", 95)
    room.until(lambda: room.verdict(2) is Verdict.EVACUATE)
    room.poll()
    room.machine.restore("gpu2")
    room.until(lambda: room.verdict(2) is Verdict.FINE)
    room.machine.xid("gpu2", 95)
    room.heard(2)
    room.poll()
    assert room.verdict(2) is Verdict.EVACUATE


def test_21_a_few_gpus_make_most_of_the_trouble_and_must_not_come_back_each_time():
    """Four GPUs of a large system made nine in ten of its uncontained memory errors."""
    bench = Bench()
    for _ in range(3):
        bench.xid(95, 3)
        bench.run(30 * HOUR, step=HOUR)
    assert bench.told(3)[-1] == "retire_soon"
    bench.run(20 * DAY, step=6 * HOUR)
    assert bench.verdict(3) is Verdict.RETIRE_SOON


def test_22_one_cause_that_condemns_half_of_the_pool_is_not_many_bad_gpus(room):
    """A power cut, a driver, a bug of ours: before everything is moved, somebody looks."""
    for gpu in range(GPUS):
        room.machine.set(f"gpu{gpu}", "recovery_action", 2)
    room.poll()
    judge = PoolJudge()
    taken = [judge.take(NODE, change, GPUS) for change in room.changes]
    passed = [each.changes[0].verdict for each in taken]
    assert passed == [Verdict.EVACUATE] * 4 + [Verdict.WATCH] * 4
    assert [finding.about for each in taken for finding in each.findings] == ["pool"]


# ---------------------------------------------------------------------------- programs and poisoned processes


def test_23_eight_workers_are_still_eight_after_ten_hours_of_a_faulty_program():
    """A cluster once lost its GPUs one by one, eight to one in ten hours."""
    bench = Bench(count=8)
    for turn in range(40):
        bench.xid((13, 31, 43, 45)[turn % 4], turn % 8, by=["ana"])
        bench.run(15 * MINUTE, step=MINUTE)
    assert bench.worst() is Verdict.RESTART_WORKER
    assert [each.subject for each in bench.findings if each.about == "program"] == ["ana"]


def test_24_running_out_of_gpu_memory_is_neither_a_bad_gpu_nor_a_bad_process():
    error = simulated.OutOfMemoryError(9 * 10**9, 75 * 10**9, 80 * 10**9)
    assert classify_error(error) is Fault.MEMORY
    assert not needs_restart(classify_error(error))
    assert not is_hardware(classify_error(error), Verdict.RESTART_WORKER)


def test_25_a_poisoned_process_does_not_stay_in_service_for_a_day(room):
    """Processes whose context was dead answered errors for 22 hours, or wrong numbers with "OK"."""
    error = simulated.CUDARuntimeError("cudaErrorIllegalAddress")
    assert needs_restart(classify_error(error))
    room.machine.fail("gpu0", 31)
    room.heard(1)
    assert room.verdict(0) is Verdict.RESTART_WORKER
    later = RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert needs_restart(classify_error(later))


def test_26_a_worker_that_restarts_in_a_circle_is_told_to_its_owner_and_keeps_its_gpu():
    """An illegal access in the program: workers restarted without end and nobody said why."""
    bench = Bench()
    for turn in range(6):
        bench.xid(31, turn % 2, by=["ana"])
        bench.run(30 * SECOND, step=10 * SECOND)
    assert bench.told(0).count("restart_worker") == bench.told(1).count("restart_worker") == 3
    assert bench.worst() is Verdict.RESTART_WORKER
    assert [each.subject for each in bench.findings if each.about == "program"] == ["ana"]


def test_27_a_broken_worker_does_not_get_the_task_again(room):
    """The failing device's task goes elsewhere: its error is the GPU's once the driver says so."""
    error = RuntimeError("P2P transfer failed")
    error.__cause__ = simulated.CUDARuntimeError("cudaErrorLaunchFailure")
    room.machine.fail("gpu0", 79)
    room.until(lambda: room.verdict(0) is Verdict.GONE)
    assert is_hardware(classify_error(error), room.verdict(0))
    assert not is_hardware(classify_error(error), room.verdict(1))


def test_28_an_error_in_a_monitor_of_dask_s_is_no_statement_about_the_gpu():
    """Dask's own monitor raised NVML errors in the middle of tasks and connections."""
    for name in ("NVMLError_Unknown: Unknown Error", "NVMLError_NotSupported: Not Supported"):
        assert classify_error(name) is Fault.MONITOR
    assert classify_error("NVMLError_GpuIsLost: GPU is lost") is Fault.HARDWARE


def test_29_one_bad_gpu_costs_itself_only(room):
    """Is it the worker or the cluster that has to be replaced? Neither the node nor its other GPUs."""
    room.machine.fail("gpu3", 48)
    room.until(lambda: room.verdict(3) is Verdict.EVACUATE)
    room.poll()
    assert [gpu for gpu in range(GPUS) if room.verdict(gpu) in CONDEMNED] == [3]


def test_30_a_gpu_that_asks_for_a_reset_takes_no_work_until_it_has_had_one(room):
    room.machine.set("gpu1", "reset_required", 1)
    room.until(lambda: room.verdict(1) is Verdict.EVACUATE)
    room.machine.restore("gpu1")
    room.until(lambda: room.verdict(1) is Verdict.FINE)
    assert room.changes[-1].probation
