"""Helpers of the health tests: a node with a judge, and a driver that says what the test says."""

from __future__ import annotations

import json

from jupyter_gpupool.core.health import Judge, Outcome, Thresholds
from jupyter_gpupool.core.history import rank
from jupyter_gpupool.core.model import SECOND, Device, NvmlEvent, Reading, Verdict

#: A sound GPU as the driver describes it.
SOUND = {"recovery_action": 0, "remap_pending": False, "remap_failed": False, "ecc_uncorrected": 0}
SOUND |= {"slowdown": 0, "pcie_width": 16, "nvlinks": (True,) * 4, "nvlink_errors": 0}


def gpus(count: int = 4, node: str = "node-1", **more) -> list[Device]:
    """Describe GPUs named "GPU-<node>-<index>" in slots of their own."""
    return [
        Device(
            uuid=f"GPU-{node}-{index}",
            node=node,
            index=index,
            model="H100-80GB",
            memory=80 * 10**9,
            pci=f"0000:{index:02x}:00.0",
            **more,
        )
        for index in range(count)
    ]


class Bench:
    """One node on a test bench: time moves only when the test says so, and everything told is kept."""

    def __init__(self, limits: Thresholds | None = None, count: int = 4, node: str = "node-1", **more):
        self.now = 1_000 * SECOND
        self.listed = gpus(count, node, **more)
        self.judge = Judge(node, limits, boot="boot-1")
        self.changes, self.findings = [], []
        self.take(self.judge.devices(self.listed, self.now, boot="boot-1"))

    def take(self, outcome: Outcome) -> Outcome:
        self.changes += outcome.changes
        self.findings += outcome.findings
        return outcome

    def name(self, gpu: int) -> str:
        return self.listed[gpu].uuid

    def xid(self, code: int, gpu: int = 0, by=(), instance: int = -1) -> Outcome:
        return self.announce("xid", gpu, by, xid=code, gpu_instance=instance)

    def announce(self, kind: str, gpu: int = 0, by=(), **more) -> Outcome:
        event = NvmlEvent(device=self.name(gpu), now=self.now, kind=kind, **more)
        return self.take(self.judge.event(event, by))

    def read(self, gpu: int = 0, **signals) -> Outcome:
        values = {**SOUND, **signals} if not signals.get("error") else signals
        return self.take(self.judge.reading(Reading(device=self.name(gpu), now=self.now, **values)))

    def list(self, *indexes: int, boot: str = "boot-1") -> Outcome:
        return self.take(self.judge.devices([self.listed[gpu] for gpu in indexes], self.now, boot=boot))

    def wait(self, ms: int) -> Outcome:
        self.now += ms
        return self.take(self.judge.tick(self.now))

    def run(self, ms: int, step: int = 15 * SECOND, **signals_by_gpu) -> None:
        """Let time pass with a reading of each GPU per step; `gpu2={…}` gives one its own signals."""
        for _ in range(ms // step):
            self.wait(step)
            for gpu in range(len(self.listed)):
                self.read(gpu, **signals_by_gpu.get(f"gpu{gpu}", {}))

    def verdict(self, gpu: int = 0) -> Verdict:
        return self.judge.opinion(self.name(gpu), self.now).verdict

    def rule(self, gpu: int = 0) -> str:
        return json.loads(self.judge.opinion(self.name(gpu), self.now).evidence)["rule"]

    def told(self, gpu: int = 0) -> list[str]:
        """All verdicts told of one GPU, in order."""
        return [change.verdict.value for change in self.changes if change.device == self.name(gpu)]

    def worst(self, gpu: int | None = None) -> Verdict:
        """The worst verdict ever told, of one GPU or of all."""
        told = [each.verdict for each in self.changes if gpu is None or each.device == self.name(gpu)]
        return max(told, key=rank, default=Verdict.FINE)
