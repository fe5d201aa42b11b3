"""A scheduler that never pauses yields to others on its node, until it rests."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from jupyter_gpupool.node.yielding import LOOKS, NICE, Yielding

#: Computes until a line comes, then rests.
CODE = """
import os, select, sys
print(1, flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    pass
sys.stdin.readline()
print(2, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def process():
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        child.stdout.readline()
        yield child
        child.kill()


def looked(yielding, *pids, times=1):
    for _ in range(times):
        time.sleep(0.1)
        yielding.look(pids)


def nice(pid):
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_what_never_pauses_yields_and_what_rests_has_its_priority_again(process):
    """However many others want the cores: to wait for one is no pause."""
    yielding = Yielding()
    mine = nice(process.pid)
    looked(yielding, process.pid)
    assert nice(process.pid) == mine, "one look says nothing"
    looked(yielding, process.pid)
    assert nice(process.pid) == NICE
    process.stdin.write(b"rest\n")
    process.stdin.flush()
    process.stdout.readline()
    looked(yielding, process.pid, times=LOOKS - 1)
    assert nice(process.pid) == NICE, "it is not trusted at once"
    yielding = Yielding()  # the next agent's
    looked(yielding, process.pid, times=LOOKS + 1)
    assert nice(process.pid) == (mine if os.geteuid() == 0 else NICE)


def test_what_is_gone_is_forgotten(process):
    yielding = Yielding()
    looked(yielding, process.pid, 2**22 + 1, times=2)
    assert list(yielding._seen) == [process.pid]
    looked(yielding)
    assert not yielding._seen
