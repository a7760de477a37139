"""The certificate of the engines and of the proxy, and its authority, which `openssl` makes for each group of cells."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.router.machine import Missing
from benchmarks.router.systems import Tls

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = ("-days", "2")
_NAME = "subjectAltName=IP:127.0.0.1\n"


def certified(folder: Path, where: frozenset[str]) -> Tls:
    """Write a certificate for 127.0.0.1, its key, and the certificate of its authority into the folder. Raises Missing.

    The authority is another certificate: the library of sglang-router accepts none that is both.
    """
    authority, authority_key = folder / "authority.pem", folder / "authority-key.pem"
    certificate, key, request = folder / "certificate.pem", folder / "key.pem", folder / "request.pem"
    names = folder / "names.cnf"
    names.write_text(_NAME)
    subject = ("-subj", "/CN=127.0.0.1")
    _openssl(
        "req",
        "-x509",
        *_NEW_KEY,
        *_DAYS,
        "-subj",
        "/CN=benchmark",
        "-keyout",
        authority_key,
        "-out",
        authority,
    )
    _openssl("req", *_NEW_KEY, *subject, "-keyout", key, "-out", request)
    by_authority = ("-CA", authority, "-CAkey", authority_key, "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *by_authority, *_DAYS, "-extfile", names, "-out", certificate)
    return Tls(authority, certificate, key, "targets" in where, "clients" in where)


def _openssl(*arguments: str | Path) -> None:
    try:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
    except FileNotFoundError as error:
        raise Missing("there is no openssl (Debian, Ubuntu: apt-get install openssl)") from error
