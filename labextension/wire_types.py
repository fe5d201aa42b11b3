"""Write `src/wire.ts`: the JSON of the HTTP API as TypeScript types, from the API's own OpenAPI schemas.

    python labextension/wire_types.py          write the file
    python labextension/wire_types.py --check  only say whether it is as it should be

Rule 1: no type there is written by hand: the sidebar is checked against what the server says of itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jupyter_gpupool.controller.schemas import SCHEMAS

TARGET = Path(__file__).parent / "src" / "wire.ts"
#: What the sidebar asks for, says and is told.
NAMES = (
    *(
        "Pool",
        "Devices",
        "Evidence",
        "Lease",
        "Leases",
        "Explanation",
        "Logs",
        "Queue",
        "ProjectsNow",
        "Usage",
        "History",
        "Notices",
    ),
    *("Request", "Change", "Health", "Problem"),
)
HEAD = "// Made by wire_types.py from the OpenAPI description of the pool's HTTP API. Do not edit.\n"
PLAIN = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}


def main() -> int:
    """Write the file, or check it."""
    text = HEAD + "".join(f"\nexport interface {name} {typed(SCHEMAS[name])}\n" for name in NAMES)
    if "--check" not in sys.argv:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{TARGET.name} is not what the API says: run python labextension/wire_types.py\n")
    return 1


def typed(schema: dict[str, Any], depth: int = 1) -> str:
    """Return a JSON schema as a TypeScript type."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(typed(each, depth) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f"'{each}'" for each in schema["enum"])
    if "const" in schema:
        return str(schema["const"]).lower()
    kinds = schema.get("type", "object")
    return " | ".join(_one(each, schema, depth) for each in ([kinds] if isinstance(kinds, str) else kinds))


def _one(kind: str, schema: dict[str, Any], depth: int) -> str:
    if kind == "array":
        inner = typed(schema.get("items", {}), depth)
        return f"({inner})[]" if " | " in inner and not inner.startswith("{") else f"{inner}[]"
    return _thing(schema, depth) if kind == "object" else PLAIN[kind]


def _thing(schema: dict[str, Any], depth: int) -> str:
    """Return the type of an object: its properties, or what each of any has."""
    if "properties" not in schema:
        more = schema.get("additionalProperties")
        return f"Record<string, {typed(more, depth) if isinstance(more, dict) else 'unknown'}>"
    pad, lines = "  " * depth, []
    for name, each in schema["properties"].items():
        mark = "" if name in schema.get("required", ()) else "?"
        if "description" in each:
            lines.append(f"{pad}/** {each['description']} */")
        lines.append(f"{pad}{name}{mark}: {typed(each, depth + 1)};")
    return "\n".join(["{", *lines, "  " * (depth - 1) + "}"])


if __name__ == "__main__":
    sys.exit(main())
