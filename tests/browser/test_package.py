"""What is shipped: small, enabled, and with nothing of the machine that built it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jupyter_gpupool

BUILT = Path(jupyter_gpupool.__file__).parent / "labextension"
SOURCE = Path(__file__).parents[2] / "labextension"


def test_the_built_sidebar_is_at_most_300_kb():
    files = list((BUILT / "static").glob("*"))
    assert files
    assert sum(each.stat().st_size for each in files) <= 300_000


def test_jupyterlab_has_it_enabled():
    command = [sys.executable, "-m", "jupyter", "labextension", "list"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert re.search(r"jupyter-gpupool v0.*enabled.*OK", done.stdout + done.stderr)


def test_one_version_everywhere():
    said = json.loads((SOURCE / "package.json").read_text())
    assert said["version"] == jupyter_gpupool.__version__


def test_nothing_names_a_host_to_download_from():
    """The lock file has versions and checksums; where from, each person's own settings say."""
    for lock in (SOURCE / "yarn.lock", SOURCE / "check" / "yarn.lock"):
        text = lock.read_text()
        assert len(text) > 10_000
        assert "://" not in text
