"""What goes wrong is told in one clear sentence, the same in Python, terminal and notebook.

Nothing leaks by it: afterwards every GPU is free, and no process or request is left.
"""

from __future__ import annotations

import http.server
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta

import numpy as np
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_gpupool import GPUPoolCluster, Pool, PoolError, cli, embedded
from jupyter_gpupool._find import configuration
from jupyter_gpupool.controller.authority import Authority
from tests.conftest import environment, wait_until

# ------------------------------------------------------------------------------------------------ three faces


@pytest.fixture
def shell(session_folder):
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "jupyter_gpupool")
    yield shell
    shell.run_line_magic("unload_ext", "jupyter_gpupool")
    InteractiveShell.clear_instance()


@pytest.fixture(params=["Python", "terminal", "notebook"])
def told(request, capsys):
    """Do something in one of the faces that goes wrong; gives the sentence that a person reads."""
    if request.param == "Python":
        return in_python
    if request.param == "terminal":
        return lambda command, **what: in_terminal(capsys, command, **what)
    shell = request.getfixturevalue("shell")
    return lambda command, **what: in_notebook(shell, capsys, command, **what)


def in_python(command, **what):
    with pytest.raises(PoolError) as no, Pool() as pool:
        pool.request(**what) if command == "request" else pool.status()
    return str(no.value)


def in_terminal(capsys, command, **what):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main([command, *flags(what)])
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (1, "")
    return said.err.splitlines()[-1].removeprefix("jupyter gpupool: ")


def in_notebook(shell, capsys, command, **what):
    capsys.readouterr()
    outcome = shell.run_cell(f"%gpupool {command} {shlex.join(flags(what))}")
    assert isinstance(outcome.error_in_exec, PoolError)
    said = capsys.readouterr()
    shown = [line for line in (said.out + said.err).splitlines() if "GPUPool" in line]
    assert len(shown) == 1
    return shown[0].partition(": ")[2]


def flags(what):
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in what.items()
    ]


