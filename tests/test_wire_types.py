"""The sidebar's types of what the API says are made from the API's own description."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "labextension" / "wire_types.py"


def test_the_sidebar_is_compiled_against_what_the_api_says_now():
    """Who changes the schemas runs labextension/wire_types.py, and the compiler finds what breaks."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
