"""A lease or a pool as a live widget: what a notebook shows of them while its kernel runs.

Rule 1: the page draws (`widget.js`) and asks; what may be had, and why not, the pool says.
Rule 2: nothing is read while nobody sees it (`_look`), and a widget costs no thread of its own.
Rule 3: beside each widget goes its plain text and its HTML, for where there are no widgets: a terminal,
        papermill, a page that has been exported. A kernel that ends leaves the HTML in the widget's place.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
from IPython.core.getipython import get_ipython
from IPython.display import DisplayHandle
from IPython.display import display as publish
from traitlets import Dict

from jupyter_gpupool import _look, commands, display, tables
from jupyter_gpupool import _steps as steps
from jupyter_gpupool._http import PoolError
from jupyter_gpupool._lease import Lease
from jupyter_gpupool.core.model import LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool._http import Address
    from jupyter_gpupool.client import AsyncPool, Pool
    from jupyter_gpupool.cluster import GPUPoolCluster

_HERE = Path(__file__).parent
MIME = "application/vnd.jupyter.widget-view+json"
#: What the form asks for: the field of a request, its label, and what stands there while nothing is said.
FORM = {
    "gpus": ("GPUs", "1"),
    "max_gpus": ("GPUs at most", ""),
    "vram": ("memory of a share", "20GB"),
    "mig": ("MIG profile", "none"),
    "model": ("model", "any"),
    "project": ("project", "the default"),
    "time_limit": ("time limit", "2h"),
    "name": ("name", ""),
}
NUMBERS = ("gpus", "max_gpus")
#: By this the sidebar's package knows outputs whose HTML it shows where there is no widget to show.
_OURS: dict[str, Any] = {"gpupool": {}}
_watch = _look.Watch()
#: The widgets of this kernel, by what they show: each is made once, however often it is displayed.
_made: dict[tuple[str, str], _Widget] = {}


class _Widget(anywidget.AnyWidget):
    """What the widgets of a lease and of a pool have in common.

    Args:
        pool: The pool.
        said: What is known of it already.
    """

    _esm = _HERE / "widget.js"
    _css = _HERE / "widget.css"
    #: What is drawn.
    said = Dict().tag(sync=True)

    def __init__(self, pool: Pool, said: dict[str, Any]) -> None:
        super().__init__(said=said)
        self.pool = pool
        self.address: Address = pool.address
        #: When each view of this widget was last heard of, by the name that the page gave it.
        self._views: dict[str, float] = {}
        self._over = False
        self._outputs: list[tuple[DisplayHandle, Callable[[], dict[str, str]]]] = []
        self.on_msg(self._on_message)

    # ---------------------------------------------------------------------------------------------- in sight

    def wanted(self) -> bool:
        """Return whether a view is in sight; while a cell runs nobody can say so."""
        if not _busy():
            now = time.monotonic()
            self._views = {name: at for name, at in self._views.items() if now - at < _look.LOST_S}
        return bool(self._views) and not self._over

    async def look(self, pool: AsyncPool) -> None:
        """Look until this is cancelled; what goes wrong is shown, and tried again."""
        async with contextlib.AsyncExitStack() as stack:
            counter = _look.Counter(pool)
            stack.push_async_callback(counter.close)
            while not self._over:
                try:
                    await self._look(pool, counter)
                except PoolError as error:
                    self.said = {**self.said, "problem": str(error)}
                    await asyncio.sleep(_look.AGAIN_S)
        _watch.poke(self)  # there is nothing more to see: the thread need not wait for the page to say so

    async def _look(self, pool: AsyncPool, counter: _look.Counter) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ what is asked

    def _on_message(self, _: object, message: dict[str, Any], __: object) -> None:
        """Hear the page: that a view came or went, or what a person wants."""
        if "shown" in message:
            self._views.pop(str(message.get("view")), None)
            if message["shown"]:
                self._views[str(message.get("view"))] = time.monotonic()
            _watch.poke(self)
            return
        answer = {"number": message.get("number")}
        try:
            answer["said"] = self.act(str(message.get("do")), message)
        except PoolError as error:
            answer["wrong"] = str(error)
        self.send(answer)

    def act(self, do: str, message: dict[str, Any]) -> str:
        """Do what a person wants, and say what has come of it.

        Args:
            do: "extend", "keep", "release", "scale", "trial" or "request".
            message: The page's, with the lease's id or what is asked for.

        Raises:
            PoolError: The pool says no.
        """
        return ACTIONS[do](self.pool, message)

    # --------------------------------------------------------------------------------------------- displaying

    def show(self, html: Callable[[], dict[str, str]]) -> None:
        """Display it.

        Args:
            html: Makes what is shown where there are no widgets, and stays when the kernel is gone.
        """
        view = {MIME: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}}
        handle = publish({**html(), **view}, raw=True, display_id=True, metadata=_OURS)
        if handle is not None:
            self._outputs.append((handle, html))

    def close(self) -> None:
        """Leave what it showed last, as HTML, and end it."""
        self._over = True
        _watch.poke(self)
        outputs, self._outputs = self._outputs, []
        for handle, html in outputs:
            with contextlib.suppress(Exception):  # the pool may be gone, and so may the page
                handle.update(html(), raw=True)
        super().close()


class LeaseWidget(_Widget):
    """A lease: its devices with what they do, its workers and tasks, the time that is left, and buttons.

    Args:
        lease: The lease.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        super().__init__(lease._pool, {"kind": "lease", **_look.lease_said(lease.data, (), None)})  # noqa: SLF001 - one thing in two classes

    async def _look(self, pool: AsyncPool, counter: _look.Counter) -> None:
        since = time.monotonic()
        data = self.lease.data
        devices = await _look.read_devices(pool)
        tasks = await counter.count(data)
        self.said = {"kind": "lease", **_look.lease_said(data, devices, tasks)}
        self._over = data["state"] == LeaseState.ENDED
        if not self._over:
            self.lease.data = await pool.carry_out(steps.changed(data, _look.PACE_S))
            if self.lease.data["version"] == data["version"]:
                await _look.pause(since)


