"""What can be asked for, field by field: how each is read, and the one sentence where it is wrong.

Rule 1: one row a field. The table reads requests and describes them in OpenAPI, so that they cannot drift.
Rule 2: a reader is given what came out of the JSON, and returns the core's integers or raises `Wrong`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dask.utils import parse_bytes, parse_timedelta

from jupyter_gpupool.core.model import DAY, MIB, WHOLE, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

#: The most of anything that is counted; more is a slip of the finger, and must not reach 64-bit arithmetic.
MOST = 1_000_000
#: Less GPU memory than this cannot even hold a context: a forgotten unit.
LEAST_MEMORY = MIB
#: The most bytes: one exabyte.
MOST_MEMORY = 10**18
#: A hundred years: longer is a slip as well.
MOST_TIME = 36_500 * DAY
#: Less time than this without a unit is rather hours or minutes, the unit forgotten.
LEAST_PLAIN = 60_000
TEXT_LENGTH = 256
_PART = re.compile(r"([0-9.]+) *([A-Za-z]+)")
#: Units of time that people write and Dask does not read.
_UNITS = {"sec": "s", "secs": "s", "min": "m", "mins": "m", "hr": "h", "hrs": "h"}
_PLAIN = re.compile(r"[0-9.]+")
_DURATION = re.compile(r"(-?)((?:[0-9.]+ *[A-Za-z]+ *)+)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Wrong(Exception):  # noqa: N818 - it is an answer, not a failure
    """A field is not right: one sentence, and what to do."""

    def __init__(self, sentence: str, advice: str = "", reason: Reason = Reason.BAD_REQUEST) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.advice = advice
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a JSON body: how it is read, and how OpenAPI describes it."""

    read: Callable[[Any], Any]
    schema: dict[str, Any]
    about: str


