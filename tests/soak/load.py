"""Steady work on one lease, whose every answer is known beforehand."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jupyter_gpupool.client import Lease

#: Seconds for one answer: work may wait for a GPU, and for a long drain.
WAIT = 120.0
#: Tasks in a round, and rounds after which the running total is fetched and begun anew.
TASKS, ROUNDS = 12, 8


def square(number: int, round_: int) -> int:
    """A task; `round_` makes its key another one."""
    del round_
    time.sleep(0.02)
    return number * number


class Load(threading.Thread):
    """Computes round after round; the total of some rounds lives on the lease's workers only."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(daemon=True)
        self.lease = lease
        self.client = lease.client()
        self.rounds = self.answers = self.totals = 0
        #: What went wrong, one sentence each.
        self.wrong: list[str] = []
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                self._total()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                self.wrong.append(f"{self.lease.name}: {type(error).__name__}: {error}"[:500])
                self._ending.wait(1.0)

    def _total(self) -> None:
        total = self.client.submit(int, 0, key=f"total-{self.rounds}")
        expected = 0
        for _ in range(ROUNDS):
            squares = self.client.map(square, range(TASKS), round_=self.rounds)
            total = self.client.submit(sum, [total, *squares], key=f"total-{self.rounds}-sum")
            answers = self.client.gather(squares)
            self._compare("squares", answers, [number * number for number in range(TASKS)])
            expected += sum(answers)
            self.rounds += 1
            if self._ending.is_set():
                break
        self._compare("a total", total.result(timeout=WAIT), expected)
        self.totals += 1

    def _compare(self, what: str, answer: Any, expected: Any) -> None:
        self.answers += 1
        if answer != expected:
            self.wrong.append(f"{self.lease.name}: {what} is {answer}, not {expected}")

    def end(self) -> None:
        """Let the present total be the last."""
        self._ending.set()
        self.join(WAIT)
        if self.is_alive():
            self.wrong.append(f"{self.lease.name}: no answer within {WAIT:g} s")
        self.client.close()
