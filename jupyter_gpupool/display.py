"""How what a pool says looks: words, tables and HTML, the same in every face.

Rule 1: a sentence says the same wherever it is shown; how tables are laid out is the business of `tables`.
Rule 2: where GPUs are simulated, that is said, in one line.
Rule 3: times are said as from now ("in 12 min"), so that no time zone has to be guessed.
"""

from __future__ import annotations

import operator
import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import ANY, GIB, WHOLE, LeaseState, SliceState, Verdict
from jupyter_gpupool.tables import Column, Rows, Said, html_line, html_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

TIMES = "\N{MULTIPLICATION SIGN}"
SIMULATED = "The GPUs are simulated."


# ------------------------------------------------------------------------------------------------------ words


def count(number: float, noun: str) -> str:
    """Say how many: "1 GPU", "2 GPUs", "0.5 GPUs".

    >>> count(1, "GPU"), count(0.5, "GPU")
    ('1 GPU', '0.5 GPUs')
    """
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Say a time span in its two largest units.

    >>> duration(7265), duration(0.2), duration(90061)
    ('2 h 1 min', '0 s', '1 d 1 h')
    """
    left = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts = []
    for name, length in units:
        many, left = divmod(left, length)
        parts.append((many, name))
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{many} {name}" for many, name in parts[:2] if many or len(parts) == 1)


def from_now(when: float | None) -> str:
    """Say when: "in 12 min", "3 s ago", or nothing."""
    if when is None:
        return ""
    ahead = when - time.time()
    return f"in {duration(ahead)}" if ahead >= 0 else f"{duration(-ahead)} ago"


def gigabytes(size: float | None) -> str:
    """Say a number of bytes in the unit that GPUs are sold by: an "80 GB" H100 has 80 GiB.

    >>> gigabytes(80 * 2**30), gigabytes(2**29)
    ('80 GiB', '0.5 GiB')
    """
    if size is None:
        return ""
    return f"{size / GIB:.0f} GiB" if size >= 10 * GIB else f"{size / GIB:.1f} GiB".replace(".0 ", " ")


def gpus(milli: int) -> str:
    """Say thousandths of a GPU as GPUs: "2", "0.5"."""
    return f"{milli / WHOLE:g}"


# ----------------------------------------------------------------------------------------------------- leases


def lease_words(lease: Mapping[str, Any]) -> str:
    """Say what a lease is and how it stands, in one line."""
    name = lease["name"] or lease["id"]
    limits = dict.fromkeys(filter(None, map(limits_words, lease["slices"])))
    limited = f"limited by {'; '.join(limits)}" if limits else ""
    has = f"Lease {name}: {count(lease['gpus'], 'GPU')}{_where(lease)}"
    parts = [has, _wants(lease), _stand(lease), _shared(lease), limited]
    words = ", ".join(filter(None, parts)) + "." + f" {lease.get('warning', '')}".rstrip()
    return f"{words} {SIMULATED}" if lease.get("simulated") else words


def limits_words(piece: Mapping[str, Any]) -> str:
    """Say what keeps a slice within its part of a device: "rmm, guard"; a layer that waits says so."""
    states = {"on": "", "ready": " once imported", "failed": " failed"}
    return ", ".join(f"{each['layer']}{states[each['state']]}" for each in piece.get("limits") or [])


def lease_html(lease: Mapping[str, Any]) -> str:
    """Show a lease: its line, and a table of its slices."""
    columns: tuple[Column, ...] = (
        ("slice", lambda row: row["id"].rpartition("/")[2]),
        ("device", lambda row: row["device_name"]),
        ("model", lambda row: row.get("profile") or row["model"]),
        ("GPUs", lambda row: gpus(row["milli"])),
        ("memory", lambda row: gigabytes(row["vram"])),
        ("state", lambda row: row["state"]),
        ("limited by", limits_words),
    )
    slices = html_table(columns, lease["slices"]) if lease["slices"] else ""
    return html_line(lease_words(lease)) + slices


def _where(lease: Mapping[str, Any]) -> str:
    places: dict[tuple[str, str], int] = {}
    stay = [piece for piece in lease["slices"] if piece["state"] != SliceState.STOPPING]
    for piece in stay or lease["slices"]:
        key = (piece.get("profile") or piece["model"], piece["node"])
        places[key] = places.get(key, 0) + 1
    said = ", ".join(f"{many} {TIMES} {model} on {node}" for (model, node), many in sorted(places.items()))
    return f" ({said})" if said else ""


def _wants(lease: Mapping[str, Any]) -> str:
    """Say how many GPUs it is on its way to, or would take if nobody else needed them."""
    wanted, slices = lease.get("wanted") or 0, lease["slices"]
    on_its_way = lease["state"] == LeaseState.ACTIVE and slices and wanted not in (0, len(slices))
    return f"wants {gpus(wanted * slices[0]['milli'])}" if on_its_way else ""


def _shared(lease: Mapping[str, Any]) -> str:
    others = lease.get("shared_with")
    return f"shared with {', '.join(others)} (who can run code as {lease['user']})" if others else ""


def _stand(lease: Mapping[str, Any]) -> str:
    state = lease["state"]
    if state == LeaseState.PENDING:
        return "pending: " + waiting_words(lease)
    if state == LeaseState.STARTING:
        return waiting_words(lease)
    if state == LeaseState.ENDED:
        return f"ended: {lease['why'].rstrip('.')}" if lease["why"] else "ended"
    if state == LeaseState.DRAINING and lease.get("suspending"):
        return f"being suspended (its running tasks may end): {lease['why'].rstrip('.')}".removesuffix(": ")
    if state == LeaseState.DRAINING:
        return f"draining (its processes are ending): {lease['why'].rstrip('.')}".removesuffix(": ")
    until = f"until {_clock(lease['ends_at'])} ({from_now(lease['ends_at'])})" if lease["ends_at"] else ""
    idle = f"idle for {duration(time.time() - lease['idle_since'])}" if lease.get("idle_since") else ""
    why = "" if state == LeaseState.ACTIVE else lease["why"].rstrip(".")
    return ", ".join(filter(None, [state, why, until, idle]))


def _clock(when: float) -> str:
    """Say a time of day on this computer's clock, with the day unless it is today."""
    then, today = time.localtime(when), time.localtime()
    shape = "%H:%M" if then[:3] == today[:3] else "%a %d %b %H:%M"
    return time.strftime(shape, then)


