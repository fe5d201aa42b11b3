"""The pool's certificate authority, and the keys of leases.

Rule 1: a private key is in a file of mode 0600 in a folder of mode 0700, or in memory; nowhere else.
Rule 2: the pool's authority vouches for the controller and its agents only. A lease has an authority of its
        own, so that nothing of one lease opens another lease, an agent or the controller.
Strategy: elliptic-curve keys (P-256) cost 0.1 ms where the RSA keys of `Security.temporary` cost 30 to 130,
so they are made when they are needed rather than ahead.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import os
import secrets
import socket
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from jupyter_gpupool.line import Line, fingerprint, write_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distributed.security import Security

#: Certificates begin a day early, for machines whose clocks disagree.
EARLY = dt.timedelta(days=1)
CA_LIFE = dt.timedelta(days=3650)
#: The controller makes its own anew at each start; an agent keeps the one it joined with.
SERVER_LIFE = dt.timedelta(days=825)
#: No lease lives longer than a year.
LEASE_LIFE = dt.timedelta(days=400)
#: The domain of names that agents' certificates bear: no host has one, so an agent cannot pose as the API.
COMM_DOMAIN = "gpupool.invalid"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, all at once, in place of the one that was there."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # made with mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter, or make sure that one that is there is such.

    Raises:
        PermissionError: It belongs to somebody else.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user: name a folder of your own.")
    path.chmod(0o700)
    return path


class Authority:
    """The pool's certificate authority, kept in `folder` as ca.pem and ca.key; made where there is none.

    Raises:
        PermissionError: The folder belongs to somebody else.
        ValueError: The files there are not a certificate and its key.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = private_folder(Path(folder))
        cert, key = self.folder / "ca.pem", self.folder / "ca.key"
        if not cert.exists():
            made = _authority()
            write_private(key, _key_pem(made[1]))  # the key first: a certificate without its key is of no use
            write_private(cert, _pem(made[0]))
        self.ca_pem = cert.read_text(encoding="ascii")
        self._cert, self._key = _read(cert, key)
        #: SHA-256 of the certificate, as hexadecimal digits: what the join and login lines pin.
        self.fingerprint = fingerprint(self.ca_pem)

    def server_context(self, names: Iterable[str] = ()) -> ssl.SSLContext:
        """Return the TLS context of the HTTP API: for this host's names, and the names or addresses given."""
        own = ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())
        cert, key = self._issue("gpupool controller", (*own, *names))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        with _in_files(cert, key) as files:
            context.load_cert_chain(*files)
        return context

    def agent_credentials(self, name: str) -> dict[str, str]:
        """Return "ca", "cert" and "key" for the Dask comms of a node's agent, made anew."""
        from jupyter_gpupool.wire import agent_name

        cert, key = self._issue(agent_name(name), (f"agent.{COMM_DOMAIN}",))
        return {"ca": self.ca_pem, "cert": cert, "key": key}

    def comm_security(self) -> Security:
        """Return the `distributed.Security` of the controller's Dask comms; encryption is required."""
        cert, key = self._issue("gpupool controller comm", (f"controller.{COMM_DOMAIN}",))
        return security({"ca": self.ca_pem, "cert": cert, "key": key})

    def line(self, url: str, token: str, kind: str) -> str:
        """Return the line by which an agent joins or a person logs in (`kind`: "agent" or "login")."""
        return write_line(Line(url=url, ca_sha256=self.fingerprint, token=token, kind=kind))

    def _issue(self, common_name: str, names: Iterable[str]) -> tuple[str, str]:
        """Return a certificate for these names or addresses, signed by the pool's authority, and its key."""
        key = _new_key()
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        cert = (
            _builder(common_name, self._cert.subject, key, SERVER_LIFE)
            .add_extension(x509.SubjectAlternativeName(_alternatives(names)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_BOTH), critical=False)
            .add_extension(issuer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _pem(cert), _key_pem(key)


def lease_credentials(lease: str) -> dict[str, str]:
    """Return a lease's own authority, also the one certificate of its scheduler, workers and clients.

    It is to Dask what `Security.temporary` makes, and takes about 0.3 ms.
    """
    key, name = _new_key(), f"lease {lease}"
    names = _alternatives(("localhost", "127.0.0.1", "dask-internal"))
    cert = _pem(
        _builder(name, _name(name), key, LEASE_LIFE)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign=True, authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return {"ca": cert, "cert": cert, "key": _key_pem(key)}


def security(credentials: dict[str, str]) -> Security:
    """Return the `distributed.Security` that uses one certificate in every role; encryption is required.

    Args:
        credentials: "ca", "cert" and "key" in PEM form.
    """
    from distributed.security import Security

    cert, key = credentials["cert"], credentials["key"]
    roles = {f"tls_{role}_cert": cert for role in ("client", "scheduler", "worker")}
    keys = {f"tls_{role}_key": key for role in ("client", "scheduler", "worker")}
    return Security(require_encryption=True, tls_ca_file=credentials["ca"], **roles, **keys)


def new_secret() -> str:
    """Return 256 random bits as URL-safe text: the secret of a lease's dashboard, for one."""
    return secrets.token_urlsafe(32)


_Builder = x509.CertificateBuilder
_BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, life: dt.timedelta) -> _Builder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])]
    )  # longer ones are not allowed


def _authority() -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key, name = _new_key(), f"gpupool authority {secrets.token_hex(4)}"
    cert = (
        _builder(name, _name(name), key, CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return cert, key


def _usage(*, sign: bool = False, authority: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=sign,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(names: Iterable[str]) -> list[x509.GeneralName]:
    """Return names and addresses, each once, as a certificate has them; what none can hold is left out."""
    found: dict[str, x509.GeneralName] = {}
    for name in names:
        try:
            found[name] = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            with contextlib.suppress(ValueError):  # not ASCII, which no certificate can hold
                found[name] = x509.DNSName(name)
    return list(found.values())


def _pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode(
        "ascii"
    )


def _read(cert: Path, key: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Read the authority back."""
    try:
        read = x509.load_pem_x509_certificate(cert.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != read.public_key():
            raise ValueError("they are not a pair")  # noqa: TRY301 - one sentence for all that can be wrong
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{cert} and {key} are not the pool's authority ({error}): put both back from a copy, or remove "
            "both and let everybody join and log in anew."
        ) from error
    return read, private


class _in_files:  # noqa: N801 - used as a function
    """PEM texts in files of this user's, for as long as `ssl` needs them: it cannot read them from memory."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def __enter__(self) -> list[str]:
        self._folder = tempfile.TemporaryDirectory(prefix="gpupool-")
        paths = [Path(self._folder.name) / str(n) for n in range(len(self._texts))]
        for path, text in zip(paths, self._texts, strict=True):
            write_private(path, text)
        return [str(path) for path in paths]

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
