"""Ports for replicas of one machine, and a network of their own for those that insist on a fixed port.

A replica that takes $SKYSERVE_REPLICA_PORT gets a free port of the loopback interface. One that always listens
on the same port is put in a network namespace, joined to the machine by a pair of virtual interfaces with a /30
of its own, so that any number of them listen on the same port. That needs root and the `ip` program; whether
it is permitted is found out by trying. An isolated replica must listen on all interfaces (0.0.0.0), as on any
real cloud; it reaches this machine and is reached from it, and has no way out to other networks.

The namespace and our end of the pair carry the same name, derived from the instance: that name is all it takes
to remove both, by whoever finds them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise
from pathlib import Path
from zlib import crc32

LOOPBACK = "127.0.0.1"
# Below the range the kernel picks from for outgoing connections (32768 and up), so nothing takes a port
# between its allocation and the moment, perhaps minutes later, when the replica listens.
_FIRST_PORT, _PORTS = 20_000, 10_000


class NotPermittedError(Exception):
    """This user may not create network namespaces; the message is what the system said."""


def free_port(taken: Collection[int], seed: str) -> int | None:
    """A loopback port that is not in `taken` and on which nobody listens, or None. Different seeds start the
    search at different places, so that two clouds of one machine rarely look at the same port."""
    start = crc32(seed.encode())
    for step in range(_PORTS):
        port = _FIRST_PORT + (start + step) % _PORTS
        if port not in taken and is_port_free(port):
            return port
    return None


def is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def namespace_name(instance_id: str) -> str:
    """15 characters, the longest name an interface can have."""
    return f"skyserve-{instance_id.removeprefix('i-')[:6]}"


def create_namespace(name: str, network: IPv4Network) -> str:
    """Create the namespace `name` with a /30 out of `network` and return the address inside it.

    Raises NotPermittedError, and then nothing is left behind.
    """
    with _machine_lock():
        remove_namespace(name)  # of a launch that was cut short
        try:
            outside, inside = _free_pair(network)
            for command in creation(name, outside, inside):
                _run(command)
            _run(entering(name, ["true"]))  # some containers let us make what they do not let us enter
        except NotPermittedError:
            remove_namespace(name)
            raise
    return inside


def creation(name: str, outside: str, inside: str) -> list[list[str]]:
    """The commands that make a namespace, as data."""
    return [
        ["ip", "netns", "add", name],
        ["ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name],
        ["ip", "address", "add", f"{outside}/30", "dev", name],
        ["ip", "link", "set", name, "up"],
        ["ip", "-n", name, "address", "add", f"{inside}/30", "dev", "eth0"],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["ip", "-n", name, "link", "set", "eth0", "up"],
        # So that the machine's own addresses can be reached from inside.
        ["ip", "-n", name, "route", "add", "default", "via", outside],
    ]


def entering(name: str, command: list[str]) -> list[str]:
    """The command that runs `command` in the namespace."""
    return ["ip", "netns", "exec", name, *command]


def remove_namespace(name: str) -> None:
    """Remove the namespace and its interfaces; nothing to remove is success."""
    if Path("/sys/class/net", name).exists():
        with suppress(NotPermittedError):
            _run(["ip", "link", "delete", name])
    if Path("/run/netns", name).exists():
        with suppress(NotPermittedError):
            _run(["ip", "netns", "delete", name])


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise NotPermittedError(error.stderr.strip() or f"{command[0]} failed") from error
    except OSError as error:
        raise NotPermittedError(str(error)) from error


def _free_pair(network: IPv4Network) -> tuple[str, str]:
    """The two addresses of the first /30 that no interface of this machine is in."""
    words = _run(["ip", "-o", "-4", "address"]).split()
    used = [IPv4Address(word.partition("/")[0]) for before, word in pairwise(words) if before == "inet"]
    for subnet in network.subnets(new_prefix=30):
        if not any(address in subnet for address in used):
            outside, inside = subnet.hosts()
            return str(outside), str(inside)
    raise NotPermittedError(f"no /30 is left in {network}")


@contextmanager
def _machine_lock() -> Iterator[None]:
    """One allocation at a time on the whole machine, whichever home it is for."""
    try:
        fd = os.open("/run/skyserve-net.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotPermittedError(str(error)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
