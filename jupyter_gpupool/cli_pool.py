"""The sub-commands of `jupyter gpupool` that run a pool rather than use one.

Rule 1: controller, agents and driver are started or imported inside a command, never when this is imported.
Rule 2: each returns what is to be said; nothing here prints.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jupyter_gpupool import display, tables
from jupyter_gpupool._http import Call, Connection, PoolError, Trouble, get
from jupyter_gpupool.commands import Argument, Command, Misuse, number
from jupyter_gpupool.core.model import Reason

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from jupyter_gpupool.client import Pool


def option(flags: str, help: str, metavar: str = "", **options: Any) -> Argument:  # noqa: A002 - argparse's word
    """An option, or a positional argument, of a command of the terminal; without a metavar, a switch."""
    flag, *more = flags.split()
    name = options.pop("name", flag.lstrip("-").replace("-", "_"))
    if not metavar and flag.startswith("-"):
        options.setdefault("action", "store_true")
    return Argument(flags=(flag, *more), name=name, help=help, metavar=metavar, options=options)


# ------------------------------------------------------------------------------------------------ start, stop


def _start(_: None, args: Namespace) -> Any:
    from jupyter_gpupool import embedded

    listen = {"host": args.host, "port": args.port, "comm_port": args.comm_port, "name": args.name}
    listen |= {"trust_users": args.trust_users, "hub_api_url": args.hub_api_url}
    listen |= {"user_map": args.user_map and str(Path(args.user_map).absolute())}
    if args.host in ("0.0.0.0", "::") and not args.name:  # noqa: S104 - the administrator's wish
        listen["name"] = _own_name()
    nodes = {socket.gethostname().partition(".")[0]: 0} if args.no_gpus else _simulated(args.simulate)
    embedded.may_start({**listen, "name": args.name}, nodes)
    address = embedded.start(listen=listen, nodes=nodes, idle_exit=0)
    with contextlib.closing(Connection(address)) as connection:
        if args.node_silence:
            _set_default(connection, "node_silence", args.node_silence)
        status = connection.send(get("/v1/pool", "gpus"))
        lines = {kind: embedded.line(connection, kind) for kind in ("agent", "login")}
    return Started({**status, **lines, "url": address.url})


def _set_default(connection: Connection, name: str, value: str) -> None:
    """Put another number in place of one of the pool's defaults; the others stay as they are.

    Raises:
        PoolError: It is no such number; the pool runs on with the one it had.
    """
    defaults = connection.send(get("/v1/projects", "defaults"))["defaults"]
    body = {"defaults": {**defaults, name: value}}
    connection.send(Call(method="PUT", path="/v1/projects", body=body))


def _simulated(text: str | None) -> dict[str, Any] | None:
    """Read "2x4" or "2x4:A100-40GB": nodes, GPUs of each, and their model.

    Raises:
        Misuse: It is something else.
    """
    if text is None:
        return None
    shape, _, model = text.partition(":")
    nodes, cross, each = shape.partition("x")
    if not cross or not nodes.isdigit() or not each.isdigit() or not int(nodes) or not int(each):
        raise Misuse(f"--simulate {text} is not NODESxGPUS: write 2x4, or 2x4:A100-40GB for another model.")
    many = int(each)
    return {f"node-{n}": [model] * many if model else many for n in range(1, int(nodes) + 1)}


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ArgumentTypeError(f"{text!r} is no port: give a number from 1 to 65535")
    return int(text)


def _own_name() -> str:
    """Return a name or an address by which others reach this machine."""
    name = socket.getfqdn()
    if name.partition(".")[0] != "localhost":
        return name
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address of documentation; nothing is sent
        return str(probe.getsockname()[0])
    return socket.gethostname()


#: Where only this machine reaches a pool.
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Started(dict[str, Any]):
    """A pool that runs, and the lines by which others come to it."""

    def __repr__(self) -> str:
        return "\n".join(
            [
                f"The pool runs at {self['url']}.",
                *display.pool_words(self),
                "",
                *self._reach(),
                "A machine with GPUs joins it with (once each; a new line: `jupyter gpupool start` again):",
                f"    jupyter gpupool agent {self['agent']}",
                "You use it from elsewhere after (once; others: `jupyter gpupool token new USER`):",
                f"    jupyter gpupool login {self['login']}",
            ]
        )

    def _reach(self) -> list[str]:
        """Say that nobody comes from other machines, where that is so: the lines would not work there."""
        if urlsplit(self["url"]).hostname not in _LOOPBACK:
            return []
        return [
            "It listens on this machine only. For others to come: `jupyter gpupool stop`, then",
            "`jupyter gpupool start --host 0.0.0.0`. Until then the lines below work on this machine only.",
        ]


def _stop(_: None, args: Namespace) -> str:
    from jupyter_gpupool import embedded

    if not embedded.stop(keep_leases=args.keep_leases):
        return "No pool runs on this machine."
    if args.keep_leases:
        return "Controller and agents have ended. Leases go on; `jupyter gpupool start` takes them back."
    return "The pool has ended, with all its leases."


# -------------------------------------------------------------------------------------------- backup, restore


def _backup(_: None, args: Namespace) -> str:
    from jupyter_gpupool.controller.backup import backup

    return _journaled(lambda: backup(journal(args), args.file), f"{args.file} is a good backup with {{}}.")


def _put_back(_: None, args: Namespace) -> str:
    from jupyter_gpupool.controller.backup import put_back

    said = "The pool goes on from {} at its next start; what was there before is kept beside it."
    return _journaled(lambda: put_back(args.file, journal(args)), said)


def _journaled(work: Callable[[], dict[str, Any]], said: str) -> str:
    """Do something with the journal and say so; what is wrong with it is one sentence."""
    from jupyter_gpupool.controller.store import StoreError

    try:
        found = work()
    except StoreError as error:
        raise PoolError(Reason.STORE_FAILED, str(error)) from error
    return said.format(f"all that happened up to event {found['last']}")


def journal(args: Namespace) -> Path:
    """The journal that a command is about: in `--dir`, or of the pool on this machine."""
    from jupyter_gpupool import embedded

    return Path(args.dir or embedded.directory() / "controller") / "journal.sqlite"


# ----------------------------------------------------------------------------------------------- agent, login


def _agent(_: None, args: Namespace) -> None:
    command = [sys.executable, "-m", "jupyter_gpupool.node", "--dir", args.dir or _agent_folder()]
    environment = {**os.environ, **({"GPUPOOL_JOIN": _line(args)} if args.line else {})}
    for option in ("name", "address", "interface", "ports", "log"):
        if getattr(args, option):
            command += [f"--{option}", getattr(args, option)]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)  # noqa: S606 - this process becomes the agent


def _line(args: Namespace) -> str:
    """The line that was given; "-": one that is pasted, or comes through a pipe."""
    if args.line != "-":
        return str(args.line)
    return getpass.getpass("The line: ") if sys.stdin.isatty() else sys.stdin.readline().strip()


def _agent_folder() -> str:
    from jupyter_core.paths import jupyter_data_dir

    return os.path.join(jupyter_data_dir(), "gpupool-agent")  # noqa: PTH118 - a text is what is needed


def _login(_: None, args: Namespace) -> str:
    from jupyter_gpupool._find import save
    from jupyter_gpupool._login import login

    address, user = login(_line(args))
    path = save(address)
    return f"You are {user} of the pool at {address.url}. {path} says so from now on."


# --------------------------------------------------------------------------------------------------- simulate


def _simulate(_: None, args: Namespace) -> Any:
    from jupyter_gpupool import embedded

    if args.action != "show":
        _device(args)
    machine = embedded.machine()
    try:
        return _SIMULATE[args.action](machine, args)
    except Misuse:
        raise
    except ValueError as error:
        raise PoolError(
            Trouble.NOT_SIMULATED, f"{str(error)[:1].upper()}{str(error)[1:].rstrip('.')}."
        ) from None


def _device(args: Namespace) -> str:
    if not args.device:
        raise Misuse(f"jupyter gpupool simulate {args.action} needs a device, such as gpu3 or node-1/gpu3.")
    return str(args.device)


def _fail(machine: Any, args: Namespace) -> str:
    machine.fail(_device(args), args.xid)
    return (
        f"{args.device} now has XID {args.xid}. `jupyter gpupool simulate restore {args.device}` repairs it."
    )


def _restore(machine: Any, args: Namespace) -> str:
    machine.restore(_device(args))
    return f"{args.device} is whole again."


def _hang(machine: Any, args: Namespace) -> str:
    machine.hang(_device(args), args.seconds)
    return f"The driver's calls on {args.device} hang for {args.seconds:g} s."


#: What a driver says in the place of a reading that this GPU has not.
_UNREAD = "not supported"


def _set(machine: Any, args: Namespace) -> str:
    name, equals, value = (args.value or "").partition("=")
    if not equals:
        raise Misuse(
            "jupyter gpupool simulate set needs a device and FIELD=VALUE, such as gpu3 temperature=95."
        )
    reading = number(value) if value else None
    if isinstance(reading, str) and reading != _UNREAD:
        raise Misuse(f"{value!r} is no reading: give a number, such as {name}=95, or {name}= for as it is.")
    machine.set(_device(args), name, reading)
    return f"{args.device}: {name} reads {value or 'as it is'} now; the pool looks every 15 s."


def _show(machine: Any, _: Namespace) -> tables.Rows:
    columns: tuple[tables.Column, ...] = (
        ("device", lambda row: f"{row['node']}/gpu{row['index']}"),
        ("model", lambda row: row["model"]),
        ("lost", lambda row: "lost" if row["lost"] else ""),
        ("reads", lambda row: ", ".join(f"{name}={value}" for name, value in row["set"].items())),
        ("uuid", lambda row: row["uuid"]),
    )
    return tables.Rows(
        [machine.describe(each) for each in machine.devices()], columns, note=display.SIMULATED
    )


_SIMULATE = {"fail": _fail, "restore": _restore, "hang": _hang, "set": _set, "show": _show}


# ----------------------------------------------------------------------------------------- for administrators


def _token(pool: Pool, args: Namespace) -> Any:
    if args.action == "list":
        return display.token_rows(pool.get("/v1/tokens"))
    if not args.who:
        raise Misuse(
            f"jupyter gpupool token {args.action} needs {'a user' if args.action == 'new' else 'an id'}."
        )
    if args.action == "revoke":
        path = f"/v1/tokens/{args.who}" + ("?restart=true" if args.restart else "")
        return f"The token {args.who} is worthless now.{_keys_words(pool.call('DELETE', path))}"
    scopes = ["read", "use", "admin"] if args.admin else ["read", "use"]
    made = pool.call("POST", "/v1/tokens", {"kind": "login", "user": args.who, "scopes": scopes})
    warning = f"{made['warning']}\n" if made.get("warning") else ""
    return f"{warning}{args.who} logs in with:\n    jupyter gpupool login {made['line']}"


def _keys_words(said: dict[str, Any]) -> str:
    """Say which leases' keys a revoked token's person has had."""
    kept = " and ".join(f"{each['name']} of {each['user']}" for each in said["kept"])
    anew = ", ".join(each["name"] for each in said["restarted"])
    words = f" On new keys: {anew}." if anew else ""
    if kept:
        ways = " ".join(each["id"] for each in said["kept"])
        words += (
            f" Whoever had it may have the keys of {kept}, which open these until they end or start anew: "
            f"`{_PROG} release {ways}`, or for each `{_PROG} share LEASE [USER …] --restart`."
        )
    return words


def _remove(pool: Pool, args: Namespace) -> str:
    pool.call("DELETE", f"/v1/agents/{args.node}")
    return (
        f"The agent of {args.node} cannot come back, and its work moves when the node is given up."
        f" `{_PROG} start` prints a line for it to join anew."
    )


def _drill(pool: Pool, args: Namespace) -> str:
    if args.end:
        return f"{pool.undrill(args.device)} is whole again."
    name = pool.drill(args.device, args.xid)
    over = f"`{_PROG} drill {name} --end` ends the drill."
    return f"{name} now has XID {args.xid}; its work moves away. {over}"


def _set_projects(pool: Pool, args: Namespace) -> Any:
    return pool.set_projects(**projects_file(args.file))


def projects_file(file: str) -> dict[str, Any]:
    """Read a file of projects and defaults.

    Raises:
        Misuse: It cannot be read, or is something else.
    """
    import yaml

    try:
        said = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise Misuse(f"{file} cannot be read: {why}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise Misuse(f"{file} is not YAML{f', see line {mark.line + 1}' if mark else ''}.") from error
    said = {"projects": said} if isinstance(said, list) else said
    if not isinstance(said, dict) or not said or set(said) - {"projects", "defaults"}:
        raise Misuse(
            f"{file} must have `projects:`, such as `projects: [{{name: vision, quota: 4}}]`, or"
            " `defaults:`, such as `defaults: {grace: 5m}`."
        )
    return said


def _get_projects(pool: Pool, _: Namespace) -> str:
    import yaml

    return str(yaml.safe_dump(pool.configuration(), sort_keys=False, allow_unicode=True)).rstrip()


_PROG = "jupyter gpupool"
_FOLDER = option("--dir", "the controller's folder (default: that of the pool on this machine)", "PATH")

#: What only a terminal has, in the order in which it is needed.
OWN: tuple[Command, ...] = (
    Command(
        name="start",
        help="Start a pool on this machine, and print the lines by which others come to it.",
        arguments=(
            option("--host", "listen here for people and agents (default: 127.0.0.1)", "ADDRESS"),
            option(
                "--port",
                "of the HTTP API (default: any that is free; the same again later)",
                "PORT",
                type=_port,
            ),
            option("--comm-port", "for agents (default: as above)", "PORT", type=_port),
            option("--name", "the name by which others reach this machine", "NAME"),
            option(
                "--simulate", 'simulate GPUs even where there are real ones: "2x4" nodes and GPUs', "SHAPE"
            ),
            option("--hub-api-url", "the people of this JupyterHub are the pool's too", "URL"),
            option("--trust-users", "serve many people even where leases cannot run as their OS users"),
            option("--user-map", "YAML of NAME: OS-USER: as whom the leases of people run", "FILE"),
            option("--node-silence", "give a node up after so long without a word (at first: 60s)", "TIME"),
            option("--no-gpus", "this machine has none to give; it only runs the pool for others"),
        ),
        run=_start,
        pool=False,
    ),
    Command(
        name="stop",
        help="End the pool on this machine, with all its leases.",
        arguments=(option("--keep-leases", "end controller and agents only, say for an upgrade"),),
        run=_stop,
        pool=False,
    ),
    Command(
        name="backup",
        help="Copy the journal of the pool on this machine, which may run meanwhile, to a new file.",
        arguments=(option("file", "the new file; keep it safe, leases' keys are in it", "FILE"), _FOLDER),
        run=_backup,
        pool=False,
    ),
    Command(
        name="restore",
        help="Put a backup in the place of the journal of the pool on this machine, which must not run.",
        arguments=(option("file", "the backup", "FILE"), _FOLDER),
        run=_put_back,
        pool=False,
    ),
    Command(
        name="agent",
        help="Let this machine join a pool with its GPUs (runs until it is ended).",
        arguments=(
            option(
                "line",
                "the line that `jupyter gpupool start` printed (not needed again), or - to paste it",
                "LINE",
                nargs="?",
            ),
            option("--name", "the node's name (default: the host's)", "NAME"),
            option("--dir", "the agent's files (default: in Jupyter's data folder)", "PATH"),
            option("--address", "by which other machines reach this one", "ADDRESS"),
            option("--interface", "leases listen on this interface only", "NAME"),
            option("--ports", "leases take their ports from these: 40000-40999", "FIRST-LAST"),
            option("--log", "write here instead of to standard error", "FILE"),
        ),
        run=_agent,
        pool=False,
    ),
    Command(
        name="login",
        help="Make a pool the one that you use from this account.",
        arguments=(option("line", "the line that an administrator gave you, or - to paste it", "LINE"),),
        run=_login,
        pool=False,
    ),
    Command(
        name="simulate",
        help="Break simulated GPUs, and repair them.",
        arguments=(
            option("action", ", ".join(_SIMULATE), "ACTION", choices=list(_SIMULATE)),
            option("device", "gpu3, node-1/gpu3 or a UUID", "DEVICE", nargs="?"),
            option(
                "value",
                "FIELD=VALUE, for set: temperature=95, ecc_uncorrected=1, remap_pending=1 …",
                "VALUE",
                nargs="?",
            ),
            option(
                "--xid",
                "what the driver announces (default: 79, fallen off the bus)",
                "N",
                type=int,
                default=79,
            ),
            option("--seconds", "for hang (default: 60)", "S", type=float, default=60.0),
        ),
        run=_simulate,
        pool=False,
    ),
    Command(
        name="token",
        help="Let people in, or out again.",
        arguments=(
            option("action", "new USER, list, revoke ID", "ACTION", choices=["new", "list", "revoke"]),
            option("who", "a user, or the id of a token", "WHO", nargs="?"),
            option("--admin", "the user may change the pool and see everybody's leases"),
            option(
                "--restart",
                "revoke: the leases whose keys the token's person has had start anew on new keys (of others' "
                "leases only if an administrator says it); what they compute and hold is lost",
            ),
        ),
        run=_token,
    ),
    Command(
        name="remove",
        help="Shut a node's agent out for good: its certificate is worthless from now on.",
        arguments=(option("node", "its name; drain it first, so that its work moves", "NODE"),),
        run=_remove,
    ),
    Command(
        name="set-projects",
        help="Put the projects with quotas, or the defaults, that a file has in place of the present ones.",
        arguments=(
            option("file", "YAML: projects under `projects:`, numbers for all under `defaults:`", "FILE"),
        ),
        run=_set_projects,
    ),
    Command(
        name="get-projects",
        help="Write the present projects and defaults as a file for set-projects.",
        run=_get_projects,
    ),
    Command(
        name="drill",
        help="Break a GPU for practice, to see its work move; on real GPUs only the pool believes it.",
        arguments=(
            option("device", "gpu3, node-1/gpu3 or a UUID", "DEVICE"),
            option("--xid", "which fault (default: 79, fallen off the bus)", "N", type=int, default=79),
            option("--end", "end the drill: the GPU is whole again"),
        ),
        run=_drill,
    ),
)
