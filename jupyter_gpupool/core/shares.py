"""Who is next, as arithmetic on values: deserved shares, decayed usage, and the order of siblings.

Rule 1: a deserved share is given out level by level: `min(quota, demand)` first, then the rest by tier,
        then by weight with the largest remainder, in whole GPUs wherever all ask for whole GPUs. Nothing is
        lost: the shares of siblings sum to what there is, or to what they want.
Rule 2: usage halves every half-life. It is kept as a sum that only grows (each second weighs more than the
        one before), so that the order of two tenants does not depend on when it is looked at.
Rule 3: what runs is charged a while ahead from the moment of its grant: a burst between two looks gains
        nothing.
Rule 4: less served = below its deserved share first, then less decayed usage by weight, then who waits
        longest. If A is less served than its sibling B, everything below A comes before everything below B.
Rule 5: integers only.

Not its business: the tree itself (`tree`), and where something goes (`placement`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from jupyter_gpupool.core.model import WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Steps of the table of powers of two, and the bits after the point.
_STEPS = 4096
_BITS = 40
#: A `Decay` remembers so many answers.
_KNOWN = 64
#: So many half-lives after its epoch, a `Decay` asks for a new one.
_SPAN = 64


class Want(NamedTuple):
    """What one of several siblings wants of what there is. Amounts in thousandths of a GPU."""

    name: str
    quota: int
    demand: int
    weight: int = 1
    tier: int = 0


def deserved(total: int, wants: Sequence[Want]) -> list[int]:
    """Give out `total` to siblings, by rule 1; the answer is in their order."""
    if len(wants) == 1:
        return [min(total, wants[0].demand)]
    given = _pour(total, [(min(each.quota, each.demand), each.quota, each.name) for each in wants], 1)
    left = total - sum(given)
    tiers = {each.tier for each in wants} if left > 0 else set()
    for tier in sorted(tiers, reverse=True):
        for heavy in (True, False):
            # A weight of nothing gets what those with a weight leave over.
            needs = [
                (each.demand - got if each.tier == tier and (each.weight > 0) is heavy else 0)
                for each, got in zip(wants, given, strict=True)
            ]
            if not any(needs):
                continue
            rows = [(need, max(1, each.weight), each.name) for need, each in zip(needs, wants, strict=True)]
            more = _pour(left, rows, _unit(needs))
            given = [got + extra for got, extra in zip(given, more, strict=True)]
            left -= sum(more)
    return given


def _unit(needs: Sequence[int]) -> int:
    """The amount to give out in: a whole GPU, or the part that all needs are multiples of."""
    common = math.gcd(WHOLE, *needs)
    return common if common >= WHOLE // 10 else WHOLE


def _pour(total: int, rows: Sequence[tuple[int, int, str]], unit: int) -> list[int]:
    """Give `total` to (need, weight, name) in proportion to weight, nobody more than their need."""
    needs = [max(0, need) for need, _, _ in rows]
    if sum(needs) <= total:
        return needs
    given = [0] * len(rows)
    left, weights = total, sum(weight for need, weight, _ in rows if need > 0)
    # Whoever needs least by weight is satisfied first; all that are left then share alike.
    active = sorted(
        (need * 1_000_000 // max(1, weight), name, at)
        for at, (need, weight, name) in enumerate(rows)
        if need > 0
    )
    for place, (_, _, at) in enumerate(active):
        need, weight, _ = rows[at]
        if need * weights > left * weight:
            active = active[place:]
            break
        given[at] = need
        left -= need
        weights -= weight
    else:
        return given
    _remainders(left, [at for _, _, at in active], rows, given, unit)
    return given


def _remainders(
    left: int, active: Sequence[int], rows: Sequence[tuple[int, int, str]], given: list[int], unit: int
) -> None:
    """Share out what is left in units; the units that remain go to the largest remainders."""
    ranked = []
    rest, weights = left, sum(rows[at][1] for at in active)
    for at in active:
        need, weight, name = rows[at]
        exact = left * weight
        given[at] = min(need, exact // weights // unit * unit)
        rest -= given[at]
        ranked.append((given[at] * weights - exact, name, at))
    ranked.sort()
    while rest > 0:
        before = rest
        for _, _, at in ranked:
            extra = min(unit, rest, rows[at][0] - given[at])
            given[at] += extra
            rest -= extra
        if rest == before:
            break


def _powers() -> tuple[int, ...]:
    """2 ** (k / _STEPS) for k = 0 … _STEPS, `_BITS` bits after the point; by integers, alike everywhere."""
    step = 2 << 120
    for _ in range(_STEPS.bit_length() - 1):
        step = math.isqrt(step << 120)
    found, power = [], 1 << 120
    for _ in range(_STEPS + 1):
        found.append(power >> (120 - _BITS))
        power = power * step >> 120
    return tuple(found)


_POWERS = _powers()


@dataclass(slots=True)
class Decay:
    """How much a millisecond at some time weighs, against one at the epoch."""

    half_life: int
    epoch: int = 0
    #: The latest answers: of one moment the same times are asked for again and again.
    _known: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def at(self, when: int) -> int:
        """Weigh a time: twice as much a half-life later.

        Differences of this function times a rate are usage: the integral of the weight, but for a constant.
        """
        found = self._known.get(when)
        if found is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = self._known[when] = self._weigh(when)
        return found

    def _weigh(self, when: int) -> int:
        lives, rest = divmod(when - self.epoch, self.half_life)
        place, part = divmod(rest * _STEPS, self.half_life)
        low = _POWERS[place]
        weight = low + (_POWERS[place + 1] - low) * part // self.half_life
        return weight << lives if lives >= 0 else weight >> -lives

    def stale(self, now: int) -> bool:
        """Numbers have become long: a new epoch is due."""
        return now - self.epoch > _SPAN * self.half_life

    def renew(self) -> int:
        """Begin a new epoch; returns by how many bits everything kept so far is to be shifted down."""
        self.epoch += _SPAN * self.half_life
        self._known.clear()
        return _SPAN

    def worth(self, usage: int, now: int) -> int:
        """Say what a kept sum is worth at `now`, in the rate's unit times milliseconds."""
        # The integral of 2**(t/h) is h / ln 2 times itself; 1 / ln 2 = 1.442695.
        return usage * self.half_life * 1_442_695 // (1_000_000 * self.at(now))

    def kept(self, worth: int, now: int) -> int:
        """Say how a usage of that worth at `now` is kept; the reverse of `worth`."""
        return worth * 1_000_000 * self.at(now) // (self.half_life * 1_442_695)
