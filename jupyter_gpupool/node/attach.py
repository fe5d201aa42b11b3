"""A process of a person's own that uses a lease's device as if it were the lease's: a notebook's kernel, say.

Rule 1: it is a process of this machine and this boot, known by PID and start time, and runs as the user that
        the lease's processes run as here. What another says of a process is never enough.
Rule 2: from then on it counts as the slice's, with all that it starts: it is no use from outside, and its
        memory counts towards a share. When the slice ends it is ended too, if the driver lists it on the
        device, or does not say: nothing is free while somebody uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.node import guard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.node.guard import Identity
    from jupyter_gpupool.node.lease_table import Entry

#: Parents that are looked at for one that is attached; a kernel's children are seldom deeper.
_DEEP = 20


def elsewhere(order: dict[str, Any]) -> bool:
    """Whether the process is of another machine, or of another boot of this one."""
    return order.get("boot") != guard.boot_id()


def refusal(order: dict[str, Any], uid: int, user: str) -> str:
    """Say why a process may not be attached; "" if it may.

    Args:
        order: `pid` and `started`, as the process has said them.
        uid: Of the user that the lease's processes run as here.
        user: That user's name.
    """
    pid = int(order.get("pid") or 0)
    if guard.started_at(pid) != order.get("started"):
        return f"PID {pid} is not this process here: it is in a container of its own, or has ended"
    if guard.user_of(pid) != uid:
        return f"PID {pid} does not run as {user}, as the lease's processes here do"
    return ""


def owner_of(entries: Iterable[Entry], pid: int) -> str:
    """Say to which slice a process, or one that it descends from, was attached; "" if to none.

    Args:
        entries: The slices here.
        pid: Its PID.
    """
    attached = {tuple(each): entry.key for entry in entries for each in entry.attached}
    if not attached:
        return ""
    for _ in range(_DEEP):
        process = guard.look_at(pid)
        if process is None or pid <= 1:
            return ""
        if process.identity in attached:
            return attached[process.identity]
        pid = process.parent
    return ""


def using(
    entry: Entry, pids: set[int] | None, processes: dict[int, guard.Process], marks: Iterable[str]
) -> set[Identity]:
    """Return the attached processes that use the device, themselves or by what they have started.

    Args:
        entry: The slice.
        pids: Those that the driver lists on the device; None where it does not say: any of them may use it.
        processes: All there are, as `guard.look` answers.
        marks: Of all leases here: a notebook may have started the pool that it is attached to.
    """
    found: set[Identity] = set()
    for pid, started in entry.attached:
        own = {each for each, _ in guard.find((), {(pid, started)}, processes, marks)}
        if own and (pids is None or pids & own):
            found.add((pid, started))
    return found
