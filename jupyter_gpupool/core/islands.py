"""Which devices of a node belong together: NVLink islands, NUMA nodes, and blocks of 8, 4 and 2 in them.

Rule 1: a gang goes into one island if any can hold it, else into the fewest.
Rule 2: blocks are kept whole for those who need them: what is small goes where a block is broken already.
Rule 3: where the driver tells of no links and no NUMA nodes, neighbours by index belong together.

Not its business: which node (`ranking`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jupyter_gpupool.core.model import Device

#: What of a node decides its topology: each device's NUMA node, and the links (from, to, how many) by place.
_Key = tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True, slots=True)
class Block:
    """Places (columns) of devices that belong together, and the closer blocks within."""

    columns: tuple[int, ...]
    within: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """How the devices of a node are connected."""

    #: By place: the number of its island: all that NVLink connects; on a node without NVLink its NUMA node.
    islands: tuple[int, ...]
    #: By place: NVLink connects it to another.
    linked: tuple[bool, ...]
    blocks: Block


def topology_of(devices: Sequence[Device]) -> Topology:
    """Work out how some devices of one node, in the order of their places, are connected."""
    at = {device.uuid: place for place, device in enumerate(devices)}
    links = tuple(
        (place, at[peer], count)
        for place, device in enumerate(devices)
        for peer, count in device.links
        if peer in at and count > 0
    )
    return _topology((tuple(device.numa for device in devices), links))


@functools.lru_cache(maxsize=1024)
def _topology(key: _Key) -> Topology:
    numa, links = key
    everybody = tuple(range(len(numa)))
    by_links = _components(everybody, links, 1)
    islands = by_links if links else [_numbered(numa)[place] for place in everybody]
    closer = sorted({count for _, _, count in links})[1:]
    levels: list[Callable[[int], int]] = [
        *([by_links.__getitem__] if links else []),
        numa.__getitem__,
        *(_components(everybody, links, least).__getitem__ for least in closer),
    ]
    linked = {place for link in links for place in link[:2]}
    return Topology(
        islands=tuple(islands),
        linked=tuple(place in linked for place in everybody),
        blocks=_block(everybody, levels),
    )


def _numbered(names: Sequence[int]) -> list[int]:
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]


def _components(places: Sequence[int], links: Iterable[tuple[int, int, int]], least: int) -> list[int]:
    """By place: the lowest place that it is connected to, over links of at least so many lanes."""
    root = list(places)

    def find(place: int) -> int:
        while root[place] != place:
            place = root[place]
        return place

    for one, other, count in links:
        if count >= least:
            low, high = sorted((find(one), find(other)))
            root[high] = low
    return _numbered([find(place) for place in places])


def _block(columns: tuple[int, ...], levels: Sequence[Callable[[int], int]]) -> Block:
    """Split at the first level that tells some of them apart; at the end by halves."""
    for number, level in enumerate(levels):
        groups: dict[int, list[int]] = {}
        for column in columns:
            groups.setdefault(level(column), []).append(column)
        if 1 < len(groups) < len(columns):
            rest = levels[number + 1 :]
            return Block(columns, tuple(_block(tuple(each), rest) for each in groups.values()))
    if len(columns) <= 2:
        return Block(columns)
    half = 1 << (len(columns) - 1).bit_length() - 1
    return Block(columns, (_block(columns[:half], ()), _block(columns[half:], ())))


def choose(block: Block, free: frozenset[int], count: int) -> list[int]:
    """Choose so many of the free places that as few blocks as possible are broken.

    >>> node = topology_of(()).blocks
    >>> choose(Block((0, 1, 2, 3), (Block((0, 1)), Block((2, 3)))), frozenset({1, 2, 3}), 1)
    [1]
    """
    here = [column for column in block.columns if column in free]
    if count >= len(here) or not block.within:
        return here[:count]
    rooms = [
        (sum(column in free for column in each.columns), place) for place, each in enumerate(block.within)
    ]
    fitting = [(room, place) for room, place in rooms if room >= count]
    if fitting:
        return choose(block.within[min(fitting)[1]], free, count)
    # None holds it all: the roomiest first, and the rest where it breaks least.
    room, place = max(rooms, key=lambda each: (each[0], -each[1]))
    taken = choose(block.within[place], free, room)
    return sorted(taken + choose(block, free - set(taken), count - room))
