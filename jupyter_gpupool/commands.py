"""The sub-commands that `%gpupool` and `jupyter gpupool` share: words, options, and the call of each.

Rule 1: one vocabulary. An option is named as the field of the request, in `Pool.request` and the HTTP API.
Rule 2: what may be asked for is the pool's to say. Here numbers become numbers, and the rest goes as it came.
Rule 3: a mistake is `Misuse`, one sentence with the nearest right word; nothing here prints or exits.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jupyter_gpupool.client import Lease, Pool


class Misuse(ValueError):  # noqa: N818 - it is no error of the program
    """A command was not written as it has to be; the sentence says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An option or a positional argument of a command."""

    #: "--gpus" and the like; of a positional argument, its name.
    flags: tuple[str, ...]
    help: str
    #: Where it is kept: the field of the request, where it is one.
    name: str
    #: "" for a switch.
    metavar: str = ""
    #: How `argparse` takes it.
    options: dict[str, Any] = field(default_factory=dict)
    #: Whether it is a field of the request.
    asks: bool = False
    #: What its value is the name of, for completion: "lease", "project", "model", "node", "device", "target"
    #: (a node or a device), "mig", "user", "variable"; or the values themselves: "=0|all".
    values: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command: its words, and what it calls."""

    name: str
    help: str
    arguments: tuple[Argument, ...] = ()
    run: Callable[[Any, argparse.Namespace], Any]
    #: What is wrong with words that are each right by themselves; "": nothing.
    wrong: Callable[[argparse.Namespace], str] = lambda _: ""
    #: Whether `run` is given a pool; else None.
    pool: bool = True
    #: Whether it starts the pool of this machine again that somebody has stopped: a look does not.
    again: bool = False


class _Parser(argparse.ArgumentParser):
    """An `argparse` parser that raises rather than ends the process."""

    #: What shows its options, and what looks at all words together.
    shown_by: str
    wrong: Callable[[argparse.Namespace], str]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Take options wherever they stand: `share LEASE --restart ben` too."""
        found = self.parse_intermixed_args(args, namespace)
        if wrong := self.wrong(found):
            raise Misuse(wrong)
        return found

    def error(self, message: str) -> NoReturn:
        raise Misuse(_taught(self, message))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002 - argparse's signature
        raise Misuse(message or "")


#: What argparse says, and how it reads as a sentence.
_PLAINER = (
    (r"argument ([^:/]+)[^:]*: invalid choice: (.+?) \(choose from (.*)\)", r"\1 is one of \3, not \2"),
    (r"argument ([^:/]+)[^:]*: expected (?:one|at least one) argument", r"\1 needs a value"),
    (r"argument ([^:/]+)[^:]*: ignored explicit argument (.*)", r"\1 takes no value, and not \2"),
    (r"argument ([^:/]+)[^:]*: invalid (?:int|float) value: (.*)", r"\1 takes a number, not \2"),
    (r"argument ([^:/]+)[^:]*: ", r"\1: "),
    (r"the following arguments are required: (.*)", r"\1 is missing"),
)


def _taught(parser: _Parser, message: str) -> str:
    for pattern, words in _PLAINER:
        message = re.sub(pattern, words, message)
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown == message:
        return f"{parser.prog}: {message}. Its options: `{parser.shown_by}`."
    word = unknown.split()[0]
    if not word.startswith("-"):
        return f"{parser.prog} does not take {word!r} here. Its options: `{parser.shown_by}`."
    known = [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no public list
    return f"{parser.prog} has no option {word.partition('=')[0]}. {nearest(word, known, parser.shown_by)}"


def nearest(word: str, known: Iterable[str], shown_by: str) -> str:
    """Say which word was probably meant, or how to see all of them."""
    alike = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"Did you mean {alike[0]}?" if alike else f"See `{shown_by}`."


def parser_of(command: Command, prog: str, shown_by: str = "") -> argparse.ArgumentParser:
    """Make the parser of a command.

    Args:
        command: The command.
        prog: What a person writes before its options: "%gpupool request".
        shown_by: What shows its options, where that is not `--help`.
    """
    parser = _Parser(prog=prog, description=command.help, add_help=False, allow_abbrev=False)
    parser.shown_by, parser.wrong = shown_by or f"{prog} --help", command.wrong
    # "-1h" and "-3GB" are values too, for the pool to refuse; no option begins with a digit.
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # noqa: SLF001 - argparse has no other way
    for each in command.arguments:
        options = dict(each.options)
        if each.flags[0].startswith("-"):
            options["dest"] = each.name
        if each.metavar:
            options["metavar"] = each.metavar
        parser.add_argument(*each.flags, help=each.help, **options)
    parser.add_argument("--help", "-h", action="store_true", help="show this")
    return parser


def asks_help(words: Iterable[str]) -> bool:
    """Return whether a command line asks for its help, whatever else it lacks."""
    return not {"--help", "-h"}.isdisjoint(words)


def split(line: str) -> list[str]:
    """Split a line into words as a shell does.

    Raises:
        Misuse: A quote is not closed.
    """
    try:
        return shlex.split(line)
    except ValueError as error:
        raise Misuse(f"The line cannot be read ({error}): close the quote.") from error


def number(text: str) -> int | float | str:
    """Return a number where it is one; the pool says what is wrong with anything else.

    >>> number("2"), number("0.5"), number("two")
    (2, 0.5, 'two')
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