def waiting_words(lease: Mapping[str, Any]) -> str:
    """Say what a lease that nobody can use yet waits for."""
    if lease["state"] == LeaseState.STARTING:
        progress = lease.get("progress") or {}
        up = "scheduler up" if progress.get("scheduler") else "starting the scheduler"
        return f"starting: {up}, workers {progress.get('workers', 0)} of {progress.get('of', 0)}"
    place = f"place {lease['place']} in the queue" if lease.get("place") else "in the queue"
    reasons = [each["sentence"].rstrip(".") for each in lease.get("reasons") or [] if each.get("sentence")]
    why = reasons[0] if reasons else lease["why"].rstrip(".")
    expected = lease.get("expected_start")
    start = f"expected to start {from_now(expected)}" if expected and expected > time.time() else ""
    return ", ".join(filter(None, [f"{place} ({_inner(why)})" if why else place, start]))


def _inner(sentence: str) -> str:
    """Begin a sentence that stands within another with a small letter, unless it begins with a name."""
    return sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() else sentence


#: A lease in these states ends by itself, whatever its time limit.
_ENDING = (LeaseState.DRAINING, LeaseState.ENDED)


def places(devices: Iterable[str]) -> str:
    """Say where devices are, a node once and neighbours as a range.

    >>> places(["node-1/gpu0", "node-1/gpu1", "node-1/gpu2", "node-2/gpu5"])
    'node-1/gpu0-2, node-2/gpu5'
    """
    found: dict[str, list[int]] = {}
    for each in devices:
        stem, index = _split_name(each)
        found.setdefault(stem, []).append(index)
    return ", ".join(f"{stem}{_ranges(many)}" for stem, many in found.items())


def _split_name(device: str) -> tuple[str, int]:
    stem = device.rstrip("0123456789")
    return (stem, int(device[len(stem) :])) if stem != device else (device, -1)


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for each in sorted(set(numbers)):
        if runs and each == runs[-1][-1] + 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    return ",".join(_run(each) for each in runs)


def _run(run: list[int]) -> str:
    if run[0] < 0:
        return ""
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])


def _says(lease: Mapping[str, Any]) -> str:
    if lease["state"] in (LeaseState.PENDING, LeaseState.STARTING):
        return waiting_words(lease)
    return str(lease["why"] or "")


