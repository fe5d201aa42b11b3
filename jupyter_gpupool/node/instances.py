"""MIG instances, made and ended as the pool orders.

Rule 1: each order runs in a process of its own: a driver call that hangs is then nobody else's.
Rule 2: orders may come twice: what is there already is made, what is not there any more is destroyed.
Rule 3: what the pool has made is remembered, so that it is never offered as if it had always been there.
Rule 4: what belongs to no slice goes: what the pool has made and nobody uses (an order was lost, or
        destroying failed), and what is half made. It has to be found so twice, and not to be new.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from jupyter_gpupool.core.model import Instance, decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from jupyter_gpupool.core.model import Device

logger = logging.getLogger(__name__)

#: Seconds for one order.
LIMIT = 60.0
#: How often destroying is tried while the driver counts a process that has just ended; seconds between.
TRIES, PAUSE = 10, 0.5
#: Seconds that an instance may be there before its slice's processes are.
NEW = 60.0
#: Slices of which is remembered what became of their orders.
REMEMBERED = 1000
#: Sweeps that look after a start or a failure.
LOOKS = 3


class Instances:
    """Makes and destroys MIG instances on this node.

    Args:
        path: Where is kept what the pool has made.
        environ: The environment of the processes that do it.
    """

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path = path
        self._environ = dict(environ)
        self._locks: dict[str, asyncio.Lock] = {}
        self._made: set[str] = set()
        #: When an instance was made, by the clock that never goes back.
        self._made_at: dict[str, float] = {}
        #: What became of the orders of slices, the last ones.
        self._asked: dict[str, asyncio.Future[tuple[Instance | None, str]]] = {}
        #: By device and start: what the last sweep has found that belongs to nothing.
        self._doubted: dict[str, dict[int, Instance]] = {}
        #: Sweeps that look whatever is known: after a start, and when something has failed.
        self._looks = LOOKS
        with contextlib.suppress(OSError, ValueError):
            self._made = set(json.loads(path.read_text(encoding="utf-8")))

    async def create_once(
        self, part: str, device: str, instance: dict[str, Any]
    ) -> tuple[Instance | None, str]:
        """Make a slice's instance as `create` does; the same order again gets the same answer.

        The pool gives up a slice whose instance could not be made, and makes another one elsewhere: what a
        second try made would be nobody's.

        Args:
            part: The slice's id.
            device: The device's UUID.
            instance: What to make.
        """
        if part not in self._asked:
            self._asked[part] = asyncio.ensure_future(self.create(device, instance))
            while len(self._asked) > REMEMBERED:
                self._asked.pop(next(iter(self._asked)))
        return await asyncio.shield(self._asked[part])

    async def create(self, device: str, instance: dict[str, Any]) -> tuple[Instance | None, str]:
        """Make an instance; return it, or None and why not."""
        answer = await self._order("create", device, instance)
        if not answer.get("uuid"):
            self._looks = LOOKS
            return None, str(answer.get("why", ""))
        made = decode(Instance, answer)
        self._made_at[made.uuid] = time.monotonic()
        self._remember(self._made | {made.uuid})
        return made, ""

    async def destroy(self, device: str, instance: dict[str, Any]) -> str:
        """Destroy an instance; return "" or why not."""
        answer = await self._order("destroy", device, instance)
        uuid = str(instance.get("uuid"))
        self._made_at.pop(uuid, None)
        if answer.get("why"):
            self._looks = LOOKS
        else:
            self._remember(self._made - {uuid})
        return str(answer.get("why", ""))

    async def sweep(self, device: str, used: set[str]) -> int:
        """Destroy the instances on a device that belong to nothing; return how many there were.

        Args:
            device: Its UUID.
            used: UUIDs of the instances that slices here have.
        """
        there = await self._order("list", device, {})
        found = [decode(Instance, each) for each in there.get("instances", ())]
        idle = {each.start: each for each in found if self._belongs_to_nothing(each, used)}
        before, self._doubted[device] = self._doubted.get(device, {}), idle
        gone = [each for each in idle.values() if before.get(each.start) == each]
        return len([each for each in gone if not await self.destroy(device, encode(each))])

    def suspects(self, used: set[str]) -> bool:
        """Whether there may be something that belongs to nothing: each look at a device costs a process.

        Args:
            used: UUIDs of the instances that slices here have.
        """
        self._looks = max(0, self._looks - 1)
        return self._looks > 0 or any(not self._is_new(each) for each in self._made - used)

    def _belongs_to_nothing(self, instance: Instance, used: set[str]) -> bool:
        """One without a UUID has no compute instance; nobody can use it, and no other listing shows it."""
        mine = instance.uuid in self._made and not self._is_new(instance.uuid)
        return not instance.uuid or (mine and instance.uuid not in used)

    def _is_new(self, uuid: str) -> bool:
        return time.monotonic() - self._made_at.get(uuid, -NEW) < NEW

    def offered(self, device: Device) -> Device:
        """Return a device without the instances of the pool's own making."""
        kept = tuple(each for each in device.instances if each.uuid not in self._made)
        return device if kept == device.instances else dataclasses.replace(device, instances=kept)

    async def _order(self, action: str, device: str, instance: dict[str, Any]) -> dict[str, Any]:
        async with self._locks.setdefault(device, asyncio.Lock()):
            command = [sys.executable, "-m", "jupyter_gpupool.node.instances"]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    action,
                    device,
                    json.dumps(instance),
                    stdout=asyncio.subprocess.PIPE,
                    env=self._environ,
                )
            except OSError as error:  # the machine has no process or memory left: the pool goes elsewhere
                return {"why": f"no process could be started to call the driver ({error.strerror})"}
            try:
                out, _ = await asyncio.wait_for(process.communicate(), LIMIT)
            except TimeoutError:
                # It is left to end by itself: to end an NVML client by force can hurt its GPU.
                return {"why": f"the driver did not answer within {LIMIT:g} s"}
        with contextlib.suppress(ValueError):
            answer = json.loads(out)
            if isinstance(answer, dict):
                return answer
        return {"why": f"the process that calls the driver ended with status {process.returncode}"}

    def _remember(self, made: set[str]) -> None:
        self._made = made
        part = self._path.with_suffix(".part")
        try:
            part.touch(mode=0o600)
            part.write_text(json.dumps(sorted(made)), encoding="utf-8")
            part.replace(self._path)
        except OSError as error:  # what was made is told all the same, and written with the next one
            logger.warning("the list of MIG instances cannot be kept: %s", error)


