"""`%gpupool`: the pool from a notebook's cell.

Rule 1: a line is parsed, the client is called, and what it returns is the value of the line: an object
        that shows itself, to be assigned (`lease = %gpupool request`) or stored (`--out lease`).
Rule 2: a mistake and a no are one sentence, not a page of traceback; the cell fails, so that "run all" stops.
Rule 3: loading the extension costs next to nothing; the client is imported by the first command.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from traitlets import Bool, Unicode
from traitlets.config import Configurable

from jupyter_gpupool import cell_line, commands
from jupyter_gpupool.commands import Argument, Command, Misuse
from jupyter_gpupool.completion import Completer
from jupyter_gpupool.upkeep import UPKEEP

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from jupyter_gpupool.cells import Cells
    from jupyter_gpupool.client import Lease, Pool

PROG = "%gpupool"
#: Commands that only a terminal has.
TERMINAL = frozenset(
    [
        "agent",
        "backup",
        "drill",
        "get-projects",
        "login",
        "remove",
        "replay",
        "restore",
        "set-projects",
        "simulate",
        "start",
        "stop",
        "token",
        "trace",
    ]
)
_OUT = Argument(
    flags=("--out",),
    name="out",
    help="store what comes of it in this variable",
    metavar="NAME",
)


_WITH_KERNEL = Argument(
    flags=("--with-kernel",),
    name="with_kernel",
    help="give it back when this kernel ends or restarts; one that is killed leaves it to idle out",
    options={"action": "store_true"},
)


@magics_class
class GPUPool(Magics, Configurable):
    """The magic, and what can be configured of it: `%config GPUPool`."""

    url = Unicode("", help="Address of the pool; empty: found as Pool() finds it.").tag(config=True)
    project = Unicode("", help="The project of requests that name none.").tag(config=True)
    time_limit = Unicode("", help="The time limit of requests that name none, such as 4h.").tag(config=True)
    interactive = Bool(
        True, help="Requests from here are interactive: within the quota never taken back."
    ).tag(config=True)

    def __init__(self, shell: InteractiveShell) -> None:
        Configurable.__init__(self, parent=shell)
        Magics.__init__(self, shell)
        self._pool: Pool | None = None
        #: What `url` was when the pool was found.
        self._asked = ""
        self.completer: Completer
        #: The lease that a command is about when it names none; the last one requested or used here.
        self.current = ""
        self._cells: Cells | None = None
        shared = map(_with_kernel, commands.COMMANDS)
        self.commands = {each.name: _with_out(each) for each in (*shared, *self._own(), *UPKEEP)}

    def _own(self) -> tuple[Command, ...]:
        """Return the sub-commands that only a notebook has."""
        lease = next(each for each in commands.COMMANDS if each.name == "keep").arguments
        return (
            Command(
                name="use",
                help="Find a lease again, say after a restart of the kernel; later commands are about it.",
                arguments=lease,
                run=lambda pool, args: pool.lease(args.lease),
            ),
            Command(
                name="attach",
                help="Have this kernel see a lease's devices, where both are on one machine.",
                arguments=lease,
                run=lambda pool, args: pool.lease(args.lease).attach(),
            ),
            Command(name="config", help="Say which pool this is, and the settings.", run=self._configuration),
        )

    @line_magic
    def gpupool(self, line: str) -> Any:
        """Share a pool of GPUs: see `%gpupool help`."""
        try:
            words = commands.split(line)
            if not words or words[0] in ("help", "--help", "-h"):
                return _Text(self.help(words[1:]))
            command = self._command(words[0])
            if commands.asks_help(words[1:]):
                return _Text(self.help([command.name]))
            return self._carry_out(command, self._parse(command, words[1:]))
        except Misuse as error:
            raise UsageError(str(error)) from None

    @cell_magic("gpupool")
    def gpupool_cell(self, line: str, cell: str) -> None:
        """Run the cell on a lease: see `%gpupool help cell`."""
        from jupyter_gpupool.cells import Cells

        self._cells = self._cells or Cells(self)
        try:
            self._cells.run(line, cell)
        except Misuse as error:
            raise UsageError(str(error)) from None

    def _command(self, word: str) -> Command:
        if word not in self.commands:
            if word in TERMINAL:
                raise Misuse(f"{PROG} has no command {word!r}: in a terminal it is `jupyter gpupool {word}`.")
            meant = commands.nearest(word, self.commands, f"{PROG} help")
            raise Misuse(f"{PROG} has no command {word!r}. {meant}")
        return self.commands[word]

    def _parse(self, command: Command, words: list[str]) -> Namespace:
        parser = commands.parser_of(command, f"{PROG} {command.name}")
        args = parser.parse_args(words)
        if args.out and not args.out.isidentifier():
            raise Misuse(f"--out needs the name of a variable, and {args.out!r} is none.")
        if hasattr(args, "lease") and not args.lease and not getattr(args, "all", False):
            args.lease = [self.current] if isinstance(args.lease, list) else self.current
        if command.name == "request":
            args.project = args.project or self.project or None
            args.time_limit = args.time_limit or self.time_limit or None
            if args.interactive is None and not args.preemptible:
                args.interactive = self.interactive
        return args

    def _carry_out(self, command: Command, args: Namespace) -> Any:
        from jupyter_gpupool.client import Lease

        try:
            value = command.run(self.pool(again=command.again), args)
        except KeyboardInterrupt:
            if command.name == "request":
                print("The request is withdrawn.", file=sys.stderr)  # noqa: T201 - beside the cell's interrupt
            raise
        if isinstance(value, Lease):
            self.current = value.id
            if getattr(args, "with_kernel", False):
                atexit.register(_release, value)
        elif isinstance(value, commands.Released):
            self._let_go(value.ids)
        if args.out:
            self.shell.push({args.out: value})
            return None
        return _Text(value) if isinstance(value, str) else value

    def _let_go(self, ids: frozenset[str]) -> None:
        """Be about leases no more that are given back."""
        if self.current in ids:
            self.current = ""
        if self._cells is not None:
            self._cells.let_go(ids)

    def pool(self, *, again: bool = False) -> Pool:
        """Return the pool, looked for when it is first needed and again when the address is changed.

        Args:
            again: Start the pool of this machine again if somebody has stopped it.
        """
        from jupyter_gpupool import embedded

        pool = self._pool
        if pool is None or self._asked != self.url or pool.address.over():
            self.close()
            pool = self._connect(start=again or not embedded.stopped())
        return pool

    def _connect(self, *, start: bool) -> Pool:
        from jupyter_gpupool.client import Pool

        self._pool = Pool(self.url or None, start=start, source="%config GPUPool.url")
        self._asked = self.url
        return self._pool

    def found_pool(self) -> Pool:
        """Return the pool if there is one already; none is started."""
        return self._pool or self._connect(start=False)

    def close(self) -> None:
        """Close the connections to the pool; leases stay."""
        if self._cells is not None:  # kept: a cell that is running may have asked for the pool
            self._cells.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _configuration(self, pool: Pool, _: Namespace) -> str:
        names = self.class_trait_names(config=True)
        lines = [f"{PROG} talks to {pool!r}."]
        lines += [f"    %config GPUPool.{name} = {getattr(self, name)!r}" for name in sorted(names)]
        return "\n".join(lines)

    def help(self, words: list[str]) -> str:
        """Say what the sub-commands are, or what the options of one are."""
        if words == ["cell"]:
            return cell_line.help_text()
        if words:
            command = self._command(words[0])
            return commands.parser_of(command, f"{PROG} {command.name}").format_help().rstrip()
        listed = [(each.name, each.help) for each in self.commands.values()]
        return "\n".join(
            [
                "Share a pool of GPUs.",
                "",
                commands.summary(listed, PROG),
                "",
                "A cell that begins with `%%gpupool` runs on the lease: `%gpupool help cell`.",
                f"`{PROG} help request` lists what can be asked for. For example:",
                "",
                f"    lease = {PROG} request --gpus 2 --time 2h",
                "    client = lease.client()          # a plain distributed.Client",
                f"    {PROG} release",
            ]
        )


class _Text(str):
    """Text that a cell shows as it is, rather than as a quoted string."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _with_kernel(command: Command) -> Command:
    """Add what only a notebook can ask for."""
    more = (_WITH_KERNEL,) if command.name == "request" else ()
    return replace(command, arguments=(*command.arguments, *more))


