"""What a frame costs the browser while 300 devices are shown, all of them changing four times a second.

A real JupyterLab with the real sidebar in Chromium; only the answer of `gpupool/devices` is made up, as no
machine here has so many. A frame's cost is the time of all tasks of the page's main thread from its begin to
that of the next one, out of Chromium's own trace; meanwhile the list is scrolled.
`python -m tests.bench.frame [--devices 300] [--hz 4]`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, sync_playwright

from jupyter_gpupool import embedded
from tests.browser.conftest import chromium
from tests.browser.lab import Lab, Sidebar

USERS = ("ann", "ben", "cleo", "dan")
SCROLL = """
() => {
  const list = document.querySelector('.jp-gpupool-Rows');
  const step = () => { list.scrollTop = (list.scrollTop + 7) % (list.scrollHeight - list.clientHeight);
    requestAnimationFrame(step); };
  requestAnimationFrame(step);
}
"""
CATEGORIES = ["devtools.timeline", "disabled-by-default-devtools.timeline", "toplevel"]


class Devices:
    """Answers as the server would, with all readings new each time."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sequence = 1
        self.chance = random.Random(1)

    def answer(self, route: Route) -> None:
        self.sequence += 1
        said = {
            "devices": [self._device(number) for number in range(self.count)],
            "gone": [],
            "sequence": self.sequence,
            "full": self.sequence == 2,
            "simulated": True,
        }
        route.fulfill(status=200, content_type="application/json", body=json.dumps(said))

    def _device(self, number: int) -> dict[str, Any]:
        node, index = f"node-{number // 8 + 1}", number % 8
        share = {"slice": f"s{number}", "lease": f"l{number}", "lease_name": "x", "user": USERS[number % 4]}
        part = {**share, "milli": 500, "vram": 1 << 35, "state": "running", "profile": ""}
        return {
            "uuid": f"GPU-{number}",
            "node": node,
            "index": index,
            "name": f"{node}/gpu{index}",
            "model": "H100-80GB",
            "memory": 80 << 30,
            "mig": False,
            "profiles": [],
            "verdict": "fine",
            "flags": [],
            "verdict_sentence": "",
            "cordoned": "",
            "outside": "",
            "free_milli": 500,
            "parts": [{**part, "start": None, "size": None}],
            "reading": {
                "utilisation": self.chance.randrange(101),
                "memory_used": self.chance.randrange(80 << 30),
                "temperature": 40 + self.chance.randrange(40),
                "power": self.chance.randrange(700),
                "error": "",
                "age_s": 0,
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=300)
    parser.add_argument("--hz", type=float, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--quick", action="store_true", help="three seconds")
    options = parser.parse_args()
    seconds = 3 if options.quick else options.seconds
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        os.environ["GPUPOOL_DIR"] = f"{folder}/pool"
        embedded.start(nodes={"node-1": 1})
        try:
            with Lab(Path(folder) / "lab") as lab, sync_playwright() as playwright:
                setting = lab.folder / "settings" / "jupyter-gpupool" / "plugin.jupyterlab-settings"
                setting.parent.mkdir(parents=True)
                setting.write_text(json.dumps({"readingsInterval": 1 / options.hz}))
                browser = playwright.chromium.launch(executable_path=chromium())
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                print(json.dumps(measure(page, lab, options.devices, seconds)))
                browser.close()
        finally:
            embedded.stop()


def measure(page: Page, lab: Lab, devices: int, seconds: float) -> dict[str, Any]:
    """Return the cost of frames in milliseconds."""
    made_up = Devices(devices)
    page.route("**/gpupool/devices*", made_up.answer)
    sidebar = Sidebar(page, lab).open()
    sidebar.only("Pool")
    page.locator(".jp-gpupool-Tile").first.wait_for()
    drawn = page.locator(".jp-gpupool-Tile").count()
    page.evaluate(SCROLL)
    page.wait_for_timeout(1000)
    before = made_up.sequence
    browser = page.context.browser
    assert browser is not None
    browser.start_tracing(page=page, categories=CATEGORIES)
    page.wait_for_timeout(1000 * seconds)
    trace = json.loads(browser.stop_tracing())
    costs = sorted(frames(trace["traceEvents"]))
    return {
        "devices": devices,
        "tiles_in_page": drawn,
        "updates": made_up.sequence - before,
        "frames": len(costs),
        "p50_ms": round(costs[len(costs) // 2], 2),
        "p95_ms": round(costs[int(0.95 * len(costs))], 2),
    }


def frames(events: list[dict[str, Any]]) -> list[float]:
    """Return, for each frame of the page, the milliseconds that the main thread worked until the next one."""
    begins = sorted(
        (each["ts"], (each["pid"], each["tid"])) for each in events if each["name"] == "FireAnimationFrame"
    )
    threads = [thread for _, thread in begins]
    page = max(set(threads), key=threads.count)
    times = [at for at, thread in begins if thread == page]
    tasks = sorted(
        (each["ts"], each["dur"])
        for each in events
        if each["name"] == "RunTask" and (each["pid"], each["tid"]) == page and "dur" in each
    )
    costs: list[float] = []
    at = 0
    for begin, length in tasks:
        draws = False
        while at < len(times) and times[at] <= begin + length:
            draws, at = True, at + 1
        if draws:
            costs.append(0.0)
        if costs:
            costs[-1] += length / 1000
    return costs[:-1]


if __name__ == "__main__":
    main()
