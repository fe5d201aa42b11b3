"""`%%gpupool` in a real IPython shell, on leases of a real pool of simulated GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from distributed.comm import listen
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from jupyter_gpupool import PoolError, _cells, checkpoint, embedded
from jupyter_gpupool._cells import Places, Way
from jupyter_gpupool.cells import NamespaceLost
from jupyter_gpupool.lease import settings
from tests.conftest import wait_until
from tests.leasing import credentials


@pytest.fixture(scope="module")
def shell(session_folder):
    patch = pytest.MonkeyPatch()
    patch.setenv("JUPYTER_DATA_DIR", str(session_folder / "data"))
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "jupyter_gpupool")
    yield shell
    shell.run_line_magic("unload_ext", "jupyter_gpupool")
    InteractiveShell.clear_instance()
    patch.undo()


@pytest.fixture
def cell(shell):
    """Run a cell, and return what it shows and the error that it ends with."""

    def cell(code: str, line: str = ""):
        with capture_output() as shown:
            result = shell.run_cell(f"%%gpupool {line}\n{code}")
        shown.error = result.error_in_exec
        return shown

    return cell


@pytest.fixture(scope="module")
def lasting(shared_pool, shell):
    """A lease that the tests share which leave it as it was."""
    lease = shared_pool.request(gpus=1, name="cells")
    yield lease
    lease.release(wait=30)


@pytest.fixture
def here(lasting, shell):
    shell.run_line_magic("gpupool", "use cells")
    return lasting


EXAMPLE = Path(__file__).parents[1] / "examples" / "cells.ipynb"


@contextlib.contextmanager
def interrupt_when(begun: Path):
    """Interrupt this process as soon as the cell has made a file, however late that is on a busy machine."""
    over = threading.Event()

    def wait():
        while not over.wait(0.02):
            if begun.exists():
                time.sleep(0.1)  # what stands after it has begun, too
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def begin(folder: Path) -> str:
    """Code with which a cell says that it has begun."""
    return f"open({str(folder / 'begun')!r}, 'w').close()"


def test_what_a_cell_prints_and_its_value_appear_here_and_its_variables_stay_there(cell, here, shell):
    assert cell("x = 41; print('hello')").stdout == "hello\n"
    shown = cell(
        f"import os, sys\nprint('to', 'stderr', file=sys.stderr)\n(x + 1, os.getpid() != {os.getpid()})"
    )
    assert shown.stderr == "to stderr\n"
    assert "(42, True)" in shown.stdout
    assert "x" not in shell.user_ns


def test_rich_output_magics_and_commands_work_as_they_do_here(cell, here):
    shown = cell(
        "from IPython.display import HTML, display\n"
        "class Plot:\n"
        "    def _repr_png_(self): return b'\\x89PNG'\n"
        "display(HTML('<b>bold</b>'))\n"
        "display(Plot())"
    )
    assert [sorted(each.data) for each in shown.outputs] == [
        ["text/html", "text/plain"],
        ["image/png", "text/plain"],
    ]
    assert shown.outputs[0].data["text/html"] == "<b>bold</b>"
    assert shown.outputs[1].data["image/png"] == b"\x89PNG"
    assert "from a program" in cell("!echo from a program").stdout
    assert "straight" in cell("import subprocess; r = subprocess.run(['echo', 'straight'])").stdout
    assert "4" in cell("%who_ls\nlen([1, 2, 3, 4])").stdout
    assert "5" in cell("import asyncio\nawait asyncio.sleep(0)\n5").stdout


def test_output_streams_while_the_cell_runs(shell, here):
    seen = []
    with capture_output() as shown:
        watch = threading.Thread(target=lambda: (time.sleep(1.0), seen.append(shown._stdout.getvalue())))
        watch.start()
        shell.run_cell("%%gpupool\nimport time\nprint('first')\ntime.sleep(2)\nprint('last')")
        watch.join()
    assert seen == ["first\n"]
    assert shown.stdout == "first\nlast\n"


def test_an_error_is_named_and_shown_as_it_was_there(cell, here):
    shown = cell("def inner():\n    return {}['missing']\ninner()")
    assert type(shown.error).__name__ == "KeyError"
    told = "\n".join(shown.error._render_traceback_())
    assert "inner" in told
    assert "missing" in told
    assert "shell.py" not in told
    assert type(cell("def f(:").error).__name__ == "SyntaxError"


def test_variables_go_over_and_back_when_asked_and_of_any_size(cell, here, shell):
    shell.user_ns["numbers"] = list(range(5))
    shell.user_ns["large"] = b"x" * (3 * _cells_piece() + 1)
    assert (
        cell("total = sum(numbers); back = large[::-1]", "--send numbers,large --fetch total back").error
        is None
    )
    assert shell.user_ns["total"] == 10
    assert shell.user_ns["back"] == shell.user_ns["large"]
    shown = cell("total * 2", "--send total --out doubled")
    assert (shell.user_ns["doubled"], shown.stdout) == (20, "")
    shell.run_cell("def mine(x): return x + 1")
    assert "8" in cell("mine(7)", "--send mine").stdout


def _cells_piece() -> int:
    return checkpoint.PIECE


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--send nowhere", "--send nowhere: there is no variable of this name here."),
        ("--on first", "--on takes numbers of slices"),
        ("--gpus 1 --lease cells", "leave out --lease"),
        ("--fetch 1x", "'1x' is none"),
        ("--lese cells", "Did you mean --lease?"),
    ],
)
def test_a_line_that_is_wrong_is_told_in_one_sentence(shell, line, sentence):
    with pytest.raises(UsageError, match=sentence.replace("?", r"\?")):
        shell.run_cell_magic("gpupool", line, "1")


def test_what_cannot_come_back_is_named(cell, here):
    assert "--fetch nothing" in str(cell("1", "--fetch nothing").error)
    assert "lock" in str(cell("import threading; lock = threading.Lock()", "--fetch lock").error)
    assert isinstance(cell("1", "--on 7").error, PoolError)


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "while True: pass", "!sleep 60"])
def test_an_interrupt_stops_the_cell_and_nothing_else(cell, here, code, tmp_path):
    cell("kept = 1; import os; pid = os.getpid()")
    began = time.monotonic()
    with interrupt_when(tmp_path / "begun"):
        shown = cell(f"{begin(tmp_path)}\n{code}")
    assert isinstance(shown.error, KeyboardInterrupt)
    assert time.monotonic() - began < 20
    assert "True" in cell("kept == 1 and pid == os.getpid()").stdout


def test_an_interrupt_that_comes_before_the_cell_runs_stops_it_and_no_namespace(cell, here):
    cell("kept = 1")
    pid = int(cell("import os; print(os.getpid())").stdout)
    way = Way.open(here._pool.carry_out(_connection(here)), here.slices[0].id)
    os.kill(pid, signal.SIGSTOP)  # a moment between the order and the cell, as long as it takes
    try:
        way.send({"do": "run", "code": "import time\ntime.sleep(60)", "send": [], "fetch": [], "out": ""})
        assert way.inbox.get(timeout=20)[1]["say"] == "begins"
        way.send({"do": "interrupt"})
        time.sleep(0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    said = [way.inbox.get(timeout=20)[1] for _ in range(2)]
    way.close()
    assert (said[0]["name"], said[1]["say"]) == ("KeyboardInterrupt", "done")
    assert "(1, True)" in cell(f"kept, os.getpid() == {pid}").stdout


def test_the_end_of_a_cell_is_taken_for_no_other_s(cell, here):
    way = Way.open(here._pool.carry_out(_connection(here)), here.slices[0].id)
    order = {"do": "run", "send": [], "fetch": [], "out": ""}
    way.send({**order, "code": "1", "cell": "one"})
    for _ in range(2):
        way.send({"do": "interrupt"})  # before it began, or after
    way.send({**order, "code": "2", "cell": "two"})
    ends = []
    while not ends or ends[-1] != "two":
        said = way.inbox.get(timeout=20)[1]
        ends += [said["cell"]] if said["say"] == "done" else []
    way.close()
    assert ends == ["one", "two"]


def test_an_interrupt_while_a_cell_is_being_sent_stops_it(cell, here, monkeypatch):
    send = Way.send

    def interrupted(way, message):
        send(way, message)
        if message["do"] == "run" and "sleep" in message["code"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Way, "send", interrupted)
    assert isinstance(cell("import time; time.sleep(60)").error, KeyboardInterrupt)
    began = time.monotonic()
    assert cell("print('mine')").stdout == "mine\n"
    assert time.monotonic() - began < 30


@pytest.mark.asyncio
async def test_a_scheduler_that_takes_a_call_and_says_nothing_is_not_waited_for_without_end(monkeypatch):
    async def silent(_):
        await asyncio.sleep(60)

    monkeypatch.setattr(_cells, "REACH", 0.5)
    said = credentials()
    options = settings.security(said).get_listen_args("scheduler")
    async with listen("tls://127.0.0.1:0", silent, **options) as listener:
        with pytest.raises(_cells.Unreachable, match=r"has not said within 0\.5 s where slice a/0 is"):
            await _cells._open({**said, "address": listener.contact_address}, "a/0")


def test_a_cell_may_deal_with_an_interrupt_itself(cell, here, tmp_path):
    with interrupt_when(tmp_path / "begun"):
        shown = cell(
            "import time\n"
            f"try:\n    {begin(tmp_path)}; time.sleep(60)\n"
            "except KeyboardInterrupt:\n    time.sleep(4); print('saved')"
        )
    assert "saved" in shown.stdout, "although it took longer than C code would be given"


def test_c_code_that_takes_no_notice_is_ended_and_that_is_said_once(cell, here, shell, tmp_path):
    cell("kept = 1")
    with interrupt_when(tmp_path / "begun"):
        shown = cell(f"import itertools\n{begin(tmp_path)}\nsum(itertools.repeat(1, 10**12))")
    assert isinstance(shown.error, NamespaceLost)
    assert "C code in the cell" in str(shown.error)
    assert type(cell("kept").error).__name__ == "NameError", "the next cell runs, in an empty namespace"


#: As on a busy machine: the thread of the shell that speaks gets its turn late.
SLOW = """
import time
from jupyter_gpupool.lease.shell import LeaseShell

