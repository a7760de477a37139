"""Secrets at rest: sealed with a key that lies in the home, not in the database."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken


class CannotUnsealError(Exception):
    """The sealing key in the home is not the one the secrets were sealed with; run `serve update` again."""


class Seal:
    def __init__(self, key: bytes) -> None:
        self._key = key
        self._fernet = Fernet(key)

    def close(self, secrets: Mapping[str, str]) -> bytes:
        return self._fernet.encrypt(json.dumps(dict(secrets)).encode())

    def open(self, sealed: bytes) -> dict[str, str]:
        """Raises CannotUnsealError."""
        try:
            opened: dict[str, str] = json.loads(self._fernet.decrypt(sealed))
        except InvalidToken:
            raise CannotUnsealError(CannotUnsealError.__doc__) from None
        return opened

    def digest(self, secrets: Mapping[str, str]) -> str:
        """Equal for equal secrets, and useless to whoever does not have the key."""
        content = json.dumps(dict(secrets), sort_keys=True).encode()
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()