def shown(value: Any) -> str:
    """Return what somebody wrote, in quotes if it is text, and never long."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:37] + "…" + text[-1:]


# ------------------------------------------------------------------------------------------ numbers


def _number(value: Any, what: str, example: str) -> Fraction:
    """Read a number, or text that is one; exactly, so that 0.1 is a tenth."""
    if isinstance(value, str) and len(value) <= 32:
        value = value.strip()
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = Fraction(str(value)) if "e" not in str(value).lower() else Fraction(float(value))
        except (ValueError, OverflowError, ZeroDivisionError):
            number = None
        if number is not None and "/" not in str(value):
            return number
    raise Wrong(f"{shown(value)} is not {what}.", f"Give a number, such as {example}.")


def gpus(value: Any) -> tuple[int, int]:
    """Read a number of GPUs: how many, and the thousandths of each.

    >>> gpus(2), gpus("0.5")
    ((2, 1000), (1, 500))
    """
    number = _number(value, "a number of GPUs", "2 for whole GPUs or 0.5 for a share of one")
    if number <= 0:
        raise Wrong(
            f"{shown(value)} GPUs cannot be granted: a request is for more than none.",
            "Ask for 1 or more whole GPUs, or for a share of one, such as 0.5.",
        )
    if number > MOST:
        raise Wrong(
            f"{shown(value)} GPUs are more than any pool has.", "Ask for fewer.", Reason.TOO_MANY_GPUS
        )
    if number.denominator == 1:
        return int(number), WHOLE
    if number > 1:
        raise Wrong(
            f"{shown(value)} GPUs cannot be granted: more than one GPU comes in whole ones only.",
            f"Ask for gpus={math.floor(number)} or gpus={math.ceil(number)}, "
            "or for a share of one GPU, such as gpus=0.5.",
        )
    milli = round(number * WHOLE)
    if milli == 0:
        raise Wrong(f"{shown(value)} of a GPU is less than a thousandth.", "Ask for at least 0.001.")
    return 1, min(milli, WHOLE)


def count(what: str) -> Callable[[Any], int]:
    """Make the reader of a whole number of GPUs, 1 or more."""

    def read(value: Any) -> int:
        number, milli = gpus(value)
        if milli != WHOLE:
            raise Wrong(f"{what}={shown(value)} is not a whole number of GPUs.", f"Give {what}=1 or more.")
        return number

    return read


def whole(what: str, least: int, most: int) -> Callable[[Any], int]:
    """Make the reader of a whole number between two others."""

    def read(value: Any) -> int:
        number = _number(value, f"a number for {what}", str(max(least, 1)))
        if number.denominator != 1 or not least <= number <= most:
            raise Wrong(f"{what}={shown(value)} is not a whole number from {least} to {most}.")
        return int(number)

    return read


def cpus(value: Any) -> int:
    """Read host CPUs, as thousandths of a core."""
    number = _number(value, "a number of CPUs", "4 or 0.5")
    milli = round(number * 1000)
    if not 1 <= milli <= MOST * 1000:
        raise Wrong(
            f"{shown(value)} CPUs cannot be given to a worker.", "Ask for more than none, such as cpus=4."
        )
    return milli


def size(value: Any) -> int:
    """Read an amount of memory in bytes: "20GB" is 20 * 10**9, "20GiB" is 20 * 2**30.

    >>> size("20GB")
    20000000000
    """
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)) > 40:
            raise ValueError(value)  # noqa: TRY301 - one sentence for all that can be wrong
        found = parse_bytes(value)
    except (ValueError, OverflowError, IndexError):
        raise Wrong(
            f"{shown(value)} is not an amount of memory.", "Give one with its unit, such as 20GB."
        ) from None
    if found <= 0:
        raise Wrong(f"{shown(value)} of memory cannot be granted.", "Ask for more than none, such as 20GB.")
    if found < LEAST_MEMORY:
        near = (
            f"Did you mean {shown(value).strip(chr(39))}GB?" if found < 1000 else "Give a unit, such as 20GB."
        )
        raise Wrong(f"{shown(value)} is {found} bytes, too little memory for anything.", near)
    if found > MOST_MEMORY:
        raise Wrong(
            f"{shown(value)} is more memory than any machine has.", "Ask for less.", Reason.TOO_MUCH_MEMORY
        )
    return int(found)


def duration(value: Any) -> int:
    """Read a length of time in milliseconds: "2h", "30m", "1h30m" or seconds.

    Seconds that are a text, as in a line or a form, are at least a minute: nobody forgets a unit unnoticed.

    >>> duration("1h30m"), duration(90)
    (5400000, 90000)
    """
    milliseconds = _milliseconds(value)
    if milliseconds is None:
        raise Wrong(
            f"{shown(value)} is not a length of time.",
            "Give one with its unit, such as 2h or 30m, or seconds.",
        )
    if isinstance(value, str) and _PLAIN.fullmatch(value.strip()) and 0 < milliseconds < LEAST_PLAIN:
        raise Wrong(
            f"{shown(value)} has no unit.",
            f"Did you mean {value.strip()}h, {value.strip()}m or {value.strip()}s?",
        )
    if milliseconds <= 0:
        raise Wrong(f"{shown(value)} is no time at all.", "Give a time above zero, such as 2h.")
    if milliseconds > MOST_TIME:
        raise Wrong(
            f"{shown(value)} is longer than any pool lives.", "Give a shorter time.", Reason.TIME_LIMIT
        )
    return milliseconds


def _milliseconds(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or len(str(value)) > 40:
        return None
    try:
        if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
            parts = [(number, _UNITS.get(unit.lower(), unit)) for number, unit in _PART.findall(match[2])]
            seconds = sum(float(parse_timedelta(number + unit)) for number, unit in parts)
            return round((-1 if match[1] else 1) * seconds * 1000)
        return round(float(value) * 1000)
    except (ValueError, OverflowError, KeyError):
        return None


def idle(value: Any) -> int:
    """Read an idle time-out in milliseconds; "never" or a negative number: none."""
    if value is False or (isinstance(value, str) and value.strip().lower() == "never"):
        return -1
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        return -1
    return duration(value)


# --------------------------------------------------------------------------------------------- words


def text(what: str, least: int = 0, most: int = TEXT_LENGTH) -> Callable[[Any], str]:
    """Make the reader of a line of text."""

    def read(value: Any) -> str:
        if (
            not isinstance(value, str)
            or not least <= len(value) <= most
            or not (value.isprintable() or not value)
        ):
            raise Wrong(f"{what} is not a text of {least} to {most} printable characters: {shown(value)}.")
        return value

    return read


def name(value: Any) -> str:
    """Read the name of a lease."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Wrong(
            f"{shown(value)} cannot be the name of a lease.",
            "Use up to 63 letters, digits, dots, dashes and underscores, a letter or digit first.",
        )
    return value


