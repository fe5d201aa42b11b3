"""The controller's process: `python -m jupyter_gpupool.controller --dir DIR`.

It has a journal, a certificate authority and its ports in DIR, and writes DIR/pool.json when it serves.
Ports, once chosen, are kept: leases, agents and people know them. One that is in use is an error, never
another port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import getpass
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dask

from jupyter_gpupool import service, wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_gpupool.controller.api import Api
    from jupyter_gpupool.controller.machine import Controller

FILE = "pool.json"
ADMIN = "admin.json"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.controller")
    parser.add_argument("--dir", required=True, type=Path, help="the controller's folder")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=0, help="of the HTTP API; 0: as before, at first any")
    parser.add_argument("--comm-port", type=int, default=0, help="of the agents; 0: as before, at first any")
    parser.add_argument("--name", default="", help="the name by which others reach this machine")
    parser.add_argument("--trust-users", action="store_true", help="people may share an OS user")
    parser.add_argument("--user-map", type=Path, help="YAML file: the OS users as whom people's leases run")
    parser.add_argument("--hub-api-url", default="", help="of a JupyterHub whose people are the pool's too")
    parser.add_argument("--hub-service", default="gpupool", help="the pool's name among the Hub's services")
    parser.add_argument(
        "--any-agents", action="store_true", help="start although agents of leases are not understood"
    )
    parser.add_argument(
        "--node-silence",
        type=float,
        default=0,
        metavar="SECONDS",
        help="give a node up after so long without a word; 0: as before, at first 60",
    )
    parser.add_argument("--log", default="", help="log file; empty: standard error")
    parser.add_argument(
        "--idle-exit",
        type=float,
        default=0,
        metavar="SECONDS",
        help="end the pool after so long without leases; 0: never",
    )
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace) -> None:
    """Run the controller until it is asked to end."""
    from jupyter_gpupool.controller import versions
    from jupyter_gpupool.controller.accounts import read_accounts
    from jupyter_gpupool.controller.auth import Authority
    from jupyter_gpupool.controller.machine import Controller
    from jupyter_gpupool.controller.store import Store

    store = Store(options.dir / "journal.sqlite")
    accounts = read_accounts(options.user_map)
    controller = Controller(store, Authority(options.dir), trust_users=options.trust_users, accounts=accounts)
    if why := "" if options.any_agents else versions.objection(store, controller.pool):
        await controller.close()
        service.give_up(why)
    service.on_signals(lambda: controller.stop("asked to end"))
    try:
        await controller.start(options.host, _port(options, controller, "comm"))
        api = _serve_people(options, controller)
    except OSError as error:
        await controller.close()
        service.give_up(
            f"The controller cannot listen: {error.strerror or error}. Choose another --host or --comm-port."
        )
    store.put("ports", {"api": api.port, "comm": _number(controller.address)})
    configure(options, controller)
    appoint(options.dir, controller)
    announce(options.dir, api.url, controller)
    watch = asyncio.create_task(_end_with_folder(controller, options))
    try:
        await _until_over(controller, options.idle_exit, (options.dir / service.STAY).exists)
    finally:
        watch.cancel()
        with contextlib.suppress(OSError):
            (options.dir / FILE).unlink()
        await api.close()
        await controller.close()


def configure(options: argparse.Namespace, controller: Controller) -> None:
    """Let the pool go by what the command line says of it, from now on."""
    from jupyter_gpupool.core.model import ConfigChanged

    pool, silence = controller.pool, round(options.node_silence * 1000)
    if silence and silence != pool.defaults.node_silence:
        defaults = dataclasses.replace(pool.defaults, node_silence=silence)
        now = controller.clock.now()
        controller.submit(
            ConfigChanged(now=now, cause="command line", projects=pool.projects, defaults=defaults)
        )


def _serve_people(options: argparse.Namespace, controller: Controller) -> Api:
    from jupyter_gpupool.controller import routes
    from jupyter_gpupool.controller.hub import Hub

    hub = Hub(options.hub_api_url, options.hub_service) if options.hub_api_url else None
    names = (options.host, *([options.name] if options.name else []))
    port = _port(options, controller, "api")
    return routes.serve(controller, options.host, port, names=names, name=options.name, hub=hub)


def _port(options: argparse.Namespace, controller: Controller, which: str) -> int:
    wanted = options.comm_port if which == "comm" else options.port
    return int(wanted or controller.store.get("ports", {}).get(which, 0)) or service.free_port()


def _number(address: str) -> int:
    return int(address.rpartition(":")[2])


def announce(folder: Path, url: str, controller: Controller) -> None:
    """Write where the pool is, for whoever starts or looks for it on this machine."""
    from jupyter_gpupool.controller.auth import write_private

    ca = controller.authority.ca_pem
    data = {"url": url, "ca": ca, "comm": controller.address, "pid": os.getpid()}
    write_private(folder / FILE, json.dumps(data))


def appoint(folder: Path, controller: Controller) -> None:
    """Make whoever starts the pool its owner and first administrator, by a token in a file only for them.

    A pool whose agents cannot switch users serves its owner, whoever starts its controller later.
    """
    from jupyter_gpupool.controller.auth import write_private

    path, user = folder / ADMIN, getpass.getuser()
    if not path.exists():
        token = controller.tokens.create(user, ("admin",), label="who started the pool")
        write_private(path, json.dumps({"user": user, "token": token}))
    if controller.store.get("owner") is None:
        controller.store.put("owner", json.loads(path.read_text(encoding="utf-8"))["user"])


async def _end_with_folder(controller: Controller, options: argparse.Namespace) -> None:
    await service.until_deleted(options.dir, "controller", options.claimed)
    controller.stop("its folder was deleted", everything=True)


async def _until_over(controller: Controller, idle_exit: float, stay: Callable[[], bool]) -> None:
    """Wait until the controller is stopped, or until there have been no leases for long enough."""
    since = time.monotonic()
    while not controller.stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(controller.stopped.wait(), 5 if idle_exit else None)
        if controller.busy or stay():
            since = time.monotonic()
        elif idle_exit and time.monotonic() - since > idle_exit:
            controller.stop(f"no leases for {idle_exit:g} s", everything=True)
            await controller.stopped.wait()


def main(arguments: list[str] | None = None) -> None:
    """Run the process."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    options.dir = options.dir.absolute()
    try:
        options.claimed = service.claim(options.dir, "controller")
    except OSError as error:
        service.give_up(error)
    service.log_to(options.log)
    dask.config.set(wire.SETTINGS)
    wire.close_comms()
    from jupyter_gpupool.controller.api import ApiError
    from jupyter_gpupool.controller.records import StoreError

    try:
        asyncio.run(serve(options))
    except (StoreError, ApiError, ValueError) as error:
        service.give_up(error)
    os.close(options.claimed)


if __name__ == "__main__":
    main()
