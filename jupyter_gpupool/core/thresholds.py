"""The numbers that the health rules compare with: configuration, each with the source that it comes from.

Rule 1: no rule has a number of its own. What can be argued about is here.
Rule 2: every number says where it comes from; "ours" where nobody has published one.
Rule 3: times are in milliseconds.

Not its business: what is compared (`history`) and what follows (`health`).
"""

# ruff: noqa: RUF009  # `_known` makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from jupyter_gpupool.core.model import DAY, HOUR, MINUTE, SECOND, Verdict
from jupyter_gpupool.core.xids import XidClass

if TYPE_CHECKING:
    from collections.abc import Mapping

_T = TypeVar("_T")


def _known(default: _T, says: str, source: str) -> _T:
    """Make a field with its meaning and its source, from which docs/health.md is checked."""
    return field(default=default, metadata={"says": says, "source": source})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the health rules; `Thresholds.parse` reads them from a configuration."""

    coalesce: int = _known(
        5 * SECOND,
        "errors of one class on one GPU within this time are one incident",
        "Delta study; gpud: 1 min",
    )
    burst: int = _known(
        3 * MINUTE, "an incident that never pauses ends after this time", "NVSentinel's burst window"
    )
    window: int = _known(DAY, "incidents older than this are forgotten", "NVSentinel counts over 24 h")
    repeats_programs: int = _known(
        2,
        "application incidents on one GPU, of different or unknown programs, that take it out",
        "NVSentinel: XID 13 or 31 twice in 24 h on one GPU",
    )
    repeats: int = _known(
        5,
        "incidents of one class on one GPU, all under one program, that take it out",
        "NVSentinel: 5 in 24 h on one GPU",
    )
    spread: int = _known(
        2,
        "GPUs on which one program has application errors that make it the program's fault",
        "NVSentinel: XID 31 on 2 or more GPUs is an application's",
    )
    restart_hold: int = _known(
        MINUTE,
        "how long `restart_worker` stands before it turns into `watch`",
        "ours: a worker is back within seconds",
    )
    watch: int = _known(
        2 * HOUR, "how long a warning keeps a GPU on `watch`", "Azure looks back 2 h for XIDs"
    )
    clean: int = _known(
        DAY,
        "without any new sign for so long, a GPU that was taken out comes back on probation",
        "NVSentinel's window; that the device plugin never gives a GPU back is reported as a bug",
    )
    probation: int = _known(
        DAY, "how long a GPU that came back is on probation", "ours: the window of 24 h once more"
    )
    strikes: int = _known(
        3,
        "times out within `strike_window` after which a GPU stays out until a person says so (0: never)",
        "ours; NVSentinel: 5 repairs of a node in 7 days, gpud: 2 reboots for the same XID",
    )
    strike_window: int = _known(7 * DAY, "how long a time out is remembered", "NVSentinel: 7 days")
    ecc_uncorrected: int = _known(
        1,
        "new uncorrected memory errors, not explained by a contained one, that retire a GPU (0: never)",
        "DCGM: any volatile double-bit error is a failure",
    )
    slow_window: int = _known(10 * MINUTE, "over how long slowdowns are counted", "gpud: 10 min")
    slow_percent: int = _known(60, "share of samples with a slowdown that warns", "gpud: 0.6 of the samples")
    slow_least: int = _known(6, "samples below which no share is taken", "gpud: 6 of 10 samples")
    steady: int = _known(
        3,
        "readings in a row that a narrow PCIe or a dead NVLink must last",
        "ours: widths and links are read as down for a moment around a reset",
    )
    link_errors: int = _known(5, "NVLink replays and recoveries within `link_window` that warn", "imbue: 5")
    link_window: int = _known(
        HOUR, "over how long NVLink errors are counted", "ours: a rate, not a life's total"
    )
    missing: int = _known(
        0,
        "a GPU that the driver lists no more for so long, while it lists others, is gone",
        "gpud: any drop of the count",
    )
    silence: int = _known(
        40 * SECOND, "without a reading for so long, readings have stopped", "two polls; NVSentinel: 45 s"
    )
    hung: int = _known(
        5 * MINUTE,
        "without an answer and without any work for so long, a worker hangs and is started anew (0: never)",
        "Dask's worker-ttl, which does not ask whether it works",
    )
    breaker_window: int = _known(
        5 * MINUTE, "condemned within this time counts for the circuit breaker", "NVSentinel: 5 min"
    )
    breaker_percent: int = _known(
        50, "share of the pool's GPUs above which the breaker stops", "NVSentinel: 50 % of the nodes"
    )
    breaker_least: int = _known(
        2, "condemned GPUs below which the breaker never stops", "ours: for a pool of one GPU"
    )
    remap_pending: Verdict = _known(
        Verdict.WATCH,
        "verdict while a row remapping waits for a reset",
        "nvml.h: does not affect future work; gpud, Meta and Azure would take it out",
    )
    slow: Verdict = _known(
        Verdict.WATCH, "verdict on a GPU that is slowed down", "DCGM warns, gpud calls it unhealthy"
    )
    narrow: Verdict = _known(Verdict.WATCH, "verdict on a PCIe link narrower than before", "ours: it works")
    link_down: Verdict = _known(
        Verdict.WATCH,
        "verdict on an NVLink that was up and is down",
        "ours: both ends see it; two sources had false alarms here",
    )
    observe: int = _known(
        0,
        "1: only observe; every verdict but `fine` is shown as `watch`, and no work is moved or held back",
        "NVSentinel's dry run",
    )
    xids: tuple[tuple[int, str], ...] = _known(
        (), "codes put into another class than in the table", "the sources disagree on many codes"
    )

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Thresholds:
        """Read thresholds from a configuration; `xids` is a mapping of codes to classes.

        Args:
            data: Names and values, such as `{"strikes": 0, "xids": {"109": "reset"}}`; times in milliseconds.

        Raises:
            ValueError: An unknown name, or a value of the wrong kind, with what is allowed.

        >>> Thresholds.parse({"xids": {"109": "reset"}, "slow": "retire_soon"}).xids
        ((109, 'reset'),)
        """
        return cls(**{name: _value(name, value) for name, value in data.items()})


_DEFAULTS = {each.name: each.default for each in fields(Thresholds)}


def _value(name: str, value: Any) -> Any:
    if name not in _DEFAULTS:
        raise ValueError(f"There is no health threshold {name!r}; there are: {', '.join(sorted(_DEFAULTS))}.")
    if name == "xids":
        return _classes(value)
    if isinstance(_DEFAULTS[name], Verdict):
        return _one_of(Verdict, name, value)
    if type(value) is not int or value < 0:
        raise ValueError(f"The health threshold {name} is a whole number from 0 up, not {value!r}.")
    return value


def _classes(value: Any) -> tuple[tuple[int, str], ...]:
    if not isinstance(value, dict) or not all(str(code).isdecimal() for code in value):
        raise ValueError('The health threshold xids maps codes to classes, such as {"109": "reset"}.')
    rows = ((int(code), _one_of(XidClass, f"xids.{code}", kind).value) for code, kind in value.items())
    return tuple(sorted(rows))


def _one_of(kind: type[_T], name: str, value: Any) -> _T:
    try:
        return kind(value)  # type: ignore[call-arg]  # a StrEnum takes its value
    except ValueError:
        allowed = ", ".join(each.value for each in kind)  # type: ignore[attr-defined]  # as above
        raise ValueError(f"The health threshold {name} is one of {allowed}, not {value!r}.") from None
