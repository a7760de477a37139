"""A notification as it is stored, as the body of a webhook, and as variables of a command; and its signature. Pure.

The signature is that of the Standard Webhooks specification (https://github.com/standard-webhooks/standard-webhooks), for which
there are libraries in most languages: HMAC-SHA256 over id, time and body.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from skyserve_cli.controller.notify.alarms import Notice

Message = Mapping[str, Any]

MOST_TEXT = 2000  # Discord takes no more
_KEY_BYTES = range(24, 65)
_PREFIX = "whsec_"


class BadKeyError(ValueError):
    """The key of signatures is not 24 to 64 bytes in base64."""


def message_of(notice: Notice, message_id: str, at: float) -> dict[str, Any]:
    """Return the JSON of a notification. Receivers know one that arrives twice by its `id`."""
    return {
        "id": message_id,
        "kind": notice.kind,
        "status": "begins" if notice.begins else "over",
        "service": notice.service,
        "text": notice.text[:MOST_TEXT],
        "at": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
    }


def body_of(message: Message, form: str) -> bytes:
    """Return the body of a POST in the format `json`, `slack` or `discord`."""
    if form == "slack":
        text = str(message["text"])
        for special, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(special, escaped)
        return json.dumps({"text": text}).encode()
    if form == "discord":  # no text can mention people
        return json.dumps({"content": message["text"], "allowed_mentions": {"parse": []}}).encode()
    return json.dumps(dict(message)).encode()


def headers_of(message: Message, body: bytes, key: bytes | None, now: float) -> dict[str, str]:
    """Return the headers of a POST at `now`, in UNIX seconds; signed if there is a key."""
    found = {
        "Content-Type": "application/json",
        "User-Agent": "skyserve",
        "webhook-id": str(message["id"]),
        "webhook-timestamp": str(int(now)),
    }
    if key is not None:
        signed = b".".join([found["webhook-id"].encode(), found["webhook-timestamp"].encode(), body])
        digest = hmac.new(key, signed, hashlib.sha256).digest()
        found["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return found


def key_of(text: str) -> bytes:
    """Return the key that a secret file contains. Raises BadKeyError."""
    try:
        key = base64.b64decode(text.strip().removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise BadKeyError("the key is not base64") from None
    if len(key) not in _KEY_BYTES:
        raise BadKeyError(f"the key has {len(key)} bytes, and not 24 to 64")
    return key


def variables_of(message: Message) -> dict[str, str]:
    """Return the environment of a command."""
    names = {
        "id": "ID",
        "kind": "KIND",
        "status": "STATUS",
        "service": "SERVICE",
        "text": "MESSAGE",
        "at": "TIME",
    }
    return {f"SKYSERVE_{name}": str(message[key]).replace("\0", "") for key, name in names.items()}