LEASE_COLUMNS: tuple[Column, ...] = (
    ("lease", lambda row: row["name"] or row["id"]),
    ("user", lambda row: row["user"]),
    ("project", lambda row: row["project"]),
    ("state", lambda row: row["state"]),
    ("GPUs", lambda row: f"{row['gpus']:g}"),
    ("where", lambda row: places(piece["device_name"] for piece in row["slices"])),
    ("ends", lambda row: "" if row["state"] in _ENDING else from_now(row["ends_at"])),
    ("says", _says),
)


# ---------------------------------------------------------------------------------------------------- devices


def _health(device: Mapping[str, Any]) -> str:
    outside = f"in use outside the pool ({device['outside']})" if device.get("outside") else ""
    flags = ", ".join(each for each in device.get("flags") or [] if not outside or each != "outside use")
    return ", ".join(filter(None, [device["verdict"], flags, outside]))


def _part(part: Mapping[str, Any]) -> str:
    amount = "" if part["milli"] >= WHOLE else f" {part.get('profile') or gpus(part['milli'])}"
    user = f" ({part['user']})" if part.get("user") else ""
    # Who may not see the names of others' leases gets neither name nor id.
    return f"{part.get('lease_name') or part['lease']}{amount}{user}".lstrip()


def _reading(device: Mapping[str, Any], name: str, shape: str) -> str:
    value = (device.get("reading") or {}).get(name)
    return "" if value is None else shape.format(value)


def _says_of_device(device: Mapping[str, Any]) -> str:
    bad = device["verdict"] != Verdict.FINE
    return " ".join(filter(None, [device.get("cordoned"), device.get("verdict_sentence") if bad else ""]))


DEVICE_COLUMNS: tuple[Column, ...] = (
    ("device", lambda row: row["name"]),
    ("model", lambda row: row["model"]),
    ("memory", lambda row: gigabytes(row["memory"])),
    ("health", _health),
    ("free", lambda row: gpus(row["free_milli"])),
    ("leases", lambda row: ", ".join(_part(part) for part in row["parts"])),
    ("busy", lambda row: _reading(row, "utilisation", "{:.0f} %")),
    ("used", lambda row: gigabytes((row.get("reading") or {}).get("memory_used"))),
    ("°C", lambda row: _reading(row, "temperature", "{:.0f}")),
    ("says", _says_of_device),
)


# ------------------------------------------------------------------------------------------------------- pool


def pool_words(pool: Mapping[str, Any]) -> list[str]:
    """Say what a pool is and how it stands."""
    models = ", ".join(f"{many} {TIMES} {model}" for model, many in sorted(pool["models"].items()))
    nodes = count(len(pool["nodes"]), "node")
    free = f"{pool['gpus_free']:g} free, at most {pool['largest_together']:g} on one node"
    lines = [
        f"{count(pool['gpus'], 'GPU')} ({models or 'none yet'}) on {nodes}: {free}.",
        f"{count(pool['leases'], 'lease')}, {count(pool['pending'], 'request')} waiting.",
        _you(pool["user"]),
    ]
    if pool["simulated"]:
        lines.append(pool.get("simulated_note") or SIMULATED)
    return lines


def _you(user: Mapping[str, Any]) -> str:
    return f"You are {user['name']}" + (", an administrator of it." if user.get("admin") else ".")


class Overview(dict[str, Any]):
    """A pool with its devices and one's leases, shown one below the other.

    Args:
        pool: What the pool is and how it stands.
        devices: Its devices.
        leases: One's leases.
    """

    def __init__(self, pool: Said, devices: list[Any], leases: list[Any]) -> None:
        table = Rows(devices, DEVICE_COLUMNS)  # that they are simulated, the first part says
        super().__init__(pool=pool, devices=table, leases=leases)

    def _parts(self) -> list[Any]:
        return [self["pool"], *filter(None, [self["devices"], self["leases"]])]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self._parts()))

    def _repr_html_(self) -> str:
        return "".join(part._repr_html_() for part in self._parts())


def explanation_words(answer: Mapping[str, Any]) -> list[str]:
    """Say why a lease is where it is."""
    lines = [str(each) for each in answer["sentences"]]
    if answer.get("expected_start"):
        lines.append(f"Expected to start {from_now(answer['expected_start'])}.")
    lines += [each["advice"] for each in answer.get("reasons") or [] if each.get("advice")]
    return lines or ["There is nothing to explain."]


