"""The short names of NVIDIA's products: what people ask for, and what quotas are counted in."""

from __future__ import annotations

import re

#: What is cut from NVML's names.
_NOISE = re.compile(
    r"\b(NVIDIA|Tesla|Quadro|GeForce|HBM\w*|SXM\d?|NVL|PCIe|Generation|Edition|\d+\s*GB|MIG \S+)\b",
    re.IGNORECASE,
)
#: Gigabytes that GPUs are sold with.
_SIZES = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 94, 96, 141, 144, 180, 186, 192, 279, 288)
#: These are sold in forms that differ in more than their memory.
_FORMS = {"pcie": "PCIE", "nvl": "NVL"}


def short_model(name: str, memory: int) -> str:
    """The short name of a product: "NVIDIA H100 80GB HBM3" with 85 GB is "H100-80GB".

    Args:
        name: As NVML says it.
        memory: bytes, as NVML says it: it gives the size where the name does not.

    >>> short_model("NVIDIA A100-SXM4-40GB", 42949672960)
    'A100-40GB'
    >>> short_model("NVIDIA L40S", 48305799168)
    'L40S-48GB'
    """
    plain = re.sub(r"[-_/]", " ", name)
    family = "-".join(_NOISE.sub(" ", plain).split()) or "GPU"
    form = next(
        (form for word, form in _FORMS.items() if re.search(rf"\b{word}\b", plain, re.IGNORECASE)), ""
    )
    said = re.search(r"(\d+)\s*GB", plain)
    size = int(said.group(1)) if said else _usual_size(memory)
    return "-".join(part for part in (family, form, f"{size}GB") if part)


def _usual_size(memory: int) -> int:
    """The size that a product with so many bytes is sold with: NVML's number is some per cent below."""
    gibibytes = memory / 2**30
    return min(_SIZES, key=lambda size: abs(size - gibibytes))
