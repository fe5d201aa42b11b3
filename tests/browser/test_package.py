"""What is shipped: small, enabled, and with nothing of the machine that built it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

import jupyter_gpupool
from tests.browser.lab import TOKEN, Lab

BUILT = Path(jupyter_gpupool.__file__).parent / "labextension"
SOURCE = Path(__file__).parents[2] / "labextension"


def test_the_built_sidebar_is_at_most_300_kb():
    files = list((BUILT / "static").glob("*"))
    assert files
    assert sum(each.stat().st_size for each in files) <= 300_000


def test_jupyterlab_has_it_enabled(lab: Lab):
    """Its page is told to load what was built; what is disabled would be named there too."""
    page = httpx.get(f"{lab.url}lab", params={"token": TOKEN}, follow_redirects=True, timeout=30).text
    said = json.loads(re.search(r'id="jupyter-config-data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    [ours] = [each for each in said["federated_extensions"] if each["name"] == "jupyter-gpupool"]
    assert (BUILT / ours["load"]).is_file()
    assert not [each for each in said.get("disabledExtensions", []) if "gpupool" in each]


def test_one_version_everywhere():
    said = json.loads((SOURCE / "package.json").read_text())
    assert said["version"] == jupyter_gpupool.__version__


def test_nothing_names_a_host_to_download_from():
    """The lock file has versions and checksums; where from, each person's own settings say."""
    for lock in (SOURCE / "yarn.lock", SOURCE / "check" / "yarn.lock"):
        text = lock.read_text()
        assert len(text) > 10_000
        assert "://" not in text
