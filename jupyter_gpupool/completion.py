"""Tab completion of `%gpupool` and `%%gpupool`: sub-commands, options, and what a value can be.

Rule 1: a Tab never starts a pool, never raises, and never waits longer than a person notices: what the pool
        has not said by then is there at the next Tab.
"""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jupyter_gpupool.client import Pool
    from jupyter_gpupool.commands import Argument, Command

#: The magic at the start of a line, or what is assigned to a variable.
LINE = re.compile(r"^\s*(?:[\w.,\s]+=\s*)?%gpupool(?P<rest>\s+.*)$")
#: The first line of a cell that runs on a lease.
CELL = re.compile(r"^%%gpupool(?P<rest>\s+.*)$")
#: Seconds that what the pool has said is good for, and that a Tab waits for it.
FRESH_S, PATIENCE_S = 5.0, 1.0
#: Options that take as many names as follow.
SEVERAL = ("--send", "--fetch")


class Completer:
    """A matcher for IPython's completer.

    Args:
        commands: The sub-commands by name.
        pool: Finds the pool; raises where there is none.
        variables: Returns those of the notebook.
    """

    def __init__(
        self,
        commands: dict[str, Command],
        pool: Callable[[], Pool],
        variables: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._commands = commands
        self._pool = pool
        self._variables = variables
        self._said: dict[str, tuple[float, list[str]]] = {}

        @context_matcher(identifier="gpupool")
        def matcher(context: CompletionContext) -> dict[str, Any]:
            """Stand for the method, on which IPython cannot write what it notes of a matcher."""
            return self.match(context)

        self.matcher = matcher

    def match(self, context: CompletionContext) -> dict[str, Any]:
        """Say what can stand at the cursor; nothing where it is not in a line of ours."""
        text = context.text_until_cursor
        line, cell = LINE.match(text), CELL.match(text)
        if line is None and cell is None:
            return {"completions": []}
        *before, word = re.split(r"[\s]+", (line or cell)["rest"].lstrip(" \t"))  # type: ignore[index]
        known = self._known(before, word) if line else self._known_of_a_cell(before, word)
        found = [each for each in known if each.startswith(context.token)]
        return {"completions": [SimpleCompletion(each) for each in found], "suppress": bool(found)}

    def _known(self, before: list[str], word: str) -> Iterable[str]:
        """Return what can stand after the words `before`; `word` has been begun."""
        if not before:
            return [*self._commands, "help"]
        if before == ["help"]:
            return [*self._commands, "cell"]
        command = self._commands.get(before[0])
        return () if command is None else self._of_command(command, before, word)

    def _known_of_a_cell(self, before: list[str], word: str) -> Iterable[str]:
        from jupyter_gpupool.cell_line import COMMAND

        return self._of_command(COMMAND, ["", *before], word)

    def _of_command(self, command: Command, before: list[str], word: str) -> Iterable[str]:
        option, equals, _ = word.partition("=")
        if not equals:
            option = _option_before(before)
        asked = _named(command, option)
        if asked is not None and asked.metavar:
            return self._values(asked.values)
        if word.startswith("-"):
            return _flags(command)
        place = _place(command, before[1:])
        return self._values(place.values) if place else () if word else _flags(command)

    def _values(self, kind: str) -> list[str]:
        """Return what there is of a kind: the notebook knows, or the pool says."""
        if kind == "variable":
            return [name for name in self._variables() if not name.startswith("_")]
        if kind.startswith("="):
            return kind[1:].split("|")
        if kind not in SOURCES:
            return []
        at, known = self._said.get(kind, (0.0, []))
        if time.monotonic() - at < FRESH_S:
            return known
        asking = threading.Thread(target=self._ask, args=(kind,), name="gpupool-tab", daemon=True)
        asking.start()
        asking.join(PATIENCE_S)
        return self._said.get(kind, (0.0, known))[1]

    def _ask(self, kind: str) -> None:
        try:
            self._said[kind] = (time.monotonic(), SOURCES[kind](self._pool()))
        except Exception:  # noqa: BLE001 - a Tab is no place for errors
            self._said[kind] = (time.monotonic(), [])


def _option_before(before: list[str]) -> str:
    """Return the option whose value comes next; one that takes several names is still the last one."""
    options = [each for each in before if each.startswith("-")]
    last = options[-1] if options else before[-1]
    return last if last in SEVERAL else before[-1]


def _named(command: Command, option: str) -> Argument | None:
    return next((each for each in command.arguments if option in each.flags), None)


def _flags(command: Command) -> list[str]:
    return [flag for each in command.arguments for flag in each.flags if flag.startswith("--")]


def _place(command: Command, before: list[str]) -> Argument | None:
    """Return the argument without a name that stands after these words; the last one may stand for many."""
    places = [each for each in command.arguments if not each.flags[0].startswith("-")]
    given = 0
    for last, each in zip(["", *before], before, strict=False):
        named = _named(command, last)
        given += not (each.startswith("-") or (named is not None and named.metavar))
    if given < len(places):
        return places[given]
    return places[-1] if places and places[-1].options.get("nargs") == "*" else None


def _profiles(pool: Pool) -> list[str]:
    return sorted({profile for row in pool.devices() for profile in row.get("profiles") or ()})


def _targets(pool: Pool) -> list[str]:
    devices = pool.devices()
    return [*dict.fromkeys(row["node"] for row in devices), *(row["name"] for row in devices)]


def _leases(pool: Pool) -> list[str]:
    return [lease.name for lease in pool.leases()]


#: What values there are, by kind.
SOURCES: dict[str, Callable[[Pool], list[str]]] = {
    "lease": _leases,
    "project": lambda pool: [row["name"] for row in pool.projects()],
    "mig": _profiles,
    "model": lambda pool: sorted(pool.status().models),
    "node": lambda pool: [row["name"] for row in pool.status().nodes],
    "device": lambda pool: [row["name"] for row in pool.devices()],
    "target": _targets,
    "user": lambda pool: sorted({row["user"] for row in pool.usage()}),
}
