"""Where the processes of a replica listen: read from /proc, here as far as this user may, or on its own machine in a session."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from skyserve_cli.causes.facts import Address
from skyserve_cli.commands.sessions import relay
from skyserve_cli.controller.api.client import AWAY, ControllerClient, RefusedError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.output import CommandFailed

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
