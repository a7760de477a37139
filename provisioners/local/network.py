"""Ports for replicas of one machine, and a network of their own for those that insist on a fixed port.

A replica that takes $SKYSERVE_REPLICA_PORT gets a free port of the loopback interface per node. One that always
listens on the same port is put in a network namespace, joined to the machine by a pair of virtual interfaces with a
subnet of its own (a /30), so that any number of them listen on the same port. The nodes of a replica of several have
a namespace each, on a wider subnet that they share: its bridge is in the head's namespace, where no packet filter of
the machine stands between them. That needs root and the `ip` program; whether it is permitted is found out by
trying. An isolated replica must listen on all interfaces (0.0.0.0), as on any real cloud; it reaches this machine
and is reached from it, and has no way out to other networks.

A namespace and our end of the head's pair carry the same name, derived from the node: that name is all it takes
to remove both, by the process that finds them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import IPv4Interface, IPv4Network
from itertools import islice, pairwise
from pathlib import Path
from zlib import crc32

LOOPBACK = "127.0.0.1"
# Below the range the kernel picks from for outgoing connections (32768 and up), so nothing takes a port
# between its allocation and the moment, perhaps minutes later, when the replica listens.
_FIRST_PORT, _PORTS = 20_000, 10_000


class NotPermittedError(Exception):
    """This user may not create network namespaces; the message is what the system said."""


def free_port(taken: Collection[int], seed: str) -> int | None:
    """Return a loopback port that is not in `taken` and on which no process listens, or None.

    Different seeds start the search at different places, so that two clouds of one machine rarely look at the same port.
    """
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


def create_namespaces(names: Sequence[str], network: IPv4Network) -> list[str]:
    """Create a namespace per name, all on one subnet of `network`, and return the addresses inside them.

    Raises NotPermittedError, and then nothing is left behind.
    """
    with _machine_lock():
        _remove_all(names)  # of a launch that was cut short
        try:
            subnet = _free_subnet(network, len(names))
            outside, *insides = [str(host) for host in islice(subnet.hosts(), 1 + len(names))]
            for command in creation(names, outside, insides, subnet.prefixlen):
                _run(command)
            for name in names:
                _run(entering(name, ["true"]))  # some containers let us make what they do not let us enter
        except NotPermittedError:
            _remove_all(names)
            raise
    return insides


def creation(names: Sequence[str], outside: str, insides: Sequence[str], prefix: int) -> list[list[str]]:
    """Return the commands that make the namespaces of one replica, the head's first, as data."""
    head, *others = names
    ours = "port0" if others else "eth0"
    commands = [
        *(["ip", "netns", "add", name] for name in names),
        ["ip", "link", "add", head, "type", "veth", "peer", "name", ours, "netns", head],
        ["ip", "address", "add", f"{outside}/{prefix}", "dev", head],
        ["ip", "link", "set", head, "up"],
    ]
    if others:  # the head's eth0 is a bridge, into which we and the other nodes are plugged
        link = ["ip", "-n", head, "link"]
        commands.append([*link, "add", "eth0", "type", "bridge"])
        for rank, name in enumerate(others, start=1):
            commands.append(
                [*link, "add", f"port{rank}", "type", "veth", "peer", "name", "eth0", "netns", name]
            )
        commands += [[*link, "set", f"port{rank}", "master", "eth0", "up"] for rank in range(len(names))]
    for name, inside in zip(names, insides, strict=True):
        commands += [
            ["ip", "-n", name, "address", "add", f"{inside}/{prefix}", "dev", "eth0"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
            ["ip", "-n", name, "link", "set", "eth0", "up"],
            # So that the machine's own addresses can be reached from inside.
            ["ip", "-n", name, "route", "add", "default", "via", outside],
        ]
    return commands


def entering(name: str, command: list[str]) -> list[str]:
    """Return the command that runs `command` in the namespace."""
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


def _free_subnet(network: IPv4Network, num_nodes: int) -> IPv4Network:
    """Return the first subnet with an address for us and each node, of which no interface of this machine has a part."""
    words = _run(["ip", "-o", "-4", "address"]).split()
    used = [IPv4Interface(word) for before, word in pairwise(words) if before == "inet"]
    prefix = 32 - (num_nodes + 2).bit_length()  # the first and the last address of a subnet are not used
    for subnet in network.subnets(new_prefix=prefix) if prefix >= network.prefixlen else ():
        if not any(_overlap(interface, subnet, network) for interface in used):
            return subnet
    raise NotPermittedError(f"no /{prefix} is left in {network}")


def _overlap(used: IPv4Interface, subnet: IPv4Network, network: IPv4Network) -> bool:
    """Subnets of other replicas are taken whole; of a wider network this machine is in, only its own address."""
    ours = used.network.subnet_of(network)
    return used.network.overlaps(subnet) if ours else used.ip in subnet


def _remove_all(names: Iterable[str]) -> None:
    for name in names:
        remove_namespace(name)


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
