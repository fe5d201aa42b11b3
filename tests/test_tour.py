"""The tour is the product's promise in one notebook: a GPU is lost in the middle, and the answer is right.

It runs as `make demo` runs it, by the demo's own code, and once more on a pool that only observes: there the
same loss must spoil it, or the tour would prove nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from jupyter_gpupool.service import free_port
from tests.conftest import wait_until

if TYPE_CHECKING:
    from jupyter_gpupool.client import Pool

ROOT = Path(__file__).parents[1]
#: Seconds for the tour at most, and in which it could still come to its answer when a GPU's error was seen.
RIGHT_S, SPOILT_S = 120, 5
#: What `make demo ONCE=1` does, on the pool that $GPUPOOL_DIR names.
DEMO = """
import sys
sys.path.insert(0, "examples")
import demo
sys.exit(not demo.show())
"""
KEYS = {
    "ok",
    "gpus",
    "simulated",
    "request_to_first_result_s",
    "migration_s",
    "tasks_lost",
    "tasks_run_twice",
}


def tour(seconds: float) -> tuple[int, str, str]:
    """Run the tour; return its exit status and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", DEMO], cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_the_tour_loses_a_gpu_and_no_task_and_its_answer_is_right(pool: Pool) -> None:
    """Its last line is the result that `make demo ONCE=1` prints."""
    status, said, errors = tour(RIGHT_S)
    assert status == 0, said[-1000:] + errors[-3000:]
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert result.keys() >= KEYS
    assert (result["ok"], result["answer_correct"], result["tasks_lost"]) == (True, True, 0)
    assert (result["gpus"], result["simulated"]) == (pool.status().gpus, True)
    assert 0 < result["migration_s"] < RIGHT_S
    # It leaves the pool as it found it: the lost GPU takes work again.
    wait_until(lambda: pool.status().gpus_free == result["gpus"])


def test_the_tour_fails_where_the_pool_only_observes(own_folder: Path) -> None:
    """With migration switched off the GPU's error reaches the notebook: what the tour shows is not luck."""
    controller = own_folder / "controller"
    controller.mkdir(mode=0o700)
    (controller / "thresholds.json").write_text(json.dumps({"observe": 1}))
    said, ended = tour_until("fallen off the bus")
    assert "fallen off the bus" in said
    assert "The lease and plain pandas agree" not in said
    assert ended != 0


def tour_until(word: str) -> tuple[str, int]:
    """Run the tour until it has said a word, and `SPOILT_S` more; what it said, and its exit status.

    A worker that nobody takes out can also leave it waiting for ever: then it is ended.
    """
    with subprocess.Popen(
        [sys.executable, "-c", DEMO], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        late = threading.Timer(RIGHT_S, process.kill)
        late.start()
        said = ""
        for line in process.stdout or ():
            said += line
            if word in line:
                break
        late.cancel()
        try:
            said += process.communicate(timeout=SPOILT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said += process.communicate()[0]
        return said, process.wait()


def test_make_demo_and_make_test_know_what_to_do() -> None:
    """`make -n` prints the commands of both and runs none."""
    for target, command in (("demo", "examples/demo.py"), ("test", "-m pytest")):
        done = subprocess.run(
            ["make", "-n", target, "ONCE=1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert command in done.stdout
    assert os.access(ROOT / "examples" / "tour.ipynb", os.R_OK)


def test_the_demo_serves_jupyterlab_with_the_tour_until_it_is_interrupted(pool: Pool) -> None:
    """At the address that it prints, to whoever has the token in it."""
    code = f"import sys; sys.path.insert(0, 'examples'); import demo; sys.exit(demo.serve({free_port()}))"
    demo = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with demo:
        address = next(line.strip() for line in demo.stdout or () if line.startswith("http"))
        wait_until(lambda: page(address).is_success, 120)
        assert "jupyter-config-data" in page(address).text
        notebook = address.replace("/lab/tree/", "/api/contents/")
        assert page(notebook).json()["type"] == "notebook"
        assert page(address.partition("?")[0]).status_code == 302, "without the token one is asked for it"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30) == 0
        assert page(address).status_code == GONE


#: Stands for no answer at all.
GONE = 599


def page(address: str) -> httpx.Response:
    try:
        return httpx.get(address, timeout=20)
    except httpx.TransportError:
        return httpx.Response(GONE)


def test_a_port_in_use_is_said_before_the_tour_runs() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        command = [sys.executable, "examples/demo.py", "--port", port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == (
        f"Port {port} cannot be used (Address already in use). Take another one: make demo PORT=8889\n"
    )
