"""The agent's process: `python -m jupyter_gpupool.node --dir DIR`, at first with `--join LINE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dask

from jupyter_gpupool import service, wire

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from jupyter_gpupool.node.agent import Agent

logger = logging.getLogger(__name__)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.node")
    parser.add_argument("--dir", required=True, type=Path, help="the agent's folder")
    parser.add_argument("--name", default="", help="the node's name in the pool (this host's)")
    parser.add_argument("--join", default="", metavar="LINE", help="join with the line of the controller")
    parser.add_argument("--head", action="store_true", help="run the schedulers of all leases")
    parser.add_argument("--address", default="", help="by which other machines reach this one")
    parser.add_argument("--interface", default="", help="interface or address on which leases listen")
    parser.add_argument(
        "--ports", type=_ports, default=None, metavar="FIRST-LAST", help="that leases may take"
    )
    parser.add_argument("--cpus", type=float, default=0, help="cores for leases; 0: all")
    parser.add_argument("--memory", type=int, default=0, help="bytes of memory for leases; 0: all")
    parser.add_argument("--interval", type=float, default=0, help="seconds between two readings")
    parser.add_argument(
        "--alone", type=float, default=0, help="seconds without an agent after which leases end; 0: a day"
    )
    parser.add_argument("--log", default="", help="log file; empty: standard error")
    return parser.parse_args(arguments)


def _ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        ports = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of ports: write 40000-40999") from None
    if not 0 < ports[0] <= ports[1] < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of ports: write 40000-40999")
    return ports


async def serve(options: argparse.Namespace) -> None:
    """Run the agent until it is asked to end."""
    from jupyter_gpupool.node.agent import Agent, Settings
    from jupyter_gpupool.node.membership import join, load

    name = options.name or socket.gethostname()
    # By a variable where others may be on this machine: a command line is for everybody to read.
    line = options.join or os.environ.pop("GPUPOOL_JOIN", "")
    member = join(options.dir, line, name) if line else load(options.dir)
    address = options.address or own_address(member.comm)
    settings = Settings(
        head=options.head,
        address=address,
        interface=options.interface,
        ports=options.ports,
        cpus=int(options.cpus * 1000),
        memory=options.memory,
        simulated={name: os.environ[name] for name in SIMULATED if name in os.environ},
        **{name: value for name in ("interval", "alone") if (value := getattr(options, name))},
    )
    agent = Agent(options.dir, member, settings)
    service.on_signals(agent.stop)
    watch = asyncio.create_task(_end_with_folder(agent, options))
    try:
        await agent.run()
        if service.is_deleted(options.dir, "agent", options.claimed):
            await _at_most(agent.leave(DELETED))
    finally:
        watch.cancel()
        await _at_most(agent.close())


#: Seconds that an agent has to end what it runs, and to write down what it leaves.
LEAVING = 20.0
DELETED = "The folder of this agent was deleted"


async def _at_most(work: Coroutine[Any, Any, None]) -> None:
    """Wait for some work, but not for its end where the time is up: it may be stuck in the driver."""
    task = asyncio.create_task(work)
    await asyncio.wait([task], timeout=LEAVING)
    if task.done() and (error := task.exception()):
        logger.error("Not all could be left in order.", exc_info=error)


async def _end_with_folder(agent: Agent, options: argparse.Namespace) -> None:
    await service.until_deleted(options.dir, "agent", options.claimed)
    await agent.leave(DELETED)


#: Variables that put a process onto a simulated machine.
SIMULATED = ("GPUPOOL_SIMULATED", "GPUPOOL_SIMULATED_NODE")


def own_address(comm: str) -> str:
    """Return the address of this machine on the way to the controller: others reach it by that."""
    from distributed.comm import parse_host_port

    host, port = parse_host_port(comm.split("://", 1)[-1])
    try:
        family, kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def main(arguments: list[str] | None = None) -> None:
    """Run the process."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    options.dir = options.dir.absolute()
    try:
        options.claimed = service.claim(options.dir, "agent")
    except OSError as error:
        service.give_up(error)
    service.log_to(options.log)
    dask.config.set(wire.SETTINGS)
    wire.close_comms()
    from jupyter_gpupool.driver import simulated

    simulated.install()
    asyncio.run(_live(options))


async def _live(options: argparse.Namespace) -> None:
    """Run the agent, and leave by `os._exit`.

    Otherwise multiprocessing would end the leases' processes first, and asyncio wait for what does not end.
    """
    from jupyter_gpupool.node.launch import LaunchError
    from jupyter_gpupool.node.membership import JoinError
    from jupyter_gpupool.node.reader import ReaderError

    try:
        await serve(options)
    except (JoinError, ReaderError, LaunchError, ValueError) as error:
        service.give_up(error)
    except BaseException:
        logger.exception("The agent ends.")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
