"""Which certificates of agents are good: an agent that was removed cannot come back on its old one.

Rule 1: a node's certificates are those that it was given at its joins, by their serial numbers. Removing the
        node makes all of them worthless; a new join line gives it a new one.
Rule 2: a node that joined before serial numbers were kept has no list, and is believed until it is removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cryptography import x509

if TYPE_CHECKING:
    from jupyter_gpupool.controller.store import Store

#: Name of the fact that the store keeps.
FACT = "certificates"
#: How many of a node's certificates are remembered: a node that joins more often is broken.
KEPT = 20


class Certificates:
    """The serial numbers of agents' certificates.

    Args:
        store: Where they are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._good: dict[str, list[str]] = store.get(FACT, {})

    def issued(self, node: str, pem: str) -> None:
        """Remember a certificate that a node is about to be given.

        Raises:
            StoreError: It could not be kept, and must not be handed out.
        """
        serial = f"{x509.load_pem_x509_certificate(pem.encode()).serial_number:x}"
        self._keep(node, [*self._good.get(node, ()), serial][-KEPT:])

    def some(self, node: str) -> bool:
        """Return whether a node has been given a certificate that is good, be it that it never came."""
        return bool(self._good.get(node))

    def revoke(self, node: str) -> None:
        """Make all certificates of a node worthless, from now on.

        Raises:
            StoreError: They are as good as before.
        """
        self._keep(node, [])

    def _keep(self, node: str, serials: list[str]) -> None:
        good = {**self._good, node: serials}
        self._store.put(FACT, good)
        self._good = good

    def good(self, node: str, comm: Any) -> bool:
        """Return whether the certificate of a comm's other end is one of the node's that were not revoked."""
        if node not in self._good:
            return True
        serial = str((comm.extra_info.get("peercert") or {}).get("serialNumber", "")).lower().lstrip("0")
        return serial in self._good[node]