# -------------------------------------------------------------------------------------- what can be asked for


def _asks(flags: str, help: str, metavar: str = "", **options: Any) -> Argument:  # noqa: A002 - argparse's word
    flag, *more = flags.split()
    name = options.pop("name", flag.lstrip("-").replace("-", "_"))
    values = options.pop("values", "")
    if not metavar and "action" not in options:
        options["action"] = "store_true"
    return Argument(
        flags=(flag, *more),
        name=name,
        help=help,
        metavar=metavar,
        options={"default": None, **options},
        asks=True,
        values=values,
    )


#: The fields of a request, in the order in which a person thinks of them.
REQUEST: tuple[Argument, ...] = (
    _asks("--gpus -g", "GPUs for sure: 2 whole ones, or 0.5 of one (default: 1)", "N", type=number),
    _asks("--max-gpus", "grow up to so many while nobody else needs them", "N", type=number),
    _asks("--min-gpus", "go on with so few when a GPU fails and there is no other", "N", type=number),
    _asks("--vram", 'a share of one GPU by its memory: "20GB"', "SIZE"),
    _asks("--mig", 'a MIG instance of this profile: "1g.10gb"', "PROFILE", values="mig"),
    _asks("--isolated", "a share that is a MIG instance, whatever its profile"),
    _asks("--time -t --time-limit", "how long at most: 30m, 2h, 1d", "TIME", name="time_limit"),
    _asks("--name -n", "a name among your leases", "NAME"),
    _asks("--project -p", "the project that pays", "PROJECT", values="project"),
    _asks("--model -m", 'only GPUs of this model: "H100-80GB"', "MODEL", values="model"),
    _asks("--min-vram", 'only GPUs with so much memory each: "40GB"', "SIZE"),
    _asks("--same-node", "all on one node"),
    _asks("--nvlink", "all linked to each other"),
    _asks("--node", "on this node only", "NODE", values="node"),
    _asks(
        "--exclude", "not on this node or device (may be repeated)", "NAME", action="append", values="target"
    ),
    _asks("--spread", "rather on many nodes than on few"),
    _asks("--same-device", "shares of this lease may sit on one GPU"),
    _asks("--idle-timeout", 'give back after so long without work; "never" to keep it', "TIME"),
    _asks("--interactive", "within the quota it is never taken back", action="store_true"),
    _asks("--preemptible", "it may be taken back for others", action="store_true"),
    _asks("--priority", "among your own requests, higher first", "N", type=number),
    _asks("--cpus", "CPUs of each worker", "N", type=number),
    _asks("--memory", 'host memory of each worker: "64GB"', "SIZE"),
    _asks("--python", "the Python of the workers (default: this one, where the node has it)", "PATH"),
    _asks(
        "--env",
        "an environment variable of the workers (may be repeated)",
        "K=V",
        action="append",
        type=_pair,
    ),
    _asks(
        "--pre-import", "a module to import in the workers ahead (may be repeated)", "NAME", action="append"
    ),
    _asks("--workdir", "the folder that the workers work in", "PATH", name="working_directory"),
    _asks(
        "--option -o",
        "an option of dask-cuda (may be repeated)",
        "K=V",
        action="append",
        type=_pair,
        name="options",
    ),
)
#: Those that the API has within `environment`.
ENVIRONMENT = {
    "python": "python",
    "env": "variables",
    "pre_import": "pre_import",
    "working_directory": "working_directory",
}

