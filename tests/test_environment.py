"""Where a lease's processes run: as the notebook does, where the node can; else a sentence says so."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import warnings
from pathlib import Path

import pytest

from jupyter_gpupool import PoolError, _environment
from jupyter_gpupool._environment import EnvironmentDiffersWarning, differences, with_wishes
from jupyter_gpupool.versions import versions
from tests.conftest import wait_until

SAME = {"versions": versions(), "missed": {}}


def where():
    return str(Path.cwd()), sys.executable


def keep_the_gil(begun, seconds):
    begun.touch()
    ctypes.PyDLL(None).sleep(seconds)


def beside():
    import a_module_beside_the_notebook

    return a_module_beside_the_notebook.answer


def test_workers_run_in_the_notebook_s_python_and_folder_and_import_what_is_beside_it(
    pool, tmp_path, monkeypatch
):
    (tmp_path / "a_module_beside_the_notebook.py").write_text("answer = 42")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EnvironmentDiffersWarning)
        with pool.request(gpus=1) as lease:
            client = lease.client()
            assert client.submit(where).result(timeout=30) == (str(tmp_path), sys.executable)
            assert client.submit(beside).result(timeout=30) == 42


def test_what_a_person_says_comes_before_what_is_preferred():
    asked = with_wishes({"gpus": 2, "environment": {"python": "/opt/python", "variables": {"A": "1"}}})
    assert asked == {
        "gpus": 2,
        "environment": {
            "python": "/opt/python",
            "variables": {"A": "1"},
            "preferred_directory": str(Path.cwd()),
        },
    }


def test_another_version_is_found_before_the_first_task_and_explained(pool, tmp_path):
    """The workers find another distributed first, as in an environment where another one is installed."""
    installed = tmp_path / "distributed-2020.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: distributed\nVersion: 2020.1.0\n")
    environment = {"variables": {"PYTHONPATH": str(tmp_path), "MINE": "7"}, "pre_import": ["fractions"]}
    with pool.request(gpus=1, name="old", environment=environment) as lease:
        with pytest.warns(EnvironmentDiffersWarning) as told:
            client = lease.client()
        mine = versions()["distributed"]
        expected = (
            f"The workers of lease old have distributed 2020.1.0 and this process has {mine}. Tasks may fail"
        )
        own = [each for each in told if each.category is EnvironmentDiffersWarning]  # Dask has a table too
        assert len(own) == 1
        assert str(own[0].message).startswith(expected)
        found = client.submit(lambda: (os.environ["MINE"], "fractions" in sys.modules)).result(timeout=30)
        assert found == ("7", True)


def test_what_the_node_does_not_have_is_said_where_it_was_only_preferred(pool):
    environment = {"preferred_directory": "/nowhere/at/all", "preferred_python": "/bin/false"}
    with pool.request(gpus=1, name="else", environment=environment) as lease:
        with pytest.warns(EnvironmentDiffersWarning) as told:
            client = lease.client()
        assert "do not work in /nowhere/at/all, which their node does not have" in str(told[0].message)
        assert "which has no /bin/false that would do" in str(told[0].message)
        assert client.submit(where).result(timeout=30)[1] == sys.executable


def test_a_lease_whose_worker_keeps_the_gil_can_be_connected_to_meanwhile(pool, tmp_path, monkeypatch):
    """A kernel that was restarted comes back to a lease at work; the comparison is not worth minutes."""
    monkeypatch.setattr(_environment, "PATIENCE_S", 0.2)
    with pool.request(gpus=1, name="busy") as lease:
        client = lease.client()
        busy = client.submit(keep_the_gil, tmp_path / "begun", 60)
        wait_until((tmp_path / "begun").exists, 60)
        client.sync(_environment.tell, client.scheduler, "as another process that asks", "busy")
        assert busy.status == "pending"


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"python": "/bin/false"},
            "/bin/false cannot run a lease's processes (it ended with status 1 and said nothing); give",
        ),
        ({"python": "/nowhere/python"}, "/nowhere/python could not be started"),
        (
            {"working_directory": "/nowhere"},
            "has ended: failed: the working directory /nowhere cannot be used on",
        ),
        (
            {"pre_import": ["colorsys", "no_such"]},
            (
                f"the workers' Python, {sys.executable} on {socket.gethostname()}, has no module 'no_such': "
                "install it there, or leave it out of pre_import. `jupyter gpupool logs "
            ),
        ),
    ],
    ids=[
        "an interpreter that is none",
        "one that is not there",
        "a folder that is not there",
        "a module that is not there",
    ],
)
def test_what_the_node_does_not_have_is_refused_in_a_sentence_where_it_was_asked_for(
    pool, environment, sentence
):
    with pytest.raises(PoolError) as no:
        pool.request(gpus=1, environment=environment)
    assert sentence in str(no.value)
    assert "Traceback" not in str(no.value)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ([SAME, SAME], []),
        ([{"versions": {"python": "3.0.7"}}], ["python 3.0.7"]),
        ([{"versions": {"python": versions()["python"].rpartition(".")[0] + ".99"}}], []),
        ([SAME, {"versions": {"dask": "1.0"}}], ["dask 1.0"]),
        ([{"versions": {"something": "1.0"}}, {}], []),
    ],
    ids=["the same", "another Python", "another last part of it", "one of two workers", "nothing known"],
)
def test_only_differences_that_matter_are_said(theirs, said):
    lines = differences("x", versions(), theirs)
    assert len(lines) == (2 if said else 0)
    assert all(each in lines[0] for each in said)
