"""What the HTTP API needs of the controller, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jupyter_gpupool.controller.accounts import Accounts
    from jupyter_gpupool.controller.auth import Authority, Tokens
    from jupyter_gpupool.controller.certificates import Certificates
    from jupyter_gpupool.controller.clock import Clock
    from jupyter_gpupool.controller.keys import Keys
    from jupyter_gpupool.controller.store import Once, Store
    from jupyter_gpupool.core.model import Instruction, PoolEvent, Reading
    from jupyter_gpupool.core.pool import Pool


class ControllerFace(Protocol):
    """The controller, as the HTTP API sees it. All of it is called in the controller's event loop."""

    store: Store
    clock: Clock
    tokens: Tokens
    authority: Authority
    #: Which of the agents' certificates are good.
    certificates: Certificates
    #: Whether people trust one another, so that agents which cannot switch users may serve several of them.
    trust_users: bool
    #: The keys of leases, and who has them.
    keys: Keys
    #: As which OS users people's leases run.
    accounts: Accounts
    #: The address of the Dask comm that agents connect to.
    address: str
    #: The last reading of each device, by its UUID.
    readings: Mapping[str, Reading]

    @property
    def pool(self) -> Pool:
        """The pool; to be read only."""

    def submit(self, event: PoolEvent, once: Once | None = None) -> list[Instruction]:
        """Journal a pool event, hand it to the pool, carry out what follows, and return that.

        Raises:
            StoreError: It could not be journaled; nothing has changed.
        """

    def wake(self) -> None:
        """Let everybody look who waits for a change."""

    async def changed(self, timeout_s: float) -> None:
        """Return when anything changes, or when the time is over."""

    def connected(self, node: str) -> bool:
        """Return whether a node's agent hears what it is told now."""

    @property
    def layers_revision(self) -> int:
        """A number that grows whenever a slice's layers change; they are none of the pool's."""

    def layers(self, part: str) -> Mapping[str, str]:
        """Return the layers that keep a slice within its share, with their states."""

    def reading_age(self, device: str) -> float:
        """Return how old the last reading of a device is, in seconds."""

    def connection(self, lease: str, user: str) -> dict[str, Any] | None:
        """Return how a lease's scheduler is reached, with its credentials; None: it does not run.

        Raises:
            StoreError: That `user` has them could not be written down.
        """

    async def logs(self, lease: str) -> list[dict[str, str]]:
        """Return what the lease's processes have written: "name" and "text" of each."""

    async def attach(self, lease: str, process: dict[str, Any]) -> dict[str, Any]:
        """Let a process use the lease's devices on its machine: `devices` and `environ`, or "why" not."""

    def decided(self, target: str, *, fit: bool) -> None:
        """An administrator has said that a device or node is fit, or that its work is to move away."""

    async def drill(self, device: str, xid: int) -> str:
        """Break a device for practice (XID 0: make it good again); return "" or why not."""

    async def remove(self, node: str) -> None:
        """Let a node's agent never come back on a certificate that it has, and hang up on it.

        Raises:
            StoreError: It is as it was.
        """

    def stop(self, why: str, *, everything: bool = False) -> None:
        """End the controller's process softly; leases and agents go on unless everything is to end."""
