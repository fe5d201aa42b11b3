"""What README and docs/ say is true: commands run, code runs, links lead somewhere, tables are complete.

A block that cannot run here has an HTML comment before it, `<!-- not run: why -->`. `<!-- status 1 -->` says
that the commands of the block fail so. What a block shows below a command must be in what the command says,
numbers aside.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_gpupool import cli, client, embedded, magic
from jupyter_gpupool.core.model import DAY, HOUR, MINUTE, SECOND, Defaults
from tests.controller_kit import DESCRIPTION

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "getting-started.md", ROOT / "docs" / "administration.md"]
PAGES += [page for page in DOCS if page not in PAGES]
#: Blocks that only run elsewhere: the two make commands, the installation, machines that join and listen.
NOT_RUN = 5
#: What a table has where there is nothing.
NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    #: What the HTML comment before it says.
    mark: str

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks(page):
    lines, found, start, mark = page.read_text().splitlines(), [], None, ""
    for number, line in enumerate(lines, start=1):
        if line.startswith("```") and start is None:
            start, kind = number, line[3:]
        elif line == "```":
            found.append(Block(page, start, kind, "\n".join(lines[start : number - 1]), mark))
            start, mark = None, ""
        elif start is None and line:
            said = re.fullmatch(r"<!-- (.*) -->", line)
            mark = said[1] if said else ""
    assert start is None, f"{page.name}:{start} is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


def runs(block):
    return block.kind in ("console", "python") and not block.mark.startswith("not run: ")


# ---------------------------------------------------------------------------------------- commands and code


@pytest.fixture(scope="module")
def place(tmp_path_factory, session_folder):
    """A pool of its own for all pages, and a folder to work in, with the files that pages tell to write."""
    patch = pytest.MonkeyPatch()
    patch.setenv("GPUPOOL_DIR", str(session_folder / "docs"))
    patch.chdir(tmp_path_factory.mktemp("docs"))
    for before, block in itertools.pairwise(BLOCKS):
        if named := re.match(r"file (\S+): ", block.mark):
            Path(named[1]).write_text(before.text)
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "jupyter_gpupool")
    yield shell
    shell.run_line_magic("unload_ext", "jupyter_gpupool")
    InteractiveShell.clear_instance()
    embedded.stop()
    patch.undo()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(runs, blocks(page)))], ids=lambda p: p.stem
)
def test_the_commands_and_the_code_of_a_page_run_in_their_order(page, place, capsys):
    if embedded.stopped():  # by the page before
        embedded.start()
    for block in filter(runs, blocks(page)):
        if block.kind == "python":
            result = place.run_cell(block.text)
            assert result.success, f"{block}: {result.error_before_exec or result.error_in_exec}"
            continue
        status = int(re.fullmatch(r"status (\d+)", block.mark)[1]) if block.mark.startswith("status") else 0
        for command, shown in commands(block):
            said = ran(command, status, capsys)
            for line in shown:
                assert plain(line) in plain(said), f"{block}: {command} does not say {line!r} but:\n{said}"


def commands(block):
    found = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:].partition("  #")[0], []))
        elif line:
            found[-1][1].append(line)
    return found


def ran(command, status, capsys):
    words = shlex.split(command)
    assert words[:2] == ["jupyter", "gpupool"], f"{command} cannot be run here: mark its block"
    with pytest.raises(SystemExit) as end:
        cli.main(words[2:])
    said = capsys.readouterr()
    assert end.value.code == status, f"{command}: {said.err}"
    return said.out + said.err


def plain(text):
    """Leave out what differs from one run to the next."""
    text = re.sub(r"\b\d+ (h|min|s)\b( \d+ (min|s)\b)?", "0 s", text)  # "59 min 58 s" or "1 h"
    return re.sub(r"\s+", " ", re.sub(r"\d+", "0", text)).strip()


def test_little_is_not_run_and_each_time_the_reason_is_said():
    marked = [block for block in BLOCKS if block.mark.startswith("not run")]
    assert len(marked) <= NOT_RUN
    assert all(re.fullmatch(r"not run: \S.{10,}", block.mark) for block in marked)


# ---------------------------------------------------------------------------------------------------- links


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_relative_links_lead_to_files_and_anchors_that_exist(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_each_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in DOCS if f"(docs/{page.name})" not in readme]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_no_path_of_somebody_s_machine(page):
    assert not re.search(r"(?<![\w.])/(root|home|work|tmp|Users)/", page.read_text())


# --------------------------------------------------------------------------------------------------- tables


def rows(page, heading=""):
    text = (ROOT / "docs" / page).read_text()
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0] if heading else text
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in part.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]


REFERENCE = (ROOT / "docs" / "reference.md").read_text()


@pytest.mark.parametrize("command", cli.ALL, ids=lambda command: command.name)
def test_the_reference_has_each_command(command):
    assert re.search(rf"`(jupyter gpupool|…) {command.name}\b", REFERENCE)


def test_the_reference_has_each_command_of_the_magic(place):
    known = magic._loaded[id(place)].commands
    missing = [name for name in known if not re.search(rf"`%gpupool {name}\b", REFERENCE)]
    assert not missing


def test_each_command_of_the_magic_has_its_call_and_its_twin_in_the_sidebar(place):
    """A row names a command, the Python or HTTP call that it is, and where the sidebar has it, if so."""
    table = [row for row in rows("reference.md") if len(row) == 6][1:]
    sources = "".join(path.read_text() for path in (ROOT / "labextension" / "src").glob("*.ts*"))
    for what, notebook, _, python, http, sidebar in table:
        assert notebook == NONE or notebook.startswith(("`%gpupool ", "`… ", "`%%gpupool`")), what
        assert re.search(r"`", python + http), f"{what} has no call"
        for label in re.findall(r"\*(.+?)\*", sidebar):
            assert f"__('{label}'" in sources, f"the sidebar has no {label}"
        assert sidebar.startswith("*") or sidebar == NONE, what
    named = {name for row in table for name in re.findall(r"`%gpupool (\w+)", row[1])}
    assert named == set(magic._loaded[id(place)].commands) | {"help"}


def test_the_magic_knows_what_only_a_terminal_has(place):
    assert {each.name for each in cli.ALL} - set(magic._loaded[id(place)].commands) == magic.TERMINAL


def test_what_the_reference_calls_exists():
    routes = {
        f"{method.upper()} {path}" for path, methods in DESCRIPTION["paths"].items() for method in methods
    }
    for method, path in re.findall(r"`([A-Z]+) (/v1/[^`?]*)", REFERENCE):
        shape = re.sub(r"\b(ID|TARGET|NODE)\b", "{}", path)
        assert f"{method} {shape}" in {re.sub(r"\{\w+\}", "{}", route) for route in routes}
    for noun, name in re.findall(r"`(pool|lease)\.(\w+)", REFERENCE):
        assert hasattr({"pool": client.Pool, "lease": client.Lease}[noun], name), f"{noun}.{name}"
    for name in re.findall(r"`(?:jupyter gpupool|…) ([a-z][a-z-]*)", REFERENCE):
        assert name in {command.name for command in cli.ALL}


UNITS = {"d": DAY, "h": HOUR, "min": MINUTE, "s": SECOND}


def value(text):
    """Read a default as the table has it: "7 d", "2", "yes", "none"."""
    number, _, unit = text.partition(" ")
    if unit in UNITS:
        return int(number) * UNITS[unit]
    return {"yes": True, "no": False, "none": ()}[text] if text in ("yes", "no", "none") else int(text)


def test_each_default_of_the_pool_is_explained_with_its_value():
    said = {
        name.strip("`"): (value(default), why)
        for name, default, why in rows("defaults.md", "The rules of the pool")[1:]
    }
    assert {name: default for name, (default, _) in said.items()} == {
        each.name: getattr(Defaults(), each.name) for each in fields(Defaults)
    }
    assert all(why.endswith(".") for _, why in said.values())


@pytest.mark.parametrize("row", rows("defaults.md", "The rest")[1:], ids=lambda row: row[0].strip("`"))
def test_each_other_default_is_that_of_the_code(row):
    found = importlib.import_module("jupyter_gpupool")
    for part in row[0].strip("`").split("."):
        if isinstance(found, type(importlib)) and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found() if isinstance(found, type) else found, part)
    assert found == ast.literal_eval(row[1])


def test_each_bench_is_in_the_table_of_performance():
    benches = {each.stem for each in (ROOT / "tests" / "bench").glob("*.py")} - {"__init__"}
    assert not benches - set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE)
    )


def test_the_glossary_defines_each_word_once():
    words = [row[0] for row in rows("glossary.md")[1:]]
    assert len(words) == len(set(words)) > 30
