"""A JSON body becomes a `Request` or a change of a lease, or a sentence for each thing that is wrong with it.

Rule 1: every field that is wrong is named at once, so that a form can show all of it.
Rule 2: the sentence is written here or in the core and nowhere else; every face prints it as it is.
Rule 3: what is not said is left to the core and the project: nothing is decided here.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields
from jupyter_gpupool.controller.fields import Field, Wrong, shown
from jupyter_gpupool.core.model import WHOLE, Reason, Refusal, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_AMOUNT = {"type": ["string", "integer", "number"]}
_NUMBER = {"type": ["number", "string"]}
_FLAG = {"type": "boolean"}
_TEXT = {"type": "string", "maxLength": fields.TEXT_LENGTH}
_TEXTS = {"type": ["array", "string"], "items": {"type": "string"}}
_OBJECT = {"type": "object"}

#: What can be asked for.
REQUEST: dict[str, Field] = {
    "gpus": Field(fields.gpus, _NUMBER, "Whole GPUs for sure (2), or a share of one (0.5). Default: 1."),
    "max_gpus": Field(fields.count("max_gpus"), _NUMBER, "How far it may grow while nobody else needs them."),
    "min_gpus": Field(fields.count("min_gpus"), _NUMBER, "How far it may shrink when a GPU fails."),
    "vram": Field(fields.size, _AMOUNT, 'A share of a GPU with this much memory ("20GB").'),
    "mig": Field(fields.text("mig", 1, 32), _TEXT, 'A MIG instance of this profile ("1g.10gb").'),
    "isolated": Field(fields.flag("isolated"), _FLAG, "With vram: any MIG profile that has so much memory."),
    "project": Field(fields.text("project", 1), _TEXT, "Who pays. Default: the person's only project."),
    "model": Field(fields.text("model", 1), _TEXT, 'The GPU\'s model ("H100-80GB"); "A|B" for either.'),
    "min_vram": Field(fields.size, _AMOUNT, "The least memory that each GPU must have in all."),
    "same_node": Field(fields.flag("same_node"), _FLAG, "All on one node."),
    "nvlink": Field(fields.flag("nvlink"), _FLAG, "All linked by NVLink."),
    "node": Field(fields.text("node", 1), _TEXT, "On this node only."),
    "exclude": Field(fields.texts("exclude"), _TEXTS, "Not on these nodes or devices (by UUID)."),
    "spread": Field(fields.flag("spread"), _FLAG, "Rather on many nodes than on few."),
    "same_device": Field(fields.flag("same_device"), _FLAG, "Shares of this lease may sit on one device."),
    "time_limit": Field(fields.duration, _AMOUNT, 'When it ends at the latest: "2h", or seconds.'),
    "idle_timeout": Field(
        fields.idle, {"type": ["string", "number", "boolean"]}, '"2h", seconds, or "never".'
    ),
    "interactive": Field(
        fields.flag("interactive"), _FLAG, "A person waits for it: not taken back within quota."
    ),
    "preemptible": Field(fields.flag("preemptible"), _FLAG, "It may be suspended when others need its GPUs."),
    "priority": Field(
        fields.whole("priority", -100, 100), _NUMBER, "Among one's own requests; higher first."
    ),
    "name": Field(fields.name, _TEXT, "Its name among the person's leases."),
    "cpus": Field(fields.cpus, _NUMBER, "Host CPUs of each worker."),
    "memory": Field(fields.size, _AMOUNT, "Host memory of each worker."),
    "environment": Field(fields.mapping("environment"), _OBJECT, "How its processes start; see ENVIRONMENT."),
    "options": Field(fields.mapping("options"), _OBJECT, "dask-cuda's own options, such as rmm_pool_size."),
}
#: What can be said of the environment of a lease's processes.
ENVIRONMENT: dict[str, Field] = {
    "python": Field(
        fields.text("environment.python", 1, 4096), _TEXT, "The interpreter's path on the nodes."
    ),
    "variables": Field(fields.variables, _OBJECT, "Environment variables."),
    "pre_import": Field(
        fields.texts("environment.pre_import"), _TEXTS, "Modules that workers import at start."
    ),
    "working_directory": Field(
        fields.text("environment.working_directory", 1, 4096), _TEXT, "Where they start."
    ),
    "preferred_python": Field(
        fields.text("environment.preferred_python", 1, 4096), _TEXT, "As python, where the node has it."
    ),
    "preferred_directory": Field(
        fields.text("environment.preferred_directory", 1, 4096),
        _TEXT,
        "As working_directory, where the node has it.",
    ),
}


def _option(name: str, make: Callable[[str], Callable[[Any], Any]], schema: dict[str, Any]) -> Field:
    return Field(make(f"options.{name}"), schema, "As dask-cuda's own option of this name.")


#: The options of dask-cuda's workers that can be given. What says where they listen, who reaches them, where
#: their files are and what they load before anything else is the pool's, and no option.
OPTIONS: dict[str, Field] = {
    "threads_per_worker": Field(
        fields.whole("options.threads_per_worker", 1, 1024), _NUMBER, "Tasks that a worker runs at a time."
    ),
    "pre_import": _option("pre_import", fields.texts, _TEXTS),
    "rmm_log_directory": _option("rmm_log_directory", lambda name: fields.text(name, 1, 4096), _TEXT),
    "rmm_allocator_external_lib_list": _option("rmm_allocator_external_lib_list", fields.texts, _TEXTS),
    "cudf_spill_stats": _option("cudf_spill_stats", lambda name: fields.whole(name, 0, 2), _NUMBER),
    **{
        name: _option(name, fields.memory_limit, _AMOUNT)
        for name in (
            "device_memory_limit",
            "rmm_pool_size",
            "rmm_maximum_pool_size",
            "rmm_release_threshold",
        )
    },
    **{
        name: _option(name, fields.switch, _FLAG)
        for name in (
            "enable_cudf_spill",
            "rmm_managed_memory",
            "rmm_async",
            "rmm_track_allocations",
            "enable_tcp_over_ucx",
            "enable_infiniband",
            "enable_nvlink",
            "enable_rdmacm",
        )
    },
}
#: What can be changed of a lease, one thing at a time.
CHANGE: dict[str, Field] = {
    "extend": Field(fields.duration, _AMOUNT, "More time on top of the present limit."),
    "keep": Field(fields.flag("keep"), {"const": True}, "It is idle, and still needed."),
    "gpus": Field(fields.count("gpus"), _NUMBER, "How many GPUs an elastic lease wants at most from now on."),
    "share": Field(fields.texts("share", 100), _TEXTS, "Who else may use it, in place of those who may now."),
}
#: What a process says of itself that is to use a lease's devices.
PROCESS: dict[str, Field] = {
    "pid": Field(fields.whole("pid", 1, 2**31), _NUMBER, "Its PID."),
    "started": Field(
        fields.whole("started", 1, 2**62), _NUMBER, "When it started, in clock ticks since boot."
    ),
    "boot": Field(fields.text("boot", 1, 64), _TEXT, "The machine's boot id."),
}
#: Which field of the core's request each becomes; those not here have the same name or a rule of their own.
_RENAMED = {"max_gpus": "max_count", "min_gpus": "min_count"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """What a request has from the one who receives it, not from the one who sends it."""

    id: str
    user: str
    now: int
    #: The project where none is named, and the name where none is given.
    project: str
    name: str
    groups: tuple[str, ...] = ()


def parse_request(body: Any, asker: Asker) -> tuple[Request | None, list[Refusal]]:
    """Read the body of a request for a lease; either the request or what is wrong is there, never both."""
    said, wrong = read_fields(body, REQUEST)
    environment, more = read_fields(said.pop("environment", {}), ENVIRONMENT, "environment.")
    own, less = read_fields(said.pop("options", {}), OPTIONS, "options.")
    wrong += [*more, *less] or _rules(said)
    if wrong:
        return None, wrong
    count, milli = said.pop("gpus", (1, WHOLE))
    options = {"environment": _listed(environment), "options": _listed(own)}
    what = {_RENAMED.get(name, name): value for name, value in said.items()}
    if milli == WHOLE and ("vram" in what or "mig" in what or what.get("isolated")):
        milli = 0  # the size of a slice is said by its memory or profile
    request = Request(
        **{"project": asker.project, "name": asker.name, **what},
        id=asker.id,
        user=asker.user,
        groups=asker.groups,
        arrived=asker.now,
        count=count,
        milli=milli,
        options=json.dumps({name: value for name, value in options.items() if value}, sort_keys=True),
    )
    return request, []


def parse_change(body: Any) -> tuple[str, Any, list[Refusal]]:
    """Read the body of a change to a lease: which of `CHANGE`, its value, and what is wrong."""
    said, wrong = read_fields(body, CHANGE)
    if not wrong and len(said) != 1:
        sentence = "A change of a lease is one thing at a time" + (
            f", not {', '.join(said)}." if said else "."
        )
        if body and not said:
            sentence = f"{', '.join(body)} without a value changes nothing."
        wrong = [
            Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, advice=f"Give one of: {', '.join(CHANGE)}.")
        ]
    if not wrong and said.get("keep") is False:
        wrong = [Refusal(reason=Reason.BAD_REQUEST, sentence="keep=false changes nothing.", field="keep")]
    name, value = next(iter(said.items())) if not wrong else ("", None)
    return name, value, wrong


def read_fields(
    body: Any, table: Mapping[str, Field], prefix: str = ""
) -> tuple[dict[str, Any], list[Refusal]]:
    """Read a JSON object by a table of fields; `null` is the same as not there.

    Returns:
        What was read, by name, and a refusal for each field that is wrong or unknown.
    """
    if not isinstance(body, dict):
        sentence = f"{prefix.rstrip('.') or 'The body'} is not a JSON object: {shown(body)}."
        return {}, [Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, field=prefix.rstrip("."))]
    said: dict[str, Any] = {}
    wrong: list[Refusal] = []
    for name, value in body.items():
        if name not in table:
            wrong.append(_unknown(name, table, prefix))
            continue
        try:
            if value is not None:
                said[name] = table[name].read(value)
        except Wrong as no:
            wrong.append(
                Refusal(reason=no.reason, sentence=no.sentence, advice=no.advice, field=prefix + name)
            )
    return said, wrong


def _unknown(name: str, table: Mapping[str, Field], prefix: str) -> Refusal:
    near = difflib.get_close_matches(name, table, n=1)
    advice = f"Did you mean {prefix}{near[0]}?" if near else f"There are: {', '.join(sorted(table))}."
    sentence = f"There is no field {shown(prefix + name)}."
    return Refusal(reason=Reason.BAD_REQUEST, sentence=sentence, advice=advice, field=(prefix + name)[:100])


def _rules(said: dict[str, Any]) -> list[Refusal]:
    """Say what does not go together; each rule is (it is broken, the field, a sentence, what to do)."""
    count, milli = said.get("gpus", (1, WHOLE))
    most, least = said.get("max_gpus", count), said.get("min_gpus", count)
    share = milli < WHOLE
    rules = (
        (
            most < count,
            "max_gpus",
            f"max_gpus={most} is less than gpus={count}.",
            f"Leave max_gpus out, or give {count} or more.",
        ),
        (
            least > count,
            "min_gpus",
            f"min_gpus={least} is more than gpus={count}.",
            f"Leave min_gpus out, or give {count} or less.",
        ),
        (
            share and "max_gpus" in said,
            "max_gpus",
            "A share of one GPU does not grow.",
            "Leave max_gpus out, or ask for whole GPUs.",
        ),
        (
            "mig" in said and share,
            "mig",
            "A MIG profile says its size itself; gpus counts such instances.",
            "Leave out gpus or mig.",
        ),
        (
            "mig" in said and "vram" in said,
            "mig",
            "A MIG profile says its memory itself.",
            "Leave out vram, or give vram with isolated=true instead of mig.",
        ),
        (
            bool(said.get("isolated")) and not ("vram" in said or "mig" in said),
            "isolated",
            "isolated=true does not say how much memory the instance must have.",
            "Give vram too, such as vram='9GB'.",
        ),
    )
    return [
        Refusal(reason=Reason.CONTRADICTION, sentence=sentence, advice=advice, field=field)
        for broken, field, sentence, advice in rules
        if broken
    ]


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
