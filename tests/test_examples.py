"""The notebooks in `examples/` run from the first cell to the last, and their numbers are right.

Each ends with a dict of its results. Numbers that depend on nothing but arithmetic are compared as they are.
"""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.timeout(300)  # a kernel and what it imports take their time on a busy machine
EXAMPLES = Path(__file__).parents[1] / "examples"
#: Notebook -> what its last cell shows. `etl` is papermill's; `cells` and `tour` have tests of their own.
RESULTS = {
    "search": {"best": {"C": 10, "gamma": 0.1}, "score": 0.97, "accurate": True, "workers": 2},
    "xgboost": {"better": True, "accurate": True, "workers": 2},
    "elastic": {"total": sum(n * n for n in range(200)), "given back": 2, "grown again": True},
    "drill": {
        "answer": sum(n**3 for n in range(200)),
        "replaced": 1,
        "GPUs": 2,
        "within a minute": True,
    },
}
ELSEWHERE = {"cells", "etl", "tour"}
#: What the ETL gives with two files of 5,000 orders, as papermill is told.
SMALL = {"orders": 9_475, "total": 4_757_103, "rows": 12}


def last(notebook):
    """Return the dict that the last cell shows."""
    return ast.literal_eval(notebook.cells[-1].outputs[-1].data["text/plain"])


@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_runs_and_its_numbers_are_right(name, pool):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    assert last(notebook) == RESULTS[name]
    assert pool.leases() == []


def test_papermill_runs_one_with_other_parameters_and_shows_text_where_there_are_no_widgets(pool, tmp_path):
    import papermill

    papermill.execute_notebook(
        str(EXAMPLES / "etl.ipynb"),
        str(tmp_path / "done.ipynb"),
        parameters={"files": 2, "rows": 5000},
        progress_bar=False,
        kernel_name="python3",
    )
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    assert last(done) == SMALL
    shown = [each.data for cell in done.cells for each in cell.get("outputs", ()) if "data" in each]
    lease = next(each for each in shown if "Lease etl" in each["text/plain"])
    assert "2 GPUs" in lease["text/plain"]
    assert "<table>" in lease["text/html"]


def test_each_example_is_in_the_table():
    assert {each.stem for each in EXAMPLES.glob("*.ipynb")} == RESULTS.keys() | ELSEWHERE
