"""What `%load_ext jupyter_gpupool` takes in a fresh IPython, and what the first widget imports after it.

And what importing and loading the server's extension adds to the start of a Jupyter server: CPU time, as
other programs blur what passes.

python -m tests.bench.load --times 20
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

CODE = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.perf_counter()
shell.run_line_magic("load_ext", "jupyter_gpupool")
loaded = time.perf_counter()
import jupyter_gpupool.widget
print((loaded - began) * 1000, (time.perf_counter() - loaded) * 1000)
"""

EXTENSION = """
import time
from jupyter_server.serverapp import ServerApp
server = ServerApp(log_level=40)
server.initialize(["--allow-root", "--port=0"], find_extensions=False, new_httpserver=False)
manager, began = server.extension_manager, time.process_time()
manager.add_extension("jupyter_gpupool", enabled=True)
manager.link_extension("jupyter_gpupool")
manager.load_extension("jupyter_gpupool")
used = time.process_time() - began
assert manager.extension_apps["jupyter_gpupool"], "it is loaded"
routes = server.web_app.default_router.rules[0].target.rules
assert "/gpupool/leases" in str([each.matcher.regex for each in routes])
print(used * 1000)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="fresh interpreters")
    parser.add_argument("--quick", action="store_true", help="five")
    args = parser.parse_args()
    times = 5 if args.quick else args.times
    load, widget = zip(*(measure(CODE) for _ in range(times)), strict=True)
    (extension,) = zip(*(measure(EXTENSION) for _ in range(times)), strict=True)
    said = {
        "bench": "load",
        "times": times,
        "load_ms": round(statistics.median(load), 1),
        "load_worst_ms": round(max(load), 1),
        "first_widget_ms": round(statistics.median(widget), 1),
        "server_extension_cpu_ms": round(statistics.median(extension), 1),
        "server_extension_worst_cpu_ms": round(max(extension), 1),
    }
    print(json.dumps(said))


def measure(code: str) -> list[float]:
    """Return what a fresh interpreter prints, in a folder that no other Jupyter configures."""
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        own = {f"JUPYTER_{kind}_DIR": folder for kind in ("CONFIG", "DATA", "RUNTIME")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, **own},
        )
    return [float(each) for each in done.stdout.split()]


if __name__ == "__main__":
    main()
