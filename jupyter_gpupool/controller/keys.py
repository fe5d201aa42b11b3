"""The keys of leases, kept beside the journal, and where each lease's scheduler lives.

Rule 1: a lease has a certificate authority, a secret for its dashboard, and a home: the node on which its
        scheduler runs. All of it is made at the grant and erased when the lease has ended.
Rule 2: keys are made anew when the pool says so (`Lease.keys` counts), and whoever had the old ones has none.
Rule 3: a lease keeps the OS account that it was started as, also when the map of names changes: its files and
        processes are that account's.
Rule 4: who has been given them is written down before they are given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_gpupool.controller.auth import lease_credentials, new_secret

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jupyter_gpupool.controller.store import Store


class Keys:
    """What the store keeps of living leases, at hand.

    Args:
        store: Where it is kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, dict[str, Any]] = {}
        #: The node whose agent runs the leases' schedulers; "" before one has come.
        self.head: str = store.get("head", "")

    def note_head(self, node: str) -> None:
        """Run new leases' schedulers on this node from now on."""
        if node != self.head:
            self._store.put("head", node)
            self.head = node

    def of(self, lease: str) -> dict[str, Any] | None:
        """Return a lease's "ca", "cert", "key", "secret", "home" and "dashboard", or None."""
        if lease not in self._known:
            kept = self._store.secret(lease)
            if kept is None:
                return None
            self._known[lease] = kept
        return self._known[lease]

    def ensure(self, lease: str, number: int, account: str) -> dict[str, Any]:
        """Return a lease's keys, made now where it has none; it gets its home once a head agent has come.

        Args:
            lease: The lease's id.
            number: How often its keys have been made anew; with another number than before, they are.
            account: As which OS user it runs, where it has not run yet.

        Raises:
            StoreError: They could not be kept, and must not be used.
        """
        keys, home = self.of(lease), self.placed(lease)
        if keys is None or keys.get("number", 0) != number:
            fresh = {**lease_credentials(lease), "secret": new_secret(), "number": number, "holders": []}
            keys = {**fresh, "dashboard": "", "account": keys.get("account", account) if keys else account}
        elif home or not self.head:
            return keys
        return self._keep(lease, {**keys, "home": home or self.head})

    def give(self, lease: str, user: str) -> None:
        """Write down that a person has a lease's keys from now on.

        Raises:
            StoreError: It is not written, and they must not be given.
        """
        keys = self.of(lease)
        if keys is not None and user not in (holders := keys.get("holders", [])):
            self._keep(lease, {**keys, "holders": [*holders, user]})

    def has(self, lease: str, user: str) -> bool:
        """Return whether a person may have a lease's keys; of those made by an older release, anybody may."""
        keys = self.of(lease)
        return keys is not None and user in keys.get("holders", [user])

    def home(self, lease: str) -> str:
        """Return where a lease's scheduler runs, or would run now."""
        keys = self.of(lease)
        return str(keys["home"] if keys else "") or self.head

    def placed(self, lease: str) -> str:
        """Return the node on which a lease's scheduler was started; "" where none has been."""
        keys = self.of(lease)
        return str(keys["home"]) if keys else ""

    def move(self, lease: str) -> None:
        """Let a lease's scheduler run on the head node from now on.

        Raises:
            StoreError: It is to run where it was.
        """
        keys = self.of(lease)
        if keys is not None:
            self._keep(lease, {**keys, "home": self.head, "dashboard": ""})

    def note_dashboard(self, lease: str, address: str) -> None:
        """Remember where a lease's dashboard is."""
        keys = self.of(lease)
        if keys is not None and keys["dashboard"] != address:
            self._keep(lease, {**keys, "dashboard": address})

    def forget(self, lease: str) -> None:
        """Erase the keys of a lease that has ended."""
        if self.of(lease) is not None:
            self._known.pop(lease, None)
            self._store.forget_secret(lease)

    def forget_all_but(self, leases: Iterable[str]) -> None:
        """Erase the keys of leases that ended while nobody could erase them."""
        for lease in sorted(set(self._store.secret_leases()) - set(leases)):
            self._store.forget_secret(lease)

    def _keep(self, lease: str, keys: dict[str, Any]) -> dict[str, Any]:
        self._store.keep_secret(lease, keys)
        self._known[lease] = keys
        return keys
