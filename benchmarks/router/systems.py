"""What the systems have in common: the values that a load balancer is started with, and what is known of each.

All of them run as their users run them: defaults, metrics on, retries and circuit breakers on, no log line per
request outside of the `extras` cell. Where something is not the default, the line gives the reason.

| system | module |
|---|---|
| ours: local, and as in a region | `ours.py`, `regional.py`; API keys: `keys.py` |
| sglang-router, smg, vllm-router | `rust_routers.py`, installed by `wheels.py` |
| Envoy | `envoy.py`, installed by `wheels.py` |
| nginx, nothing in between | `nginx.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from benchmarks.router.keys import Keys
from benchmarks.router.machine import HERE, Process

CHECKOUT = HERE.parent.parent
ORIGIN = "https://chat.example.com"  # of the web page that calls, in cells with CORS
ACCESS_LOG = "access.log"  # in a system's own folder


class Family(str, Enum):
    OURS = "ours"
    RUST = "rust"
    ENVOY = "envoy"
    NGINX = "nginx"
    DIRECT = "direct"


class Group(str, Enum):
    """Cells that are measured on the same process."""

    PLAIN = "plain"
    PREFIX = "prefix"
    EXTRAS = "extras"  # with access log and CORS; ours with API keys, too


@dataclass(frozen=True, slots=True)
class Tls:
    """Where TLS is, and the one certificate of the engines and of the proxy, for 127.0.0.1, with its authority's."""

    authority: Path
    certificate: Path
    key: Path
    targets: bool
    clients: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """The values that a command line depends on."""

    port: int
    targets: Sequence[int]
    group: Group
    folder: Path
    tls: Tls | None = None
    workers: int = 1

    @property
    def urls(self) -> list[str]:
        scheme = "https" if self.tls_targets is not None else "http"
        return [f"{scheme}://127.0.0.1:{port}" for port in self.targets]

    @property
    def tls_targets(self) -> Tls | None:
        return self.tls if self.tls is not None and self.tls.targets else None

    @property
    def tls_clients(self) -> Tls | None:
        return self.tls if self.tls is not None and self.tls.clients else None

    @property
    def has_extras(self) -> bool:
        return self.group is Group.EXTRAS

    def keys(self, keys: Keys) -> Keys:
        """Return the API keys of an agent that has `keys` outside of the cells with extras."""
        return keys.for_extras() if self.has_extras else keys


def no_facts(launch: Launch, process: Process) -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class System:
    """A load balancer with its options. It takes part in `cells` (None: all), in front of engines of vLLM's shape or
    of the nameless ones.

    `settle` is called once it responds. It completes the configuration, and returns what the system itself reports of
    how it runs. Raises OSError or ValueError.
    """

    name: str
    family: Family
    version: str
    command: Callable[[Launch], list[str]] = field(repr=False)
    policies: tuple[str, str]  # in the groups PLAIN and EXTRAS, and in PREFIX
    cwd: Path = CHECKOUT
    cells: frozenset[str] | None = None
    nameless: bool = False
    can_tls: bool = True
    settle: Callable[[Launch, Process], dict[str, object]] = field(default=no_facts, repr=False)
    environment: Callable[[Launch], Mapping[str, str]] = field(default=lambda launch: {}, repr=False)

    def policy(self, group: Group) -> str:
        return self.policies[group is Group.PREFIX]

    def takes_part(self, cell: str) -> bool:
        return self.cells is None or cell in self.cells
