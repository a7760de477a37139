"""What the agent leaves for the dead-man switch of the machine (`provisioners.port.lease`), and reads from it.

*Traffic* is a successful response of the replica to a request that is not our own poll. TLS in front of the replica sees
it (`tls_proxy`). Without TLS, and on the machines of a replica of several nodes that serve no port, it is a connection that another machine has
opened to the replica's port, or to the head: whether anything useful passes there is not known here.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Python 3.8 cannot evaluate these
    from collections.abc import Iterator

FOLDER = Path("/var/lib/skyserve")  # what the user data makes; there is none on a machine without a switch
NOTE_EVERY_S = 20.0
_ESTABLISHED = "01"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOOPBACKS = ("7F", "00000000000000000000000000000001", "00000000000000000000FFFF7F")


def visit(folder: Path = FOLDER) -> None:
    """A controller pays attention to the machine."""
    _touch(folder / "lease")


def traffic(folder: Path = FOLDER) -> None:
    """The machine is of use."""
    _touch(folder / "served")
    _touch(folder / "traffic")


def served(folder: Path = FOLDER) -> None:
    """The replica has responded."""
    _touch(folder / "served")


def terms(folder: Path = FOLDER) -> dict[str, float] | None:
    """Return the lease that holds now, and how long traffic alone renews it, in seconds; None without a switch.

    Both numbers are the same from one visit to the next.
    """
    try:
        _, _, lease, most, every_s = (int(word) for word in (folder / "count").read_text().split())
    except (OSError, ValueError):
        return None
    return {"lease_s": float(lease * every_s), "most_s": float(most * every_s)}


def is_connected(port: int | None, peers: frozenset[str], tables: tuple[Path, ...] = _TABLES) -> bool:
    """Return whether another machine is connected to our port, or any port of ours to one of the peers (IPv4 addresses)."""
    wanted = {_hexadecimal(peer) for peer in peers}
    for local, remote in _connections(tables):
        address = _address(remote)
        if not address.startswith(_LOOPBACKS) and (_port(local) == port or address[-8:] in wanted):
            return True
    return False


def _connections(tables: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """(local, remote) of each established connection, with the addresses as the kernel writes them, network order first."""
    for table in tables:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _ESTABLISHED:
                    yield words[1], words[2]


def _address(end: str) -> str:
    """Of `0100007F:1F90` in network order.

    The kernel writes words of four bytes in the machine's, which is little-endian on all machines that are rented out.
    """
    raw = bytes.fromhex(end.partition(":")[0])
    words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
    return b"".join(words).hex().upper()


def _port(end: str) -> int:
    return int(end.partition(":")[2], 16)


def _hexadecimal(address: str) -> str:
    parts = address.split(".")
    is_v4 = len(parts) == 4 and all(part.isdigit() and int(part) < 256 for part in parts)
    return bytes(int(part) for part in parts).hex().upper() if is_v4 else "-"


def _touch(path: Path) -> None:
    with suppress(OSError):
        path.touch()


def peers_of(order: dict[str, Any]) -> frozenset[str]:
    """Return the head's address on the other machines of a replica of several nodes, none on the head."""
    rank = order["env"].get("SKYPILOT_NODE_RANK", "0")
    ips = order["env"].get("SKYPILOT_NODE_IPS", "").split()
    return frozenset() if rank == "0" else frozenset(ips[:1])
