"""What is known of a service when its cause is looked for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

View = dict[str, Any]  # a service, a replica or an event as the controller's API gives it

#: Ends of replicas whose cause is in what they did, not in where they ran.
OWN_FAULTS = ("SETUP_FAILED", "RUN_EXITED", "START_TIMEOUT", "PROBE_FAILED", "ONLY_ERRORS", "CONFIG")
COMING = ("REQUESTED", "PROVISIONING", "STARTING")
_WRONG_RESPONSE = "probe returned 4"  # a 4xx: the replica will return the same to the next probe
_WORST_FIRST = ("NOT_READY", "STARTING", "PROVISIONING", "READY")
PRINTS = "; it prints: "
WAITING = "waiting for the readiness probe: "
LOADED = "loaded: "
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")
_LISTENS = re.compile(
    r"(?i)(?:running on|listening (?:on|at)|serving(?: https?)? (?:on|at)|server(?: \S+){0,3} (?:on|at))[: ]+"
    r"(?:tcp |https?://)?(\[[0-9a-f:]+\]|[\w.*-]+)(?::| port )(\d{2,5})\b"
)


class Address(NamedTuple):
    """Where a program listens."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return self.host.startswith(_LOOPBACK)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one service, by its view. Instants are UNIX seconds.

    `replica` is the one whose cause is looked for (`subject`); `asked`: the user named it. `log` is the end of its log,
    `listening` where its processes listen, if they run on this machine. `endpoint_trouble` is why the endpoint of the service
    takes no connection from here, `requests` and `errors` are those of the last minutes.
    """

    view: View
    now: float
    replica: View | None = None
    asked: bool = False
    events: Sequence[View] = ()
    log: str = ""
    listening: Sequence[Address] = ()
    endpoint_trouble: str = ""
    requests: int = 0
    errors: int = 0

    @property
    def name(self) -> str:
        return str(self.view["name"])

    @property
    def notes(self) -> str:
        return str(self.view["notes"] or "")

    @property
    def message(self) -> str:
        return "" if self.replica is None else str(self.replica["message"] or "")

    @property
    def reason(self) -> str:
        """Why the replica ended; "" while it lives."""
        return "" if self.replica is None else str(self.replica["end_reason"] or "")

    @property
    def state(self) -> str:
        return "" if self.replica is None else str(self.replica["state"])

    @property
    def who(self) -> str:
        return "" if self.replica is None else f"replica {self.replica['id']}"

    @property
    def is_short(self) -> bool:
        """Whether fewer replicas are ready than are wanted, or the newest version does not work."""
        view = self.view
        return view["ready"] < view["wanted"] or view["version"] in view["failed_versions"]

    @property
    def probe(self) -> str:
        """Why the last readiness probe of the replica failed; "" if it passed, or was not sent."""
        message = self.message
        if message.startswith(WAITING):
            return message.removeprefix(WAITING).partition(PRINTS)[0]
        if self.reason in ("START_TIMEOUT", "PROBE_FAILED"):
            return message.partition("; ")[2].removeprefix("probe failed: ")
        if self.state in ("NOT_READY", "READY"):
            return message.removeprefix("probe failed: ")
        return ""

    def addresses(self) -> Iterator[Address]:
        """Yield where the replica's program listens: as seen on this machine, then as the end of its log says, the newest first."""
        yield from self.listening
        for host, port in reversed(_LISTENS.findall(self.log)):
            yield Address(host, int(port))

    def port(self) -> int | None:
        """Return the port that the replica is reached at."""
        endpoint = None if self.replica is None else self.replica["endpoint"]
        return urlsplit(endpoint).port if endpoint else None

    def at(self) -> str:
        """Return the host and the port that the replica is reached at; "" if it has none yet."""
        endpoint = None if self.replica is None else self.replica["endpoint"]
        return urlsplit(endpoint).netloc if endpoint else ""


def subject(view: View, asked: int | None = None) -> View | None:
    """Return the replica that says most about the service, or the one that is `asked` for; None if there is none.

    That is the last one that failed by its own fault, unless a later one has got further. (The view has no last failure once a
    later replica is ready.) Of a service whose newest version is on trial it is the last of that version that failed. Else it is
    the live replica that is worst off.
    """
    replicas: list[View] = view["replicas"]
    if asked is not None:
        return by_id(view, asked)
    failure = view["last_failure"]
    failed = None if failure is None else by_id(view, failure["replica_id"])
    troubled = [r for r in replicas if r["state"] in _WORST_FIRST and r["message"]]
    troubled.sort(key=lambda replica: _WORST_FIRST.index(replica["state"]))
    if failed is not None and (failed["end_reason"] in OWN_FAULTS or not troubled):
        further = (r for r in troubled if r["id"] > failed["id"] and _WRONG_RESPONSE in r["message"])
        return next(further, failed)
    trial = view.get("trial")  # a controller of an earlier release sends none
    tried = (trial or view)["version"]
    ended = [r for r in replicas if r["version"] == tried and r["end_reason"] in OWN_FAULTS]
    if ended and (trial or is_updating(view)):
        return max(ended, key=lambda replica: int(replica["id"]))
    coming = [replica for replica in replicas if replica["state"] in COMING]
    return next(iter((*troubled, *coming)), failed)


def is_updating(view: View) -> bool:
    """Return whether an older version serves until the newest one does."""
    newest = view["version"]
    return view["serving_version"] not in (None, newest) and newest not in view["failed_versions"]


def by_id(view: View, replica_id: int) -> View | None:
    found: View | None = next((r for r in view["replicas"] if r["id"] == replica_id), None)
    return found
