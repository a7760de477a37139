"""The cookie that keeps a browser with one target: an opaque id, made at random for a client that has none."""

from __future__ import annotations

import re
import secrets

NAME = "skyserve_session"
_IN_HEADER = re.compile(rb"(?:^|;[ \t]*)%b=([A-Za-z0-9_-]{22})[ \t]*(?:;|$)" % NAME.encode())


def read_or_make(cookie: bytes, *, secure: bool) -> tuple[str, bytes]:
    """Return the session of a `Cookie` header, and the `Set-Cookie` line, with its CRLF, if the session is new.

    `secure`: the client came by https, and should send the cookie by nothing else.
    """
    found = _IN_HEADER.search(cookie)
    if found is not None:
        return found[1].decode("ascii"), b""
    session = secrets.token_urlsafe(16)
    attributes = "; Path=/; HttpOnly; SameSite=Lax" + ("; Secure" if secure else "")
    return session, f"Set-Cookie: {NAME}={session}{attributes}\r\n".encode("ascii")