_WAIT = Argument(
    flags=("--no-wait",),
    name="wait",
    help="do not wait for the grant; the request stays in the queue",
    options={"action": "store_false"},
)
_TIMEOUT = Argument(
    flags=("--timeout",),
    name="timeout",
    help="withdraw it if it is not granted within so many seconds",
    metavar="SECONDS",
    options={"type": number},
)
_DRY_RUN = Argument(
    flags=("--dry-run",),
    name="dry_run",
    help="only say whether it would start now, else when and why",
    options={"action": "store_true"},
)
_LEASE = Argument(
    flags=("lease",),
    name="lease",
    help="a lease, by name or id (not needed if you have only one)",
    metavar="LEASE",
    options={"nargs": "?"},
    values="lease",
)
_LEASES = Argument(
    flags=("lease",),
    name="lease",
    help="leases, by name or id (not needed if you have only one)",
    metavar="LEASE",
    options={"nargs": "*"},
    values="lease",
)
_ALL_MINE = Argument(flags=("--all",), name="all", help="all that you have", options={"action": "store_true"})
_EVERYBODY = Argument(flags=("--all",), name="all", help="everybody's", options={"action": "store_true"})
_ENDED = Argument(
    flags=("--ended",), name="ended", help="those that have ended too", options={"action": "store_true"}
)
_BY = Argument(
    flags=("--by",),
    name="by",
    help="how much longer: 30m, 2h (default: 1h)",
    metavar="TIME",
    options={"default": "1h"},
)


_USERS = Argument(
    flags=("users",),
    name="users",
    help="who may use it besides you; nobody: it is yours alone again",
    metavar="USER",
    options={"nargs": "*", "default": []},
    values="user",
)
_RESTART = Argument(
    flags=("--restart",),
    name="restart",
    help="start its scheduler and workers anew on new keys, which shuts out everybody else who had the old "
    "ones; what it computes and holds is lost",
    options={"action": "store_true"},
)
_MANY = Argument(
    flags=("gpus",), name="gpus", help="GPUs at most from now on", metavar="N", options={"type": number}
)
_ONE_DEVICE = Argument(
    flags=("device",),
    name="device",
    help="a GPU, by name or UUID",
    metavar="GPU",
    options={"nargs": "?"},
    values="device",
)
_THIS_LEASE = Argument(
    flags=("lease",), name="lease", help="a lease, by name or id", metavar="LEASE", values="lease"
)


def _health(pool: Pool, args: argparse.Namespace) -> Any:
    if not args.device:
        return pool.devices()
    from jupyter_gpupool import tables
    from jupyter_gpupool._evidence import evidence_words

    return tables.Said(pool.get(f"/v1/health/{args.device}"), evidence_words)


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a parsed command line asks for, as the fields of the request."""
    what: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    for each in REQUEST:
        value = getattr(args, each.name, None)
        if value is None:
            continue
        if each.options.get("type") is _pair:
            value = dict(value)
        if each.name in ENVIRONMENT:
            environment[ENVIRONMENT[each.name]] = value
        else:
            what[each.name] = value
    return {**what, "environment": environment} if environment else what


# ----------------------------------------------------------------------------------------------- the commands


def _request(pool: Pool, args: argparse.Namespace) -> Any:
    what = asked(args)
    if args.dry_run:
        return pool.trial(**what)
    return pool.request(wait=args.wait, timeout=args.timeout, **what)


class Released(str):
    """Which leases were given back, in a sentence; a notebook's later commands are about them no more."""

    __slots__ = ("ids",)
    #: Their ids.
    ids: frozenset[str]


