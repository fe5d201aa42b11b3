"""`jupyter gpupool`: what a person types, what is printed, and with which exit status it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpupool import cli, display, embedded
from jupyter_gpupool._find import configuration
from jupyter_gpupool.cli_pool import Started
from jupyter_gpupool.commands import COMMANDS
from tests.conftest import environment, wait_until

JUPYTER = [sys.executable, "-m", "jupyter_gpupool.cli"]


@pytest.fixture
def run(capsys):
    """Run a command in this process; gives its exit status, standard output and standard error."""

    def ran(*words):
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return ran


def test_without_a_command_it_says_what_there_is(run):
    for words in ((), ("--help",), ("help",)):
        status, out, _ = run(*words)
        assert status == 0
        assert all(f"jupyter gpupool {each.name} " in out for each in cli.ALL)


@pytest.mark.parametrize("command", [each.name for each in cli.ALL])
def test_each_command_has_a_help_of_its_own(run, command):
    status, out, err = run(command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: jupyter gpupool {command} ")
    assert "options:" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["reqest"], "jupyter gpupool has no command 'reqest'. Did you mean request?"),
        (["frobnicate"], "jupyter gpupool has no command 'frobnicate'. See `jupyter gpupool --help`."),
        (["request", "--gpu", "2"], "jupyter gpupool request has no option --gpu. Did you mean --gpus?"),
        (["request", "2"], "jupyter gpupool request does not take '2' here. Its options: "),
        (["request", "--gpus"], "jupyter gpupool request: --gpus needs a value. Its "),
        (["request", "--env", "x"], "jupyter gpupool request: --env: 'x' is not NAME=VALUE. Its "),
        (["start", "--simulate", "4"], "--simulate 4 is not NODESxGPUS: write 2x4, or "),
        (["simulate", "fail"], "jupyter gpupool simulate fail needs a device, such as gpu3 or node-1/gpu3."),
        (["simulate", "set", "gpu3"], "jupyter gpupool simulate set needs a device and FIELD=VALUE, such as"),
        (["simulate", "set", "gpu3", "temperature=hot"], "'hot' is no reading: give a number, such as "),
        (
            ["health", "node-1"],
            "Verdicts are on devices; node-1 is a node. Name a device of it, such",
        ),
        (["request", "--time", "2"], "'2' has no unit. Did you mean 2h, 2m or 2s?"),
        (["simulate", "explode"], "jupyter gpupool simulate: ACTION is one of 'fail', "),
        (
            ["login", "nonsense"],
            "This is not a line of a pool: copy the whole line that begins with gpupool: ",
        ),
        (
            ["simulate", "fail", "gpu0", "--xid", "x"],
            "jupyter gpupool simulate: --xid takes a number, not 'x'.",
        ),
        (["status", "--url", "x"], "'x' (from --url) is not the address of a pool. It looks like https://"),
        (["login"], "jupyter gpupool login: LINE is missing. Its options: "),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_right(run, pool, words, sentence):
    status, out, err = run(*words)
    assert (status, out) == (1, "")
    assert err.removeprefix("jupyter gpupool: ").startswith(sentence)
    assert err.count("\n") == 1


def test_jupyters_own_options_work(run, pool):
    assert run("status", "--debug")[0] == 0
    assert run("--version")[1].strip() == "0.1.0"


def test_a_lease_from_request_to_release(run, pool):
    status, out, _ = run("request", "--gpus", "2", "--name", "sweep", "--time", "2h")
    assert status == 0
    assert out.startswith("Lease sweep: 2 GPUs (2 \N{MULTIPLICATION SIGN} H100-80GB on node-")
    assert "simulated" in out
    lease = pool.lease("sweep")
    assert lease.state == "active"
    assert 7000 < lease.ends_at - time.time() <= 7200

    assert "sweep" in run("leases")[1]
    assert lease.id in run("leases", "--all")[1]  # by which an administrator ends it
    assert run("why", "sweep")[1].strip()
    assert run("extend", "sweep", "--by", "1h")[0] == 0
    assert lease.refresh().ends_at - time.time() > 10000
    assert run("keep")[0] == 0
    assert "scheduler" in run("logs", "sweep")[1]
    [mine] = [each for each in json.loads(run("usage", "--json")[1]) if each["gpus"]]
    assert (mine["gpus"], mine["leases"], mine["deserved"]) == (2, 1, 2)
    assert run("usage")[1].splitlines()[0].split()[:5] == ["project", "user", "leases", "has", "weight"]
    assert "H100-80GB  whole" in run("ledger")[1]
    assert run("history")[1].splitlines()[0].split() == ["day", "used", "idle"]
    assert run("reclaims")[0] == 0
    assert run("release", "sweep")[1] == "Released: sweep.\n"
    assert lease.refresh().state in ("draining", "ended")


def test_what_stands_below_usage_is_of_columns_that_are_shown():
    row = dict.fromkeys(("leases", "gpus", "waiting", "tier", "deserved", "borrowed"), 0)
    row |= {"project": "vision", "user": "ann", "quota": {}, "limit": {}, "weight": 1}
    hours = dict.fromkeys(("decayed", "used", "idle", "lost"), 0.0)
    assert "GPU hours" not in repr(display.usage_rows({"usage": [row | hours]}))
    said = repr(display.usage_rows({"usage": [row | hours | {"used": 7200.0}]}))
    assert said.endswith("\nin all: in GPU hours.")


@pytest.mark.parametrize(
    ("host", "only_here"), [("127.0.0.1", True), ("[::1]", True), ("head-node", False), ("192.0.2.7", False)]
)
def test_a_pool_that_no_other_machine_reaches_says_so_above_its_lines(pool, host, only_here):
    started = Started({**pool.status(), "url": f"https://{host}:8790", "agent": "LINE", "login": "LINE"})
    assert ("listens on this machine only" in repr(started)) is only_here


def test_status_shows_the_pool_its_devices_and_ones_leases_and_says_that_they_are_simulated(run, pool):
    pool.request(gpus=1, name="mine")
    out = run("status")[1]
    assert out.startswith("8 GPUs (8 \N{MULTIPLICATION SIGN} H100-80GB) on 2 nodes: 7 free, ")
    assert "simulated" in out
    assert "node-2/gpu3" in out
    assert "mine" in out
    assert max(map(len, out.splitlines())) < 150


def test_what_is_said_can_be_read_by_machines(run, pool):
    pool.request(gpus=1, name="mine")
    assert json.loads(run("leases", "--json")[1])[0]["name"] == "mine"
    assert json.loads(run("status", "--json")[1])["pool"]["gpus"] == 8
    assert json.loads(run("request", "--gpus", "1", "--json")[1])["state"] == "active"


def test_a_request_that_does_not_wait_stays_in_the_queue_and_says_why(run, pool):
    pool.request(gpus=8)
    status, out, _ = run("request", "--gpus", "1", "--no-wait", "--name", "later")
    assert status == 0
    assert "pending: place 1 in the queue" in out
    assert "later" in run("queue")[1]
    status, _, err = run("request", "--gpus", "1", "--timeout", "0.5")
    assert status == 1
    assert "got nothing within 0.5 s and is withdrawn" in err
    assert run("release", "--all")[1].startswith("Released: ")
    assert run("request", "--gpus", "1", "--dry-run")[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
def test_whoever_stops_waiting_withdraws_their_request(pool, number):
    """By Ctrl-C, by being ended, or by closing the terminal."""
    pool.request(gpus=8)
    command = [*JUPYTER, "request", "--gpus", "1", "--name", "impatient"]
    waiting = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True)
    wait_until(lambda: "impatient" in [lease.name for lease in pool.leases()])
    waiting.send_signal(number)
    _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == cli.INTERRUPTED
    assert err.splitlines()[-1] == "jupyter gpupool: interrupted; a request that was waiting is withdrawn."
    assert "impatient" not in [lease.name for lease in pool.leases()]


def test_a_simulated_gpu_is_broken_and_repaired(run, pool):
    status, out, _ = run("simulate", "fail", "gpu3", "--xid", "79")
    assert (status, out.split(".")[0]) == (0, "gpu3 now has XID 79")
    assert "lost" in run("simulate", "show")[1].splitlines()[5]
    wait_until(lambda: "gone" in run("health")[1])
    assert run("simulate", "restore", "gpu3")[0] == 0
    wait_until(lambda: "gone" not in run("health")[1])
    assert run("simulate", "set", "gpu3", "temperature=70")[0] == 0
    assert "temperature=70" in run("simulate", "show")[1]
    status, _, err = run("simulate", "fail", "gpu99")
    assert status == 1
    assert "no simulated device 'gpu99'" in err.lower()


def test_what_a_verdict_rests_on_can_be_read(run, pool):
    assert run("drill", "gpu2", "--xid", "95")[1].startswith("node-1/gpu2 now has XID 95")
    wait_until(lambda: pool.devices()[2]["verdict"] == "evacuate")
    said = run("health", "gpu2")[1]
    assert said.startswith("node-1/gpu2 is evacuate: ")
    assert "By the rule “recovery: reset”, since" in said
    assert "XID 95 (uncontained memory error" in said
    assert re.search(r"It was taken out (once|\d+ times) within a week", said)  # others use this pool too
    run("drill", "gpu2", "--end")
    wait_until(lambda: "It is on probation until" in run("health", "gpu2")[1])
    assert json.loads(run("health", "gpu2", "--json")[1])["probation"] is True
    assert "is a node" in run("health", "node-1")[2]


def test_a_device_is_taken_out_and_back(run, pool):
    assert run("cordon", "node-1/gpu0", "--why", "loose cable")[1] == "node-1/gpu0 takes no new work.\n"
    assert pool.status().gpus_free == 7
    assert run("uncordon", "gpu0")[1] == "node-1/gpu0 takes work again.\n"
    assert run("retire", "node-1", "--why", "sold", "--deadline", "5m")[0] == 0
    assert pool.devices()[0]["cordoned"] == "retired: sold"
    assert "fine, retired" in run("health")[1]
    run("cordon", "gpu0")
    still = run("undrain", "gpu0")[1]
    assert still.startswith("node-1/gpu0 still takes no new work, nor does its node: retired: sold. ")
    assert still.endswith(" `uncordon node-1` ends that.\n")
    assert run("undrain", "node-1")[1] == "node-1 takes work again; what has not moved stays.\n"
    assert pool.status().gpus_free == 8
    assert "is not a length of time" in run("drain", "node-1", "--deadline", "soon")[2]
    status, _, err = run("cordon", "node-9")
    assert status == 1
    assert "The pool has no node or device 'node-9'." in err


def test_an_administrator_gets_and_sets_the_projects_and_the_numbers_of_the_pool(run, pool, tmp_path):
    before, file = run("get-projects")[1], tmp_path / "projects.yaml"
    try:
        file.write_text(
            "projects: [{name: default, quota: 2, limit: {'*': 6}}, {name: lab, parent: default, quota: 1}]\n"
            "defaults: {grace: 5m, model_weights: {H100-80GB: 3}}\n"
        )
        status, out, _ = run("set-projects", str(file))
        assert (status, out.splitlines()[-1].split()[:4]) == (0, ["lab", "default", "1", "1"])
        assert "\n  grace: 300.0\n" in run("get-projects")[1]
        file.write_text("projects: [{name: default, quota: 9}]")
        status, _, err = run("set-projects", str(file))
        assert (status, "Quotas sum to 9 GPUs, above the 8 of the pool." in err) == (1, True)
        file.write_text("default: {grace: 5m}")
        assert "must have `projects:`" in run("set-projects", str(file))[2]
    finally:
        file.write_text(before)
        assert run("set-projects", str(file))[0] == 0
    assert run("get-projects")[1] == before


def test_a_person_logs_in_by_a_line_that_works_once(run, pool, monkeypatch, tmp_path):
    line = run("token", "new", "nora")[1].split()[-1]
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "of nora"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
    status, out, _ = run("login", "-")
    assert status == 0
    assert out.startswith(f"You are nora of the pool at {pool.url}.")
    assert configuration().stat().st_mode & 0o077 == 0
    assert json.loads(run("status", "--json")[1])["pool"]["user"]["name"] == "nora"
    status, _, err = run("login", line)
    assert status == 1
    assert "works once" in err
    status, _, err = run("cordon", "node-1")
    assert (status, "scope" in err) == (1, True), "nora is no administrator"
    monkeypatch.undo()
    token = next(row for row in pool.get("/v1/tokens")["tokens"] if row["user"] == "nora")
    assert run("token", "revoke", token["id"])[0] == 0
    assert "nora" not in run("token", "list")[1]


def test_start_prints_the_lines_by_which_others_come_and_stop_ends_everything(run, own_folder):
    status, out, _ = run("start", "--simulate", "1x1:A100-40GB")
    assert status == 0
    assert "1 GPU (1 \N{MULTIPLICATION SIGN} A100-40GB) on 1 node" in out
    assert "simulated" in out
    assert out.count("jupyter gpupool agent gpupool:") == 1
    assert out.count("jupyter gpupool login gpupool:") == 1
    assert run("start", "--node-silence", "90s")[0] == 0, "again: it is found, and new lines are printed"
    assert "node_silence: 90" in run("get-projects")[1]
    status, _, err = run("start", "--node-silence", "soon")
    assert (status, "length of time" in err) == (1, True), err
    line = next(each for each in out.splitlines() if " agent gpupool:" in each).split()[-1]
    join_another_machine(own_folder, line)
    assert run("stop")[1] == "The pool has ended, with all its leases.\n"
    assert run("stop")[1] == "No pool runs on this machine.\n"
    status, _, err = run("status")
    assert status == 1, "a look does not start it again"
    assert "was stopped on" in err
    assert "`jupyter gpupool start`" in err
    assert not embedded.processes()
    assert run("status", "--url", "https://127.0.0.1:9")[0] == 1


def join_another_machine(folder, line):
    """Let a second (simulated) machine join by the line, as a person would."""
    from jupyter_gpupool.driver import simulated

    simulated.create(folder / "elsewhere", {"other": 2})
    agent = subprocess.Popen(
        [*JUPYTER, "agent", "-", "--name", "other", "--dir", str(folder / "agent")],
        env=environment(**simulated.environment(folder / "elsewhere", "other")),
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    agent.stdin.write(f"{line}\n")
    agent.stdin.close()
    from jupyter_gpupool import Pool

    with Pool(start=False) as pool:
        wait_until(lambda: pool.status().gpus == 3)
    assert line not in Path(f"/proc/{agent.pid}/cmdline").read_text(), "where everybody could read it"
    os.kill(agent.pid, signal.SIGTERM)
    assert agent.wait(30) == 0


def test_the_commands_of_a_notebook_are_those_of_a_terminal():
    assert {each.name for each in COMMANDS} < {each.name for each in cli.ALL}


def test_it_is_found_by_jupyter(pool):
    said = subprocess.run(
        ["jupyter", "gpupool", "status"],
        env=environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.startswith("8 GPUs")
    assert embedded.find().url == pool.url


def test_output_that_nobody_reads_to_the_end_is_no_error(pool):
    said = subprocess.run(
        f"{sys.executable} -m jupyter_gpupool.cli status | head -1",
        shell=True,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.startswith("8 GPUs")
    assert "Traceback" not in said.stderr


def test_the_reference_has_every_command():
    text = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()
    missing = [each.name for each in cli.ALL if f" {each.name}" not in text]
    assert missing == []