class PoolWidget(_Widget):
    """A pool: its devices, one's leases, and a form to request more.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool, {"kind": "pool", "fields": _fields(pool), **_seen_now(pool)})

    async def _look(self, pool: AsyncPool, _: _look.Counter) -> None:
        since = time.monotonic()
        stand = await pool.carry_out(steps.read("/v1/pool", "gpus"))
        devices = await _look.read_devices(pool)
        leases = await pool.carry_out(steps.leases(everybody=False, ended=False))
        fields = self.said["fields"]
        self.said = {"kind": "pool", "fields": fields, **_look.pool_said(stand, devices, leases)}
        await _look.pause(since)


def _seen_now(pool: Pool) -> dict[str, Any]:
    return _look.pool_said(pool.status(), pool.devices(), [each.data for each in pool.leases()])


def _fields(pool: Pool) -> list[dict[str, Any]]:
    """Return the fields of the form: what can be asked for, and what the pool has to choose from."""
    known = {each.name: each for each in commands.REQUEST}
    profiles = {profile for row in pool.devices() for profile in row.get("profiles") or ()}
    choices = {
        "model": sorted(pool.status().models),
        "project": [row["name"] for row in pool.projects()],
        "mig": sorted(profiles),
    }
    return [
        {
            "name": name,
            "label": label,
            "hint": hint,
            "help": known[name].help,
            "choices": choices.get(name),
        }
        for name, (label, hint) in FORM.items()
        if choices.get(name) != []
    ]


# ------------------------------------------------------------------------------------------------ the actions


def _lease(pool: Pool, message: dict[str, Any]) -> Lease:
    return pool.lease(str(message.get("lease")))


def _extend(pool: Pool, message: dict[str, Any]) -> str:
    lease = _lease(pool, message).extend(str(message.get("by") or "1h"))
    return f"{lease.name} has {message.get('by') or '1h'} more."


def _keep(pool: Pool, message: dict[str, Any]) -> str:
    return f"{_lease(pool, message).keep().name} is kept."


def _scale(pool: Pool, message: dict[str, Any]) -> str:
    gpus: Any = commands.number(str(message.get("gpus")))  # the pool says what is wrong with it
    lease = _lease(pool, message).scale(gpus)
    return f"{lease.name} wants {display.count(gpus, 'GPU')} at most from now on."


def _release(pool: Pool, message: dict[str, Any]) -> str:
    lease = _lease(pool, message)
    lease.release()
    return f"{lease.name} is given back."


def _asked(message: dict[str, Any]) -> dict[str, Any]:
    what = {name: each for name, each in dict(message.get("what") or {}).items() if name in FORM and each}
    return {name: commands.number(each) if name in NUMBERS else each for name, each in what.items()}


def _trial(pool: Pool, message: dict[str, Any]) -> str:
    return repr(pool.trial(**_asked(message)))


def _request(pool: Pool, message: dict[str, Any]) -> str:
    lease = pool.request(wait=False, **_asked(message))
    return f'Requested. In a cell: lease = pool.lease("{lease.name}")'


ACTIONS: dict[str, Callable[[Pool, dict[str, Any]], str]] = {
    "extend": _extend,
    "keep": _keep,
    "scale": _scale,
    "release": _release,
    "trial": _trial,
    "request": _request,
}


# ------------------------------------------------------------------------------------------------- displaying


def _plain_and_html(thing: Any) -> dict[str, str]:
    return {"text/plain": repr(thing), "text/html": thing._repr_html_()}


def show_lease(lease: Lease) -> None:
    """Display a lease as a widget."""
    widget = _once(("lease", lease.id), lambda: LeaseWidget(lease))
    widget.show(lambda: _plain_and_html(lease))


def show_pool(pool: Pool) -> None:
    """Display a pool as a widget; one that does not answer as its error's sentence."""
    try:
        widget = _once(("pool", pool.url), lambda: PoolWidget(pool))
    except PoolError as error:
        publish({"text/plain": str(error), "text/html": tables.html_line(str(error))}, raw=True)
    else:
        widget.show(lambda: _plain_and_html(pool))


