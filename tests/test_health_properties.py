"""What holds for the judge whatever the driver says, in whatever order."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpupool.core.health import CONDEMNED, Judge
from jupyter_gpupool.core.model import HOUR, MINUTE, SECOND, NvmlEvent, Reading, Verdict
from jupyter_gpupool.core.xids import XIDS, XidClass, lookup

from .judging import Bench, gpus

FINE, WATCH, RESTART, RETIRE, EVACUATE, GONE = Verdict


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
