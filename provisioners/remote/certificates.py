"""Certificates of machines, derived from the home's secret like their host keys, so that nothing has to be stored.

Each owner has a certificate authority that signs nothing but the certificates of the owner's machines. A certificate is for one
name, the machine's token: a client checks that name, and not the address or the host name, which say nothing about
who is there. Ed25519 signatures are deterministic, so the same machine always has the same certificate, to the byte.

The load balancer agents of a service have an authority of their own, and certificates that expire: with one of them an agent gets
the service's prompts. Within a period of RENEWED_EVERY all controllers of a home make the same certificate for an agent.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from provisioners.remote.ssh_keys import derived_seed

# Clocks of machines may be far off, and keys do not change for as long as a home has its secret.
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
RENEWED_EVERY = timedelta(days=10)
VALID_FOR = timedelta(
    days=30
)  # an agent's file is up to RENEWED_EVERY old, so it serves for 20 days at least without a controller
_CLOCKS_OFF = timedelta(days=1)
CACHE_KEY = "SKYSERVE CACHE KEY"  # as in `lb.regions.identity`


@dataclass(frozen=True)
class Authority:
    """The certificate authority of one owner, or of the agents of one of its services. `secret` are the 32 bytes of the home."""

    secret: bytes = field(repr=False)
    owner: str
    service: str = ""

    @cached_property
    def certificate(self) -> bytes:
        """The authority's own certificate in DER, by which others check those of the machines."""
        name = self._name
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        return (
            self._builder(name, self._key)
            .add_extension(constraints, critical=True)
            .sign(self._key, None)
            .public_bytes(Encoding.DER)
        )

    @property
    def pem(self) -> bytes:
        """The authority's own certificate in PEM."""
        return x509.load_der_x509_certificate(self.certificate).public_bytes(Encoding.PEM)

    def of_machine(self, token: str) -> bytes:
        """Return the private key and the certificate of the machine of that token, in PEM."""
        return self._issued(token, f"tls\0{self.owner}\0{token}", _FROM, _UNTIL)

    def of_agent(self, name: str, now: datetime) -> bytes:
        """Return, in PEM, an agent's private key and certificate, and the key of cache digests (`lb.regions.identity`).

        The certificate is valid for VALID_FOR from the last multiple of RENEWED_EVERY before `now`, and so is its key. Raises
        ValueError for an authority of machines.
        """
        if not self.service:
            raise ValueError("agents have certificates by the authority of their service")
        period = (now - _FROM) // RENEWED_EVERY
        start = _FROM + period * RENEWED_EVERY
        seed = f"tls agent\0{self.owner}\0{self.service}\0{name}\0{period}"
        digests = derived_seed(self.secret, f"cache digests\0{self.owner}\0{self.service}")
        block = f"-----BEGIN {CACHE_KEY}-----\n{b64encode(digests).decode()}\n-----END {CACHE_KEY}-----\n"
        return self._issued(name, seed, start - _CLOCKS_OFF, start + VALID_FOR) + block.encode()

    def _issued(self, name: str, seed: str, start: datetime, end: datetime) -> bytes:
        key = Ed25519PrivateKey.from_private_bytes(derived_seed(self.secret, seed))
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        certificate = (
            self._builder(subject, key, start, end)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self._key, None)
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + certificate.public_bytes(Encoding.PEM)

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        seed = f"tls authority\0{self.owner}" + (f"\0{self.service}" if self.service else "")
        return Ed25519PrivateKey.from_private_bytes(derived_seed(self.secret, seed))

    @property
    def _name(self) -> x509.Name:
        return x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"skyserve {self.owner} {self.service}".strip()[:64])]
        )

    def _builder(
        self, name: x509.Name, key: Ed25519PrivateKey, start: datetime = _FROM, end: datetime = _UNTIL
    ) -> x509.CertificateBuilder:
        public = key.public_key()
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(int.from_bytes(identifier.digest[:16], "big") or 1)
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(identifier, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
