"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import jupyter_gpupool

ROOT = Path(jupyter_gpupool.__file__).parents[1]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in sorted((ROOT / "jupyter_gpupool").rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_what_a_docstring_shows_is_what_comes_out(module, capsys):
    found = doctest.testmod(importlib.import_module(module))
    assert not found.failed, capsys.readouterr().out
    assert found.attempted, "an example that nothing collects is none"


def test_there_are_examples():
    assert len(MODULES) >= 25
