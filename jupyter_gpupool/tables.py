"""Tables and lines of words that know how to show themselves, as plain text and as HTML.

Rule 1: plain text comes first; HTML says the same. Whatever a pool or a person wrote is escaped in it, and no
        control character of theirs reaches a terminal.
Rule 2: what a pool says stays usable as data: a list of dicts, a dict; only its looks are added.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

#: A column of a table: its heading, and how its cell is made of a row.
Column = tuple[str, Callable[[Mapping[str, Any]], Any]]

#: Characters of a line of the last column in plain text: it holds sentences, and a table must fit a terminal.
SENTENCE = 48


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay rows out as plain text with aligned columns; columns without any content are left out."""
    heads, cells = _cells(columns, rows)
    cells = [part for line in cells for part in _wrapped(line)]
    lines = [heads, *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    numbers = [bool(cells) and all(_is_number(line[i]) for line in cells) for i in range(len(heads))]

    def laid(line: list[str]) -> str:
        return "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([laid(heads), rule, *(laid(line) for line in cells)])


def _wrapped(line: list[str]) -> list[list[str]]:
    """Go on with a long sentence in the last column below its beginning."""
    if not line or len(line[-1]) <= SENTENCE:
        return [line]
    first, *more = textwrap.wrap(line[-1], SENTENCE)
    return [[*line[:-1], first], *([""] * (len(line) - 1) + [part] for part in more)]


def html_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay rows out as an HTML table."""
    heads, cells = _cells(columns, rows)
    head = "".join(f"<th style='text-align:left'>{html.escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    lines = [[_text(make(row)) for _, make in columns] for row in rows]
    used = [i for i in range(len(columns)) if not lines or any(line[i] for line in lines)]
    return [columns[i][0] for i in used], [[line[i] for i in used] for line in lines]


def _text(value: Any) -> str:
    """Write a cell; control characters must not reach a terminal."""
    text = "" if value is None else str(value)
    return "".join(char if char.isprintable() else " " for char in text)


def _is_number(text: str) -> bool:
    return not text or text.replace(".", "", 1).isdigit()


def html_line(words: str) -> str:
    """Write a line of words as HTML."""
    return f"<div>{html.escape(words)}</div>"


class Rows(list[Any]):
    """A list of what a pool says (dicts), shown as a table.

    Args:
        rows: The dicts, or objects that have them as `data`.
        columns: What to show of them.
        empty: The sentence to show when there are none.
        note: A line below the table.
    """

    def __init__(
        self, rows: Iterable[Any], columns: Sequence[Column], empty: str = "", note: str = ""
    ) -> None:
        super().__init__(rows)
        self._columns = columns
        self._empty = empty
        self._note = note

    def __repr__(self) -> str:
        shown = table(self._columns, map(_data, self)) if self else self._empty
        return "\n".join(filter(None, [shown, self._note]))

    def _repr_html_(self) -> str:
        shown = html_table(self._columns, map(_data, self)) if self else html.escape(self._empty)
        return shown + (f"<div>{html.escape(self._note)}</div>" if self._note else "")


def _data(row: Any) -> Mapping[str, Any]:
    """Return the dict of a row, which may be a `Lease` that carries it."""
    data: Mapping[str, Any] = row if isinstance(row, Mapping) else row.data
    return data


class Said(dict[str, Any]):
    """What a pool says of one thing (a dict whose keys are attributes too), shown as lines of words.

    Args:
        data: The dict.
        words: Makes the lines of it.
    """

    def __init__(self, data: Mapping[str, Any], words: Callable[[Mapping[str, Any]], list[str]]) -> None:
        super().__init__(data)
        self._words = words

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the pool says nothing of {name!r}; it says {', '.join(self)}") from None

    def __repr__(self) -> str:
        return "\n".join(self._words(self))

    def _repr_html_(self) -> str:
        return "<br>".join(html.escape(line) for line in self._words(self))


class Logs(dict[str, str]):
    """Texts by the name of the process that wrote them."""

    def __repr__(self) -> str:
        if not self:
            return "Nothing has been written yet."
        return "\n\n".join(f"── {name} ──\n{text.rstrip() or '(nothing)'}" for name, text in self.items())

    def _repr_html_(self) -> str:
        if not self:
            return "Nothing has been written yet."
        return "".join(
            f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
            for name, text in self.items()
        )
