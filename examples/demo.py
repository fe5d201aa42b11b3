"""Run the tour on an embedded pool, say what happened step by step, then serve JupyterLab with it.

`make demo` runs this. `make demo ONCE=1` ends after the tour; its last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
from nbclient import NotebookClient

from jupyter_gpupool import Pool, embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
TOUR = HERE / "tour.ipynb"


def main() -> int:
    """Run the demo as the command line says; the exit status is 0 if the tour's answer was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--once", action="store_true", help="end the pool after the tour")
    parser.add_argument("--port", type=int, default=8888, help="of JupyterLab (default: 8888)")
    options = parser.parse_args()
    if options.once:
        with own_pool():
            return 0 if show() else 1
    if trouble := in_use(options.port):
        say(f"Port {options.port} cannot be used ({trouble}). Take another one: make demo PORT=8889")
        return 1
    if not show():
        return 1
    return serve(options.port)


def in_use(port: int) -> str:
    """Say why nobody can listen at a port; empty: one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error.strerror)
    return ""


@contextlib.contextmanager
def own_pool() -> Iterator[None]:
    """Use a pool of our own in a folder that goes away with it, whatever pool this user may have besides."""
    folder = tempfile.mkdtemp(prefix="gpupool-demo-")
    os.environ["GPUPOOL_DIR"] = folder
    os.environ.pop("GPUPOOL_URL", None)
    try:
        yield
    finally:
        embedded.stop()
        shutil.rmtree(folder, ignore_errors=True)


def show() -> bool:
    """Run the tour, print it, measure, and print the result as the last line."""
    say("Starting the embedded pool …")
    with Pool() as pool:
        status = pool.status()
        say(f"{status.gpus} GPUs on {len(status.nodes)} nodes. {status.simulated_note}".rstrip())
        first_result = request_to_first_result(pool)
        say(f"One GPU asked for, first result of client.submit after {first_result:.2f} s.")
        outcome = run_tour()
        result = {
            "ok": outcome["answer_correct"] and outcome["tasks_lost"] == 0,
            "gpus": status.gpus,
            "simulated": status.simulated,
            "request_to_first_result_s": round(first_result, 3),
            **outcome,
        }
    print(json.dumps(result), flush=True)
    return bool(result["ok"])


def request_to_first_result(pool: Pool) -> float:
    """Seconds from asking for one GPU to the first result on it; a first lease warms the pool up."""
    for _ in range(2):
        began = time.perf_counter()
        with pool.request(gpus=1, name="warm-up", time_limit="10m") as lease, lease.client() as client:
            assert client.submit(sum, [20, 22]).result(timeout=60) == 42
            seconds = time.perf_counter() - began
    return seconds


def run_tour() -> dict[str, Any]:
    """Execute the notebook cell by cell, printing each, and return what it found out."""
    notebook = nbformat.read(TOUR, as_version=4)
    client = NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    )
    cost: dict[str, Any] = {}
    correct = False
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if cell.cell_type == "markdown":
                say("\n" + cell.source.splitlines()[0].lstrip("# "))
                continue
            client.execute_cell(cell, index)
            text = output_of(cell)
            say(indent(text))
            if '"tasks_lost"' in cell.source:
                cost = eval(text, {"__builtins__": {}})  # noqa: S307 (a dict that our own notebook displayed)
            correct = correct or "agree" in text
    return {
        "migration_s": cost["seconds_to_first_task_on_the_new_gpu"],
        "tasks_lost": cost["tasks_lost"],
        "tasks_run_twice": cost["tasks_run_twice"],
        "answer_correct": correct,
    }


def output_of(cell: Any) -> str:
    """Join what a cell printed and displayed as plain text."""
    parts = [
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
        if output.output_type != "stream" or output.name == "stdout"
    ]
    return "\n".join(part.rstrip("\n") for part in parts if part)


def indent(text: str) -> str:
    """Set a cell's output off from the headings."""
    return "\n".join("    " + line for line in text.splitlines())


def say(text: str) -> None:
    """Print at once, so that a person sees each step when it happens."""
    if text:
        print(text, flush=True)


def serve(port: int) -> int:
    """Serve JupyterLab with the tour on 127.0.0.1 until Ctrl-C; the pool ends itself when unused.

    JupyterLab would ask back on Ctrl-C, in a group of its own it gets none; SIGTERM ends it with its kernels.
    """
    token = secrets.token_hex(16)
    say("\nJupyterLab with this notebook, until Ctrl-C:")
    say(f"http://127.0.0.1:{port}/lab/tree/tour.ipynb?token={token}")
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
        *(
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={HERE}",
            *(["--allow-root"] if os.getuid() == 0 else []),
        ),
    ]
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with subprocess.Popen(command, env={**os.environ, "JUPYTER_TOKEN": token}, process_group=0) as lab:
        try:
            return lab.wait()
        except KeyboardInterrupt:
            lab.terminate()
            return 0


if __name__ == "__main__":
    sys.exit(main())
