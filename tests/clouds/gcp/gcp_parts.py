"""Small parts of the make-believe Google Cloud: time, refusals, operations, pages, filters."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

HOST = "https://www.googleapis.com/compute/v1"


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class VirtualClock:
    """Moves only by sleeps."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now += max(0.0, seconds)


class RealClock:
    """For machines that really boot."""

    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class Refusal(Exception):
    """An error response, in Google's shape."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message

    @property
    def body(self) -> dict[str, Any]:
        entry = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [entry]}}


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` calls of a method: a refusal, or the connection breaks (`status` 0). `after`:
    the call has had its effect by then."""

    method: str
    status: int = 0
    reason: str = ""
    message: str = ""
    after: bool = False
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a machine's host needs to know to boot it."""

    name: str
    zone: str
    private_ip: str
    user_data: str
    ssh_keys: str
    labels: Mapping[str, str]
    is_spot: bool


@dataclass(slots=True)
class Operation:
    """Something that takes time. `on_done` has the effect; an error of `(code, message, status)` instead of it."""

    view: dict[str, Any]
    done_at: float
    error: tuple[str, str, int] | None = None
    on_done: Callable[[], None] | None = None
    on_failed: Callable[[], None] | None = None

    @property
    def is_done(self) -> bool:
        return bool(self.view["status"] == "DONE")

    def finish(self, now: float) -> None:
        self.view |= {"status": "DONE", "progress": 100, "endTime": timestamp(now)}
        if self.error is not None:
            code, message, status = self.error
            self.view["error"] = {"errors": [{"code": code, "message": message}]}
            self.view |= {"httpErrorStatusCode": status, "httpErrorMessage": "REFUSED"}
        effect = self.on_done if self.error is None else self.on_failed
        if effect is not None:
            effect()


def timestamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")


def last(url: str) -> str:
    return url.rpartition("/")[2]


def not_found(path: str) -> Refusal:
    return Refusal(404, "notFound", f"The resource '{path}' was not found")


def kept(items: Iterable[Mapping[str, Any]], expression: str) -> list[Mapping[str, Any]]:
    """Those that the filter lets through. Three forms are understood: `labels.KEY="VALUE"`,
    `labels.KEY:*` and `targetLink:SUBSTRING`."""
    if not expression:
        return list(items)
    if label := re.fullmatch(r'labels\.([a-z][a-z0-9_-]*)="([a-z0-9_-]*)"', expression):
        return [item for item in items if item.get("labels", {}).get(label[1]) == label[2]]
    if label := re.fullmatch(r"labels\.([a-z][a-z0-9_-]*):\*", expression):
        return [item for item in items if label[1] in item.get("labels", {})]
    if target := re.fullmatch(r"targetLink:([a-z0-9/-]+)", expression):
        return [item for item in items if target[1] in item["targetLink"]]
    raise Refusal(
        400, "invalid", f"Invalid value for field 'filter': '{expression}'. Invalid list filter expression."
    )


def page_of(
    items: Sequence[Any], query: Mapping[str, str], size: int
) -> tuple[Sequence[Any], dict[str, str]]:
    """One page, and the token of the next if there is one."""
    start = int(query.get("pageToken", "0"))
    end = start + min(size, int(query.get("maxResults", "500")))
    return items[start:end], ({"nextPageToken": str(end)} if end < len(items) else {})
