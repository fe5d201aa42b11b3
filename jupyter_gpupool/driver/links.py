"""NVLink as NVML tells of it: where each link ends, which are up, how many errors they had.

Rule 1: indexes above a device's last link are not supported, which is normal; links of a device in MIG mode
        are none.

The functions take the bindings (`api`) first, so that only `driver.nvml` imports them.
"""

from __future__ import annotations

import contextlib
from typing import Any

from jupyter_gpupool.driver.errors import optional, text

LINK_COUNT, LINK_REPLAYS, LINK_RECOVERIES = 91, 161, 162
#: Of any product so far.
MOST_LINKS = 18
#: A link's other end, where it is no device of its own.
SWITCH = "switch"


def field_value(each: Any) -> int:
    """A field's value, of whichever integer type it is."""
    names = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    return int(getattr(each.value, names.get(each.valueType, "uiVal")))


def field(api: Any, handle: Any, number: int) -> int | None:
    """One field of a device, or None where it has none such: each field has a return code of its own."""
    values = optional(api.NVMLError, api.nvmlDeviceGetFieldValues, handle, [number])
    if not values or values[0].nvmlReturn != api.NVML_SUCCESS:
        return None
    return field_value(values[0])


def count(api: Any, handle: Any) -> int:
    """How many NVLinks a device has."""
    said = field(api, handle, LINK_COUNT)
    if said is not None:
        return min(said, MOST_LINKS)
    states = (
        optional(api.NVMLError, api.nvmlDeviceGetNvLinkState, handle, link) for link in range(MOST_LINKS)
    )
    return sum(1 for state in states if state is not None)


def ends(api: Any, handle: Any, links: int) -> tuple[str, ...]:
    """For each NVLink where it ends: a PCI bus id, "switch", or "" where it is down."""
    return tuple(_end(api, handle, link) for link in range(links))


def _end(api: Any, handle: Any, link: int) -> str:
    with contextlib.suppress(api.NVMLError):
        if not api.nvmlDeviceGetNvLinkState(handle, link):
            return ""
        kind = optional(api.NVMLError, api.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == api.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return SWITCH
        return text(api.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId).upper()
    return ""


def peers(
    mine: tuple[str, ...], others: dict[str, tuple[str, tuple[str, ...]]]
) -> tuple[tuple[str, int], ...]:
    """The number of NVLinks to each peer; behind a switch each is reached over all of them.

    Args:
        mine: Where a device's links end.
        others: UUID -> (PCI bus id, where its links end) of the node's other devices.
    """
    found = {uuid: mine.count(bus) for uuid, (bus, _) in others.items() if bus in mine}
    if SWITCH in mine:
        found |= {uuid: mine.count(SWITCH) for uuid, (_, theirs) in others.items() if SWITCH in theirs}
    return tuple(sorted(found.items()))


def states(api: Any, handle: Any, links: int) -> tuple[bool, ...] | None:
    """Which links are up; None where the device tells of none."""
    found = [optional(api.NVMLError, api.nvmlDeviceGetNvLinkState, handle, link) for link in range(links)]
    return tuple(bool(each) for each in found if each is not None) or None


def errors(api: Any, handle: Any, links: int) -> int | None:
    """Replays and recoveries of all links so far; one call asks for all."""
    wanted = [(number, link) for number in (LINK_REPLAYS, LINK_RECOVERIES) for link in range(links)]
    values = (optional(api.NVMLError, api.nvmlDeviceGetFieldValues, handle, wanted) or ()) if wanted else ()
    known = [field_value(each) for each in values if each.nvmlReturn == api.NVML_SUCCESS]
    return sum(known) if known else None
