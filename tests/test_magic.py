"""`%gpupool` in a real IPython shell."""

from __future__ import annotations

import _thread
import getpass
import subprocess
import sys
import threading
import time

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_gpupool import Pool, PoolError, embedded
from jupyter_gpupool.commands import COMMANDS, parser_of
from jupyter_gpupool.completion import Completer
from jupyter_gpupool.display import Overview
from tests.conftest import environment, wait_until


@pytest.fixture(scope="module")
def shell(session_folder):
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "jupyter_gpupool")
    yield shell
    shell.run_line_magic("unload_ext", "jupyter_gpupool")
    InteractiveShell.clear_instance()


@pytest.fixture
def gpupool(shell):
    return lambda line="": shell.run_line_magic("gpupool", line)


def test_loading_it_imports_nothing_heavy_and_takes_no_time():
    code = (
        "import sys, time; from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance(); before = set(sys.modules)\n"
        "shell.run_line_magic('load_ext', 'jupyter_gpupool')\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(),
    ).stdout.split()
    for heavy in ("httpx", "distributed", "dask", "tornado", "ipywidgets", "yaml", "pynvml", "psutil"):
        assert heavy not in loaded
    assert "jupyter_gpupool.magic" in loaded


def test_it_says_what_there_is(gpupool, shell):
    for line in ("", "help"):
        assert all(f"%gpupool {each.name} " in repr(gpupool(line)) for each in COMMANDS)
    assert "--gpus" in repr(gpupool("help request"))
    assert repr(gpupool("request --help")) == repr(gpupool("help request"))
    assert "--fetch" in repr(gpupool("help cell"))
    assert "`%gpupool help cell`" in repr(gpupool("help")), (
        "IPython runs no `%%gpupool --help` without a cell"
    )
    shown = shell.object_inspect_text("%gpupool", 0)
    assert "%gpupool request" in shown
    assert "--fetch" in shell.object_inspect_text("%%gpupool", 0)


def test_an_administrator_takes_a_gpu_out_and_back(gpupool, pool):
    assert repr(gpupool('drain gpu1 --why "driver upgrade"')).startswith("node-1/gpu1 takes no new work")
    assert pool.devices()[1]["cordoned"] == "driver upgrade"
    gpupool("undrain gpu1")
    assert pool.status().gpus_free == 8


def test_status_is_an_object_that_shows_itself(gpupool, pool):
    value = gpupool("status")
    assert isinstance(value, Overview)
    assert value["pool"].gpus == 8
    assert "simulated" in repr(value)
    assert "node-1/gpu0" in value._repr_html_()


def test_a_lease_from_request_to_release(gpupool, pool, shell):
    lease = gpupool("request --gpus 2 --time 1h --name sweep")
    assert lease.state == "active"
    assert len(lease.slices) == 2
    assert lease.data["interactive"], "requests from a notebook are, unless they say otherwise"
    assert lease.client().submit(sum, [1, 2]).result(timeout=30) == 3
    assert [each.name for each in gpupool("leases")] == ["sweep"]
    assert gpupool("why").sentences
    before = lease.ends_at
    assert gpupool("extend --by 30m").ends_at == pytest.approx(before + 1800, abs=2)
    assert gpupool("keep sweep").state == "active"
    assert "scheduler" in gpupool("logs")
    assert repr(gpupool("release")) == "Released: sweep."
    assert lease.refresh().state in ("draining", "ended")


def test_what_comes_of_it_can_be_stored_in_a_variable(gpupool, pool, shell):
    assert gpupool("request --gpus 1 --name one --out mine") is None
    assert shell.user_ns["mine"].name == "one"
    shell.user_ns.pop("mine")
    assert gpupool("use one").id == pool.lease("one").id, "as after a restart of the kernel"
    shell.run_cell("name = 'one'")
    shell.run_cell("%gpupool release $name")
    assert pool.lease("one").state in ("draining", "ended")
    with pytest.raises(UsageError, match="'1x' is none"):
        gpupool("status --out 1x")


