"""The first line of a cell that runs on a lease: its options, and what may stand in them.

Rule 1: it costs nothing to import: the help of a cell, and Tab, need it before any cell has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_gpupool import commands
from jupyter_gpupool.commands import Argument, Command, Misuse

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

PROG = "%%gpupool"
#: How its options are seen: IPython runs no cell without a body, such as `%%gpupool --help` alone.
HELP = "%gpupool help cell"


def _names(flag: str, help_: str) -> Argument:
    return Argument(
        flags=(f"--{flag}",),
        name=flag,
        help=help_,
        metavar="NAME",
        options={"action": "extend", "nargs": "+", "default": []},
        values="variable",
    )


COMMAND = Command(
    name="cell",
    help="Run this cell on a lease, in a namespace that stays there.",
    arguments=(
        Argument(
            flags=("--lease", "-l"),
            name="lease",
            help="a lease, by name or id (not needed if you have only one)",
            metavar="LEASE",
            values="lease",
        ),
        Argument(
            flags=("--on",),
            name="on",
            help="on which of its slices: 0 (the default), 0,2 or all",
            metavar="0|all",
            values="=0|all",
        ),
        Argument(
            flags=("--gpus", "-g"),
            name="gpus",
            help="on a lease of so many GPUs for this cell only; with several, on each of them",
            metavar="N",
            options={"type": commands.number},
        ),
        Argument(
            flags=("--out",),
            name="out",
            help="store the value of its last line in this variable here",
            metavar="NAME",
        ),
        _names("send", "variables to copy to the lease first"),
        _names("fetch", "variables to copy back afterwards"),
    ),
    run=lambda _, __: None,
)


def help_text() -> str:
    """Say what the options of `%%gpupool` are."""
    return commands.parser_of(COMMAND, PROG).format_help().rstrip()


def parse(words: list[str]) -> Namespace:
    """Read the words after `%%gpupool`.

    Raises:
        Misuse: They are not as they have to be.
    """
    args = commands.parser_of(COMMAND, PROG, HELP).parse_args(words)
    args.send, args.fetch = list(_each(args.send)), list(_each(args.fetch))
    for name in (*args.send, *args.fetch, *([args.out] if args.out else [])):
        if not name.isidentifier():
            raise Misuse(f"{PROG} needs names of variables, and {name!r} is none.")
    if args.on and args.on != "all" and not all(each.isdecimal() for each in args.on.split(",")):
        raise Misuse(f"--on takes numbers of slices (0,1) or all, not {args.on!r}.")
    if args.gpus is not None and args.lease:
        raise Misuse("--gpus makes a lease for this cell only; leave out --lease.")
    return args


def _each(names: list[str]) -> Iterator[str]:
    for text in names:
        yield from (name for name in text.split(",") if name)