def _with_out(command: Command) -> Command:
    return replace(command, arguments=(*command.arguments, _OUT))


def _release(lease: Lease) -> None:
    """Give a lease back at the end of the kernel; where the pool cannot be reached it idles out."""
    with contextlib.suppress(Exception):
        lease.release()


def load(shell: InteractiveShell) -> None:
    """Register the magic with an IPython shell."""
    magics = GPUPool(shell)
    shell.register_magics(magics)
    magics.completer = Completer(magics.commands, magics.found_pool, lambda: shell.user_ns)
    if shell.Completer is not None:
        shell.Completer.custom_matchers.append(magics.completer.matcher)
    if magics not in shell.configurables:
        shell.configurables.append(magics)
    GPUPool.gpupool.__doc__ = magics.help([])  # what `%gpupool?` shows
    GPUPool.gpupool_cell.__doc__ = magics.help(["cell"])
    if getattr(shell, "kernel", None) is not None:  # a terminal has no widgets
        for module, name, show in _LIVE:
            shell.display_formatter.ipython_display_formatter.for_type_by_name(module, name, _shown(show))
    _loaded[id(shell)] = magics


def unload(shell: InteractiveShell) -> None:
    """Take the magic out of an IPython shell again; leases stay."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    magics.close()
    if shell.Completer is not None:
        shell.Completer.custom_matchers.remove(magics.completer.matcher)
    if shell.display_formatter is not None:
        for module, name, _ in _LIVE:
            with contextlib.suppress(KeyError):
                shell.display_formatter.ipython_display_formatter.pop(f"{module}.{name}")
    if "jupyter_gpupool.widget" in sys.modules:
        sys.modules["jupyter_gpupool.widget"].close()
    if "jupyter_gpupool._cells" in sys.modules and not _loaded:
        sys.modules["jupyter_gpupool._cells"].Loop.end()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("gpupool", None)
    shell.magics_manager.registry.pop(type(magics).__name__, None)
    shell.configurables.remove(magics)


#: What is shown as a live widget, by class, and the function of `widget` that does it.
_LIVE = (
    ("jupyter_gpupool._lease", "Lease", "show_lease"),
    ("jupyter_gpupool.client", "Pool", "show_pool"),
    ("jupyter_gpupool.cluster", "GPUPoolCluster", "show_cluster"),
)


def _shown(name: str) -> Callable[[Any], None]:
    """Return what displays an object as a widget; nothing is imported before there is one to be shown."""

    def show(thing: Any) -> None:
        from jupyter_gpupool import widget

        widget.follow()
        getattr(widget, name)(thing)

    return show


#: The magic of each shell that has loaded it.
_loaded: dict[int, GPUPool] = {}