def test_a_command_that_names_no_lease_is_about_the_one_that_was_requested_here(gpupool, pool):
    gpupool("request --gpus 1 --name here")
    pool.request(gpus=1, name="elsewhere")
    assert gpupool("keep").name == "here"
    gpupool("use elsewhere")
    assert gpupool("keep").name == "elsewhere"
    assert gpupool("scale 1").name == "elsewhere"
    gpupool("release here")
    assert gpupool("keep").name == "elsewhere", "another one was released"
    gpupool("release")
    with pytest.raises(PoolError, match="You have no lease"):
        gpupool("keep")


def test_no_cell_begins_on_a_lease_that_was_released_here(gpupool, pool, shell):
    gpupool("request --gpus 1 --name brief")
    shell.run_cell_magic("gpupool", "", "pass")
    gpupool("release")
    with pytest.raises(PoolError, match="You have no lease"):
        shell.run_cell_magic("gpupool", "", "pass")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("requst", "%gpupool has no command 'requst'. Did you mean request?"),
        ("request --gpu 2", "%gpupool request has no option --gpu. Did you mean --gpus?"),
        ("request 2", "%gpupool request does not take '2' here. Its options: `%gpupool request --help`."),
        ("request --name 'x", "The line cannot be read (No closing quotation): close the quote."),
        (
            "share",
            ("%gpupool share: LEASE is missing. Its options: `%gpupool share --help`."),
        ),
        ("release --all one", "release takes leases or --all, not both."),
        ("start", "%gpupool has no command 'start': in a terminal it is `jupyter gpupool start`."),
        ("help frobnicate", "%gpupool has no command 'frobnicate'. See `%gpupool help`."),
    ],
)
def test_a_mistake_teaches(gpupool, line, sentence):
    with pytest.raises(UsageError) as no:
        gpupool(line)
    assert str(no.value) == sentence


def test_options_stand_where_a_person_writes_them(gpupool):
    share = next(each for each in COMMANDS if each.name == "share")
    said = parser_of(share, "share").parse_args(["mine", "--restart", "ben"])
    assert (said.lease, said.users, said.restart) == ("mine", ["ben"], True)


def test_a_no_is_one_sentence_and_fails_the_cell(shell, pool, capsys):
    outcome = shell.run_cell("%gpupool request --gpus 9")
    said = capsys.readouterr()
    assert isinstance(outcome.error_in_exec, PoolError), "so that 'run all' stops"
    shown = (said.out + said.err).strip()
    assert "GPUPool" in shown
    assert "there are at most 8" in shown
    assert shown.count("\n") == 0


def test_a_no_of_the_python_calls_is_one_sentence_too(shell, pool, capsys):
    outcome = shell.run_cell("from jupyter_gpupool import Pool\nPool().request(gpus=9)")
    said = capsys.readouterr()
    assert isinstance(outcome.error_in_exec, PoolError)
    shown = (said.out + said.err).strip()
    assert "there are at most 8" in shown
    assert shown.count("\n") == 0


def test_ctrl_c_while_it_waits_withdraws_the_request(shell, pool, capsys):
    pool.request(gpus=8)

    def press():
        with Pool(start=False) as other:
            wait_until(lambda: "impatient" in [lease.name for lease in other.leases()])
            time.sleep(1)
        _thread.interrupt_main()

    threading.Thread(target=press).start()
    outcome = shell.run_cell("%gpupool request --gpus 1 --name impatient")
    assert isinstance(outcome.error_in_exec, KeyboardInterrupt)
    err = capsys.readouterr().err
    assert "Lease impatient: place 1 in the queue (" in err, "what it waited for was shown"
    assert "The request is withdrawn." in err
    assert "impatient" not in [lease.name for lease in pool.leases()]


