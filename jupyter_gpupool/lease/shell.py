"""The shell of a slice: an IPython process beside its worker that runs `%%gpupool` cells, one at a time.

It has the slice's device, mark and log, and a namespace that stays until it ends. A process of its own,
because a cell must be interrupted without hitting the worker, and spoil no CUDA context but its own.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
from IPython.core.error import StdinNotImplementedError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from jupyter_gpupool.core.faults import SUSPECT, classify_error
from jupyter_gpupool.lease import limits, process
from jupyter_gpupool.lease.shell_line import Line, Message, pieces
from jupyter_gpupool.lease.shell_output import Hook, Outside, Publisher
from jupyter_gpupool.lease.shell_space import Space, gathered

if TYPE_CHECKING:
    import socket
    from types import FrameType, TracebackType

#: matplotlib draws into the notebook, as it does in a kernel.
_BACKEND = "module://matplotlib_inline.backend_inline"
#: Seconds that a cell's reaction to an interrupt waits for the host to be told of it.
_NOTICE = 0.1


class CellError(Exception):
    """What a cell needed besides its code could not be had; the sentence says what."""


class LeaseShell(InteractiveShell):
    """IPython, with a line to the host in place of a terminal."""

    displayhook_class = Type(Hook)
    display_pub_class = Type(Publisher)
    line: Line
    #: IPython is at work on a cell and not yet at its code: where it would swallow an interrupt.
    preparing = False
    #: An interrupt came meanwhile.
    interrupted = False

    async def run_code(self, *arguments: Any, **options: Any) -> Any:
        """Run a part of a cell, unless the cell was interrupted before its first."""
        self.preparing = False
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        return await super().run_code(*arguments, **options)

    def showtraceback(self, exc_tuple: Any = None, *arguments: Any, **options: Any) -> None:
        """Show an error, without what this process adds to an interrupt's traceback."""
        kind, error, trace = exc_tuple or sys.exc_info()
        if kind is not None and error is not None and isinstance(error, KeyboardInterrupt):
            exc_tuple = (kind, error, _without_handler(trace))
        super().showtraceback(exc_tuple, *arguments, **options)

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        self.line.say({"say": "error", "name": etype.__name__, "value": _text(evalue), "traceback": stb})

    def ask_exit(self) -> None:
        """Say what to do instead: `exit` would only lose the namespace."""
        print("The namespace stays; `%gpupool release` gives the lease back.", file=sys.stderr)  # noqa: T201 - for the cell's reader

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: nobody sees a window here."""


def main(spec: dict[str, Any], line: socket.socket) -> None:
    """Run cells until the host ends this process.

    Args:
        spec: As the host's, with its environ, device, simulated, directory and options.
        line: To the host.
    """
    process.enter(spec["environ"][process.MARK], spec["environ"]["GPUPOOL_LOG"], spec["environ"])
    os.environ.update(CUDA_VISIBLE_DEVICES=spec["device"])
    os.environ.setdefault("MPLBACKEND", _BACKEND)
    limits.watch_imports()
    _Cells(spec, Line(line)).serve()


class _Cells:
    def __init__(self, spec: dict[str, Any], line: Line) -> None:
        self._spec = spec
        self._line = line
        self._running = False
        self._outside = Outside(line)
        _log_to(self._outside.log)
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_DFL)
        _work_where_the_worker_does(spec["options"].get("environment") or {})
        self._shell = _make_shell(spec, line)
        self._check = _device_check(spec)
        builtins.input = _cannot_ask

    def serve(self) -> NoReturn:
        """Run what the host sends."""
        self._line.say({"say": "ready", "python": sys.version.split()[0]})
        while True:
            signal.signal(signal.SIGINT, self.on_interrupt)  # a cell may have set its own
            order = self._line.heard.get()
            if order["do"] == "run":
                self._line.say({"say": "done", **self._run(order)})

    def on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise an interrupt in the cell, if one runs."""
        del number, frame
        if self._running:  # else the cell has ended in the same moment
            self._line.tell({"say": "interrupted"}, _NOTICE)
            if not self._shell.preparing:
                raise KeyboardInterrupt
            self._shell.interrupted = True

    def _run(self, order: Message) -> Message:
        """Run a cell; what comes of it, the error included, is said on the way."""
        error: BaseException | None = None
        try:
            try:
                self._running = True
                self._line.tell({"say": "running"})  # from here on an interrupt reaches the cell
                error = self._steps(order)
            finally:
                self._running = False
        except BaseException as failure:  # noqa: BLE001 - KeyboardInterrupt included: this process goes on
            error = failure
            self._shell._showtraceback(type(failure), failure, _plain_traceback(failure))  # noqa: SLF001 - ours
        self._outside.flush()
        told: Message = {"ok": error is None}
        if error is not None and (fault := classify_error(error)) in SUSPECT:
            told.update(fault=fault.value, error=f"{type(error).__name__}: {_text(error)}"[:1000])
        return told

    def _steps(self, order: Message) -> BaseException | None:
        shell = self._shell
        if order["send"]:
            shell.push(self._arrived(order["send"]))
        shell.displayhook.silent = bool(order["out"])
        self._check()
        shell.interrupted = False
        shell.preparing = True
        result = shell.run_cell(order["code"], store_history=True)
        shell.preparing = False
        self._check()
        error: BaseException | None = result.error_before_exec or result.error_in_exec
        if error is None:
            self._send_back(order, result.result)
        return error

    def _arrived(self, names: list[str]) -> dict[str, Any]:
        values = {}
        for name, data in gathered(self._line, len(names)):
            try:
                values[name] = cloudpickle.loads(data)
            except Exception as error:
                raise CellError(
                    f"{name} cannot be read on the lease ({type(error).__name__}: {error}); "
                    "its Python environment must have what it is made of"
                ) from error
        return values

    def _send_back(self, order: Message, value: Any) -> None:
        back = {}
        for name in order["fetch"]:
            if name not in self._shell.user_ns:
                raise CellError(f"--fetch {name}: the cell has left no variable of this name")
            back[name] = self._shell.user_ns[name]
        wanted = [("fetch", name, each) for name, each in back.items()]
        wanted += [("out", order["out"], value)] if order["out"] else []
        for kind, name, each in wanted:
            for data, last in pieces(_pickled(name, each)):
                self._line.say({"say": "part", "kind": kind, "name": name, "data": data, "last": last})


