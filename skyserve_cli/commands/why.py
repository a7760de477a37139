"""`serve why`: the cause of what a service or a replica does, and the next command to try."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from skyserve_cli.causes.explain import Explanation, explain
from skyserve_cli.causes.facts import Address, Facts, subject
from skyserve_cli.causes.log_text import TAIL_BYTES, cleaned
from skyserve_cli.commands.options import Format, OutputFormat, View, complete_service, controller, find
from skyserve_cli.commands.sentences import words
from skyserve_cli.commands.sessions import relay
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.reconcile.clock import SystemClock
from skyserve_cli.output import CommandFailed, WrongUsage, printable, put, put_json

LOG_S = 5.0
CONNECT_S = 2.0
LATELY_S = 300.0
EVENTS = 50


def why(
    target: Annotated[
        str,
        typer.Argument(
            metavar="NAME[/ID]",
            help="A service, or one of its replicas.",
            autocompletion=complete_service,
            show_default=False,
        ),
    ],
    output: Format = OutputFormat.TABLE,
) -> None:
    """Say why a service, or one of its replicas, is not well, and what to do about it.

    The first line has the cause, the last one the next command to try; of a service that is well there is one line. It reads the
    status, the events, the end of the log of the replica that failed, and the endpoint.

    \b
    serve why chat
    serve why chat/3 -o json
    """
    name, replica_id = parsed(target)
    found = explained(controller(), name, replica_id)
    if output is OutputFormat.JSON:
        put_json(found.view())
        return
    for line in found.lines(target):
        put(printable(line))


def parsed(target: str) -> tuple[str, int | None]:
    """Return the service, and the replica if one is named. Raises WrongUsage."""
    name, slash, number = target.partition("/")
    if slash and not (number.isascii() and number.isdecimal()):
        raise WrongUsage(f"name a service, or one of its replicas as in chat/3 (got {target!r})")
    return name, int(number) if slash else None


def explained(client: ControllerClient, name: str, replica_id: int | None = None) -> Explanation:
    """Return the account. Raises CommandFailed, and what calls of the controller raise."""
    view = find(client.services(name, down=True, ended=True), name)
    replica = subject(view, replica_id)
    if replica_id is not None and replica is None:
        raise CommandFailed(
            f"service {name} has no replica {replica_id} that is live or ended within the last hour"
        )
    events = client.events(name, newest=True, limit=EVENTS)
    shown = [{**each, "words": words(each["kind"])} for each in events if _belongs(each, replica_id)]
    requests, errors = _lately(client, view)
    return explain(
        Facts(
            view,
            SystemClock().now(),
            replica,
            replica_id is not None,
            shown,
            "" if replica is None else cleaned(log_tail(client, f"replica/{name}/{replica['id']}")),
            _listening(client, view, replica),
            _endpoint_trouble(client, view),
            requests,
            errors,
        )
    )


def _belongs(event: View, replica_id: int | None) -> bool:
    return event["kind"] != "Progressed" and replica_id in (None, event["replica_id"])


def log_tail(client: ControllerClient, what: str) -> bytes:
    """Return the end of a log; nothing where none is kept, or where it does not arrive in time."""
    try:
        with client.waiting.within(LOG_S, LOG_S):
            content, _ = client.log(what, offset=-TAIL_BYTES)
            return content[-TAIL_BYTES:]
    except (RefusedError, DeadlineError, *AWAY, OSError):
        return b""


def _listening(client: ControllerClient, view: View, replica: View | None) -> list[Address]:
    """Return where the replica listens; of one that has ended, where the next one like it does, if not at its own port."""
    if replica is None:
        return []
    alike = [r for r in view["replicas"] if r["version"] == replica["version"] and r["state"] == "STARTING"]
    for one in (replica, *alike):
        port = urlsplit(one["endpoint"] or "").port
        found = listening(view["name"], one["id"], port) if port and one["state"] != "GONE" else []
        if found and (one is replica or all(each.port != port for each in found)):
            return found
    port = urlsplit(replica["endpoint"] or "").port
    if port and replica["state"] == "STARTING" and "refused" in replica["message"]:
        return listening_there(client, view["name"], replica["id"], port)
    return []


def _endpoint_trouble(client: ControllerClient, view: View) -> str:
    """Return why the endpoint takes no connection from here; "" if it does, or if it is not to be expected."""
    url = urlsplit(view["endpoint"] or "")
    is_elsewhere = "://" in client.where and view["endpoint_reach"] == "this_machine"
    if not view["ready"] or url.hostname is None or is_elsewhere:
        return ""
    try:
        socket.create_connection((url.hostname, url.port or 443), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _lately(client: ControllerClient, view: View) -> tuple[int, int]:
    """Return the requests of the last minutes, and those that got an error; zeros where that is not known."""
    if not view["ready"]:
        return 0, 0
    with suppress(RefusedError, DeadlineError):
        total = client.series(view["name"], since=SystemClock().now() - LATELY_S)["total"]
        return (total["requests"], total["errors"]) if total else (0, 0)
    return 0, 0


_LISTEN = "0A"
#: Ports from here on are given to programs that ask for any, such as engines for their own processes.
_FIRST_ANY = 32_768
_TABLES = ("tcp", "tcp6")
_READ_TABLES = "cat /proc/net/tcp /proc/net/tcp6"
SESSION_S = 5.0


def listening(service: str, replica_id: int, port: int | None, proc: Path = Path("/proc")) -> list[Address]:
    """Return the TCP addresses at which processes of the replica listen; none elsewhere than on Linux, or if it runs elsewhere.

    `port` is $SKYSERVE_REPLICA_PORT: replicas of another home may have the same name and id.
    """
    found: dict[Address, None] = {}
    wanted = {f"SKYSERVE_SERVICE={service}", f"SKYSERVE_REPLICA_ID={replica_id}"}
    wanted |= set() if port is None else {f"SKYSERVE_REPLICA_PORT={port}"}
    with suppress(OSError):
        for folder in proc.iterdir():
            if folder.name.isdecimal() and wanted <= _variables(folder):
                found |= dict.fromkeys(each for each in _addresses(folder) if each.port < _FIRST_ANY)
    return list(found)


def _variables(folder: Path) -> set[str]:
    with suppress(OSError):
        return set((folder / "environ").read_bytes().decode(errors="replace").split("\0"))
    return set()


def _addresses(folder: Path) -> Iterator[Address]:
    """Yield what a process listens at: sockets of its network that are among its files."""
    own = set()
    with suppress(OSError):
        for link in (folder / "fd").iterdir():
            with suppress(OSError):
                own.add(str(link.readlink()))
    for table in _TABLES:
        with suppress(OSError):
            yield from (
                at for at, socket in _listeners((folder / "net" / table).read_text()) if socket in own
            )


def _listeners(table: str) -> Iterator[tuple[Address, str]]:
    """Yield the addresses in one of the kernel's tables of sockets, with the link that a process which has the socket shows."""
    for line in table.splitlines():
        _, local, _, state, *rest = line.split()
        if state == _LISTEN:
            yield address_of(local), f"socket:[{rest[5]}]"


def listening_there(client: ControllerClient, service: str, replica_id: int, port: int) -> list[Address]:
    """Return the addresses with this port that are listened at where the replica runs, on a machine or in a Pod.

    None if this caller may open no session there, or if it takes longer than SESSION_S.
    """
    printed = bytearray()
    try:
        with client.waiting.within(SESSION_S, SESSION_S):
            link = client.session(service, replica_id)
            end = client.waiting.now() + SESSION_S
            relay(
                link,
                _READ_TABLES,
                out=printed.extend,
                err=lambda _: None,
                stopped=lambda: client.waiting.now() > end,
            )
    except (CommandFailed, RefusedError, DeadlineError, *AWAY, OSError):
        return []
    found = (at for at, _ in _listeners(printed.decode(errors="replace")))
    return list(dict.fromkeys(each for each in found if each.port == port))


def address_of(local: str) -> Address:
    """``0100007F:1F90`` -> 127.0.0.1:8080; words of the address are in the byte order of this machine, which is little."""
    host, _, port = local.partition(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return Address(f"[{ip}]" if ip.version == 6 else str(ip), int(port, 16))
