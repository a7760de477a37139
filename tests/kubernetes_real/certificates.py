"""The certificates and keys of a cluster: one authority, an identity for each of its programs and people, RSA keys for tokens."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

_PEM, _PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()
_LASTS = timedelta(days=2)
_NAMES = ("localhost", "kubernetes", "kubernetes.default.svc")
_ADDRESSES = ("127.0.0.1", "10.96.0.1")


class Authority:
    """Writes `ca.crt` into a folder, and NAME.crt and NAME.key for each identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("authority")
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = _builder(self._name, self._name, self._key.public_key())
        made = builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)
        (folder / "ca.crt").write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def issue(self, name: str, user: str, group: str | None = None) -> None:
        """Make the certificate of a server on loopback, which identifies `user` of `group` as a client, too."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [x509.DNSName(one) for one in _NAMES]
        alternatives += [x509.IPAddress(ipaddress.ip_address(one)) for one in _ADDRESSES]
        made = _builder(_named(user, group), self._name, key.public_key()).add_extension(
            x509.SubjectAlternativeName(alternatives), critical=False
        )
        (self.folder / f"{name}.crt").write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        form = serialization.PrivateFormat.PKCS8
        (self.folder / f"{name}.key").write_bytes(key.private_bytes(_PEM, form, _PLAIN))


def write_token_keys(folder: Path) -> None:
    """Write `tokens.key` and `tokens.pub`, by which tokens of service accounts are signed and checked."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "tokens.key").write_bytes(key.private_bytes(_PEM, form, _PLAIN))
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    (folder / "tokens.pub").write_bytes(key.public_key().public_bytes(_PEM, public))


def _named(user: str, group: str | None = None) -> x509.Name:
    given = [(x509.NameOID.COMMON_NAME, user)]
    given += [(x509.NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([x509.NameAttribute(*one) for one in given])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + _LASTS)
    )