def attached_words(answer: Mapping[str, Any]) -> list[str]:
    """Say what a process has got by being attached to a lease."""
    devices = answer["names"]
    return [
        f"This process has {count(len(devices), 'device')} of lease {answer['lease']}: {', '.join(devices)}.",
        "When the lease ends, a process that still uses them is ended with it.",
    ]


def trial_words(answer: Mapping[str, Any]) -> list[str]:
    """Say what would come of a request."""
    if answer["starts_now"]:
        return [*answer.get("sentences", ())] or ["It would start now."]
    when = from_now(answer.get("expected_start")) or "at a time that nobody can tell"
    place = f", at place {answer['place']} in the queue" if answer.get("place") else ""
    reasons = [" ".join(filter(None, (each["sentence"], each["advice"]))) for each in answer["reasons"]]
    return [f"It would wait and start {when}{place}.", *reasons]


# ------------------------------------------------------------------------------------------------------ lists


def lease_rows(leases: Iterable[Any], *, everybody: bool = False) -> Rows:
    """Show leases."""
    if not everybody:
        return Rows(leases, LEASE_COLUMNS, "You have no lease.")
    none = "You have no lease, and only administrators see those of others."
    name, *others = LEASE_COLUMNS  # names are each person's own, so that others' are ended by their ids
    return Rows(leases, (name, ("id", operator.itemgetter("id")), *others), none)


def device_rows(answer: Mapping[str, Any]) -> Rows:
    """Show the devices of a pool."""
    return Rows(
        answer["devices"],
        DEVICE_COLUMNS,
        "No node has joined yet.",
        SIMULATED if answer.get("simulated") else "",
    )


def queue_rows(answer: Mapping[str, Any]) -> Rows:
    """Show who waits, in their order."""
    columns: tuple[Column, ...] = (
        ("place", lambda row: row["place"]),
        ("lease", lambda row: row.get("name") or row.get("id")),
        ("user", lambda row: row.get("user")),
        ("project", lambda row: row.get("project")),
        ("GPUs", lambda row: f"{row['gpus']:g}"),
        ("starts", lambda row: from_now(row.get("expected_start"))),
        ("says", lambda row: row.get("why")),
    )
    return Rows(answer["queue"], columns, "Nobody waits.")


def token_rows(answer: Mapping[str, Any]) -> Rows:
    """Show tokens, without what could be used of them."""
    columns: tuple[Column, ...] = (
        ("id", operator.itemgetter("id")),
        ("user", operator.itemgetter("user")),
        ("may", lambda row: row["scopes"][-1]),
        ("for", operator.itemgetter("label")),
        ("made", lambda row: from_now(row["made"])),
        ("expires", lambda row: from_now(row["expires"])),
    )
    return Rows(answer["tokens"], columns, "There are no tokens.")


