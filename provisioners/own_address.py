"""The addresses from which this host reaches machines, so that firewalls can let in no other host.

Machines inside a network that we are in see the address from which the kernel's own routes lead to them. Machines with public
addresses see ours after any translation on the way. In this order, the first that knows:

1. what machines have seen: sshd shows each session where it comes from (SSH_CLIENT), and each machine reports it;
2. the address of this host's default route, if that is a public one;
3. the metadata service of the cloud that this host is a machine of;
4. a service that responds with the caller's address (`address_url`). It is the only one that is not on this host, not ours and
   not the user's cloud's, so it is called last, only while no machine reports, and never if the user says so.

Addresses are kept in a file of this host, since what machines saw before a restart is better than a guess.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from provisioners.files import write_json

log = logging.getLogger(__name__)

ADDRESS_URL = "https://checkip.amazonaws.com"
KEPT_S = (
    900.0  # an address that was seen this long before the newest one may still be one of several ways out
)
CONFIRMED_S = 180.0  # machines report each minute
FIND_EVERY_S = 300.0
_SOMEWHERE = "192.0.2.1"  # RFC 5737: where the default route leads; nothing is sent
_METADATA = "http://169.254.169.254"
_METADATA_TIMEOUT_S = 0.5
_URL_TIMEOUT_S = 5.0
_MOST = 16


def current(seen: Mapping[str, float]) -> frozenset[str]:
    """Of addresses and when each was last seen: those that were seen shortly before the newest one, or after."""
    newest = max(seen.values(), default=0.0)
    return frozenset(address for address, at in seen.items() if at >= newest - KEPT_S)


def local_address(towards: str) -> str | None:
    """Return the address of this host that a connection there would come from. Nothing is sent."""
    try:
        family = socket.AF_INET6 if ip_address(towards).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None


def is_public(address: str | None) -> bool:
    try:
        return address is not None and ip_address(address).is_global
    except ValueError:
        return False


class OwnAddresses:
    """Thread-safe.

    `path` None keeps nothing, `address_url` None calls no service. `read` gets a URL with headers; it raises OSError.
    """

    def __init__(
        self,
        path: Path | None,
        address_url: str | None,
        now: Callable[[], float],
        *,
        read: Callable[[str, Mapping[str, str], str, float], str] | None = None,
        local: Callable[[str], str | None] = local_address,
    ) -> None:
        self._path = path
        self._address_url = address_url
        self._now = now
        self._read = _read if read is None else read
        self._local = local
        self._lock = threading.Lock()
        self._finding = threading.Lock()
        self._seen = _load(path)
        self._confirmed_at = float("-inf")
        self._checked: tuple[str | None, float] = None, float("-inf")  # from which route, and when

    def saw(self, address: str) -> None:
        """A machine reports that we came from there. Any thread."""
        try:
            ip_address(address)
        except ValueError:
            return
        with self._lock:
            if is_public(address):
                self._confirmed_at = self._now()
            self._note(address)

    def public(self) -> frozenset[str]:
        """Return the addresses that machines with public addresses see; empty if nothing knows. May take seconds."""
        route = self._local(_SOMEWHERE)
        with self._finding:
            looked_from, looked_at = self._checked
            now = self._now()
            is_confirmed = now - self._confirmed_at < CONFIRMED_S and looked_from == route
            if not is_confirmed and (looked_from != route or now - looked_at >= FIND_EVERY_S):
                self._checked = route, now
                found = self._find(route)
                if found is not None:
                    with self._lock:
                        self._note(found)
        return self._known(is_public)

    def private(self, machines: Iterable[str]) -> frozenset[str]:
        """Return the addresses that machines inside our network see; `machines` are theirs, as far as there are any."""
        routes = {self._local(machine) for machine in (*machines, _SOMEWHERE)}
        routes |= self._known(lambda address: not is_public(address))
        return frozenset(address for address in routes if address is not None)

    def _known(self, fits: Callable[[str], bool]) -> frozenset[str]:
        with self._lock:
            return current({address: at for address, at in self._seen.items() if fits(address)})

    def _find(self, route: str | None) -> str | None:
        if is_public(route):
            return route
        for url, headers, method in _METADATA_QUESTIONS:
            with suppress(OSError, ValueError):
                asked = dict(headers)
                if "{token}" in str(headers):
                    token = self._read(
                        f"{_METADATA}/latest/api/token", _TOKEN_TTL, "PUT", _METADATA_TIMEOUT_S
                    )
                    asked = {key: value.format(token=token.strip()) for key, value in headers.items()}
                found = self._read(f"{_METADATA}{url}", asked, method, _METADATA_TIMEOUT_S).strip()
                if is_public(found):
                    return found
        if self._address_url is not None:
            try:
                found = self._read(self._address_url, {}, "GET", _URL_TIMEOUT_S).strip()
            except (OSError, ValueError) as error:
                log.warning("%s does not tell this host's address: %s", self._address_url, error)
            else:
                if is_public(found):
                    return found
                log.warning("%s responds with no public address", self._address_url)
        return None

    def _note(self, address: str) -> None:
        """With the lock held."""
        before = set(self._seen)
        self._seen[address] = self._now()
        newest = sorted(self._seen, key=lambda one: self._seen[one])[-_MOST:]
        self._seen = {one: self._seen[one] for one in newest}
        if set(self._seen) != before and self._path is not None:
            with suppress(OSError):  # a full disk: it is known as long as this process runs
                write_json(self._path, self._seen)


_TOKEN_TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
_METADATA_QUESTIONS: tuple[tuple[str, Mapping[str, str], str], ...] = (
    ("/latest/meta-data/public-ipv4", {"X-aws-ec2-metadata-token": "{token}"}, "GET"),
    (
        "/computeMetadata/v1/instance/network-interfaces/0/access-configs/0/external-ip",
        {"Metadata-Flavor": "Google"},
        "GET",
    ),
    (
        "/metadata/instance/network/interface/0/ipv4/ipAddress/0/publicIpAddress?api-version=2021-02-01&format=text",
        {"Metadata": "true"},
        "GET",
    ),
)


def _read(url: str, headers: Mapping[str, str], method: str, timeout_s: float) -> str:
    """Without any proxy: what a proxy shows of itself is not where SSH comes from."""
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url} is no URL of HTTP")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 (checked above)
    with opener.open(request, timeout=timeout_s) as response:
        return str(response.read(256).decode("ascii", "replace"))


def _load(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
        return {str(ip_address(address)): float(at) for address, at in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
