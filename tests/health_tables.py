"""The tables of docs/health.md from the code: `python -m tests.health_tables` writes, a test compares."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from jupyter_gpupool.core.rules import RULES
from jupyter_gpupool.core.thresholds import Thresholds
from jupyter_gpupool.core.xids import CLASSES, XIDS, XidClass

PAGE = Path(__file__).parent.parent / "docs" / "health.md"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def rules() -> str:
    verdicts = [rule.verdict if rule.verdict in VERDICTS else f"`{rule.verdict}` says" for rule in RULES]
    rows = [[rule.name, f"{verdict}", rule.says] for rule, verdict in zip(RULES, verdicts, strict=True)]
    return table(["rule", "verdict", "sentence"], rows)


def classes() -> str:
    rows = [
        [kind.value, row.single.value, row.repeated.value, row.spread.value, row.says]
        for kind, row in CLASSES.items()
    ]
    return table(["class", "once", "repeated", "spread", "meaning"], rows)


def xids() -> str:
    """Rows of codes with the same words; the unused ones are left out."""
    found: dict[tuple[str, str, XidClass], list[int]] = {}
    for code, row in XIDS.items():
        if row.meaning != "unused code":
            found.setdefault((row.meaning, row.why, row.kind), []).append(code)
    rows = [
        [", ".join(map(str, codes)), kind.value, meaning, why]
        for (meaning, why, kind), codes in found.items()
    ]
    return table(["XID", "class", "meaning", "why"], rows)


def thresholds() -> str:
    rows = [
        [f"`{each.name}`", f"{each.default or 0}", each.metadata["says"], each.metadata["source"]]
        for each in fields(Thresholds)
    ]
    return table(["name", "default", "meaning", "source"], rows)


VERDICTS = {"fine", "watch", "restart_worker", "retire_soon", "evacuate", "gone"}
TABLES = {"rules": rules, "classes": classes, "xids": xids, "thresholds": thresholds}


def rendered(page: str) -> str:
    """The page with its tables as the code has them now."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name}\b[^>]*-->\n).*?(<!-- end -->)"
        page, count = re.subn(
            pattern, lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", page, flags=re.DOTALL
        )
        assert count == 1, f"{name} has no place in {PAGE.name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
