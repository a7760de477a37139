"""Calls of Lambda's Cloud API: JSON over HTTPS, paced as it requests, errors by what the caller does next.

Lambda takes one request a second, and one launch in twelve seconds (docs.lambda.ai/api/cloud, "Rate limiting"; older versions of
that page say ten).
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

from policies.model import Scope, Zone
from provisioners.lambda_labs.prices import NAME
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    RefusedError,
    TransientError,
)
from provisioners.rate_limit import Rate, RateLimiter

_CALLS = Rate(burst=5.0, per_s=1.0)
_LAUNCHES = Rate(burst=1.0, per_s=1.0 / 12.0)
_TIMEOUT_S = 30.0
_MAX_BYTES = 32 << 20
_KEY_LINE = re.compile(r"^\s*api_key\s*=\s*(\S+)", re.MULTILINE)

LAUNCH = "/instance-operations/launch"
GONE = "global/object-does-not-exist"

#: What a code means. The codes are those of the API's schema.
_MEANINGS: dict[str, tuple[type[ProvisionError], Scope | None, str]] = {
    "instance-operations/launch/insufficient-capacity": (CapacityError, None, "there is no room for it now"),
    "global/quota-exceeded": (
        QuotaError,
        Scope.CLOUD,
        "the account's quota of instances is used up; ask Lambda's support for more",
    ),
    "global/invalid-api-key": (
        AuthError,
        Scope.CLOUD,
        "the API key is not accepted: see clouds.lambda.api_key_file",
    ),
    "global/account-inactive": (
        AuthError,
        Scope.CLOUD,
        "the account is inactive: verify the address and the means of payment",
    ),
    "global/invalid-billing-address": (AuthError, Scope.CLOUD, "the account has no valid billing address"),
    "global/invalid-parameters": (RefusedError, None, "it refuses the request"),
}


class LambdaApi:
    """Thread-safe. Raises the classes of `provisioners.port.errors`."""

    def __init__(
        self, url: str, api_key_file: str, *, now: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._url = url.rstrip("/")
        self._key_file = Path(api_key_file).expanduser()
        self._pacer = RateLimiter(now, sleep)
        self._direct = urllib.request.build_opener(_NoRedirects)

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def call(self, method: str, path: str, body: Any = None, *, zone: Zone | None = None) -> Any:
        """Return what the response has as `data`."""
        headers = {"Authorization": f"Bearer {self._key()}", "Accept": "application/json"}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        if path == LAUNCH:
            self._pacer.take_turn("launch", _LAUNCHES)
        self._pacer.take_turn("call", _CALLS)
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310
        try:
            with self._direct.open(request, timeout=_TIMEOUT_S) as response:
                return json.loads(response.read(_MAX_BYTES))["data"]
        except urllib.error.HTTPError as error:
            if error.code == 429:
                self._pacer.drain("launch" if path == LAUNCH else "call")
            raise _error_of(error, zone) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "reason", error)
            raise TransientError(
                f"lambda: no response from its API ({reason})", cloud=NAME, zone=zone
            ) from error

    def _key(self) -> str:
        try:
            text = self._key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            message = f"lambda: {self._key_file} cannot be read ({why}): make an API key, or set clouds.lambda.api_key_file"
            raise AuthError(message, cloud=NAME, scope=Scope.CLOUD) from error
        found = _KEY_LINE.search(text)
        key = found[1] if found else text.strip()
        if not re.fullmatch(r"[!-~]{8,512}", key):
            raise AuthError(f"lambda: {self._key_file} has no API key", cloud=NAME, scope=Scope.CLOUD)
        return key


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key must not follow a redirect to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def _error_of(error: urllib.error.HTTPError, zone: Zone | None) -> ProvisionError:
    try:
        said = json.loads(error.read(1 << 16))["error"]
        code, message = str(said["code"]), str(said.get("message", ""))[:300]
    except (OSError, ValueError, KeyError, TypeError):
        code, message = str(error.code), ""
    detail = f" ({code}: {message})" if message else f" ({code})"
    if code in _MEANINGS:
        kind, scope, sentence = _MEANINGS[code]
        return kind(f"lambda: {sentence}{detail}", cloud=NAME, code=code, zone=zone, scope=scope)
    if error.code in (401, 403):
        return AuthError(
            f"lambda: it does not let us{detail}", cloud=NAME, code=code, zone=zone, scope=Scope.CLOUD
        )
    if error.code in (408, 429) or error.code >= 500:
        wait_s = 12.0 if error.code == 429 else 2.0
        return TransientError(
            f"lambda: not now{detail}", cloud=NAME, code=code, zone=zone, retry_after_s=wait_s
        )
    if error.code == 413:
        return InvalidRequestError(
            f"lambda: the request is too large{detail}", cloud=NAME, code=code, zone=zone
        )
    return RefusedError(f"lambda: refused{detail}", cloud=NAME, code=code, zone=zone)
