"""Who breaks things: several at once, each with one thing after the other, never two with the same thing.

Rule 1: a kind that needs something which another one is at is passed over for another kind.
Rule 2: what was broken is left in peace for a moment; else a controller would never be up for long enough to
        confirm anything.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from tests.chaos.faults import CONTROLLER, KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.world import World

#: Seconds for which a controller, and anything else, is left in peace at most; and the part that is sure.
PEACE, ELSE, SURE = 4.0, 1.0, 0.25


class Turns:
    """What is being broken now.

    Args:
        things: The names of what there is, by what it is.
    """

    def __init__(self, things: Mapping[str, Sequence[str]]) -> None:
        self._things = things
        self._taken: set[str] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, needs: Sequence[str], rng: random.Random) -> Iterator[list[str] | None]:
        """Take one of each that is needed, until the end of the `with`; None: one is not to be had."""
        with self._lock:
            free = [[each for each in self._things[what] if each not in self._taken] for what in needs]
            got = [rng.choice(each) for each in free] if all(free) else None
            self._taken.update(got or ())
        try:
            yield got
        finally:
            with self._lock:
                self._taken.difference_update(got or ())


class Attacker(threading.Thread):
    """Breaks one thing after the other, and makes it good.

    Args:
        world: What it breaks.
        turns: What the others are at.
        seed: Of all that it decides.
    """

    def __init__(self, world: World, turns: Turns, seed: str) -> None:
        super().__init__(daemon=True)
        self.world, self.turns = world, turns
        self.rng = random.Random(seed)
        #: What has been done, by kind.
        self.happened: Counter[str] = Counter()
        self.error: Exception | None = None

    def run(self) -> None:
        weights = [kind.weight for kind in KINDS.values()]
        try:
            while not self.world.over.is_set():
                name = self.rng.choices(list(KINDS), weights)[0]
                with self.turns.of(KINDS[name].needs, self.rng) as got:
                    if got is not None:
                        self._act(name, KINDS[name], got)
        except Exception as error:  # noqa: BLE001 - raised by whoever runs the attackers
            self.error = error
            self.world.over.set()

    def _act(self, name: str, kind: Kind, got: list[str]) -> None:
        begun = time.monotonic()
        done = kind.act(self.world, self.rng, got[-1] if got else "")
        self.happened[name] += done
        took = time.monotonic() - begun
        print(
            f"{took:6.1f} s: {name} {' '.join(got)}{'' if done else ' (nothing there)'}",
            file=sys.stderr,
            flush=True,
        )
        peace = PEACE if CONTROLLER in got else ELSE
        self.world.over.wait(peace * self.rng.uniform(SURE, 1))
