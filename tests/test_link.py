"""The line of a lease's process to its agent: told anew to each agent, and given up when none comes back."""

from __future__ import annotations

import asyncio
import json

import pytest

from jupyter_gpupool.lease.link import Link


class Ended:
    """What a process does when it is alone: here, it is only noted."""

    def __init__(self):
        self.times = 0
        self.event = asyncio.Event()

    def __call__(self):
        self.times += 1
        self.event.set()


def make(path, ended, alone_s):
    return Link(str(path), lambda: {"report": "here"}, lambda order: None, alone=ended, alone_s=alone_s)


@pytest.mark.asyncio
@pytest.mark.parametrize("there", ["no folder", "no socket", "a socket where nobody listens"])
async def test_a_process_whose_agent_never_comes_back_ends_itself_once(tmp_path, there):
    path = tmp_path / ("gone/s" if there == "no folder" else "s")
    if there == "a socket where nobody listens":
        (await asyncio.start_unix_server(lambda *_: None, path)).close()
    ended = Ended()
    link = make(path, ended, 0.1)
    link.start()
    await asyncio.wait_for(ended.event.wait(), 10)
    await asyncio.sleep(0.1)
    assert ended.times == 1
    await link.close()


@pytest.mark.asyncio
async def test_the_time_alone_begins_anew_when_an_agent_has_been_there(tmp_path):
    said: asyncio.Queue[dict] = asyncio.Queue()

    async def agent(reader, writer):
        said.put_nowait(json.loads(await reader.readline()))
        await asyncio.sleep(1.0)  # longer than it may be alone: it is not
        writer.close()

    ended = Ended()
    link = make(tmp_path / "s", ended, 0.6)
    link.start()
    server = await asyncio.start_unix_server(agent, tmp_path / "s")
    for _ in range(2):  # it comes back after an agent has hung up
        assert await asyncio.wait_for(said.get(), 10) == {"report": "here"}
        assert not ended.times
    server.close()
    await asyncio.wait_for(ended.event.wait(), 10)
    await link.close()
