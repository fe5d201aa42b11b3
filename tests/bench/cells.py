"""`%%gpupool` beside a local cell: overhead, delay of a printed line, and how soon an interrupt ends a cell.

    python -m tests.bench.cells

An embedded pool of simulated GPUs is started in a folder of its own; notebook and cell are on one machine, so
their clocks are the same. Measured are `pass` on the lease and locally in turn (`overhead_p50_ms` is the
difference of the medians), the time from `print` there to the text here (`stream_delay_p50_ms`), and the time
from SIGINT to this process to the end of a cell in `time.sleep` (`interrupt_p95_ms`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

PRINTS = "import time\nfor _ in range({}):\n    print(time.time())\n    time.sleep(0.05)"


def main() -> None:
    """Run the bench and print its result as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="20 cells")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        os.environ["GPUPOOL_DIR"] = folder
        for name in ("GPUPOOL_URL", "GPUPOOL_TOKEN", "GPUPOOL_CA"):
            os.environ.pop(name, None)
        from jupyter_gpupool import embedded

        shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        shell.run_line_magic("load_ext", "jupyter_gpupool")
        try:
            shell.run_line_magic("gpupool", "request --gpus 1")
            result = measured(shell, 20 if options.quick else options.cells)
        finally:
            shell.run_line_magic("unload_ext", "jupyter_gpupool")
            embedded.stop()
    print(json.dumps(result))


def measured(shell: InteractiveShell, cells: int) -> dict[str, float]:
    """Measure on a lease that is there."""
    remote, local = [], []
    ran(shell, "%%gpupool\npass")
    for _ in range(cells):
        remote.append(ran(shell, "%%gpupool\npass"))
        local.append(ran(shell, "pass"))
    delays = stream_delays(shell, max(20, cells // 2))
    ends = [interrupted(shell) for _ in range(max(10, cells // 5))]
    return {
        "cells": cells,
        "overhead_p50_ms": round(1000 * (statistics.median(remote) - statistics.median(local)), 2),
        "stream_delay_p50_ms": round(1000 * statistics.median(delays), 2),
        "interrupt_p95_ms": round(1000 * sorted(ends)[int(0.95 * (len(ends) - 1))], 2),
    }


def ran(shell: InteractiveShell, code: str) -> float:
    """Return the seconds that a cell takes."""
    begun = time.perf_counter()
    shell.run_cell(code)
    return time.perf_counter() - begun


class Stamps:
    """Stands for the notebook's output, and notes when what was printed there arrives."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.delays: list[float] = []

    def write(self, text: str) -> int:
        """Take a text: lines that are times."""
        now = time.time()
        self.delays += [now - float(line) for line in text.split()]
        return len(text)

    def flush(self) -> None:
        """Do nothing."""


def stream_delays(shell: InteractiveShell, lines: int) -> list[float]:
    """Return the seconds that each of some printed lines takes."""
    kept, sys.stdout = sys.stdout, Stamps()
    try:
        shell.run_cell("%%gpupool\n" + PRINTS.format(lines))
        return sys.stdout.delays
    finally:
        sys.stdout = kept


def interrupted(shell: InteractiveShell) -> float:
    """Return the seconds from an interrupt to the end of the cell."""
    at: list[float] = []

    def interrupt() -> None:
        at.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.5, interrupt)
    timer.start()
    _quietly(lambda: shell.run_cell("%%gpupool\nimport time\ntime.sleep(60)"))
    return time.perf_counter() - at[0]


def _quietly(run: Callable[[], object]) -> None:
    """Run something without the traceback that it shows."""
    kept, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115, PTH123 - for a moment
    try:
        run()
    finally:
        sys.stdout.close()
        sys.stdout = kept


if __name__ == "__main__":
    main()
