"""A certificate authority for tests that have no controller; its certificates are like the pool's own."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    ca: str
    cert: str
    key: str


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


class TestAuthority:
    __test__ = False

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test pool")])
        self._cert = self._sign(self._name, self._key, ca=True)
        self.ca = self._cert.public_bytes(serialization.Encoding.PEM).decode()

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.Certificate:
        now = dt.datetime.now(tz=dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def pair(self, name: str) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, ca=False)
        return Pair(self.ca, cert.public_bytes(serialization.Encoding.PEM).decode(), _pem(key))
