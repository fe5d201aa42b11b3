"""A real kernel in a process of its own, spoken to as a notebook's page does."""

from __future__ import annotations

import collections
import os
import queue
import signal
import time

from jupyter_client.manager import KernelManager

from tests.conftest import wait_until


class Kernel:
    """A real kernel: what cells print comes back, and what it publishes is kept."""

    def __init__(self):
        self.manager = KernelManager()
        self.manager.start_kernel()
        self.messages = collections.deque()
        self._connect()

    def _connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext jupyter_gpupool")

    def run(self, code):
        """Run a cell and return what it prints and displays, as text."""
        shown = [each["content"] for each in self._execute(code)]
        return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in shown)

    def shown(self, code):
        """Run a cell and return what it displays."""
        kinds = ("display_data", "execute_result")
        return [each["content"] for each in self._execute(code) if each["msg_type"] in kinds]

    def _execute(self, code):
        """Run a cell; whatever is published meanwhile can be heard afterwards."""
        ident = self.client.execute(code)
        said = []
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            self.messages.append(message)
            if message["parent_header"].get("msg_id") == ident:
                said.append(message)
                if message["content"].get("execution_state") == "idle":
                    break
        wrong = [each["content"] for each in said if each["msg_type"] == "error"]
        assert not wrong, "\n".join(wrong[0]["traceback"])
        return said

    def tell(self, comm, content):
        """Say something to a widget, as its page would."""
        data = {"comm_id": comm, "data": {"method": "custom", "content": content}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", data))

    def heard(self, so, seconds=30):
        """Return the first of the next messages of which something is so."""
        end = time.monotonic() + seconds
        while True:
            try:
                left = max(0.01, end - time.monotonic())
                message = (
                    self.messages.popleft() if self.messages else self.client.get_iopub_msg(timeout=left)
                )
            except queue.Empty:
                raise AssertionError(f"not heard within {seconds} s") from None
            if so(message):
                return message

    def restart(self):
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def kill(self):
        os.kill(self.manager.provisioner.pid, signal.SIGKILL)
        wait_until(lambda: not self.manager.is_alive())

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