def _hours(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Make the cell of GPU-seconds, in GPU hours."""
    return lambda row: f"{row[name] / 3600:.1f}" if row[name] >= 180 else ""


def _some(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Make the cell of a number of GPUs, empty for none."""
    return lambda row: f"{row[name]:g}" if row[name] else ""


#: Columns in GPU hours, with what the note below the table says of those that are shown.
_HOURS: tuple[tuple[str, Callable[[Mapping[str, Any]], str], str], ...] = (
    ("lately", _hours("decayed"), "lately (decayed)"),
    ("in all", _hours("used"), "in all"),
    ("idle", _hours("idle"), "idle"),
    ("taken back", _hours("lost"), "taken back (work that was undone)"),
)
#: How a project or a user stands.
_STANDING: tuple[Column, ...] = (
    ("has", _some("gpus")),
    ("waits for", lambda row: f"{max(0, row['demand'] - row['served']):g}" if row["waiting"] else ""),
    ("quota", lambda row: amounts(row["quota"])),
    ("limit", lambda row: amounts(row["limit"])),
    ("weight", operator.itemgetter("weight")),
    ("tier", lambda row: row["tier"] or ""),
    ("deserved", _some("deserved")),
    ("borrowed", _some("borrowed")),
    _HOURS[0][:2],
)


def usage_rows(answer: Mapping[str, Any]) -> Rows:
    """Show who has, deserves and has used how much."""
    columns: tuple[Column, ...] = (
        ("project", operator.itemgetter("project")),
        ("user", operator.itemgetter("user")),
        ("leases", lambda row: row["leases"] or ""),
        *_STANDING,
        *((title, show) for title, show, _ in _HOURS[1:]),
    )
    rows = answer["usage"]
    hours = [words for title, show, words in _HOURS if any(show(row) for row in rows)]
    note = f"{', '.join(hours)}: in GPU hours." if hours else ""
    return Rows(rows, columns, "Nobody has had any GPU.", note)


def move_rows(answer: Mapping[str, Any]) -> Rows:
    """Show what a consolidation moves."""
    columns: tuple[Column, ...] = (
        ("lease", operator.itemgetter("lease_name")),
        ("user", operator.itemgetter("user")),
        ("from", operator.itemgetter("from")),
        ("to", operator.itemgetter("to")),
    )
    would = "would come free" if answer["dry_run"] else "will be free"
    note = f"Then {', '.join(answer['freed'])} {would}." if answer["freed"] else ""
    return Rows(answer["moves"], columns, "Nothing can be moved that would free a GPU.", note)


def history_rows(answer: Mapping[str, Any]) -> Rows:
    """Show what a person used by day, in this machine's time zone; the last day first."""
    days: dict[str, dict[str, Any]] = {}
    for each in answer["hours"]:
        day = time.strftime("%Y-%m-%d", time.localtime(each["time"]))
        row = days.setdefault(day, {"day": day, "used": 0.0, "idle": 0.0})
        row["used"] += each["used"]
        row["idle"] += each["idle"]
    columns: tuple[Column, ...] = (
        ("day", operator.itemgetter("day")),
        ("used", lambda row: f"{row['used'] / 3600:.2f}"),
        ("idle", lambda row: f"{row['idle'] / 3600:.2f}"),
    )
    note = f"GPU hours of {answer['user']}; idle: of them while nothing was done."
    return Rows(
        [days[day] for day in sorted(days, reverse=True)],
        columns,
        "You have not had any GPU in the last two weeks.",
        note if days else "",
    )


def ledger_rows(answer: Mapping[str, Any]) -> Rows:
    """Show what was used, by user, project, model and kind of slice."""
    columns: tuple[Column, ...] = (
        *((name, operator.itemgetter(name)) for name in ("project", "user", "model", "kind")),
        *(
            (head, _number(name))
            for head, name in (
                ("used", "used"),
                ("lately", "decayed"),
                ("idle", "idle"),
                ("taken back", "lost"),
            )
        ),
    )
    note = "In GPU-seconds; lately: decayed; idle: while nothing was done; taken back: work that was undone."
    return Rows(answer["accounts"], columns, "Nothing has been used yet.", note if answer["accounts"] else "")


def _number(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[name]:.0f}"


def reclaim_rows(answer: Mapping[str, Any]) -> Rows:
    """Show what was taken back lately, for whom and by which numbers."""
    columns: tuple[Column, ...] = (
        ("when", lambda row: from_now(row["time"])),
        ("for", lambda row: " ".join(filter(None, [row["user"], row["lease_name"]]))),
        (
            "of",
            lambda row: ", ".join(
                dict.fromkeys(each["lease_name"] or each["user"] for each in row["victims"])
            ),
        ),
        ("GPUs", lambda row: f"{row['gpus']:g}"),
        ("undone", lambda row: duration(row["cost"]) if row["cost"] else ""),
        ("says", operator.itemgetter("sentence")),
    )
    return Rows(answer["reclaims"], columns, "Nothing has been taken back.")


def project_rows(answer: Mapping[str, Any]) -> Rows:
    """Show the tree of projects."""
    columns: tuple[Column, ...] = (
        ("project", operator.itemgetter("name")),
        ("in", operator.itemgetter("parent")),
        *_STANDING,
        ("members", lambda row: ", ".join(ANYBODY.get(each, each) for each in row.get("members", ()))),
        ("users with numbers of their own", lambda row: ", ".join(u["name"] for u in row.get("users", ()))),
    )
    return Rows(answer["projects"], columns, "There are no projects.")


#: How it is said that whoever asks is meant.
ANYBODY = {ANY: "everybody"}


def amounts(given: Mapping[str, float]) -> str:
    """Say GPUs by model, CPUs and memory, whatever a model is called.

    >>> amounts({"*": 8.0, "cpus": 96.0})
    '8, 96 CPUs'
    """
    return ", ".join(_amount(key, number) for key, number in given.items())


def _amount(key: str, number: float) -> str:
    if key == "memory":
        return f"{gigabytes(number)} of memory"
    unit = {ANY: "", "cpus": " CPUs"}.get(key, f" {TIMES} {key}")
    return f"{number:g}{unit}"
