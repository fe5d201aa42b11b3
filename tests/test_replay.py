"""Replaying a trace: every figure on traces so small that the answer can be worked out by hand."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_gpupool import cli, replay
from jupyter_gpupool import replay_figures as shown
from jupyter_gpupool.controller.records import Ran
from jupyter_gpupool.controller.store import Store
from jupyter_gpupool.core.model import ANY, HOUR, MINUTE, SECOND, WHOLE, Project
from jupyter_gpupool.replay import Job, TraceError
from tests.bench.philly import TRACE, capacity, run
from tests.share_checker import Checker, fill

MIN_RUN_AND_GRACE = 12 * MINUTE


def job(ident: str, arrival: int, duration: int, gpus: int = 1, project: str = "a") -> Job:
    """A request; times in minutes."""
    return Job(ident, project, project, arrival * MINUTE, duration * MINUTE, gpus)


def played(jobs: list[Job], gpus: int, policy: str = "ours") -> dict[str, Job]:
    """The jobs after a replay, by id."""
    return {each.id: each for each in replay.play(jobs, gpus, policy).jobs}


def wait(each: Job) -> int:
    """Minutes that a job has waited."""
    return (each.finished - each.arrival - each.duration) // MINUTE


# ------------------------------------------------------------------------------------------------- policies


def test_first_come_first_served_lets_nobody_pass_a_request_that_does_not_fit():
    jobs = [job("r1", 0, 60, 3), job("r2", 1, 60, 2), job("r3", 2, 10, 1)]
    done = played(jobs, 4, "fifo")
    assert {ident: wait(each) for ident, each in done.items()} == {"r1": 0, "r2": 59, "r3": 58}


def test_under_quotas_alone_nobody_borrows_what_is_free():
    jobs = [job("r1", 0, 60, 2), job("r2", 0, 60, 2), job("r3", 0, 60, 1, project="b")]
    done = played(jobs, 4, "quota-only")
    assert {ident: wait(each) for ident, each in done.items()} == {"r1": 0, "r2": 60, "r3": 0}


def test_under_quotas_alone_what_is_wider_than_its_quota_never_starts():
    done = played([job("r1", 0, 60, 3), job("r2", 0, 60, 1, project="b")], 4, "quota-only")
    assert done["r1"].refused
    assert done["r1"].finished == -1


def test_under_our_rules_who_borrows_gives_back_and_what_was_cut_off_is_computed_again():
    """`a` borrows all four GPUs; after the grace `b` has its two, and `a` goes on when they are free."""
    jobs = [job("r1", 0, 120, 2), job("r2", 0, 120, 2), job("r3", 20, 60, 2, project="b")]
    found = replay.play(jobs, 4)
    done = {each.id: each for each in found.jobs}
    assert wait(done["r3"]) == 2
    cut = [each for each in (done["r1"], done["r2"]) if each.suspended]
    assert [each.suspended for each in cut] == [1]
    # It stood still while r3 ran, and computed the last minute again.
    assert wait(cut[0]) == 60 + 1
    assert found.lost == replay.RESTART * 2 * WHOLE
    assert found.pool.ledger.count == 1
    found.pool.validate()


def test_a_big_request_beyond_its_users_share_holds_up_nobody_within_theirs():
    """`a` deserves five of eight GPUs, has three and asks for four; `b` deserves three, asks for its third.

    `a` has used less, so its request comes first. It cannot start before something ends, and what is free
    would be kept for it; but with it `a` would be above its share, and `b` would not.
    """
    days = 6 * 24 * 60
    jobs = [job(f"b{n}", 0, days, project="b") for n in range(2)]
    jobs += [job(f"c{n}", 600, days) for n in range(3)]
    jobs += [job("d1", 601, 60, 4), job("e1", 602, days + days // 2, project="b")]
    done = played(jobs, 8)
    assert wait(done["e1"]) == 0
    assert wait(done["d1"]) > 0
    assert not violations(jobs, 8, "ours")


def test_work_that_ends_with_its_time_limit_is_done_whoever_else_ends_then():
    done = played([job("r1", 0, 60), job("r2", 0, 60), job("r3", 0, 60)], 3)
    assert [wait(each) for each in done.values()] == [0, 0, 0]
    assert not any(each.refused for each in done.values())


def test_the_pool_sees_a_time_limit_never_the_duration():
    seen = []
    replay.play([job("r1", 0, 61)], 1, look=lambda item, _: seen.append(item))
    limits = [item.request.time_limit for item in seen if hasattr(item, "request")]
    assert set(limits) == {4 * HOUR}


# -------------------------------------------------------------------------------------------------- figures


def test_alone_a_project_serves_its_requests_in_turn_and_what_is_too_wide_is_left_out():
    jobs = [job("r1", 0, 60, 2), job("r2", 10, 30, 1), job("r3", 10, 30, 1), job("r4", 11, 5, 3)]
    found = shown.finishes(jobs, 2)
    assert found == {"r1": 60 * MINUTE, "r2": 90 * MINUTE, "r3": 90 * MINUTE}


@pytest.mark.parametrize(
    ("took", "alone", "late"),
    [
        pytest.param(100, 100, False, id="as long as alone is fair"),
        pytest.param(117, 100, False, id="5 % longer, and min run time and grace, are excused"),
        pytest.param(118, 100, True, id="more is not"),
    ],
)
def test_a_request_is_treated_unfairly_only_beyond_what_sharing_excuses(took, alone, late):
    each = replace(job("r1", 7, 10), finished=(7 + took) * MINUTE)
    assert shown.unfair(each, (7 + alone) * MINUTE) is late
    assert shown.rho(each, (7 + alone) * MINUTE) == took / alone


def test_what_never_finished_was_treated_unfairly():
    assert shown.unfair(job("r1", 0, 10), 10 * MINUTE)


def test_under_quotas_alone_everybody_fares_as_on_gpus_of_their_own():
    jobs = [job(f"r{n}", n, 17, 1 + n % 2, project="ab"[n % 3 == 0]) for n in range(30)]
    found = shown.figures(replay.play(jobs, 4, "quota-only"), replay.equal(jobs, 4))
    assert (found.worst_rho, found.mean_rho, found.unfair_percent) == (1.0, 1.0, 0.0)


def test_utilisation_is_work_done_up_to_the_last_arrival_without_what_was_computed_again():
    found = replay.play([job("r1", 0, 30, 2), job("r2", 60, 60, 1)], 4)
    assert shown.utilisation(found) == 30 * 2 / (60 * 4)
    found.lost = 6 * MINUTE * WHOLE
    assert shown.utilisation(found) == pytest.approx((30 * 2 - 6) / (60 * 4))


def test_jains_index_and_the_share_error_are_of_what_was_deserved_and_served():
    """Two projects want all of two GPUs all the time; one has both for the first half, one each then."""
    first = replace(job("r1", 0, 100, 2, "a"), runs=[(0, 50 * MINUTE)], finished=50 * MINUTE, started=0)
    then = [
        replace(job(ident, 0, 100, 2, name), runs=runs, finished=100 * MINUTE, started=0)
        for ident, name, runs in (("r2", "a", []), ("r3", "b", []))
    ]
    half = [
        replace(
            job("r4", 50, 50, 1, name),
            id=f"{name}4",
            runs=[(50 * MINUTE, 100 * MINUTE)],
            finished=100 * MINUTE,
        )
        for name in "ab"
    ]
    end = [replace(job("r9", 100, 1, 1), refused=True)]
    projects = tuple(Project(name=name) for name in "ab")
    parts, error = shown.shares([first, *then, *half, *end], 2, projects)
    # `a` was served what it deserves all the time, `b` half of the time.
    assert parts == pytest.approx([1.0, 0.5], abs=0.01)
    assert error == pytest.approx(25, abs=0.5)
    assert shown.jain([1.0, 0.5]) == pytest.approx(1.5**2 / (2 * 1.25))


def test_waits_and_gangs_are_counted():
    jobs = [job("r1", 0, 10, 32), job("r2", 1, 10, 32), job("r3", 2, 10, 1)]
    found = shown.figures(replay.play(jobs, 32, "fifo"), replay.equal(jobs, 32))
    assert (found.gangs_total, found.gangs_started, found.gangs_ended) == (2, 2, 2)
    assert found.mean_wait_s == round(60 * (0 + 9 + 18) / 3, 1)
    assert (found.requests, found.finished, found.refused) == (3, 3, 0)


# ------------------------------------------------------------------------------------- share violations


def test_shares_are_filled_up_evenly_and_what_is_left_goes_by_name():
    assert fill(10, 2, {"a": 1, "b": 9, "c": 9}) == {"a": 1, "b": 5, "c": 4}
    assert fill(10, 5, {"a": 3, "b": 1}) == {"a": 3, "b": 1}


def violations(jobs: list[Job], gpus: int, policy: str) -> set[str]:
    """The requests that were passed over, as the checker sees it."""
    checker = Checker(
        gpus, gpus // len({each.project for each in jobs}), {each.id: each.project for each in jobs}
    )
    replay.play(jobs, gpus, policy, look=checker)
    return set(checker.violations)


def test_who_waits_below_their_share_while_another_has_more_than_theirs_is_a_violation():
    jobs = [job("r1", 0, 120, 4), job("r2", 1, 60, 1, project="b")]
    assert violations(jobs, 4, "fifo") == {"r2"}
    assert violations(jobs, 4, "ours") == set()


def test_who_waits_with_gpus_free_and_room_in_their_share_is_a_violation():
    jobs = [job("r1", 0, 120, 3), job("r2", 1, 60, 2), job("r3", 2, 60, 1, project="b")]
    assert violations(jobs, 4, "fifo") == {"r3"}
    assert violations(jobs, 4, "ours") == set()


def test_who_waits_at_their_share_is_none():
    jobs = [job("r1", 0, 120, 2), job("r2", 1, 60, 1), job("r3", 0, 120, 2, project="b")]
    assert violations(jobs, 4, "fifo") == set()


def test_who_waits_shorter_than_min_run_time_and_grace_is_none():
    jobs = [job("r1", 0, 12, 4), job("r2", 1, 60, 1, project="b")]
    assert violations(jobs, 4, "fifo") == set()
    jobs[0] = replace(jobs[0], duration=MIN_RUN_AND_GRACE + 2 * MINUTE)
    assert violations(jobs, 4, "fifo") == {"r2"}


@pytest.mark.parametrize("at", [1, 2], ids=["by its id", "by its time"])
def test_who_waits_for_an_earlier_one_of_their_own_is_none(at):
    """`a` is to have four: its first asks for all, and the later one would hold it up for longer."""
    jobs = [job("r1", 0, 50, 1), job("r2", 1, 50, 4), job("r3", at, 200, 1)]
    done = played(jobs, 4)
    assert wait(done["r2"]) == 49
    assert violations(jobs, 4, "ours") == set()


def test_who_waits_for_several_that_are_wider_than_their_shares_is_none():
    """Room for one more would be left beside the first of them, and none when both have started."""
    jobs = [job(f"r{at}", 0, 50, 2, project=f"d{at}") for at in range(1, 5)]
    jobs += [job("r5", 0, 200, 2, project="d5"), job("r6", 1, 30, 7), job("r7", 1, 30, 7, project="b")]
    jobs += [job("r8", 1, 200, 1, project="c")]
    assert wait(played(jobs, 16)["r8"]) == 61
    assert violations(jobs, 16, "ours") == set()


# ------------------------------------------------------------------------------------------ a real trace


def test_a_slice_of_the_real_trace_is_shared_fairly():
    """The first 300 requests of the Philly trace on three quarters of what they need."""
    jobs = replay.read(TRACE)[:300]
    gpus = capacity(jobs, 0.75)
    ours, fifo = run(jobs, gpus, "ours"), run(jobs, gpus, "fifo")
    assert ours["share_violations"] == 0 < fifo["share_violations"]
    assert ours["unfair_percent"] <= 1
    assert ours["worst_rho"] < fifo["worst_rho"]
    assert ours["mean_wait_s"] < fifo["mean_wait_s"]
    assert ours["finished"] == fifo["finished"] == 300
    assert ours["reclaims"] > 0


# ------------------------------------------------------------------------------------------ from a terminal


def written(tmp_path: Path, text: str, name: str = "trace.csv") -> str:
    """A file with that text."""
    path = tmp_path / name
    path.write_text(text)
    return str(path)


ROWS = "timestamp,duration,gpus,project,user\n0,3600,2,vision,ann\n60,600,0.5,speech,ben\n"


def test_a_trace_may_say_seconds_or_dates_shares_of_gpus_and_be_compressed(tmp_path):
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(
        gzip.compress(
            b"timestamp,duration,num_gpus,cluster\n"
            b"2017-10-09 07:00:05,1.5,1,x\n2017-10-09 07:00:00,2,0.25,y\n"
        )
    )
    first, second = replay.read(path)
    assert (first.project, first.arrival, first.duration, first.size) == ("y", 0, 2 * SECOND, WHOLE // 4)
    assert (second.project, second.arrival, second.duration, second.size) == ("x", 5 * SECOND, 1500, WHOLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "has no column timestamp", id="empty"),
        pytest.param("timestamp,gpus\n0,1\n", "has no column duration", id="a column is missing"),
        pytest.param("timestamp,duration,gpus\n", "has no requests", id="no rows"),
        pytest.param("timestamp,duration,gpus\n0,1,1\nnoon,1,1\n", "Line 3 of", id="no time"),
        pytest.param("timestamp,duration,gpus\n0,1,0\n", "Line 2 of", id="no GPUs"),
        pytest.param("timestamp,duration,gpus\n0,1,1.5\n", "Line 2 of", id="one and a half GPUs"),
        pytest.param("timestamp,duration,gpus\n0,-1,1\n", "Line 2 of", id="it ends before it begins"),
        pytest.param("timestamp,duration,gpus\n0,nan,1\n", "Line 2 of", id="no number"),
        pytest.param("timestamp,duration,gpus\n0,1\n", "Line 2 of", id="a short row"),
    ],
)
def test_a_trace_that_is_none_is_refused_in_a_sentence(tmp_path, text, said):
    with pytest.raises(TraceError, match=said):
        replay.read(Path(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(
            ["{tmp}/none.csv", "--gpus", "4"], "none.csv cannot be read: No such file", id="no file"
        ),
        pytest.param(["{trace}", "--gpus", "0"], "'0' is no number of GPUs", id="no GPUs"),
        pytest.param(["{trace}", "--gpus", "-2"], "'-2' is no number of GPUs", id="less than none"),
        pytest.param(["{trace}"], "--gpus", id="not said how many"),
        pytest.param(["{trace}", "--gpus", "4", "--policy", "lottery"], "lottery", id="another policy"),
        pytest.param(
            ["{trace}", "--gpus", "4", "--projects", "{tmp}/none.yaml"], "cannot be read", id="no projects"
        ),
        pytest.param(["{trace}", "--gpus", "4", "--projects", "{big}"], "Quotas sum to 9", id="too much"),
        pytest.param(
            ["{trace}", "--gpus", "4", "--projects", "{few}"], "add speech", id="a project is missing"
        ),
        pytest.param(["{trace}", "--gpus", "4", "--projects", "{bad}"], "weight", id="no such weight"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_sentence(tmp_path, capsys, words, said):
    files = {
        "tmp": tmp_path,
        "trace": written(tmp_path, ROWS),
        "big": written(tmp_path, "projects: [{name: vision, quota: 9}, {name: speech}]", "big.yaml"),
        "few": written(tmp_path, "projects: [{name: vision, quota: 1}]", "few.yaml"),
        "bad": written(tmp_path, "projects: [{name: vision, weight: heavy}]", "bad.yaml"),
    }
    with pytest.raises(SystemExit) as status:
        cli.main(["replay", *(word.format(**files) for word in words)])
    error = capsys.readouterr().err
    assert status.value.code == 1
    assert said in error
    assert error.count("\n") == 1


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `replay` answers."""
    return told(capsys, "replay", *words)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command answers."""
    with pytest.raises(SystemExit) as status:
        cli.main([*words])
    assert status.value.code == 0
    return capsys.readouterr().out


def test_policies_are_shown_beside_each_other_as_a_table_or_as_json(tmp_path, capsys):
    trace = written(tmp_path, ROWS)
    quotas = written(
        tmp_path, "projects: [{name: vision, quota: 2}, {name: speech, quota: {T4: 1}}]", "p.yaml"
    )
    text = said(capsys, trace, "--gpus", "4", "--projects", quotas, "--policy", "all")
    assert text.startswith("2 requests on 4 GPUs")
    assert all(word in text for word in ("ours", "fifo", "quota-only", "mean wait", "share error", "Jain"))
    found = json.loads(said(capsys, trace, "--gpus", "4", "--json"))
    assert found["policies"]["ours"]["finished"] == 2
    assert found["policies"]["ours"]["mean_wait_s"] == 0.0


def test_quotas_of_a_file_decide_who_waits(tmp_path, capsys):
    """The what-if: the same requests, and a project that is guaranteed more."""
    rows = "timestamp,duration,gpus,project\n0,7200,2,a\n0,7200,2,b\n0,7200,2,b\n"
    trace = written(tmp_path, rows)
    waits = []
    for quota in (2, 4):
        file = written(
            tmp_path, f"projects: [{{name: a, quota: {4 - quota}}}, {{name: b, quota: {quota}}}]", "p.yaml"
        )
        text = said(capsys, trace, "--gpus", "4", "--projects", file, "--policy", "quota-only", "--json")
        waits.append(json.loads(text)["policies"]["quota-only"])
    assert waits[0]["mean_wait_s"] == 7200 / 3
    assert waits[1]["mean_wait_s"] == 0.0
    assert waits[1]["refused"] == 1


def test_what_has_run_on_this_machine_is_written_as_a_trace_that_can_be_replayed(tmp_path, capsys):
    begin = time.time()
    with contextlib.closing(Store(tmp_path / "journal.sqlite")) as store:
        store.keep_ran(
            [Ran("r1", begin - 60, 90.0, 2000, "vision", "ann"), Ran("r2", begin, 9.5, 500, "x", "ben")]
        )
        store.keep_ran([Ran("r0", begin - 9 * 86_400, 9.0, 1000, "old", "eve")])
    file = str(tmp_path / "out.csv")
    assert "2 requests" in told(capsys, "trace", file, "--since", "1d", "--dir", str(tmp_path))
    first, second = replay.read(Path(file))
    assert (first.project, first.user, first.duration, first.size) == (
        "vision",
        "ann",
        90 * SECOND,
        2 * WHOLE,
    )
    assert (second.arrival, second.size) == (60 * SECOND, WHOLE // 2)
    with pytest.raises(SystemExit):
        cli.main(["trace", file, "--dir", str(tmp_path)])
    assert "out.csv cannot be written: File exists. Name a new file." in capsys.readouterr().err


def test_equal_quotas_are_whole_gpus():
    jobs = [job("r1", 0, 1, 1, "a"), job("r2", 0, 1, 1, "b")]
    assert [each.quota for each in replay.equal(jobs, 5)] == [((ANY, 2 * WHOLE),)] * 2
