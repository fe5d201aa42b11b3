"""Tab completion of `%gpupool`: sub-commands, options, and what a value can be.

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
#: Seconds that what the pool has said is good for, and that a Tab waits for it.
FRESH_S, PATIENCE_S = 5.0, 1.0


class Completer:
    """A matcher for IPython's completer.

    Args:
        commands: The sub-commands by name.
        pool: Finds the pool; raises where there is none.
    """

    def __init__(self, commands: dict[str, Command], pool: Callable[[], Pool]) -> None:
        self._commands = commands
        self._pool = pool
        self._said: dict[str, tuple[float, list[str]]] = {}

        @context_matcher(identifier="gpupool")
        def matcher(context: CompletionContext) -> dict[str, Any]:
            """Stand for the method, on which IPython cannot write what it notes of a matcher."""
            return self.match(context)

        self.matcher = matcher

    def match(self, context: CompletionContext) -> dict[str, Any]:
        """Say what can stand at the cursor; nothing where it is not in a line of ours."""
        line = LINE.match(context.text_until_cursor)
        if line is None:
            return {"completions": []}
        *before, word = re.split(r"[\s]+", line["rest"].lstrip(" \t"))
        found = [each for each in self._known(before, word) if each.startswith(context.token)]
        return {"completions": [SimpleCompletion(each) for each in found], "suppress": bool(found)}

    def _known(self, before: list[str], word: str) -> Iterable[str]:
        """Return what can stand after the words `before`; `word` has been begun."""
        if not before:
            return [*self._commands, "help"]
        if before == ["help"]:
            return self._commands
        command = self._commands.get(before[0])
        if command is None:
            return ()
        option, equals, _ = word.partition("=")
        if not equals:
            option = before[-1]
        asked = next((each for each in command.arguments if option in each.flags), None)
        if asked is not None and asked.metavar:
            return self._values(asked.values)
        if word.startswith("-"):
            return [flag for each in command.arguments for flag in each.flags if flag.startswith("--")]
        return self._values(next(filter(None, map(_of_a_position, command.arguments)), ""))

    def _values(self, kind: str) -> list[str]:
        """Return what the pool says that there is of a kind."""
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


def _of_a_position(argument: Argument) -> str:
    return "" if argument.flags[0].startswith("-") else argument.values


def _leases(pool: Pool) -> list[str]:
    return [lease.name for lease in pool.leases()]


#: What values there are, by kind.
SOURCES: dict[str, Callable[[Pool], list[str]]] = {
    "lease": _leases,
    "project": lambda pool: [row["name"] for row in pool.projects()],
    "model": lambda pool: sorted(pool.status().models),
    "node": lambda pool: [row["name"] for row in pool.status().nodes],
    "target": lambda pool: [row["name"] for row in pool.devices()],
}