def _pickled(name: str, value: Any) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise CellError(
            f"{name} cannot leave the lease ({type(error).__name__}: {error}); fetch what can be pickled"
        ) from error
    return data


def _make_shell(spec: dict[str, Any], line: Line) -> LeaseShell:
    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    # In the lease's folder: nothing is written into the owner's home.
    folder = os.path.join(spec["directory"], "ipython")  # noqa: PTH118 - IPython takes a text
    LeaseShell.line = Hook.line = Publisher.line = line
    shell: LeaseShell = LeaseShell.instance(config=config, ipython_dir=folder)
    shell.push({"gpupool": Space(spec, line, shell.user_ns)}, interactive=False)
    return shell


def _work_where_the_worker_does(environment: dict[str, Any]) -> None:
    if folder := environment.get("working_directory"):
        os.chdir(folder)
    sys.path.insert(0, "")
    for name in environment.get("pre_import") or ():
        with contextlib.suppress(ImportError):  # the worker's log has it
            importlib.import_module(name)


def _device_check(spec: dict[str, Any]) -> Any:
    """Answer with what makes a simulated device's fault felt; CUDA itself does on a real one."""
    if not spec["simulated"]:
        return lambda: None
    importlib.import_module("jupyter_gpupool.driver.simulated").install()
    return importlib.import_module("jupyter_gpupool.driver.simulated.cuda").check


def _log_to(descriptor: int) -> None:
    log = os.fdopen(descriptor, "w", buffering=1)
    faulthandler.enable(log)
    for name in ("jupyter_gpupool", "distributed", ""):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(log)


def _without_handler(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the last step of an interrupt's traceback: the handler of the signal."""
    last = before = trace
    while last is not None and last.tb_next is not None:
        last, before = last.tb_next, last
    if before is not None and last is not None and last.tb_frame.f_code is _Cells.on_interrupt.__code__:
        before.tb_next = None
    return trace


def _plain_traceback(error: BaseException) -> list[str]:
    return [f"\x1b[31m{type(error).__name__}\x1b[0m: {_text(error)}"]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - it is the cell's own class
        return ""


def _cannot_ask(prompt: object = "") -> NoReturn:
    raise StdinNotImplementedError(
        f"a cell on a lease cannot ask {str(prompt)!r}: ask in a cell of the notebook, and --send the answer"
    )
