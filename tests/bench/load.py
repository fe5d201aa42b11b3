"""What `%load_ext jupyter_gpupool` takes in a fresh IPython, and what the first widget imports after it.

python -m tests.bench.load --times 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="fresh interpreters")
    parser.add_argument("--quick", action="store_true", help="five")
    args = parser.parse_args()
    found = [measure() for _ in range(5 if args.quick else args.times)]
    load, widget = zip(*found, strict=True)
    said = {
        "bench": "load",
        "times": len(found),
        "load_ms": round(statistics.median(load), 1),
        "load_worst_ms": round(max(load), 1),
        "first_widget_ms": round(statistics.median(widget), 1),
    }
    print(json.dumps(said))


def measure() -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True
    )
    load, widget = map(float, done.stdout.split())
    return load, widget


if __name__ == "__main__":
    main()