def carry_out(action: str, device: str, instance: Instance) -> dict[str, Any]:
    """Do one order in this process; return the instance, or `why` not."""
    from jupyter_gpupool.driver.nvml import Driver, DriverError

    driver = Driver()
    try:
        driver.open()
        if action == "list":
            return {"instances": [encode(each) for each in driver.instances(device)]}
        if action == "destroy":
            _destroy(driver, device, instance)
            return {}
        place = (instance.profile, instance.start, instance.size)
        there = [each for each in driver.instances(device) if (each.profile, each.start, each.size) == place]
        made = next((each for each in there if each.uuid), None) or driver.create_instance(device, instance)
        return {**encode(made)}
    except DriverError as error:
        return {"why": str(error)}
    finally:
        driver.close()


def _destroy(driver: Any, device: str, instance: Instance) -> None:
    from jupyter_gpupool.driver.nvml import DriverError

    for left in range(TRIES - 1, -1, -1):
        try:
            driver.destroy_instance(device, instance)
        except DriverError as error:
            if error.name != "IN_USE" or not left:
                raise
            time.sleep(PAUSE)
        else:
            return


def main() -> None:
    """Run one order: `python -m jupyter_gpupool.node.instances create|destroy|list DEVICE INSTANCE`."""
    from jupyter_gpupool.driver import simulated

    simulated.install()
    action, device, text = sys.argv[1:]
    said = json.loads(text)
    instance = decode(Instance, said) if said else Instance(profile="", start=0, size=0)
    sys.stdout.write(json.dumps(carry_out(action, device, instance)))


if __name__ == "__main__":
    main()