class Slow:
    def __init__(self, line): self.line = line
    def sendall(self, data): time.sleep(0.2); self.line.sendall(data)

LeaseShell.line._line = Slow(LeaseShell.line._line)
"""


def test_c_code_that_begins_at_once_is_ended_too(cell, here):
    cell(SLOW)
    way = Way.open(here._pool.carry_out(_connection(here)), here.slices[0].id)
    code = "sum(__import__('itertools').repeat(1, 10**12))"
    way.send({"do": "run", "code": code, "send": [], "fetch": [], "out": ""})
    assert way.inbox.get(timeout=20)[1]["say"] == "begins"
    time.sleep(0.5)
    way.send({"do": "interrupt"})
    said = way.inbox.get(timeout=20)[1]
    way.close()
    assert said["say"] == "lost"
    assert "C code in the cell" in said["why"]
    assert isinstance(cell("1").error, NamespaceLost)


def test_a_cell_may_answer_an_interrupt_with_c_code(cell, here, tmp_path):
    with interrupt_when(tmp_path / "begun"):
        shown = cell(
            "import ctypes, time\n"
            f"try:\n    {begin(tmp_path)}; time.sleep(60)\n"
            "except KeyboardInterrupt:\n    ctypes.PyDLL(None).sleep(4)\nprint('saved')"  # the GIL is kept
        )
    assert "saved" in shown.stdout, shown.error


def test_a_checkpoint_brings_back_what_was_lost_and_is_its_owner_s_alone(cell, here):
    assert cell("model = {'w': 1}; gpupool.checkpoint(model=model)").error is None
    path = checkpoint.folder(here.id) / "model.pickle"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = cell("import os; os._exit(3)")
    assert isinstance(shown.error, NamespaceLost)
    assert "status 3" in str(shown.error)
    assert "`gpupool.restore()` in a cell brings back model" in str(shown.error)
    assert "{'w': 1}" in cell("gpupool.restore()\nmodel").stdout
    assert "no checkpoint of other" in str(cell("gpupool.restore('other')").error)


def test_an_interrupt_loses_no_piece_of_a_checkpoint_wherever_it_hits(cell, here, monkeypatch):
    add = checkpoint.Writer.add

    def interrupted(writer, data, *, last):
        monkeypatch.setattr(checkpoint.Writer, "add", add)
        os.kill(os.getpid(), signal.SIGINT)
        add(writer, data, last=last)

    assert cell("gpupool.checkpoint(v='old')").error is None
    monkeypatch.setattr(checkpoint.Writer, "add", interrupted)
    shown = cell("gpupool.checkpoint(v='n' * 20_000_000)")
    assert isinstance(shown.error, KeyboardInterrupt)
    shown = cell("gpupool.restore('v'); len(v) in (3, 20_000_000)")
    assert "True" in shown.stdout, shown.error


def test_a_cell_may_close_its_standard_streams(cell, here):
    pid = int(cell("import os; print(os.getpid())").stdout)
    cell("os.close(1)")
    process = psutil.Process(pid)
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - before < 0.15, "nothing runs meanwhile"
    assert cell("print('still')").stdout == "still\n"
    assert isinstance(cell("os._exit(0)").error, NamespaceLost)  # others have a shell that has them


def test_what_the_first_cell_of_a_notebook_has_left_is_missed_when_it_is_gone(cell, lasting, shell):
    for magic in ("unload_ext", "load_ext"):
        shell.run_line_magic(magic, "jupyter_gpupool")  # as in a notebook that has not looked at the pool yet
    pid = int(cell("import os; print(os.getpid())", "--lease cells").stdout)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    assert isinstance(cell("os", "--lease cells").error, NamespaceLost)


def test_a_cell_has_a_client_of_the_whole_lease(cell, here):
    shown = cell("gpupool.client() is gpupool.client(), gpupool.client().submit(sum, [1, 2, 3]).result()")
    assert shown.error is None, shown.error
    assert "(True, 6)" in shown.stdout


def test_the_scheduler_passes_the_words_on_where_its_port_is_the_only_one_open(here, monkeypatch):
    connection = here._pool.carry_out(_connection(here))
    direct = Way.open(connection, here.slices[0].id)
    monkeypatch.setattr(_cells, "DIRECT", 0.0)
    passed = Way.open(connection, here.slices[0].id)
    try:
        assert (direct.direct, passed.direct) == (True, False)
        assert direct.hello["shell"] == passed.hello["shell"]
        for way in (direct, passed):
            way.send({"do": "run", "code": "6 * 7", "send": [], "fetch": [], "out": ""})
            said = [way.inbox.get(timeout=20)[1] for _ in range(3)]
            assert {"begins", "result", "done"} == {each["say"] for each in said}
    finally:
        direct.close()
        passed.close()


def test_only_the_lease_s_own_credentials_reach_a_shell(here, pool_of_others):
    ours = here._pool.carry_out(_connection(here))
    theirs = pool_of_others._pool.carry_out(_connection(pool_of_others))
    with pytest.raises(_cells.Unreachable):
        Way.open({**ours, **{name: theirs[name] for name in ("ca", "cert", "key")}}, here.slices[0].id)


@pytest.fixture
def pool_of_others(shared_pool):
    with shared_pool.request(gpus=1, name="other") as lease:
        yield lease


def _connection(lease):
    from jupyter_gpupool import _steps

    return _steps.connection(lease.data)


def test_a_notebook_that_goes_away_has_its_cell_stopped_and_others_wait_their_turn(here, cell):
    connection = here._pool.carry_out(_connection(here))
    way = Way.open(connection, here.slices[0].id)
    way.send({"do": "run", "code": "import time\ntime.sleep(60)", "send": [], "fetch": [], "out": ""})
    wait_until(lambda: not way.inbox.empty())

    def leave():
        said = "Another cell runs there"
        wait_until(lambda: said in getattr(sys.stderr, "getvalue", str)())  # what a cell shows is captured
        way.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    shown = cell("print('mine')")
    leaving.join()
    assert "Another cell runs there" in shown.stderr
    assert shown.stdout == "mine\n"


def test_two_interrupts_in_a_row_leave_no_slice_at_work_however_late_they_are_sent(
    cell, shared_pool, shell, tmp_path
):
    def press():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        # As on a busy machine: the thread that sends gets its turn late.
        _cells.Loop.get().loop.call_soon_threadsafe(time.sleep, 1.0)
        for _ in range(2):
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    with shared_pool.request(gpus=2, name="both"):
        pressing = threading.Thread(target=press)
        pressing.start()
        code = f"import os, time\nopen(f'{tmp_path}/{{os.getpid()}}', 'w').close()\ntime.sleep(600)"
        assert isinstance(cell(code, "--lease both --on all").error, KeyboardInterrupt)
        pressing.join()
        shown = cell("print('next')", "--lease both --on all")
    assert shown.stdout.count("next") == 2, shown.error


def test_a_cell_on_all_slices_says_which_has_said_what(cell, shared_pool, shell):
    with shared_pool.request(gpus=2, name="two"):
        shell.user_ns["seed"] = 5
        shown = cell(
            "import os\nprint('a\\nb')\nmine = os.environ['CUDA_VISIBLE_DEVICES']",
            "--lease two --on all --fetch mine --send seed",
        )
        assert shown.error is None
        assert sorted(shown.stdout.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
        assert len(set(shell.user_ns["mine"])) == 2
        assert cell("1/0", "--lease two --on 1").error is not None
        assert "[1]" in "".join(cell("1/0", "--lease two --on all").error._render_traceback_())


def test_a_lease_for_one_cell_is_given_back_after_it(cell, shared_pool, shell):
    before = {each.id for each in shared_pool.leases()}
    shown = cell("import os\nwho = os.getpid()\nprint('borrowed')", "--gpus 1 --fetch who")
    assert shown.stdout.endswith("borrowed\n")
    wait_until(lambda: {each.id for each in shared_pool.leases()} <= before)
    wait_until(lambda: not psutil.pid_exists(shell.user_ns["who"]))


def test_what_a_cell_leaves_running_ends_with_the_lease(cell, shared_pool, shell):
    with shared_pool.request(gpus=1, name="left"):
        code = "import subprocess\nleft = subprocess.Popen(['sleep', '600'], start_new_session=True).pid"
        cell(code, "--lease left --fetch left")
        assert psutil.pid_exists(shell.user_ns["left"])
    wait_until(lambda: not psutil.pid_exists(shell.user_ns["left"]))


@pytest.mark.parametrize(
    ("steps", "places"),
    [
        pytest.param([["a/0", "a/1"]], ["a/0", "a/1"], id="in their order"),
        pytest.param([["a/0", "a/1"], ["a/1", "a/2"]], ["a/2", "a/1"], id="a replacement takes the place"),
        pytest.param([["a/0", "a/1"], ["a/1"]], ["a/1"], id="without one the others move up"),
        pytest.param([["a/0"], ["a/0", "a/1"]], ["a/0", "a/1"], id="what is new comes last"),
    ],
)
def test_a_place_keeps_its_slice(steps, places):
    kept = Places()
    assert [kept.update(now) for now in steps][-1] == places


def test_a_failing_gpu_is_said_once_and_the_cells_go_on_elsewhere(cell, pool):
    with pool.request(gpus=1, name="fails") as lease:
        assert cell("x = 7; gpupool.checkpoint(x=x)", "--lease fails").error is None
        before = lease.slices[0].device_name
        embedded.machine().lose(before)
        shown = cell("x", "--lease fails")
        assert isinstance(shown.error, NamespaceLost), shown.error
        assert "`gpupool.restore()`" in str(shown.error)
        wait_until(lambda: [each.device_name for each in lease.refresh().slices] not in ([before], []))
        shown = cell("gpupool.restore()\nx", "--lease fails")
        if isinstance(
            shown.error, NamespaceLost
        ):  # the replacement's is another one than that of the first word
            shown = cell("gpupool.restore()\nx", "--lease fails")
        assert "7" in shown.stdout


def test_a_spoilt_context_costs_the_namespace_and_not_the_slice(cell, pool):
    with pool.request(gpus=1, name="spoilt") as lease:
        before = lease.slices[0].id
        code = "from jupyter_gpupool.driver.simulated import cuda\ncuda.fault('illegal_address')"
        shown = cell(code, "--lease spoilt")
        assert isinstance(shown.error, NamespaceLost)
        assert "CUDA context was spoilt" in str(shown.error)
        assert "2" in cell("1 + 1", "--lease spoilt").stdout
        assert [each.id for each in lease.refresh().slices] == [before]


def test_the_notebook_about_cells_runs_in_a_kernel_and_its_numbers_are_right(shared_pool):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLE, as_version=4)
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    shown = {
        output.output_type: output
        for each in notebook.cells
        if "sum(squares)\n" in each.source + "\n"
        for output in each.get("outputs", ())
    }
    assert shown["execute_result"].data["text/plain"] == "285"
    frames = [each for each in notebook.cells if "groupby" in each.source]
    assert "text/plain" in frames[0].outputs[-1].data
