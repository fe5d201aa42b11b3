"""What the extension adds to the start of JupyterLab: of its server, and of its page until it is restored.

Two JupyterLabs before the same pool, one with the extension of the server and of the page switched off. Each
server is started and each page is loaded in turns, in one Chromium, so that whatever else the machine does
falls on both; the first load of each, which fills the browser's caches, does not count. Beside the time that
passes there is the CPU time of the page's main thread and of the server's process: others blur it less.
`python -m tests.bench.lab_start [--loads 20] [--starts 5]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from playwright.sync_api import sync_playwright

from jupyter_gpupool import embedded
from tests.browser.conftest import chromium
from tests.browser.lab import READY, TOKEN, Lab

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

#: Milliseconds: that passed, and of CPU time.
Times = tuple[float, float]
#: Note the moment at which the layout is restored, in milliseconds since the navigation began.
CLOCK = """
const look = setInterval(() => {
  if (window.jupyterapp) {
    clearInterval(look);
    window.jupyterapp.restored.then(() => { window.restoredAt = performance.now(); });
  }
}, 1);
"""
#: As `jupyter server extension disable` and `jupyter labextension disable` write it.
OFF = {
    "jupyter_server_config.d/jupyter_gpupool.json": {
        "ServerApp": {"jpserver_extensions": {"jupyter_gpupool": False}}
    },
    "labconfig/page_config.json": {"disabledExtensions": {"jupyter-gpupool": True}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=20, help="of the page, of each")
    parser.add_argument("--starts", type=int, default=5, help="of the server, of each")
    parser.add_argument("--quick", action="store_true", help="five loads and two starts")
    options = parser.parse_args()
    loads, starts = (5, 2) if options.quick else (options.loads, options.starts)
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        os.environ["GPUPOOL_DIR"] = f"{folder}/pool"
        embedded.start(nodes={"node-1": 4, "node-2": 4})
        try:
            print(json.dumps(measure(Path(folder), loads, starts)))
        finally:
            embedded.stop()


def measure(folder: Path, loads: int, starts: int) -> dict[str, Any]:
    """Return the times of both in milliseconds, and the median of the differences of neighbours."""
    labs = [Lab(folder / "with"), Lab(folder / "without")]
    for name, said in OFF.items():
        path = labs[1].folder / "config" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(said))
    ups = [[up(lab) for lab in turn(labs, n)] for n in range(starts)]
    with labs[0], labs[1], sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium())
        windows = {lab.url: browser.new_context(viewport={"width": 1280, "height": 900}) for lab in labs}
        shown = [[load(windows[lab.url], lab) for lab in turn(labs, n)] for n in range(loads + 1)][1:]
        assert [has_it(windows[lab.url], lab) for lab in labs] == [True, False]
        browser.close()
    return {
        "loads": loads,
        "starts": starts,
        **both("page", [back(row, n + 1) for n, row in enumerate(shown)]),
        **both("server", [back(row, n) for n, row in enumerate(ups)]),
    }


def turn(labs: list[Lab], number: int) -> list[Lab]:
    """Let the one go first that went last the time before."""
    return labs[::-1] if number % 2 else labs


def back(row: list[Times], number: int) -> list[Times]:
    """Put a row's times into the order with, without."""
    return row[::-1] if number % 2 else row


def up(lab: Lab) -> Times:
    begun = time.perf_counter()
    lab.start()
    gone = 1000 * (time.perf_counter() - begun)
    used = psutil.Process(lab.process.pid).cpu_times()
    lab.stop()
    return gone, 1000 * (used.user + used.system)


def load(window: BrowserContext, lab: Lab) -> Times:
    page = window.new_page()
    tools = window.new_cdp_session(page)
    tools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.add_init_script(CLOCK)
    page.goto(f"{lab.url}lab?reset&token={TOKEN}")
    page.wait_for_function("window.restoredAt", timeout=60_000)
    at = float(page.evaluate("window.restoredAt"))
    said = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
    page.close()
    return at, 1000 * said["TaskDuration"]


def has_it(window: BrowserContext, lab: Lab) -> bool:
    page = window.new_page()
    page.goto(f"{lab.url}lab?reset&token={TOKEN}")
    page.wait_for_function(READY, timeout=60_000)
    found = bool(page.evaluate("jupyterapp.commands.hasCommand('jupyter-gpupool:open-pool')"))
    page.close()
    return found


def both(name: str, rows: list[list[Times]]) -> dict[str, Any]:
    passed, used = ([[each[at] for each in row] for row in rows] for at in (0, 1))
    return {**figures(name, passed), **figures(f"{name}_cpu", used)}


def figures(name: str, rows: list[list[float]]) -> dict[str, Any]:
    """Return medians of both, of their differences, and the quartiles of these."""
    differences = [ours - plain for ours, plain in rows]
    quarters = statistics.quantiles(differences, n=4) if len(differences) > 1 else differences * 3
    return {
        f"{name}_with_ms": round(statistics.median(row[0] for row in rows)),
        f"{name}_without_ms": round(statistics.median(row[1] for row in rows)),
        f"{name}_difference_ms": round(statistics.median(differences)),
        f"{name}_difference_quartiles_ms": [round(quarters[0]), round(quarters[2])],
    }


if __name__ == "__main__":
    main()
