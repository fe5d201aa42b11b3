"""A process of one's own on a lease's device: who may, what it sees, and that it counts as the lease's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jupyter_gpupool import Pool, PoolError
from jupyter_gpupool._attach import this_process
from jupyter_gpupool.core.model import Reading
from jupyter_gpupool.node import guard
from jupyter_gpupool.node.outside import OutsideWatch
from tests.conftest import environment, wait_until
from tests.kernel import Kernel
from tests.leasing import Node, running

#: Takes memory of the first device that it sees, in a child too, when it is told to.
PROGRAM = """
import subprocess, sys
if sys.stdin.readline().strip() == "use":
    from jupyter_gpupool.driver import simulated
    simulated.install()
    simulated.malloc(2**30)
    print("uses", flush=True)
sys.stdin.readline()
"""


class Program:
    """A person's own process."""

    def __init__(self, *command, **options):
        self.process = subprocess.Popen(
            command or [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        self.pid = self.process.pid

    def order(self, lease, **other):
        said = {"pid": self.pid, "started": guard.started_at(self.pid), "boot": guard.boot_id()}
        return {"lease": lease, "user": "me", **said, **other}

    def use(self):
        self.process.stdin.write("use\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "uses\n"

    def close(self):
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture(autouse=True)
def no_cuda_here(monkeypatch):
    """Other tests may have used a GPU in this process; processes of their own are asked where it matters."""
    monkeypatch.setattr("jupyter_gpupool.driver.simulated.cuda._context", None)


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("n"))
    node.start()
    yield node
    node.stop()


@pytest.fixture
def program(node, monkeypatch):
    made = []

    def program(*command, **options):
        made.append(Program(*command, **options))
        return made[-1]

    yield program
    for each in made:
        each.close()


def attach(node, order):
    async def attach():
        return node.leases.attach(order)

    return node.run(attach())


def test_an_attached_process_counts_as_the_lease_s_and_ends_with_it_where_it_uses_the_device(node, program):
    with running(node, "att") as lease:
        environ = attach(node, program().order("att"))["environ"]
        assert environ["CUDA_VISIBLE_DEVICES"] == lease.parts[0].device
        uses, idles, stranger = (program(env=environment(**environ)) for _ in range(3))
        for each in (uses, idles):
            assert attach(node, each.order("att"))["why"] == ""
        for each in (uses, stranger):
            each.use()
        watch = OutsideWatch(node.leases.owner)
        pids = tuple((each.pid, 2**30) for each in (uses, stranger))
        reading = Reading(device=lease.parts[0].device, now=1, processes=pids)
        told = [who for _ in range(2) for _, who in watch.changes([reading])]
        assert len(told) == 1
        assert f"PID {stranger.pid}," in told[0]
        assert str(uses.pid) not in told[0]
        stranger.close()
    assert uses.process.wait(10) != 0, "nothing is free while somebody uses it"
    assert idles.process.poll() is None, "what uses nothing is left alone"
    assert node.leases.owner(idles.pid) == ""


def test_where_the_driver_does_not_say_who_uses_the_device_no_attached_process_goes_on(
    node, program, monkeypatch
):
    monkeypatch.setattr(guard, "STALE", 0.5)
    with running(node, "mute") as lease:
        part, kernel = lease.parts[0], program()
        assert attach(node, kernel.order("mute"))["why"] == ""
        monkeypatch.setattr(node.leases._processes, "_device_pids", lambda _: None)
        node.obey("stop_slice", lease="mute", slice=part.id)
        node.wait("slice_freed", slice=part.id)
        assert kernel.process.wait(10) != 0
        said = node.heard("finding")[-1]
        assert said["subject"] == part.device
        assert "the driver does not say whether its device is free" in said["sentence"]


def test_what_an_attached_process_has_started_counts_too_and_a_new_agent_knows_it(node, program, tmp_path):
    with running(node, "kids") as lease:
        parent = program()
        attach(node, parent.order("kids"))
        mine = this_process("kids")
        attach(node, {"lease": "kids", "user": "me", **mine})
        assert node.leases.owner(parent.pid) == lease.parts[0].id
        child = program()  # of this process, which is attached
        assert node.leases.owner(child.pid) == lease.parts[0].id
        table = node.leases._table
        again = type(table)(table._path)
        assert [mine["pid"], mine["started"]] in again.entries[lease.parts[0].id].attached
        again.close()
        attach(node, {"lease": "other", "user": "me", **mine})  # no lease of that name: nothing changes
        assert node.leases.owner(os.getpid()) == lease.parts[0].id


def test_only_a_process_of_the_owner_on_this_machine_is_taken(node, program):
    with running(node, "who"):
        own = program()
        assert attach(node, own.order("who", boot="another")) == {"why": ""}, "it is another machine's to say"
        assert "is not this process here" in attach(node, own.order("who", started=1))["why"]
        assert "is not this process here" in attach(node, own.order("who", pid=2**22, started=5))["why"]
        assert node.leases.owner(own.pid) == ""
        if os.geteuid() == 0:
            other = program("sleep", "60", user=65534)
            assert f"PID {other.pid} does not run as" in attach(node, other.order("who"))["why"]


def test_a_kernel_is_attached_unless_cuda_is_initialised_already(pool: Pool):
    kernel = Kernel()
    try:
        kernel.run("%gpupool request --gpus 1 --name near")
        [part] = pool.lease("near").slices
        device, name = part.device, part.device_name
        assert f"This process has 1 device of lease near: {name}." in kernel.run("%gpupool attach near")
        assert device in kernel.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
        use = "from jupyter_gpupool.driver import simulated; simulated.install(); simulated.malloc(2**30)"
        kernel.run(use)
        again = (
            "try: get_ipython().run_line_magic('gpupool', 'attach near')\nexcept Exception as no: print(no)"
        )
        assert kernel.run(again).strip() == (
            "CUDA is initialised in this process already: it keeps the devices that it sees. Restart the "
            "kernel, and run `%gpupool attach near` before anything that uses a GPU."
        )
        pool.lease("near").release()
        wait_until(lambda: not kernel.manager.is_alive())
        wait_until(lambda: pool.lease("near").state == "ended")
    finally:
        kernel.close()


def test_a_process_elsewhere_is_told_where_the_devices_are(pool: Pool):
    with pool.request(gpus=1, name="far", node="node-2") as lease:
        process = {**this_process("far"), "boot": "of another machine"}
        with pytest.raises(PoolError) as no:
            pool.call("POST", f"/v1/leases/{lease.id}/attach", process)
        assert "its devices are on node-2, and this process is not. Cells (`%%gpupool`)" in str(no.value)
