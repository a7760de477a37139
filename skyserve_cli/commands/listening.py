"""Where the processes of a replica listen, if it runs on this machine: read from /proc, as far as this user may."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from skyserve_cli.causes.facts import Address

_LISTEN = "0A"
#: Ports from here on are given to programs that ask for any, such as engines for their own processes.
_FIRST_ANY = 32_768


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
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (folder / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTEN and f"socket:[{rest[5]}]" in own:
                    yield address_of(local)


def address_of(local: str) -> Address:
    """``0100007F:1F90`` -> 127.0.0.1:8080; words of the address are in the byte order of this machine, which is little."""
    host, _, port = local.partition(":")
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    ip = ipaddress.ip_address(b"".join(words))
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return Address(f"[{ip}]" if ip.version == 6 else str(ip), int(port, 16))
