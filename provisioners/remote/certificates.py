"""Certificates of machines, derived from the home's secret like their host keys, so that nothing has to be stored.

Each owner has a certificate authority that signs nothing but the certificates of the owner's machines. A certificate is for one
name, the machine's token: a client checks that name, and not the address or the host name, which say nothing about
who is there. Ed25519 signatures are deterministic, so the same machine always has the same certificate, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from provisioners.remote.ssh_keys import derived_seed

# Clocks of machines may be far off, and keys do not change for as long as a home has its secret.
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Authority:
    """Of one owner. `secret` are the 32 bytes of the home."""

    secret: bytes = field(repr=False)
    owner: str

    @cached_property
    def certificate(self) -> bytes:
        """Its own, in DER: what others need to check the machines' certificates."""
        name = self._name
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        return (
            self._builder(name, self._key)
            .add_extension(constraints, critical=True)
            .sign(self._key, None)
            .public_bytes(Encoding.DER)
        )

    def of_machine(self, token: str) -> bytes:
        """Return the private key and the certificate of the machine of that token, in PEM."""
        key = Ed25519PrivateKey.from_private_bytes(derived_seed(self.secret, f"tls\0{self.owner}\0{token}"))
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, token)]), key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(token)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, None)
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + certificate.public_bytes(Encoding.PEM)

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(derived_seed(self.secret, f"tls authority\0{self.owner}"))

    @property
    def _name(self) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"skyserve {self.owner}"[:64])])

    def _builder(self, name: x509.Name, key: Ed25519PrivateKey) -> x509.CertificateBuilder:
        public = key.public_key()
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(int.from_bytes(identifier.digest[:16], "big") or 1)
            .not_valid_before(_FROM)
            .not_valid_after(_UNTIL)
            .add_extension(identifier, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
