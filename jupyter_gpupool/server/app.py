"""The extension: its settings, its place in the server, its start and end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_server.extension.application import ExtensionApp
from traitlets import Bool, Float, Unicode

from jupyter_gpupool.server.dashboards import ROUTES as DASHBOARDS
from jupyter_gpupool.server.handlers import ROUTES
from jupyter_gpupool.server.link import Where
from jupyter_gpupool.server.pool import ServerPool

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The schemas of what is put on the event bus, by name.
SCHEMAS = Path(__file__).parent.parent / "events"
SCHEMA_ID = "https://jupyter-gpupool.readthedocs.io/events/{}/v1"
NEWS = ("notice", "lease", "pool")


class GPUPoolServer(ExtensionApp):
    """A pool of GPUs for the people of this Jupyter server."""

    name = "jupyter_gpupool"
    extension_url = "/gpupool/pool"
    load_other_extensions = True

    url = Unicode(
        "", help="The pool's address; empty: $GPUPOOL_URL, the login file, or this user's own pool here."
    ).tag(config=True)
    token_file = Unicode("", help="A file with the token for `url`.").tag(config=True)
    ca_file = Unicode("", help="A file with the certificate authority (PEM) of `url`.").tag(config=True)
    start_embedded = Bool(False, help="Start a pool of this user on this machine if there is none.").tag(
        config=True
    )
    poll_seconds = Float(25.0, min=0.1, max=60.0, help="How long the pool holds one question for news.").tag(
        config=True
    )
    fresh_seconds = Float(0.25, min=0.0, help="For so long one look serves all browser tabs.").tag(
        config=True
    )
    retry_seconds = Float(5.0, min=0.1, help="Between two tries to reach a lost pool, at most.").tag(
        config=True
    )
    ticket_hours = Float(12.0, min=0.01, help="How long the address of an opened dashboard works.").tag(
        config=True
    )

    pool: ServerPool

    def initialize_settings(self) -> None:
        """Make what all handlers talk to, and tell the event bus what will be on it."""
        self._register_schemas()
        where = Where(
            url=self.url, token_file=self.token_file, ca_file=self.ca_file, start=self.start_embedded
        )
        self.pool = ServerPool(
            where,
            self._emit,
            fresh_s=self.fresh_seconds,
            poll_s=self.poll_seconds,
            retry_s=self.retry_seconds,
            ticket_s=3600 * self.ticket_hours,
        )

    def initialize_handlers(self) -> None:
        """Add the endpoints."""
        every = (*ROUTES, *DASHBOARDS)
        self.handlers.extend((path, handler, {"pool": self.pool}) for path, handler in every)

    async def _start_jupyter_server_extension(self, _: Any) -> None:
        """Begin to ask for news; where Jupyter is too old to call this, the first request does it."""
        self.pool.start()

    async def stop_extension(self) -> None:
        """End what runs."""
        await self.pool.close()

    def _register_schemas(self) -> None:
        """Make the schemas known now: a browser that is connected before never gets such events."""
        logger = self.serverapp.event_logger
        for name in NEWS:
            if SCHEMA_ID.format(name) not in logger.schemas:
                logger.register_event_schema(SCHEMAS / f"{name}.yaml")

    def _emit(self, name: str, data: Mapping[str, Any]) -> None:
        try:
            self.serverapp.event_logger.emit(schema_id=SCHEMA_ID.format(name), data=dict(data))
        except Exception:  # somebody else's listener, or a newer pool's words: the next news are to come
            self.log.exception("an event of the GPU pool could not be emitted")
