"""Who may import whom: the layout as tables, read from the sources with `ast`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jupyter_gpupool

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "jupyter_gpupool"
ROOT = Path(jupyter_gpupool.__file__).parent

#: Which room a module is in; the longest name that fits. Modules at the top with "_" before are the client's.
ROOMS = {
    "": "hooks",
    "core.model": "core.model",
    "core.mig": "core.mig",
    "core.health": "core.health",
    "core.faults": "core.faults",
    "core": "core",
    "driver": "driver",
    "controller": "controller",
    "node": "node",
    "lease": "lease",
    "wire": "wire",
    "service": "service",
    "line": "line",
    "hub": "hub",
    "versions": "versions",
    "replay": "replay",
    "replay_figures": "replay",
    "client": "client",
    "cluster": "client",
    "progress": "client",
    "_": "client",
    "embedded": "embedded",
    "embedded_start": "embedded",
    "commands": "words",
    "upkeep": "words",
    "display": "display",
    "tables": "display",
    "cli": "cli",
    "cli_pool": "cli",
    "cli_replay": "cli",
    "magic": "magic",
    "completion": "magic",
    "cells": "magic",
    "cell_line": "magic",
    "checkpoint": "client",
    "widget": "widget",
    "server": "server",
}
CORE = {"core", "core.model", "core.mig", "core.health", "core.faults"}
#: What a room may import when it is loaded, besides itself.
WHEN_LOADED: dict[str, set[str]] = {
    "hooks": set(),
    "core.model": set(),
    "core.mig": {"core.model"},
    "core.faults": {"core.model"},
    "core.health": CORE,
    "core": CORE,
    "driver": {"core.model", "core.mig"},
    "wire": set(),
    "service": set(),
    "line": set(),
    "hub": set(),
    "versions": set(),
    "replay": CORE,
    "controller": {*CORE, "wire", "service", "line"},
    "node": {"core.model", "core.mig", "core.health", "driver", "wire", "service", "line"},
    "lease": {"core.model", "core.faults", "versions"},
    "display": {"core.model"},
    "client": {"core.model", "line", "display", "versions"},
    "embedded": {"client"},
    "words": {"client", "display", "core.model"},
    "cli": {"client", "display", "words", "core.model"},
    "magic": {"client", "display", "words", "core.model"},
    "widget": {"client", "display", "words", "core.model"},
    "server": {"client", "display", "words", "core.model"},
}
#: What a room may import besides, when a function of its runs or for its types only.
LATER: dict[str, set[str]] = {
    "hooks": {"client", "magic", "widget", "server"},
    "client": {"embedded", "words"},
    "embedded": {"driver", "service"},
    "words": {"embedded"},
    "cli": {*CORE, "embedded", "controller", "node", "driver", "replay"},
    "magic": {"embedded", "widget"},
    "widget": {"embedded"},
    "server": {"embedded"},
}
#: Rules that are arithmetic on single whole numbers; only what searches for a place has columns.
WITHOUT_NUMPY = {
    f"core.{name}"
    for name in (
        *("model", "pool", "state", "submit", "lives", "grants", "nodes", "records", "validate", "explain"),
        *(
            "strokes",
            "line",
            "give",
            "reserve",
            "forecast",
            "bounds",
            "turns",
            "reclaim",
            "plan",
            "victims",
            "fits",
            "claims",
        ),
        *("consolidate", "replace", "elastic", "extend", "idle", "settle", "ledger", "figures", "times"),
        *(
            "shares",
            "tree",
            "quotas",
            "health",
            "poolhealth",
            "rules",
            "history",
            "findings",
            "faults",
            "xids",
        ),
    )
}
#: Each outside thing has one module.
ONLY_IN = {
    "pynvml": {"driver.nvml"},
    "sqlite3": {"controller.store"},
    "httpx": {"_http", "_login"},
}
#: What the rules must not know: clocks, chance, the outside.
IMPURE = {
    "datetime",
    "time",
    "random",
    "secrets",
    "uuid",
    "os",
    "logging",
    "pathlib",
    "sys",
    "io",
    "subprocess",
}


@dataclass(frozen=True)
class Import:
    """One import: by which module, of what, in which line, and whether loading the module does it."""

    by: str
    what: str
    line: int
    loading: bool

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.what}"


def modules() -> dict[str, Path]:
    """All modules of the package by their names within it."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports_of(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _walk(name, tree, path.name == "__init__.py", loading=True)


