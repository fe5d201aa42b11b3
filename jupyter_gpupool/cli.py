"""`jupyter gpupool`: the pool from a terminal, as a Jupyter application with sub-commands.

Rule 1: a sub-command is a row of a table: its words from `commands`, or here where only a terminal has it.
Rule 2: what is said goes to standard output, as text or with `--json` for machines; a mistake or a no is one
        line on standard error and exit status 1.
Rule 3: Jupyter's own options (`--config`, `--debug`, `--Class.trait=…`) work with every sub-command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from jupyter_core.application import JupyterApp, NoStart
from traitlets import Unicode

from jupyter_gpupool import __version__, commands
from jupyter_gpupool._http import PoolError
from jupyter_gpupool.cli_pool import OWN
from jupyter_gpupool.cli_replay import REPLAYS
from jupyter_gpupool.commands import Argument, Command, Misuse, asks_help
from jupyter_gpupool.upkeep import UPKEEP

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

PROG = "jupyter gpupool"
#: Exit status of a command that Ctrl-C ended, as shells have it.
INTERRUPTED = 130
_JSON = Argument(
    flags=("--json",), name="json", help="write JSON, for machines", options={"action": "store_true"}
)
_URL = Argument(
    flags=("--url",), name="url", help="the pool's address (default: as Pool() finds it)", metavar="URL"
)
#: Options of every Jupyter application that are passed on to it.
_JUPYTER = ("--config", "--debug", "--log-level", "--show-config", "--generate-config", "--answer-yes")


class GPUPoolCommand(JupyterApp):
    """A sub-command of `jupyter gpupool`."""

    version = __version__
    #: Said by each of the classes that `_sub_application` makes.
    command: ClassVar[Command]
    url = Unicode("", help="Address of the pool; empty: found as Pool() finds it.").tag(config=True)
    aliases: ClassVar[dict[str, str]] = {
        "config": "JupyterApp.config_file",
        "log-level": "Application.log_level",
    }

    def _config_file_name_default(self) -> str:
        return "jupyter_gpupool_config"

    def parse_command_line(self, argv: Sequence[str] | None = None) -> None:
        """Take our options, and leave Jupyter's to Jupyter."""
        self.parser = _parser(self.command)
        words = list(sys.argv[1:] if argv is None else argv)
        ours = [word for word in words if not _is_jupyters(word)]
        self.args = None if asks_help(ours) else self.parser.parse_args(ours)
        super().parse_command_line([word for word in words if _is_jupyters(word)])

    def start(self) -> None:
        """Carry the command out and print what comes of it."""
        super().start()
        if self.args is None:
            print(self.parser.format_help().rstrip())
            return
        show(self._value(self.args), as_json=self.args.json)

    def _value(self, args: Namespace) -> Any:
        if not self.command.pool:
            return self.command.run(None, args)
        from jupyter_gpupool import embedded
        from jupyter_gpupool.client import Pool

        start = self.command.again or not embedded.stopped()
        source = "--url" if args.url else f"{type(self).__name__}.url"
        with Pool(args.url or self.url or None, start=start, source=source) as pool:
            return self.command.run(pool, args)


class GPUPoolApp(JupyterApp):
    """`jupyter gpupool` itself."""

    name = "jupyter-gpupool"
    description = "Share a pool of GPUs."
    version = __version__
    aliases: ClassVar[dict[str, str]] = {}
    flags: ClassVar[dict[str, Any]] = {}

    def parse_command_line(self, argv: Sequence[str] | None = None) -> None:
        """Find the sub-command; without one, show what there is."""
        words = list(sys.argv[1:] if argv is None else argv)
        if not words or words[0] in ("help", "-h", "--help", "--help-all"):
            print(overview())
            raise NoStart
        if words[0] == "--version":
            print(__version__)
            raise NoStart
        if words[0] not in self.subcommands:
            meant = commands.nearest(words[0], self.subcommands, f"{PROG} --help")
            raise Misuse(f"{PROG} has no command {words[0]!r}. {meant}")
        self.initialize_subcommand(words[0], words[1:])


def _is_jupyters(word: str) -> bool:
    name = word.partition("=")[0]
    return name in _JUPYTER or (name.startswith("--") and "." in name)


def _parser(command: Command) -> ArgumentParser:
    more = (_URL, _JSON) if command.pool else (_JSON,)
    whole = replace(command, arguments=(*command.arguments, *more))
    return commands.parser_of(whole, f"{PROG} {command.name}")


def _sub_application(command: Command) -> type[GPUPoolCommand]:
    said = {
        "name": "jupyter-gpupool",
        "description": command.help,
        "command": command,
        "__doc__": command.help,
    }
    return type(f"{command.name.title()}Command", (GPUPoolCommand,), said)


#: What only runs a pool comes first, then what uses one.
ALL: tuple[Command, ...] = (*OWN, *REPLAYS, *UPKEEP, *commands.COMMANDS)
GPUPoolApp.subcommands = {each.name: (_sub_application(each), each.help) for each in ALL}


def overview() -> str:
    """Say what the sub-commands are."""
    listed = [(each.name, each.help) for each in ALL]
    return "\n".join(
        [
            "Share a pool of GPUs.",
            "",
            commands.summary(listed, PROG),
            "",
            f"`{PROG} COMMAND --help` has the options of each. For example:",
            "",
            f"    {PROG} start",
            f"    {PROG} request --gpus 2 --time 2h --name sweep",
            f"    {PROG} release sweep",
        ]
    )


def show(value: Any, *, as_json: bool) -> None:
    """Print what came of a command."""
    if as_json:
        print(json.dumps(value, indent=2, default=_plain))
    elif value is not None and str(value):
        print(value if isinstance(value, str) else repr(value))


def _plain(value: Any) -> Any:
    data = getattr(value, "data", None)
    return data if data is not None else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `jupyter gpupool`; the exit status is 0 only if it did what was asked."""
    status = 0
    for number in (signal.SIGTERM, signal.SIGHUP):  # a request that waits must not outlive who waits for it
        signal.signal(number, signal.default_int_handler)
    try:
        run(argv)
    except NoStart:
        pass
    except (Misuse, PoolError) as error:
        sentence = str(error)
        print(sentence if sentence.startswith(PROG) else f"{PROG}: {sentence}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print(f"{PROG}: {interrupted(sys.argv[1:] if argv is None else argv)}.", file=sys.stderr)
        status = INTERRUPTED
    except BrokenPipeError:  # `jupyter gpupool logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def interrupted(argv: Sequence[str]) -> str:
    """Say what became of a command that was interrupted.

    >>> interrupted(["logs", "request"]), interrupted(["request", "--gpus", "1"])
    ('interrupted', 'interrupted; a request that was waiting is withdrawn')
    """
    asks = next((each for each in argv if not each.startswith("-")), "") == "request"
    return "interrupted" + ("; a request that was waiting is withdrawn" if asks else "")


def run(argv: Sequence[str] | None = None) -> None:
    """Run `jupyter gpupool` and let errors out.

    Raises:
        Misuse: The command line is not as it has to be.
        PoolError: The pool says no, or there is none.
    """
    app = GPUPoolApp()
    try:
        app.initialize(list(sys.argv[1:] if argv is None else argv))
        app.start()
    finally:  # traitlets keeps one application a process; there may be another after this one
        if app.subapp:
            app.subapp.clear_instance()


if __name__ == "__main__":
    main()