TABS = {
    "%gpupool re": {"reclaims", "release", "request", "retire"},
    "lease = %gpupool req": {"request"},
    "%gpupool help re": {"reclaims", "release", "request", "retire"},
    "%gpupool request --mod": {"--model"},
    "%gpupool request --gpus 2 --pro": {"--project"},
    "%gpupool request --model H": {"H100-80GB"},
    "%gpupool request --model=H": {"H100-80GB"},
    "%gpupool request --project ": {"default"},
    "%gpupool request --node ": {"node-1", "node-2"},
    "%gpupool release ta": {"tabbed"},
    "%gpupool release x ta": {"tabbed"},
    "%gpupool request --with": {"--with-kernel"},
    "%gpupool why ": {"tabbed"},
    "%gpupool scale ta": {"tabbed"},
    "%gpupool scale --out x ta": {"tabbed"},
    "%gpupool share tabbed ": {getpass.getuser()},
    "%gpupool cordon node-1": {"node-1", *(f"node-1/gpu{n}" for n in range(4))},
    "%gpupool health node-2/gpu3": {"node-2/gpu3"},
    "%gpupool leases ": {"--all", "--ended", "--out"},
    "%gpupool scale tabbed ": set(),
    "%gpupool help ce": {"cell"},
    "%%gpupool ": {"--fetch", "--gpus", "--lease", "--on", "--out", "--send"},
    "%%gpupool --le": {"--lease"},
    "%%gpupool --lease ta": {"tabbed"},
    "%%gpupool --on ": {"0", "all"},
    "%%gpupool --send weigh": {"weights"},
    "%%gpupool --send data weigh": {"weights"},
    "%%gpupool --on 0 --fetch weigh": {"weights"},
}


def completions(shell, text):
    """What Tab offers; nothing of ours is followed by what IPython has for any line."""
    with provisionalcompleter():
        found = {each.text for each in shell.Completer.completions(text, len(text))}
    return found if "%%gpupool" not in found else set()


def test_tab_completes_commands_options_and_what_the_pool_has(shell, pool):
    pool.request(gpus=1, name="tabbed", wait=False)
    shell.push({"weights": [1, 2]})
    assert {text: completions(shell, text) for text in TABS} == TABS


class Partitioned:
    """A pool two of whose devices are in MIG mode."""

    def devices(self):
        return [{"profiles": ["1g.10gb", "2g.20gb"]}, {"profiles": []}, {"profiles": ["1g.10gb"]}]


def test_tab_completes_the_mig_profiles_that_devices_offer():
    completer = Completer({each.name: each for each in COMMANDS}, Partitioned)
    assert completer._known(["request", "--mig"], "") == ["1g.10gb", "2g.20gb"]


def test_tab_starts_no_pool_and_fails_silently(own_folder, shell, gpupool):
    shell.run_line_magic("unload_ext", "jupyter_gpupool")
    shell.run_line_magic("load_ext", "jupyter_gpupool")
    assert "tabbed" not in completions(shell, "%gpupool release ta")
    assert embedded.processes() == {}


def test_its_settings_are_the_shells(shell, gpupool, pool):
    shell.run_line_magic("config", "GPUPool.time_limit = '30m'")
    shell.run_line_magic("config", "GPUPool.interactive = False")
    try:
        lease = gpupool("request --gpus 1")
        assert 1700 < lease.ends_at - time.time() <= 1800
        assert not lease.data["interactive"]
        assert "%config GPUPool.time_limit = '30m'" in repr(gpupool("config"))
        assert "the embedded pool of this machine" in repr(gpupool("config"))
    finally:
        shell.run_line_magic("config", "GPUPool.time_limit = ''")
        shell.run_line_magic("config", "GPUPool.interactive = True")
        gpupool("release")


def test_unloading_it_leaves_nothing_behind_but_leases(shell, gpupool, pool):
    gpupool("request --gpus 1 --name stays")
    shell.run_cell_magic("gpupool", "", "pass")
    matchers = len(shell.Completer.custom_matchers)
    shell.run_line_magic("unload_ext", "jupyter_gpupool")
    assert shell.find_line_magic("gpupool") is None
    assert shell.find_cell_magic("gpupool") is None
    assert "GPUPool" not in shell.magics_manager.registry
    assert len(shell.Completer.custom_matchers) == matchers - 1
    assert "gpupool-cells" not in [each.name for each in threading.enumerate()]
    assert not [each for each in shell.configurables if type(each).__name__ == "GPUPool"]
    shell.run_line_magic("load_ext", "jupyter_gpupool")
    assert pool.lease("stays").state == "active"
