"""JSON schemas of what the API takes and answers, by name, for its OpenAPI description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller import fields, parse, routes_admin, tree
from jupyter_gpupool.controller.problems import Trouble
from jupyter_gpupool.core.model import Layer, LayerState, LeaseState, Reason, SliceState, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
#: Seconds since the epoch.
TIME: Schema = {"type": ["number", "null"]}


def ref(name: str) -> Schema:
    """Return the reference to a schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def many(item: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": item}


def maybe(schema: Schema) -> Schema:
    """Return the schema of something or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def words(values: Any) -> Schema:
    """Return the schema of a word from a closed list."""
    return {"enum": [str(each) for each in values]}


def thing(properties: Mapping[str, Schema], *, optional: tuple[str, ...] = ()) -> Schema:
    """Return the schema of an object that has just these properties."""
    needed = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": needed,
        "additionalProperties": False,
    }


def body(table: Mapping[str, fields.Field], *needed: str) -> Schema:
    """Return the schema of a body that a table of fields reads."""
    properties = {
        name: {**each.schema, "description": each.about} if "enum" not in each.schema else each.schema
        for name, each in table.items()
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(needed),
        "additionalProperties": False,
    }


_REASON = thing({"reason": TEXT, "sentence": TEXT, "advice": TEXT, "field": TEXT})
_AMOUNTS: Schema = {"type": "object", "additionalProperties": NUMBER}
_STATE = words(LeaseState)
_PART = {
    "slice": TEXT,
    "lease": TEXT,
    "lease_name": TEXT,
    "user": TEXT,
    "milli": WHOLE,
    "vram": WHOLE,
    "state": words(SliceState),
    "profile": TEXT,
    "start": maybe(WHOLE),
    "size": maybe(WHOLE),
}
_READING = {
    "utilisation": maybe(NUMBER),
    "memory_used": maybe(WHOLE),
    "temperature": maybe(NUMBER),
    "power": maybe(NUMBER),
    "error": TEXT,
    "age_s": NUMBER,
}
_DEVICE = {
    "uuid": TEXT,
    "node": TEXT,
    "index": WHOLE,
    "name": TEXT,
    "model": TEXT,
    "memory": WHOLE,
    "mig": FLAG,
    "profiles": many(TEXT),
    "verdict": words(Verdict),
    "verdict_sentence": TEXT,
    "flags": many(TEXT),
    "cordoned": TEXT,
    "outside": TEXT,
    "parts": many(thing(_PART)),
    "free_milli": WHOLE,
    "reading": maybe(thing(_READING)),
}
_INCIDENT = {
    "kind": TEXT,
    "labels": many(TEXT),
    "meaning": TEXT,
    "first": WHOLE,
    "last": WHOLE,
    "count": WHOLE,
    "instance": WHOLE,
    "programs": many(TEXT),
}
#: What was read when it was judged; what is missing is what that driver does not say.
_READ = {
    "now": WHOLE,
    "error": TEXT,
    "utilisation": maybe(WHOLE),
    "memory_used": maybe(WHOLE),
    "temperature": maybe(NUMBER),
    "power": maybe(NUMBER),
    "recovery_action": maybe(WHOLE),
    "remap_pending": maybe(FLAG),
    "remap_failed": maybe(FLAG),
    "ecc_uncorrected": maybe(WHOLE),
    "slowdown": maybe(WHOLE),
    "pcie_width": maybe(WHOLE),
    "nvlinks": maybe(many(FLAG)),
    "nvlink_errors": maybe(WHOLE),
}
#: As `core.findings.evidence` writes it; times in milliseconds since the epoch, by the node's clock. An agent
#: of another version may say more or less.
_GROUNDS: dict[str, Any] = {
    "rule": TEXT,
    "since": WHOLE,
    "instance": WHOLE,
    "programs": many(TEXT),
    "incidents": many(thing(_INCIDENT, optional=tuple(_INCIDENT))),
    "readings": many({**thing(_READ, optional=tuple(_READ)), "additionalProperties": True}),
    "error": TEXT,
    "memory_errors": many(many(WHOLE)),
    "strikes": many(WHOLE),
    "probation_until": WHOLE,
}
_EVIDENCE = {
    "device": TEXT,
    "name": TEXT,
    "verdict": words(Verdict),
    "sentence": TEXT,
    "probation": FLAG,
    "cordoned": TEXT,
    "evidence": {**thing(_GROUNDS, optional=tuple(_GROUNDS)), "additionalProperties": True},
}
_NODE = {
    "name": TEXT,
    "address": TEXT,
    "state": words(("up", "silent", "lost")),
    "connected": FLAG,
    "cordoned": TEXT,
    "retired": FLAG,
    "cpus": NUMBER,
    "memory": WHOLE,
    "devices": WHOLE,
    "simulated": FLAG,
}
_POOL = {
    "version": TEXT,
    "api": WHOLE,
    "simulated": FLAG,
    "simulated_note": TEXT,
    "trust_users": FLAG,
    "one_user": maybe(TEXT),
    "nodes": many(thing(_NODE)),
    "gpus": WHOLE,
    "gpus_free": NUMBER,
    "largest_together": WHOLE,
    "models": {"type": "object", "additionalProperties": WHOLE},
    "pending": WHOLE,
    "leases": WHOLE,
    "user": thing({"name": TEXT, "admin": FLAG, "scopes": many(TEXT)}),
}
_SLICE = {
    "id": TEXT,
    "device": TEXT,
    "device_name": TEXT,
    "node": TEXT,
    "model": TEXT,
    "milli": WHOLE,
    "vram": WHOLE,
    "state": words(SliceState),
    "profile": TEXT,
    "limits": many(thing({"layer": words(Layer), "state": words(LayerState), "sentence": TEXT})),
}
_LEASE = {
    "id": TEXT,
    "name": TEXT,
    "user": TEXT,
    "project": TEXT,
    "state": _STATE,
    "version": WHOLE,
    "why": TEXT,
    "requested": {"type": "object"},
    "gpus": NUMBER,
    "submitted_at": TIME,
    "granted_at": TIME,
    "started_at": TIME,
    "ends_at": TIME,
    "ended_at": TIME,
    "place": maybe(WHOLE),
    "expected_start": TIME,
    "reasons": many(_REASON),
    "progress": thing({"scheduler": FLAG, "workers": WHOLE, "of": WHOLE}),
    "slices": many(thing(_SLICE)),
    "suspending": FLAG,
    "sure": WHOLE,
    "wanted": WHOLE,
    "surplus": WHOLE,
    "holds": thing({"parts": many(thing({"name": TEXT, "size": WHOLE})), "count": WHOLE, "size": WHOLE}),
    "preemptible": FLAG,
    "interactive": FLAG,
    "idle_since": TIME,
    "idle_timeout": NUMBER,
    "simulated": FLAG,
    "shared_with": many(TEXT),
    "notes": many(TEXT),
    "warning": TEXT,
}
_WHICH = {"id": TEXT, "name": TEXT, "user": TEXT}
_WAITS = {
    "place": WHOLE,
    "id": TEXT,
    "name": TEXT,
    "user": TEXT,
    "project": TEXT,
    "gpus": NUMBER,
    "submitted_at": TIME,
    "expected_start": TIME,
    "why": TEXT,
}
#: How a project or user stands: GPUs, and GPU-seconds.
_STANDING = {
    "gpus": NUMBER,
    "waiting": WHOLE,
    "demand": NUMBER,
    "guaranteed": NUMBER,
    "deserved": NUMBER,
    "deserved_by_model": _AMOUNTS,
    "served": NUMBER,
    "borrowed": NUMBER,
    "used": NUMBER,
    "decayed": NUMBER,
    "idle": NUMBER,
    "lost": NUMBER,
    "charged": NUMBER,
}
_USER = {
    "project": TEXT,
    "user": TEXT,
    "leases": WHOLE,
    "quota": _AMOUNTS,
    "limit": _AMOUNTS,
    "weight": WHOLE,
    "tier": WHOLE,
    **_STANDING,
}
_ACCOUNT = {
    **dict.fromkeys(("project", "user", "model", "kind"), TEXT),
    **dict.fromkeys(("used", "decayed", "idle", "lost"), NUMBER),
}
_HOUR = dict.fromkeys(("time", "used", "idle"), NUMBER)
_VICTIM = {
    "lease": TEXT,
    "lease_name": TEXT,
    "user": TEXT,
    "project": TEXT,
    "slices": WHOLE,
    "gpus": NUMBER,
    "whole": FLAG,
    "ran": NUMBER,
    "of": TEXT,
    "served": NUMBER,
    "deserved": NUMBER,
}
_RECLAIM = {
    "number": WHOLE,
    "time": TIME,
    "lease": TEXT,
    "lease_name": TEXT,
    "user": TEXT,
    "project": TEXT,
    "gpus": NUMBER,
    "served": NUMBER,
    "deserved": NUMBER,
    "over_before": many(WHOLE),
    "over_after": many(WHOLE),
    "cost": NUMBER,
    "victims": many(thing(_VICTIM)),
    "sentence": TEXT,
}
_DEFAULTS = dict.fromkeys(tree.DEFAULTS, NUMBER) | {"passing": FLAG, "model_weights": _AMOUNTS}
_PROJECT = {
    "name": TEXT,
    "parent": TEXT,
    "quota": _AMOUNTS,
    "limit": _AMOUNTS,
    "weight": WHOLE,
    "tier": WHOLE,
    "default_time": NUMBER,
    "max_time": NUMBER,
    "held": _AMOUNTS,
    **_STANDING,
    "users": many({"type": "object"}),
    "members": many(TEXT),
}
_NOTICE = {
    "seq": WHOLE,
    "time": NUMBER,
    "user": TEXT,
    "notice": TEXT,
    "lease": TEXT,
    "sentence": TEXT,
    "data": {"type": "object"},
}
_EXPLANATION = {
    "starts_now": FLAG,
    "place": maybe(WHOLE),
    "expected_start": TIME,
    "reasons": many(_REASON),
    "sentences": many(TEXT),
}
_TOKEN = {
    "id": TEXT,
    "user": TEXT,
    "label": TEXT,
    "made": NUMBER,
    "expires": maybe(NUMBER),
    "scopes": many(TEXT),
    "groups": many(TEXT),
}
_CONNECTION = {"address": TEXT, "ca": TEXT, "cert": TEXT, "key": TEXT, "dashboard": TEXT, "secret": TEXT}
_MOVE = dict.fromkeys(("slice", "lease", "lease_name", "user", "from", "to"), TEXT)
_PROBLEM = {
    "type": TEXT,
    "title": TEXT,
    "status": WHOLE,
    "detail": TEXT,
    "reason": words([*Reason, *Trouble]),
    "advice": TEXT,
    "field": TEXT,
    "errors": many(_REASON),
}

SCHEMAS: dict[str, Schema] = {
    "Request": body({**parse.REQUEST}),
    "Environment": body(parse.ENVIRONMENT),
    "Change": {**body(parse.CHANGE), "minProperties": 1, "maxProperties": 1},
    "Process": body(parse.PROCESS, "pid", "started", "boot"),
    "Projects": body(tree.BODY),
    "Project": body(tree.PROJECT, "name"),
    "Defaults": body(tree.DEFAULTS),
    "Health": body(routes_admin.HEALTH, "action"),
    "NewToken": body(routes_admin.TOKEN),
    "Login": body(routes_admin.LOGIN, "token"),
    "Join": body(routes_admin.AGENT, "token", "name"),
    "Stop": body(routes_admin.STOP),
    "Consolidate": body(routes_admin.CONSOLIDATE),
    "Revoked": thing({"restarted": many(thing(_WHICH)), "kept": many(thing(_WHICH))}),
    "Consolidation": thing({"moves": many(thing(_MOVE)), "freed": many(TEXT), "dry_run": FLAG}),
    "Pool": thing(_POOL),
    "Devices": thing(
        {"devices": many(thing(_DEVICE)), "gone": many(TEXT), "sequence": WHOLE, "simulated": FLAG}
    ),
    "Evidence": thing(_EVIDENCE),
    "Ordered": thing({"target": TEXT, "name": TEXT, "cordoned": TEXT}),
    "Lease": thing(_LEASE, optional=("warning",)),
    "Leases": thing({"leases": many(ref("Lease")), "next": maybe(TEXT)}),
    "Explanation": thing(_EXPLANATION),
    "Connection": thing(_CONNECTION, optional=("dashboard", "secret")),
    "Attached": thing({"devices": many(TEXT), "environ": {"type": "object", "additionalProperties": TEXT}}),
    "Logs": thing({"logs": many(thing({"name": TEXT, "text": TEXT}))}),
    "Queue": thing({"queue": many(thing(_WAITS))}),
    "ProjectsNow": thing(
        {"projects": many(thing(_PROJECT, optional=("users", "members"))), "defaults": thing(_DEFAULTS)}
    ),
    "Usage": thing({"usage": many(thing(_USER)), "accounts": many(thing(_ACCOUNT)), "reclaims": WHOLE}),
    "History": thing({"user": TEXT, "now": NUMBER, "hours": many(thing(_HOUR))}),
    "Reclaims": thing({"reclaims": many(thing(_RECLAIM)), "count": WHOLE}),
    "Notices": thing({"notices": many(thing(_NOTICE)), "next": WHOLE, "missed": FLAG, "leases": WHOLE}),
    "Token": thing(
        {"kind": words(routes_admin.KINDS), **dict.fromkeys(("token", "user", "line", "warning"), TEXT)},
        optional=("warning",),
    ),
    "Tokens": thing({"tokens": many(thing(_TOKEN))}),
    "LoggedIn": thing({"token": TEXT, "user": TEXT}),
    "Joined": thing({"name": TEXT, "comm": TEXT, "ca": TEXT, "cert": TEXT, "key": TEXT}),
    "Stopping": thing({"stopping": FLAG}),
    "Description": {"type": "object"},
    "Certificate": TEXT,
    "Problem": thing(_PROBLEM, optional=("errors",)),
}
