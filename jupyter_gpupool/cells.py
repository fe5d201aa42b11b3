"""`%%gpupool`: run a cell on a lease, as if it ran here.

Rule 1: what the cell shows, its errors and an interrupt are as they would be here: `run all` stops where it
        would; only variables do not come and go by themselves (`--send`, `--fetch`).
Rule 2: that a namespace is gone is said once, by a cell that is not run: what comes after it was written for
        variables that are not there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jupyter_gpupool import checkpoint, commands
from jupyter_gpupool._cell_run import Run, Target
from jupyter_gpupool._cells import Message, Places, Unreachable, Way
from jupyter_gpupool.cell_line import help_text, parse
from jupyter_gpupool.commands import Misuse

if TYPE_CHECKING:
    from argparse import Namespace

    from jupyter_gpupool.client import Lease
    from jupyter_gpupool.magic import GPUPool

E = TypeVar("E", bound=BaseException)
#: Seconds to wait for a slice that is being replaced.
APPEAR = 60.0


class RemoteError(Exception):
    """An error of a cell on a lease; its class has the name of the one that was raised there."""


class NamespaceLost(Exception):  # noqa: N818 - it is what has happened
    """The variables of former cells on this slice are gone; the sentence says why, and what can be done."""


@dataclass
class _Known:
    """The namespace that this notebook has used at a place; empty: one that it knows to be gone."""

    shell: str = ""
    device: str = ""


class Cells:
    """Runs the cells of one notebook.

    Args:
        magic: The magic that they are written with.
    """

    def __init__(self, magic: GPUPool) -> None:
        self._magic = magic
        self._ways: dict[tuple[str, str], Way] = {}
        self._places: dict[str, Places] = {}
        self._known: dict[tuple[str, int], _Known] = {}
        #: The lease that cells run on which name none.
        self._last: Lease | None = None

    def run(self, line: str, cell: str) -> Any:
        """Run a cell.

        Raises:
            Misuse: The line is not as it has to be.
            PoolError: There is no such lease, or it cannot be reached.
            NamespaceLost: The variables of former cells are gone.
        """
        words = commands.split(line)
        if commands.asks_help(words):
            print(help_text())  # noqa: T201 - what was asked for
            return
        args = parse(words)
        sent = self._pickled(args.send)
        if args.gpus is None:
            self._run_on(self._lease(args.lease), args, cell, sent)
            return
        lease = self._borrow(args)
        try:
            args.on = args.on or ("all" if len(lease.slices) > 1 else "0")
            self._run_on(lease, args, cell, sent)
        finally:
            self._forget(lease.id)
            lease.release()

    def close(self) -> None:
        """Hang up; which namespaces were used is kept in mind."""
        self._last = None
        for way in self._ways.values():
            with contextlib.suppress(Exception):
                way.close()
        self._ways.clear()

    # -------------------------------------------------------------------------------------- leases and slices

    def _borrow(self, args: Namespace) -> Lease:
        magic = self._magic
        asked = {"project": magic.project, "time_limit": magic.time_limit, "interactive": magic.interactive}
        said = {name: each for name, each in asked.items() if each not in ("", None)}
        return magic.pool(again=True).request(gpus=args.gpus, **said)

    def _lease(self, name: str | None) -> Lease:
        """Find the lease; the one that the last cell ran on is asked for only when it does not answer."""
        current = self._magic.current
        last = self._last
        if last is not None and name is None and current in ("", last.id) and self._reaches(last):
            return last
        lease = self._magic.pool().lease(name or current or None)
        if not lease.slices:
            lease.wait()
        if name is None:
            self._last, self._magic.current = lease, lease.id
        return lease

    def let_go(self, ids: frozenset[str]) -> None:
        """Hang up on leases that are given back: no cell begins on what is ending."""
        if self._last is not None and self._last.id in ids:
            self._last = None
        for ident in ids:
            self._forget(ident)

    def _reaches(self, lease: Lease) -> bool:
        return any(way.is_open for (ident, _), way in self._ways.items() if ident == lease.id)

    def _forget(self, ident: str) -> None:
        for key in [key for key in self._ways if key[0] == ident]:
            self._ways.pop(key).close()

    def _targets(self, lease: Lease, on: str) -> list[Target]:
        if on == "all":
            lease.refresh()
            wanted = list(range(len(self._parts(lease))))
        else:
            wanted = [int(each) for each in on.split(",")]
        return [self._target(lease, place) for place in wanted]

    def _parts(self, lease: Lease) -> list[str]:
        now = sorted((each.id for each in lease.slices), key=lambda ident: int(ident.rpartition("/")[2]))
        return self._places.setdefault(lease.id, Places()).update(now)

    def _target(self, lease: Lease, place: int) -> Target:
        """Reach the shell at a place; while its slice is being replaced that is waited for."""
        end = time.monotonic() + APPEAR
        while True:
            parts = self._parts(lease)
            part = parts[place] if place < len(parts) else ""
            try:
                way = self._way(lease, part)
            except Unreachable as error:
                lease.refresh()
                self._give_up(lease, place, error, late=time.monotonic() > end)
                time.sleep(0.2)
            else:
                return Target(place, way, next(each.device_name for each in lease.slices if each.id == part))

    def _give_up(self, lease: Lease, place: int, error: Unreachable, *, late: bool) -> None:
        from jupyter_gpupool.client import PoolError
        from jupyter_gpupool.core.model import LeaseState

        if lease.state not in (LeaseState.ACTIVE, LeaseState.STARTING):
            raise PoolError("lease_over", f"Lease {lease.name} is {lease.state}: {lease.why}", "Request one.")
        count = len(lease.slices)
        if place >= max(count, 1):
            have = f"{count} slice{'' if count == 1 else 's'}"
            raise PoolError("bad_request", f"Lease {lease.name} has {have}, counted from 0.")
        if late:
            sentence = f"No cell can run on slice {place} of lease {lease.name}: {error}."
            raise PoolError("unreachable", sentence, f"`%gpupool logs {lease.name}` shows what it wrote.")

    def _way(self, lease: Lease, part: str) -> Way:
        way = self._ways.get((lease.id, part))
        if way is not None:
            if way.is_open:
                return way
            self._ways.pop((lease.id, part)).close()  # its other half may still wait
        if not part:
            raise Unreachable("it is being replaced")
        from jupyter_gpupool import _steps as steps

        way = Way.open(self._magic.pool().carry_out(steps.connection(lease.data)), part)
        self._ways[lease.id, part] = way
        return way

    # ------------------------------------------------------------------------------------------------ the run

    def _pickled(self, names: list[str]) -> dict[str, bytes]:
        import cloudpickle

        found = {}
        for name in names:
            if name not in self._magic.shell.user_ns:
                raise Misuse(f"--send {name}: there is no variable of this name here.")
            try:
                found[name] = cloudpickle.dumps(self._magic.shell.user_ns[name])
            except Exception as error:
                raise Misuse(
                    f"--send {name}: it cannot be pickled ({type(error).__name__}: {error})."
                ) from error
        return found

    def _run_on(self, lease: Lease, args: Namespace, cell: str, sent: dict[str, bytes]) -> None:
        targets = self._targets(lease, args.on or "0")
        for target in targets:
            self._recognise(lease, target)
        order = {
            "do": "run",
            "code": cell,
            "send": list(sent),
            "fetch": args.fetch,
            "out": args.out or "",
        }
        run = Run(self._magic.shell, lease.id, targets, sent)
        try:
            run.go(order)
        finally:
            for target in targets:
                if target.place in run.lost:
                    self._known[lease.id, target.place] = _Known()  # it is said below
                if run.asleep:
                    target.way.close()
        self._tell(lease, run)
        self._magic.shell.push(run.values(args))

    def _recognise(self, lease: Lease, target: Target) -> None:
        """See whether the namespace is the one of the last cell here; say so once if it is not."""
        hello = target.way.hello
        key = (lease.id, target.place)
        known = self._known.get(key)
        if known is not None and known.shell == hello["shell"]:
            return
        self._known[key] = _Known(hello["shell"], target.device)
        if known is not None and known.shell:
            moved = f"its GPU {known.device} was replaced by {target.device}"
            why = moved if known.device != target.device else hello["why"] or "its slice was started anew"
            raise _lost(lease, target.place, why)
        if known is None and hello["fresh"] and (words := checkpoint.words(lease.id, target.place)):
            print(f"This namespace is empty. {words}", file=sys.stderr)  # noqa: T201 - beside the cell's own

    def _tell(self, lease: Lease, run: Run) -> None:
        """Raise what has come of the cell, if that is not well."""
        for place, why in run.lost.items():
            raise _lost(lease, place, why)
        if run.errors:
            raise _raised(run.errors)
        if run.stopped:
            raise KeyboardInterrupt


def _lost(lease: Lease, place: int, why: str) -> NamespaceLost:
    words = checkpoint.words(lease.id, place)
    empty = (
        "The next cell there finds none; what `gpupool.checkpoint(name=object)` in a cell keeps can be "
        "brought back."
    )
    error = NamespaceLost(
        f"The variables of the cells on this slice are gone: {why.rstrip('.')}. {words or empty}"
    )
    return _shown_as(error, [f"\x1b[31mNamespaceLost\x1b[0m: {error}"])


def _raised(errors: dict[int, Message]) -> BaseException:
    """Make the cell's error: named as it was there, shown as it was shown there."""
    first = next(iter(errors.values()))
    base = KeyboardInterrupt if first["name"] == "KeyboardInterrupt" else RemoteError
    error: BaseException = type(first["name"], (base,), {"__module__": __name__})(first["value"])
    lines: list[str] = []
    for place, each in errors.items():
        lines += [f"[{place}]"] if len(errors) > 1 else []
        lines += each["traceback"]
    return _shown_as(error, lines)


def _shown_as(error: E, lines: list[str]) -> E:
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # IPython's hook
    return error