def _release(pool: Pool, args: argparse.Namespace) -> str:
    leases: Sequence[Lease]
    if args.all:
        leases = pool.leases()
        if not leases:
            return "You have no lease."
    else:
        leases = [pool.lease(name) for name in args.lease or [None]]
    for lease in leases:
        lease.release()
    names = ", ".join(lease.name or lease.id for lease in leases)
    told = Released(f"Released: {names}.")
    told.ids = frozenset(lease.id for lease in leases)
    return told


COMMANDS: tuple[Command, ...] = (
    Command(
        name="request",
        help="Ask for GPUs and wait for them; Ctrl-C meanwhile withdraws.",
        arguments=(*REQUEST, _WAIT, _TIMEOUT, _DRY_RUN),
        run=_request,
        again=True,
    ),
    Command(
        name="status", help="Say what the pool is and how it stands.", run=lambda pool, _: pool.overview()
    ),
    Command(
        name="leases",
        help="List your leases and the requests that wait.",
        arguments=(_EVERYBODY, _ENDED),
        run=lambda pool, args: pool.leases(everybody=args.all, ended=args.ended),
    ),
    Command(
        name="why",
        help="Say why a request waits, or why a lease is as it is.",
        arguments=(_LEASE,),
        run=lambda pool, args: pool.explain(args.lease),
    ),
    Command(
        name="extend",
        help="Ask for more time for a lease.",
        arguments=(_LEASE, _BY),
        run=lambda pool, args: pool.lease(args.lease).extend(number(args.by)),
    ),
    Command(
        name="keep",
        help="Say that an idle lease is still needed.",
        arguments=(_LEASE,),
        run=lambda pool, args: pool.lease(args.lease).keep(),
    ),
    Command(
        name="scale",
        help="Let a lease grow or shrink to so many GPUs, as far as nobody else needs them.",
        arguments=(_LEASE, _MANY),
        run=lambda pool, args: pool.lease(args.lease).scale(args.gpus),
    ),
    Command(
        name="share",
        help="Let exactly these people use a lease too; what they run on it runs as you.",
        arguments=(_THIS_LEASE, _USERS, _RESTART),
        run=lambda pool, args: pool.lease(args.lease).share(*args.users, restart=args.restart),
    ),
    Command(
        name="release",
        help="Give leases back, or withdraw requests.",
        arguments=(_LEASES, _ALL_MINE),
        wrong=lambda args: "release takes leases or --all, not both." if args.all and args.lease else "",
        run=_release,
    ),
    Command(
        name="logs",
        help="Show what a lease's scheduler and workers wrote.",
        arguments=(_LEASE,),
        run=lambda pool, args: pool.lease(args.lease).logs(),
    ),
    Command(
        name="health",
        help="List the GPUs: how they are, and who has them; of one GPU, what its verdict rests on.",
        arguments=(_ONE_DEVICE,),
        run=_health,
    ),
    Command(name="queue", help="List who waits, in their order.", run=lambda pool, _: pool.queue()),
    Command(
        name="projects",
        help="List the projects with their quotas, and how each stands.",
        run=lambda pool, _: pool.projects(),
    ),
    Command(
        name="usage",
        help="List who has, deserves and has used how much.",
        run=lambda pool, _: pool.usage(),
    ),
    Command(
        name="ledger",
        help="List GPU-seconds by user, project, model and kind of slice.",
        run=lambda pool, _: pool.ledger(),
    ),
    Command(
        name="history",
        help="List your GPU hours by day.",
        run=lambda pool, _: pool.history(),
    ),
    Command(
        name="reclaims",
        help="List what was taken back lately, for whom and by which numbers.",
        run=lambda pool, _: pool.reclaims(),
    ),
)


def summary(commands: Iterable[tuple[str, str]], prog: str) -> str:
    """List commands with their help, for people."""
    listed = list(commands)
    width = max(len(name) for name, _ in listed)
    return "\n".join(f"    {prog} {name.ljust(width)}  {help_}" for name, help_ in listed)
