"""The sub-commands by which administrators take GPUs and nodes out of service, and back.

Rule 1: each but `consolidate` names a GPU or a node and may say why; the reason is shown to everybody.
Rule 2: planned maintenance and a bad GPU take one path: the work moves, then the GPU is free to be touched.

Not its business: who may do so (the controller says no in a sentence), and how work moves (`lease`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_gpupool.commands import Argument, Command, number

if TYPE_CHECKING:
    from argparse import Namespace

    from jupyter_gpupool.client import Pool

_TARGET = Argument(
    flags=("target",),
    name="target",
    help="a node, or a device by name or UUID",
    metavar="TARGET",
    values="target",
)
_WHY = Argument(
    flags=("--why",), name="why", help="the reason, for everybody to read", metavar="TEXT", values=""
)
_DRY_RUN = Argument(
    flags=("--dry-run",),
    name="dry_run",
    help="only say what would move",
    options={"action": "store_true"},
)
_DEADLINE = Argument(
    flags=("--deadline",),
    name="deadline",
    help="cut off what still runs after so long, such as 30m (default: the pool's)",
    metavar="TIME",
)


#: Orders after which work is taken again, unless the node takes none.
_LETS_IN = ("uncordon", "undrain")


@dataclass(frozen=True, slots=True)
class _Upkeep:
    """Tells the pool that a device or node is to be used no more, or again."""

    action: str
    said: str

    def __call__(self, pool: Pool, args: Namespace) -> str:
        asked = {"action": self.action, "why": args.why or "", "deadline": None}
        if getattr(args, "deadline", None):
            asked["deadline"] = number(args.deadline)
        said = {name: value for name, value in asked.items() if value is not None}
        answer = pool.call("POST", f"/v1/health/{args.target}", said) or {}
        name, still = answer.get("name", args.target), answer.get("cordoned", "")
        if still and self.action in _LETS_IN:
            node = name.rpartition("/")[0]
            return f"{name} still takes no new work, nor does its node: {still}. `uncordon {node}` ends that."
        return f"{name} {self.said}."


#: The commands; `%gpupool` and `jupyter gpupool` have them all.
UPKEEP: tuple[Command, ...] = (
    Command(
        name="cordon",
        help="Keep new work off a device or node.",
        arguments=(_TARGET, _WHY),
        run=_Upkeep("cordon", "takes no new work"),
    ),
    Command(
        name="uncordon",
        help="Let a device or node take work again.",
        arguments=(_TARGET, _WHY),
        run=_Upkeep("uncordon", "takes work again"),
    ),
    Command(
        name="drain",
        help="Keep new work off a device or node, and move away what is there, for maintenance.",
        arguments=(_TARGET, _WHY, _DEADLINE),
        run=_Upkeep("drain", "takes no new work, and its work moves away"),
    ),
    Command(
        name="undrain",
        help="End a drain or retirement: the device or node takes work again, and what has not moved stays.",
        arguments=(_TARGET, _WHY),
        run=_Upkeep("undrain", "takes work again; what has not moved stays"),
    ),
    Command(
        name="retire",
        help="Take a device or node out for good: its work may end, and only `undrain` lets it in again.",
        arguments=(_TARGET, _WHY, _DEADLINE),
        run=_Upkeep("retire", "is retired: what runs there may end, and nothing new goes there"),
    ),
    Command(
        name="consolidate",
        help="Move shares and MIG instances that lose nothing by it together, so that whole GPUs come free.",
        arguments=(_DRY_RUN,),
        run=lambda pool, args: pool.consolidate(dry_run=args.dry_run),
    ),
)
