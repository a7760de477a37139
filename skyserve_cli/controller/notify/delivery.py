"""One delivery to a destination. Why it failed is a sentence that contains no address and no secret."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from skyserve_cli.config_notify import Destination
from skyserve_cli.controller.notify.message import (
    BadKeyError,
    Message,
    body_of,
    headers_of,
    key_of,
    variables_of,
)

WITHIN_S = 10.0
_MOST_BYTES = 4096


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A signed body goes where the configuration says, and nowhere else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def deliver(
    to: Destination, message: Message, now: float, run: Callable[[str, Mapping[str, str]], str]
) -> str:
    """Return why the destination has not confirmed the message, or "".

    A webhook confirms with a status of 200 to 299, a command with exit code 0. `run` runs a command with variables and returns
    why it failed. Files with secrets are read each time, so a new secret is used at once.
    """
    if to.command is not None:
        return run(to.command, variables_of(message))
    try:
        address = to.webhook or _first_line(to.webhook_file)
        key = None if to.secret_file is None else key_of(_first_line(to.secret_file))
    except OSError as error:
        return f"a file of the destination cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "a file of the destination is not text"
    except BadKeyError as error:
        return f"secret_file: {error}"
    if not _is_web(address):
        return "webhook_file: its first line is not an address that begins with http:// or https://"
    return _post(address, message, to.format, key, now)


def _is_web(address: str) -> bool:
    try:
        found = urlsplit(address)
    except ValueError:
        return False
    return found.scheme in ("http", "https") and bool(found.hostname)


def _post(address: str, message: Message, form: str, key: bytes | None, now: float) -> str:
    body = body_of(message, form)
    try:
        request = urllib.request.Request(  # noqa: S310 - http or https, see above
            address, data=body, headers=headers_of(message, body, key, now), method="POST"
        )
        with _OPENER.open(request, timeout=WITHIN_S) as response:
            response.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        return f"the response has status {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
        return reason.strerror or type(reason).__name__ if isinstance(reason, OSError) else "no connection"
    except OSError as error:
        return error.strerror or type(error).__name__
    except (HTTPException, ValueError) as error:  # their texts may contain the address
        return type(error).__name__
    return ""


def _first_line(path: Path | None) -> str:
    text = "" if path is None else path.read_text(encoding="utf-8")
    return text.strip().partition("\n")[0].strip()
