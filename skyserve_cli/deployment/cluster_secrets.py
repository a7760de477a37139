"""The contents of the Secrets of a controller in Kubernetes, made here and sent to the cluster alone."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from skyserve_cli.home import MACHINE_SECRET_BYTES

_VALID = timedelta(days=3650)


def new_keys() -> dict[str, bytes]:
    """Return the keys that two controllers share."""
    from cryptography.fernet import Fernet

    return {
        "sealing.key": Fernet.generate_key(),
        "machines.key": secrets.token_bytes(MACHINE_SECRET_BYTES),
        "metrics.token": secrets.token_hex(32).encode(),
    }


def certificate(namespace: str, now: float) -> dict[str, bytes]:
    """Return a key and a certificate of the API that signs itself, for its names inside the cluster."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyserve-api")])
    host = f"skyserve-api.{namespace}"
    names = [f"{host}.svc", f"{host}.svc.cluster.local", host, "skyserve-api", "localhost"]
    at = datetime.fromtimestamp(now, UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - timedelta(hours=1))
        .not_valid_after(at + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {"tls.crt": made.public_bytes(pem), "tls.key": private}