def show_cluster(cluster: GPUPoolCluster) -> None:
    """Display a cluster: its lease's widget, and beside it Dask's own text and HTML."""
    lease = cluster.lease
    if lease is None:
        publish(_plain_and_html(cluster), raw=True)
        return
    widget = _once(("lease", lease.id), lambda: LeaseWidget(Lease(cluster.pool, lease.data)))
    widget.show(lambda: _plain_and_html(cluster))


def _once(key: tuple[str, str], make: Callable[[], _Widget]) -> _Widget:
    """Return the widget of a thing; one whose page or kernel has closed it is made anew."""
    if key not in _made or _made[key].comm is None:
        _made[key] = make()
    return _made[key]


# -------------------------------------------------------------------------------------------------- the shell

#: Whether a cell runs; the first widget is displayed by one.
_running = [True]


def _busy() -> bool:
    return _running[0]


def _begins(*_: object) -> None:
    _running[0] = True


def _ended(*_: object) -> None:
    _running[0] = False


def follow() -> None:
    """Follow when cells run, and close what is shown when the kernel ends."""
    shell = get_ipython()
    if shell is not None and _begins not in shell.events.callbacks["pre_run_cell"]:
        shell.events.register("pre_run_cell", _begins)
        shell.events.register("post_run_cell", _ended)
        atexit.register(close)


def close() -> None:
    """Close all widgets; what they showed last stays, as HTML."""
    made = list(_made.values())
    _made.clear()
    for widget in made:
        widget.close()
    shell = get_ipython()
    if shell is not None and _begins in shell.events.callbacks["pre_run_cell"]:
        shell.events.unregister("pre_run_cell", _begins)
        shell.events.unregister("post_run_cell", _ended)
    atexit.unregister(close)
