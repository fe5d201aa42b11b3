"""Who is asking, and the pool's certificates: what opens what, and what does not."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import ssl

import pytest
from cryptography import x509
from distributed.comm import connect, listen

from jupyter_gpupool.controller.auth import (
    Authority,
    Person,
    Tokens,
    lease_credentials,
    new_secret,
    private_folder,
    security,
    write_private,
)
from jupyter_gpupool.controller.store import Store
from jupyter_gpupool.line import Line, fingerprint, read_line, write_line


@pytest.fixture
def now():
    return [1_000_000.0]


@pytest.fixture
def store(tmp_path, now):
    opened = Store(tmp_path / "journal.sqlite", wall=lambda: now[0])
    yield opened
    opened.close()


@pytest.fixture
def tokens(store, now):
    return Tokens(store, wall=lambda: now[0])


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


# -------------------------------------------------------------------------------------------------- tokens


def test_a_token_stands_for_the_person_it_was_made_for(tokens):
    text = tokens.create("ann", ("use",), groups=("physics",), label="laptop")
    person = tokens.verify(text)
    assert person == Person(
        user="ann", scopes=frozenset({"read", "use"}), groups=("physics",), token=person.token
    )
    assert not person.admin
    assert tokens.verify(tokens.create("root", ("admin",))).admin


WRONG = {
    "nothing": lambda text: "",
    "something else": lambda text: "let me in",
    "one letter more": lambda text: text + "A",
    "one letter less": lambda text: text[:-1],
    "another secret": lambda text: text.rpartition("_")[0] + "_" + "A" * 43,
    "another id": lambda text: text.replace(text.split("_")[1], "0" * 12),
    "another prefix": lambda text: text.replace("gpupool", "gpupools"),
    "the id alone": lambda text: text.split("_")[1],
    "bytes that are no text": lambda text: text + "\udcff",
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_is_not_exactly_a_token_stands_for_nobody(tokens, change):
    assert tokens.verify(change(tokens.create("ann"))) is None


def test_the_store_has_no_token_that_could_be_used(store, tokens, tmp_path):
    text = tokens.create("ann")
    once = tokens.create_once("login", user="ann")
    assert text.split("_", 2)[2] not in json.dumps(tokens.list())
    store.close()
    whole = b"".join(each.read_bytes() for each in tmp_path.iterdir() if each.name.startswith("journal"))
    assert text.split("_", 2)[2].encode() not in whole
    assert once.split("_", 2)[2].encode() not in whole


def test_a_token_ends_when_it_expires_or_is_revoked(tokens, now):
    short, long = tokens.create("ann", expires_in=60), tokens.create("ann")
    assert tokens.verify(short)
    now[0] += 60
    assert tokens.verify(short) is None
    ident = tokens.verify(long).token
    assert not tokens.revoke(ident, user="ben")
    assert tokens.revoke(ident, user="ann")
    assert tokens.verify(long) is None
    assert not tokens.revoke(ident)


def test_tokens_are_listed_by_their_owner(tokens, now):
    tokens.create("ann", label="one")
    now[0] += 1
    tokens.create("ben", ("read",), label="two")
    assert [each["label"] for each in tokens.list()] == ["one", "two"]
    (row,) = tokens.list("ben")
    assert (row["user"], row["scopes"], row["expires"]) == ("ben", ["read"], None)
    assert "hash" not in row


@pytest.mark.parametrize(
    ("user", "scopes"),
    [
        ("ann", ()),
        ("ann", ("root",)),
        ("", ("use",)),
        ("a b", ("use",)),
        ("*", ("use",)),
        ("x" * 200, ("use",)),
    ],
    ids=["no scope", "an unknown scope", "no name", "a space", "the sign for everybody", "a long name"],
)
def test_a_token_for_nobody_or_nothing_is_not_made(tokens, user, scopes):
    with pytest.raises(ValueError, match=r"is no name of a user|The scopes of a token"):
        tokens.create(user, scopes)


def test_a_one_time_token_works_once_for_what_it_was_made_for_and_for_a_day(tokens, now):
    text = tokens.create_once("agent")
    assert tokens.redeem(text, "login", "ann") is None
    assert tokens.redeem(text + "x", "agent", "node-1") is None
    assert tokens.redeem(text, "agent", "node-1") == {"user": "", "scopes": ["read", "use"], "groups": []}
    assert tokens.redeem(text, "agent", "node-1") is None
    late = tokens.create_once("agent")
    now[0] += 24 * 3600
    assert tokens.redeem(late, "agent", "node-1") is None
    assert tokens.verify(late) is None  # it is no token to call with


def test_a_login_token_is_exchanged_once_for_a_lasting_one(tokens):
    once = tokens.create_once("login", user="ann", scopes=("admin",), groups=("staff",))
    text, user = tokens.login(once, "10.0.0.7")
    assert user == "ann"
    assert tokens.verify(text).admin
    assert tokens.verify(text).groups == ("staff",)
    assert tokens.login(once, "10.0.0.8") is None
    assert tokens.list("ann")[0]["label"] == "login from 10.0.0.7"


def test_revoking_one_token_leaves_the_others_of_the_same_person(tokens):
    one, two = tokens.create("ann"), tokens.create("ann")
    tokens.revoke(tokens.verify(one).token)
    assert tokens.verify(two)


# ----------------------------------------------------------------------------------------------- the lines


def test_a_line_is_one_word_that_is_read_back_whatever_spaces_copying_put_in():
    line = Line("https://head:8790", "ab" * 32, "gpupool_x_y", "agent")
    text = write_line(line)
    assert text.startswith("gpupool:")
    assert len(text.split()) == 1
    assert read_line(text) == line
    assert read_line(f"  {text[:30]}\n{text[30:]} ") == line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpupool:",
        "gpupool:%%%",
        "gpupool:bnVsbA",
        "hello",
        write_line(Line("u", "c", "t", "other")),
        "gpupool:W10",
    ],
)
def test_what_is_no_line_is_refused_with_where_to_get_one(text):
    with pytest.raises(ValueError, match="copy the whole line that begins with gpupool:"):
        read_line(text)


def test_the_authoritys_line_pins_its_certificate(authority):
    line = read_line(authority.line("https://head:1", "secret", "login"))
    assert line == Line("https://head:1", fingerprint(authority.ca_pem), "secret", "login")
    assert line.ca_sha256 == authority.fingerprint


# ------------------------------------------------------------------------------------------- the authority


def test_the_authority_is_made_once_and_its_files_are_private(tmp_path):
    folder = tmp_path / "controller"
    first = Authority(folder)
    assert Authority(folder).fingerprint == first.fingerprint
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {each.name: oct(each.stat().st_mode & 0o777) for each in folder.iterdir()} == {
        "ca.pem": "0o600",
        "ca.key": "0o600",
    }


def test_an_authority_that_has_another_key_is_refused_with_what_to_do(tmp_path):
    Authority(tmp_path / "one")
    Authority(tmp_path / "two")
    (tmp_path / "one" / "ca.key").write_bytes((tmp_path / "two" / "ca.key").read_bytes())
    with pytest.raises(ValueError, match=r"are not the pool's authority .*not a pair.*: put both back"):
        Authority(tmp_path / "one")
    (tmp_path / "two" / "ca.key").write_text("nonsense")
    with pytest.raises(ValueError, match="put both back"):
        Authority(tmp_path / "two")


def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        private_folder(tmp_path)


def test_a_private_file_is_replaced_all_at_once_and_never_readable_by_others(tmp_path):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def context_of(ca, credentials=None, tmp_path=None):
    context = ssl.create_default_context(cadata=ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 has it
    if credentials:
        for name in ("cert", "key"):
            write_private(tmp_path / name, credentials[name])
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    return context


async def reach(server_context, client_context, name):
    """Say hello over TLS; return the name of what failed, or ""."""

    async def hello(reader, writer):
        writer.write(await reader.read(5))
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0, ssl=server_context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=client_context, server_hostname=name
            )
            writer.write(b"hello")
            assert await asyncio.wait_for(reader.read(5), 5) == b"hello"
            writer.close()
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return ""


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "head.example", "10.1.2.3"])
async def test_the_api_is_trusted_under_all_names_that_it_was_given(authority, name):
    server = authority.server_context(("head.example", "10.1.2.3", "überhost"))
    assert await reach(server, context_of(authority.ca_pem), name) == ""


@pytest.mark.asyncio
async def test_the_api_is_not_trusted_under_another_name_or_by_another_authority(authority, tmp_path):
    server = authority.server_context()
    assert "mismatch" in await reach(server, context_of(authority.ca_pem), "other.example")
    other = Authority(tmp_path)
    assert "unable to get local issuer" in await reach(server, context_of(other.ca_pem), "localhost")


@pytest.mark.asyncio
async def test_an_agent_cannot_pose_as_the_api(authority, tmp_path):
    credentials = authority.agent_credentials("localhost")
    write_private(tmp_path / "cert", credentials["cert"])
    write_private(tmp_path / "key", credentials["key"])
    posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    posing.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    assert "mismatch" in await reach(posing, context_of(authority.ca_pem), "localhost")


def test_certificates_have_limits_and_an_agents_cannot_sign(authority):
    cert = x509.load_pem_x509_certificate(authority.agent_credentials("node-1")["cert"].encode())
    assert cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert cert.not_valid_after_utc - cert.not_valid_before_utc < dt.timedelta(days=900)
    assert cert.subject.rfc4514_string() == "CN=gpupool agent node-1"
    ca = x509.load_pem_x509_certificate(authority.ca_pem.encode())
    cert.verify_directly_issued_by(ca)


# -------------------------------------------------------------------------------------------- Dask's comms


async def comm_works(server, client):
    """Send a message over a Dask comm with these securities; False where either end refuses."""
    got = asyncio.get_running_loop().create_future()

    async def handle(comm):
        got.set_result(await comm.read())

    try:
        async with listen("tls://127.0.0.1:0", handle, **server.get_listen_args("scheduler")) as listener:
            comm = await connect(listener.contact_address, timeout=2, **client.get_connection_args("worker"))
            await comm.write({"op": "hello"})
            assert await asyncio.wait_for(got, 5) == {"op": "hello"}
            await comm.close()
    except OSError:
        return False
    return True


@pytest.mark.asyncio
async def test_an_agent_reaches_the_controller_by_the_certificate_it_joined_with(authority):
    agent = security(authority.agent_credentials("node-1"))
    assert agent.require_encryption
    assert await comm_works(authority.comm_security(), agent)


@pytest.mark.asyncio
async def test_what_belongs_to_a_lease_opens_neither_the_controller_nor_another_lease(authority):
    one, two = security(lease_credentials("one")), security(lease_credentials("two"))
    assert await comm_works(one, one)
    assert not await comm_works(one, two)
    assert not await comm_works(authority.comm_security(), one)
    assert not await comm_works(one, security(authority.agent_credentials("node-1")))


def test_each_leases_credentials_are_its_own():
    made = [lease_credentials("a" * 200) for _ in range(3)]
    assert len({each["key"] for each in made}) == 3
    assert all(each["ca"] == each["cert"] for each in made)
    assert new_secret() != new_secret()
    assert len(new_secret()) >= 43
