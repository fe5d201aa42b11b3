"""As which OS users leases run, and which certificates of agents are good."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from jupyter_gpupool.controller.accounts import Accounts, is_root, read_accounts
from jupyter_gpupool.controller.auth import Authority
from jupyter_gpupool.controller.certificates import Certificates
from jupyter_gpupool.controller.store import Store
from tests.pool_processes import PoolProcesses, user, wait_for

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("known", "name", "account"),
    [
        pytest.param({}, "ann", "ann", id="everybody is who they are"),
        pytest.param({"ben@example.org": "ben"}, "ben@example.org", "ben", id="a name that is mapped"),
        pytest.param({"ben@example.org": "ben"}, "ann", "ann", id="one that is not"),
        pytest.param({"ben": "ben", "*": "guest"}, "cleo", "guest", id="all others"),
        pytest.param({"ben": "ben", "*": "guest"}, "ben", "ben", id="but those that are named"),
    ],
)
def test_a_lease_runs_as_the_os_user_that_the_map_says(tmp_path, known, name, account):
    path = tmp_path / "users.yaml"
    path.write_text(json.dumps(known))
    assert read_accounts(path).of(name) == account
    assert Accounts(known).of(name) == account


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ben: root", "ben would be root"),
        ('"*": root', "would be root"),
        ("ben: 7", "write NAME: OS-USER"),
        ("ben: a b", "write NAME: OS-USER"),
        ("- ben", "has no lines such as"),
        ("ben: [", "cannot be read"),
    ],
)
def test_a_map_to_root_or_to_nobody_is_refused_before_the_pool_starts(tmp_path, text, word):
    path = tmp_path / "users.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=word):
        read_accounts(path)


def test_root_is_root_by_any_name(monkeypatch):
    import pwd

    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid={"toor": 0}.get(name, 1000)))
    assert is_root("toor")
    assert not is_root("ann")


def comm_with(pem: str) -> SimpleNamespace:
    """The end of a comm whose other end has shown a certificate, as Python's `ssl` tells of it."""
    from cryptography import x509

    serial = x509.load_pem_x509_certificate(pem.encode()).serial_number
    digits = f"{serial:X}"
    return SimpleNamespace(
        extra_info={"peercert": {"serialNumber": digits.zfill(len(digits) + len(digits) % 2)}}
    )


def test_a_nodes_certificates_are_good_until_it_is_removed_and_a_new_one_is_after(tmp_path: Path):
    store, authority = Store(tmp_path / "journal.sqlite"), Authority(tmp_path)
    certificates = Certificates(store)
    old, other, new = (authority.agent_credentials("node-1")["cert"] for _ in range(3))
    assert certificates.good("node-1", comm_with(old)), "of a join before serial numbers were kept"
    certificates.issued("node-1", old)
    assert certificates.good("node-1", comm_with(old))
    assert not certificates.good("node-1", comm_with(other))
    certificates.revoke("node-1")
    assert not certificates.good("node-1", comm_with(old))
    certificates.issued("node-1", new)
    again = Certificates(store)
    assert [again.good("node-1", comm_with(each)) for each in (old, new)] == [False, True]
    assert not again.good("node-1", SimpleNamespace(extra_info={}))
    assert again.good("node-2", comm_with(other)), "another node is another matter"
    store.close()


def test_an_agent_that_was_removed_cannot_come_back_but_by_a_new_line(tmp_path):
    with PoolProcesses(tmp_path, {"node-1": 1, "node-2": 1}) as pool:
        pool.start()
        assert pool.call("GET", "/v1/pool")["one_user"] in (None, user())
        pool.call("DELETE", "/v1/agents/node-2")
        pool.wait_for_nodes({"node-2"}, "silent")
        wait_for(lambda: "certificate of node-2 was revoked" in pool.log("controller"), "it was turned away")
        wait_for(lambda: "was revoked" in pool.log("node-2"), "and was told why")
        assert pool.node_states() == {"node-1": "up", "node-2": "silent"}
        pool.kill("node-2")
        (tmp_path / "node-2" / "agent.json").unlink()
        pool.start_agent("node-2")
        pool.wait_for_nodes({"node-1", "node-2"})
