"""JSON over HTTP from price APIs: bounded in time and size, patient with throttling, through the proxy if there is one."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from policies.backoff import delay_s
from provisioners.port.errors import AuthError, InvalidRequestError, ProvisionError, TransientError

_ATTEMPTS = 4
_BACKOFF_S = 1.0
_LONGEST_WAIT_S = 30.0
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Sources:
    """Where prices are requested. AWS finds its endpoints and credentials by boto3's own settings.

    `timeout_s` is of a connection and of every read; a larger response than `max_bytes` is an error.
    """

    azure_url: str = "https://prices.azure.com"
    gcp_url: str = "https://cloudbilling.googleapis.com"
    gcp_api_key: str | None = None
    aws_profile: str | None = None
    timeout_s: float = 30.0
    max_bytes: int = 64 << 20
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Sources:
        default = cls()
        return cls(
            azure_url=environ.get("SKYSERVE_AZURE_PRICES_URL", default.azure_url).rstrip("/"),
            gcp_url=environ.get("SKYSERVE_GCP_PRICES_URL", default.gcp_url).rstrip("/"),
            gcp_api_key=environ.get("SKYSERVE_GCP_API_KEY") or None,
            aws_profile=environ.get("AWS_PROFILE") or None,
        )


def fetch_json(url: str, cloud: str, sources: Sources) -> dict[str, Any]:
    """Return the JSON object at `url`.

    Raises AuthError, InvalidRequestError, or TransientError once patience is used up; the query, which may hold a key, is
    in no message.
    """
    shown = url.partition("?")[0]
    if not url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"{shown} is not the address of a price API", cloud=cloud)
    for attempt in range(1, _ATTEMPTS + 1):
        wait_s = delay_s(attempt, _BACKOFF_S, _LONGEST_WAIT_S)
        try:
            return _object(_get(url, cloud, sources), shown, cloud)
        except urllib.error.HTTPError as error:
            problem = _meaning(error, shown, cloud)
            if not isinstance(problem, TransientError) or attempt == _ATTEMPTS:
                raise problem from error
            wait_s = _retry_after_s(error) or wait_s
        except (OSError, HTTPException) as error:
            if attempt == _ATTEMPTS:
                reason = getattr(error, "reason", None) or error
                raise TransientError(f"{shown} does not respond: {reason}", cloud=cloud) from error
        sources.sleep(min(_LONGEST_WAIT_S, wait_s))
    raise AssertionError("the last attempt returns or raises")


def _get(url: str, cloud: str, sources: Sources) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "application/json", "User-Agent": "skyserve"})  # noqa: S310 (http and https only, see above)
    parts, size = [], 0
    with urllib.request.urlopen(request, timeout=sources.timeout_s) as response:  # noqa: S310
        while part := response.read(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > sources.max_bytes:
                shown = url.partition("?")[0]
                raise TransientError(f"{shown} answers with more than {sources.max_bytes} bytes", cloud=cloud)
    return b"".join(parts)


def _object(content: bytes, shown: str, cloud: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise TransientError(f"{shown} answers with something that is not JSON", cloud=cloud) from error
    if not isinstance(found, dict):
        raise TransientError(f"{shown} answers with something that is no object", cloud=cloud)
    return found


def _meaning(error: urllib.error.HTTPError, shown: str, cloud: str) -> ProvisionError:
    if error.code in (401, 403):
        return AuthError(f"{shown} refuses the key (HTTP {error.code})", cloud=cloud, code=str(error.code))
    if error.code == 429 or error.code >= 500:
        return TransientError(f"{shown} answers HTTP {error.code}", cloud=cloud, code=str(error.code))
    return InvalidRequestError(f"{shown} answers HTTP {error.code}", cloud=cloud, code=str(error.code))


def _retry_after_s(error: urllib.error.HTTPError) -> float | None:
    wait = error.headers.get("Retry-After", "")
    return float(wait) if wait.isdecimal() else None