def _walk(name: str, node: ast.AST, package: bool, *, loading: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = loading and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            inside = False
        if isinstance(child, ast.Import):
            for each in child.names:
                yield Import(name, each.name, child.lineno, inside)
        elif isinstance(child, ast.ImportFrom):
            base = _resolve(name, child, package)
            for each in child.names:
                yield Import(name, f"{base}.{each.name}", child.lineno, inside)
        yield from _walk(name, child, package, loading=inside)


def _resolve(name: str, node: ast.ImportFrom, package: bool) -> str:
    """The full name of what `from … import` names, relative ones included."""
    if not node.level:
        return node.module or ""
    parts = [PACKAGE, *(name.split(".") if name else [])]
    keep = len(parts) - node.level + (1 if package else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def room_of(module: str) -> str:
    """The room that a module, or a name within one, is in."""
    if module.startswith("_"):
        return ROOMS["_"]
    parts = module.split(".")
    while parts and ".".join(parts) not in ROOMS:
        parts.pop()
    return ROOMS[".".join(parts)]


MODULES = modules()
IMPORTS = [each for name, path in MODULES.items() for each in imports_of(name, path)]
OWN = [each for each in IMPORTS if each.what == PACKAGE or each.what.startswith(PACKAGE + ".")]


def _inner(each: Import) -> str:
    return each.what.removeprefix(PACKAGE).removeprefix(".")


def test_every_module_has_a_room():
    homeless = [name for name in MODULES if name and room_of(name) == "hooks"]
    assert not homeless, "give it a room in ROOMS and say what it may import"


def test_the_architecture_names_every_room():
    said = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = {
        cell for row in said.splitlines() if row.startswith("| `") for cell in re.findall("`(.+?)`", row)
    }
    names = {name.replace(".", "/") for name in ROOMS.keys() - {"", "_", "core"}}
    assert {each for each in names if not {f"{each}.py", f"{each}/"} & table} == set()


@pytest.mark.parametrize("room", sorted(WHEN_LOADED))
def test_a_room_loads_only_what_its_row_allows(room):
    allowed = WHEN_LOADED[room] | {room, "hooks"}
    wrong = [
        str(each)
        for each in OWN
        if each.loading and room_of(each.by) == room and room_of(_inner(each)) not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("room", sorted(WHEN_LOADED))
def test_a_room_reaches_nothing_else_later_either(room):
    allowed = WHEN_LOADED[room] | LATER.get(room, set()) | {room, "hooks"}
    wrong = [str(each) for each in OWN if room_of(each.by) == room and room_of(_inner(each)) not in allowed]
    assert not wrong


@pytest.mark.parametrize("thing", sorted(ONLY_IN))
def test_an_outside_thing_is_imported_in_one_place_only(thing):
    wrong = [
        str(each) for each in IMPORTS if each.what.split(".")[0] == thing and each.by not in ONLY_IN[thing]
    ]
    assert not wrong


def test_the_core_knows_no_clock_no_chance_and_no_outside():
    standard = set(sys.stdlib_module_names)
    wrong = []
    for each in IMPORTS:
        top = each.what.split(".")[0]
        if each.by.split(".")[0] == "core" and top not in (PACKAGE, "__future__"):
            numpy = top == "numpy" and each.by not in WITHOUT_NUMPY
            if top in IMPURE or not (top in standard or numpy):
                wrong.append(str(each))
    assert not wrong


def _loaded_by(module: str, unwanted: set[str]) -> set[str]:
    code = f"import sys, {module}; print(*sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            f"{PACKAGE}.core.pool",
            {
                "distributed",
                "dask",
                "tornado",
                "jupyter_server",
                "IPython",
                "ipywidgets",
                "pynvml",
                "sqlite3",
            },
        ),
        (
            PACKAGE,
            {"distributed", "dask", "tornado", "jupyter_server", "IPython", "httpx", "numpy", "pynvml"},
        ),
        (
            f"{PACKAGE}.client",
            {"distributed", "dask", "httpx", "tornado", "jupyter_server", "pynvml", "sqlite3"},
        ),
        (f"{PACKAGE}.wire", {"distributed", "dask", "tornado"}),
    ],
    ids=["the machine", "the package", "the client", "the wire"],
)
def test_loading_one_thing_does_not_load_the_world(module, unwanted):
    assert not _loaded_by(module, unwanted)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from . import agent", ["jupyter_gpupool.node.agent"]),
        ("from ..core import pool", ["jupyter_gpupool.core.pool"]),
        ("def f():\n  from ..controller.plugin import X", ["jupyter_gpupool.controller.plugin.X"]),
        ("import jupyter_gpupool.lease.plugin", ["jupyter_gpupool.lease.plugin"]),
    ],
)
def test_the_reader_of_imports_sees_every_kind(source, expected):
    assert [each.what for each in _walk("node.reader", ast.parse(source), False, loading=True)] == expected