def flag(what: str) -> Callable[[Any], bool]:
    """Make the reader of a yes or no."""

    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise Wrong(
                f"{what}={shown(value)} is neither true nor false.", f"Give {what}=true or {what}=false."
            )
        return value

    return read


def switch(what: str) -> Callable[[Any], bool]:
    """Make the reader of a yes or no that may come from a line of text."""
    read = flag(what)
    return lambda value: read({"true": True, "false": False}.get(str(value).lower(), value))


def texts(what: str, most: int = 1000) -> Callable[[Any], tuple[str, ...]]:
    """Make the reader of a list of texts; a single text is a list of one."""
    each = text(f"An entry of {what}", 1)

    def read(value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or len(items) > most:
            raise Wrong(f"{what}={shown(value)} is not a list of texts.", f'Give {what}=["…", "…"].')
        return tuple(each(item) for item in items)

    return read


def mapping(what: str, *, plain: bool = False) -> Callable[[Any], dict[str, Any]]:
    """Make the reader of a JSON object; `plain`: of texts and numbers only."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > 1000:
            raise Wrong(f"{what}={shown(value)} is not an object.", f'Give {what}={{"…": …}}.')
        for key, item in value.items():
            if plain and not _is_variable(key, item):
                raise Wrong(
                    f"{what}: {shown(key)} is not a name with a text.", f'Give {what}={{"NAME": "text"}}.'
                )
        return {key: str(item) for key, item in value.items()} if plain else value

    return read


def _is_variable(name: str, value: Any) -> bool:
    """Whether a process can have it; half a surrogate pair could not even be sent to its node."""
    if not isinstance(value, str | int | float) or not name or "=" in name:
        return False
    said = f"{name}{value}"
    return "\0" not in said and not any("\ud800" <= each <= "\udfff" for each in said)


#: Variables by which the pool finds, marks and binds a lease's processes; a request must not set them.
RESERVED = ("GPUPOOL_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def variables(value: Any) -> dict[str, str]:
    """Read environment variables: names and texts, none of them the pool's own."""
    found: dict[str, str] = mapping("environment.variables", plain=True)(value)
    for key in found:
        if key.startswith(RESERVED):
            raise Wrong(f"The variable {shown(key)} is the pool's own.", "Leave it out: the pool sets it.")
    return found


def memory_limit(what: str) -> Callable[[Any], Any]:
    """Make the reader of a limit that dask-cuda reads: an amount of memory, or a part of all there is."""

    def read(value: Any) -> Any:
        try:
            part = not isinstance(value, bool) and 0 < float(value) <= 1
        except (TypeError, ValueError, OverflowError):
            part = False
        try:
            return float(value) if part else size(value)
        except Wrong as no:
            advice = f"Give {what}=20GB, or a part of the GPU, such as {what}=0.8."
            raise Wrong(f"{what}={no.sentence}", advice) from None

    return read


# ---------------------------------------------------------------------------------- a query's parameters


def yes_no(what: str) -> Callable[[str], bool]:
    """Make the reader of "true" or "false"."""

    def read(value: str) -> bool:
        if value not in ("true", "false"):
            raise Wrong(
                f"{what}={shown(value)} is neither true nor false.", f"Give {what}=true or {what}=false."
            )
        return value == "true"

    return read


def seconds(most: float) -> Callable[[str], float]:
    """Make the reader of a number of seconds; more than `most` is taken as that."""

    def read(value: str) -> float:
        number = _number(value, "a number of seconds", "10")
        if number < 0:
            raise Wrong(f"{shown(value)} is less than no time.", "Give a number of seconds, such as 10.")
        return float(min(number, Fraction(most)))

    return read


def natural(what: str, least: int = 0, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Make the reader of a whole number between two others."""

    def read(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,19}", value) or not least <= int(value) <= most:
            raise Wrong(f"{what}={shown(value)} is not a whole number from {least} to {most}.")
        return int(value)

    return read


def one_of(what: str, words: list[str]) -> Callable[[Any], str]:
    """Make the reader of a word from a list."""

    def read(value: Any) -> str:
        if value not in words:
            raise Wrong(
                f"{what}={shown(value)} is none of {', '.join(words)}.", f"Give {what} as one of them."
            )
        return str(value)

    return read