# ----------------------------------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"gpus": 9}, "9 GPUs: there are at most 8"),
        ({"gpus": 10**30}, "more than any pool has. Ask for fewer."),
        ({"model": "V100-16GB"}, "No GPU of the pool is of the model V100-16GB. Its models are: H100-80GB."),
        ({"project": "manhattan"}, "There is no project 'manhattan'. The projects are: default."),
        (
            {"gpus": 0},
            "0 GPUs cannot be granted: a request is for more than none. Ask for 1 or more whole GPUs",
        ),
        (
            {"gpus": -2},
            "-2 GPUs cannot be granted: a request is for more than none. Ask for 1 or more whole GPUs",
        ),
        (
            {"gpus": 1.5},
            "more than one GPU comes in whole ones only. Ask for gpus=1 or gpus=2, or for a share",
        ),
        ({"gpus": "two"}, "'two' is not a number of GPUs. Give a number, such as 2 for whole GPUs or 0.5"),
        ({"gpus": float("nan")}, "'nan' is not a number of GPUs. Give a number, such as 2 for whole GPUs or"),
        ({"max_gpus": float("-inf")}, "'-inf' is not a number of GPUs. Give a number, such as 2 for whole"),
        ({"node": "node-9"}, "The pool has no node node-9. Its nodes are: node-1, node-2."),
        ({"cpus": 100000}, "The largest has "),
        ({"memory": "900TB"}, "The largest has "),
        ({"time_limit": "soon"}, "'soon' is not a length of time. Give one with its unit, such as 2h or 30m"),
        ({"time_limit": "90d"}, "2160 hours are more than the 168 allowed. Ask for at most 168 hours"),
        ({"vram": "200GB"}, "No GPU of the pool has 200 GB: 85.52 GB is the most. Ask for at most 85GB."),
        (
            {"min_vram": "81GiB"},
            "No GPU of the pool has 86.97 GB: 85.52 GB is the most. Ask for at most 85GB.",
        ),
        (
            {"mig": "1g.10gb"},
            "No GPU of the pool is in MIG mode. Ask for a share instead: gpus=0.5, or vram.",
        ),
        (
            {"node": "node-1", "exclude": "node-1"},
            "No GPU of the pool meets node, exclude together. Such GPUs are on: node-1, node-2.",
        ),
        ({"exclude": "node-9"}, "The pool has no node or device 'node-9'. Its nodes: node-1, node-2;"),
        (
            {"vram": "9GB", "gpus": 2, "nvlink": True},
            "Shares are not placed by NVLink: nvlink is for whole GPUs. Leave out nvlink, or ask for whole",
        ),
        (
            {"gpus": 5, "same_node": True},
            "5 GPUs: there are at most 4 such GPUs on one node. Ask for at most 4, or without same_node.",
        ),
        ({"isolated": True}, "isolated=true does not say how much memory the instance must have. Give vram"),
        ({"name": "two words"}, "'two words' cannot be the name of a lease. Use up to 63 letters"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_request_that_can_never_be_granted_is_refused_with_what_can(pool, told, what, sentence):
    said = told("request", **what)
    assert sentence in said
    assert "Traceback" not in said
    assert pool.leases() == []
    assert pool.status().gpus_free == 8


def test_two_leases_of_one_name_are_refused(pool, told):
    pool.request(gpus=1, name="sweep")
    assert "sweep" in told("request", gpus=1, name="sweep")
    assert len(pool.leases()) == 1


def test_a_field_that_there_is_not_is_named_with_the_nearest(pool):
    with pytest.raises(PoolError, match=r"There is no field 'gpu'. Did you mean gpus\?") as no:
        pool.request(gpu=1)
    assert no.value.field == "gpu"


def test_what_json_cannot_say_is_told_in_a_sentence_and_numbers_of_numpy_are_numbers(pool):
    assert "would start now" in str(pool.trial(gpus=np.int64(2)))
    assert "on node-2" in str(pool.trial(gpus=np.float32(0.5), exclude={"node-1"}))
    with pytest.raises(PoolError, match=r"'1:00:00' is not a length of time\. Give one with its unit"):
        pool.trial(gpus=1, time_limit=timedelta(hours=1))


# ----------------------------------------------------------------------------------------------- no way to it


def test_a_wrong_token(shared_pool, told, monkeypatch, tmp_path):
    (tmp_path / "ca.pem").write_text(shared_pool.address.ca)
    monkeypatch.setenv("GPUPOOL_URL", shared_pool.url)
    monkeypatch.setenv("GPUPOOL_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("GPUPOOL_TOKEN", "gpupool_0123_wrong")
    assert told("status") == (
        f"The pool at {shared_pool.url} does not accept the token from $GPUPOOL_URL. "
        "Ask its administrator for a line and run `jupyter gpupool login LINE`."
    )


def test_an_address_that_answers_with_something_else(told, monkeypatch, tmp_path):
    authority = Authority(tmp_path)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    server.socket = authority.server_context().wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("GPUPOOL_URL", url)
    monkeypatch.setenv("GPUPOOL_CA", authority.ca_pem)
    try:
        assert told("status") == (
            f"Something else than a GPU pool answers at {url}. "
            "Correct the address in $GPUPOOL_URL; `jupyter gpupool start` prints that of its pool."
        )
    finally:
        server.shutdown()
        server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_an_address_where_nobody_answers(told, monkeypatch):
    monkeypatch.setenv("GPUPOOL_URL", "https://127.0.0.1:9")
    assert told("status") == (
        "No pool answers at https://127.0.0.1:9 ([Errno 111] Connection refused). "
        "Start one with `jupyter gpupool start`, or correct the address in $GPUPOOL_URL."
    )


def test_a_broken_configuration_file(told, monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    configuration().write_text("url: https://head-node:8790\ntoken: [\n")
    said = told("status")
    assert said.startswith(f"The configuration file {configuration()} is broken (line 3: ")
    assert said.endswith("Correct it, or remove it and log in again with `jupyter gpupool login LINE`.")


def test_a_port_in_use(capsys, own_folder):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        said = in_terminal(capsys, "start", port=other.server_port, simulate="1x1")
    assert said.endswith("is in use: end what uses it, or choose another with --port.")
    assert embedded.processes() == {}


@pytest.mark.parametrize("url", ["head-node", "https://[::1", "https://127.0.0.1:9"])
def test_an_address_that_is_configured_wrongly_is_named_and_gone_with_its_setting(pool, shell, url):
    shell.run_cell(f"%config GPUPool.url = {url!r}")
    outcome = shell.run_cell("%gpupool status").error_in_exec
    assert "%config GPUPool.url" in str(outcome)
    shell.run_cell("%config GPUPool.url = ''")
    assert "8 GPUs (8" in str(shell.run_line_magic("gpupool", "status"))


def test_the_address_of_a_pool_that_one_is_logged_in_to_is_enough(pool, shell):
    shell.run_cell(f"%config GPUPool.url = {pool.url + '/'!r}")
    assert "8 GPUs (8" in str(shell.run_line_magic("gpupool", "status"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--timeout -3", "timeout=-3 is not a number of seconds above zero. Give one, such as 300."),
        ("--timeout soon", "timeout='soon' is not a number of seconds above zero."),
        ("--time -1h", "'-1h' is no time at all. Give a time above zero, such as 2h."),
        ("--vram -3GB", "'-3GB' of memory cannot be granted."),
        ("--gpus", "%gpupool request: --gpus needs a value. Its options: `%gpupool request --help`."),
        ("--nvlink=x", "%gpupool request: --nvlink takes no value, and not 'x'."),
    ],
)
def test_options_that_are_wrong_are_told_as_what_they_mean(pool, shell, options, sentence):
    assert sentence in str(shell.run_cell(f"%gpupool request {options}").error_in_exec)
    assert pool.leases() == []


@pytest.mark.parametrize(
    ("arguments", "what", "sentence"),
    [
        ((2,), {}, "GPUPoolCluster takes a Pool first, not 2. Say what is wanted by name: GPUPoolCluster(gp"),
        (("https://node",), {}, "GPUPoolCluster takes a Pool first, not 'https://node'."),
        (
            (),
            {"lease": "x", "gpus": 2},
            "A lease that is there already is as it is: gpus cannot be asked for",
        ),
        ((), {"gpus": 1, "timeout": -3}, "timeout=-3 is not a number of seconds above zero."),
        ((), {"n_workers": 2}, "There is no field 'n_workers'."),
    ],
)
def test_a_cluster_that_cannot_be_meant_is_told_in_a_sentence(pool, arguments, what, sentence):
    with pytest.raises(PoolError) as no:
        GPUPoolCluster(*arguments, **what)
    assert str(no.value).startswith(sentence)
    assert pool.leases() == []


# ------------------------------------------------------------------------------------------------ no free GPU


def test_where_no_gpu_is_free_it_waits_with_reason_and_place_and_is_withdrawn(pool, told):
    pool.request(gpus=8, time_limit="1h")
    said = told("request", gpus=2, timeout=0.6)
    assert "got nothing within 0.6 s and is withdrawn: " in said
    assert "No room" in said
    assert len(pool.leases()) == 1


# ----------------------------------------------------------------------------------- what people leave behind


def test_a_kernel_that_dies_leaves_a_lease_that_is_found_again(pool):
    code = """
        import os, signal
        from jupyter_gpupool import Pool
        lease = Pool().request(gpus=1, name="orphan")
        assert lease.client().submit(sum, [1, 2]).result() == 3
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, env=environment(), timeout=60, check=False).returncode == -signal.SIGKILL
    lease = pool.lease("orphan")
    assert lease.state == "active"
    assert lease.client().submit(sum, [3, 4]).result(timeout=30) == 7
    lease.release(wait=30)
    assert pool.status().gpus_free == 8


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def leave_a_child():
    """Leave a process behind, in a session of its own, that does not mind SIGTERM."""
    return subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True).pid


def test_what_a_task_leaves_running_ends_with_its_lease_whatever_it_ignores(pool):
    lease = pool.request(gpus=1)
    child = lease.client().submit(leave_a_child).result(timeout=30)
    wait_until(lambda: "SIG_IGN" in " ".join(psutil.Process(child).cmdline()))
    lease.release(wait=60)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert pool.status().gpus_free == 8


def test_a_client_that_is_killed_while_it_waits_leaves_a_request_that_can_be_withdrawn(pool):
    pool.request(gpus=8)
    code = "from jupyter_gpupool import Pool; Pool().request(gpus=1, name='dead')"
    waiting = subprocess.Popen([sys.executable, "-c", code], env=environment())
    wait_until(lambda: "dead" in [lease.name for lease in pool.leases()])
    os.kill(waiting.pid, signal.SIGKILL)
    waiting.wait(10)
    pool.lease("dead").release(wait=10)
    assert [lease.name for lease in pool.leases()] != ["dead"]
