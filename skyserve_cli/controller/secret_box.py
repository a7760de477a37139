"""Secrets at rest: sealed with a key that lies in the home, not in the database."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from skyserve_cli.home import Home


class CannotUnsealError(Exception):
    """The sealing key in the home is not the one the secrets were sealed with; run `serve update` again."""


class SecretBox:
    """`key` seals; `older` ones still open, while a rotation is under way.

    Digests are made with `digest_key`, which outlives rotations: with another one every service would seem to have changed
    at its next update.
    """

    def __init__(self, key: bytes, *older: bytes, digest_key: bytes | None = None) -> None:
        self._digest_key = digest_key or key
        self._fernet = MultiFernet([Fernet(one) for one in (key, *older)])

    def close(self, secrets: Mapping[str, str]) -> bytes:
        return self._fernet.encrypt(json.dumps(dict(secrets)).encode())

    def open(self, sealed: bytes) -> dict[str, str]:
        """Raise CannotUnsealError."""
        try:
            opened: dict[str, str] = json.loads(self._fernet.decrypt(sealed))
        except InvalidToken:
            raise CannotUnsealError(CannotUnsealError.__doc__) from None
        return opened

    def again(self, sealed: bytes) -> bytes:
        """Return the same secrets, sealed with `key`. Raises CannotUnsealError."""
        try:
            return self._fernet.rotate(sealed)
        except InvalidToken:
            raise CannotUnsealError(CannotUnsealError.__doc__) from None

    def digest(self, secrets: Mapping[str, str]) -> str:
        """Equal for equal secrets, and useless without the key."""
        content = json.dumps(dict(secrets), sort_keys=True).encode()
        return hmac.new(self._digest_key, content, hashlib.sha256).hexdigest()


def seal_of(home: Home) -> SecretBox:
    return SecretBox(*home.sealing_keys(), digest_key=home.digest_key())
