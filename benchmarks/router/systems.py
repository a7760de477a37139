"""The load balancers that are compared: how each is installed and started.

All of them run as their users run them: defaults, metrics on, retries and circuit breakers on, no log line per
request. Where something is not the default, the line gives the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from pathlib import Path

from benchmarks.router.machine import HERE, Missing, cache_folder, free_port, native_agent

CHECKOUT = HERE.parent.parent
CLIENT_KEY = "benchmark-key"  # in the head of every request of load.c


class Family(str, Enum):
    OURS = "ours"
    RUST = "rust"
    NGINX = "nginx"
    DIRECT = "direct"


class Group(str, Enum):
    """Cells that are measured on the same process."""

    PLAIN = "plain"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Tls:
    """Where TLS is, and the one certificate of the engines and of the proxy, for 127.0.0.1; it is its own authority."""

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


@dataclass(frozen=True, slots=True)
class System:
    """A load balancer with its options. It takes part in `cells` (None: all), in front of engines of vLLM's shape or
    of the nameless ones."""

    name: str
    family: Family
    version: str
    command: Callable[[Launch], list[str]] = field(repr=False)
    policies: tuple[str, str]  # in the groups PLAIN, PREFIX
    cwd: Path = CHECKOUT
    cells: frozenset[str] | None = None
    nameless: bool = False
    can_tls: bool = True

    def policy(self, group: Group) -> str:
        return self.policies[group is Group.PREFIX]

    def takes_part(self, cell: str) -> bool:
        return self.cells is None or cell in self.cells


# --- ours


def ours(
    name: str,
    checkout: Path = CHECKOUT,
    arguments: Sequence[str] = (),
    plain: str = "round_robin",
    prefix: str = "cache_aware",
    cells: frozenset[str] | None = None,
    nameless: bool = False,
    native: bool = False,
    keyed: bool = False,
) -> System:
    """Our agent of a checkout: the defaults of its command line, and `arguments`. `plain` and `prefix` are its policies
    in these groups of cells. `native`: as a wheel has it, compiled; else the Python modules of the checkout. `keyed`: with
    the table of a controller, in which requests need CLIENT_KEY."""

    def command(launch: Launch) -> list[str]:
        policy = plain if launch.group is Group.PLAIN else prefix
        if keyed:
            targets = ["--table-file", str(_keyed_table(launch, policy))]
        else:
            targets = [word for url in launch.urls for word in ("--target", url)]
        base = [
            sys.executable,
            "-m",
            "lb",
            "--port",
            str(launch.port),
            "--policy",
            policy,
            "--health-path",
            "/health",
        ]
        if launch.tls_targets is not None:
            base += ["--targets-cafile", str(launch.tls_targets.certificate)]
        if launch.tls_clients is not None:
            tls = launch.tls_clients
            base += ["--tls-certfile", str(tls.certificate), "--tls-keyfile", str(tls.key)]
        return [*base, "--log-level", "warning", *targets, *arguments]

    version = _revision(checkout)
    folder = native_agent(checkout) if native else checkout
    return System(name, Family.OURS, version, command, (plain, prefix), folder, cells, nameless)


def _keyed_table(launch: Launch, policy: str) -> Path:
    """Write a table with an API key, and limits that are not reached, into the system's own folder."""
    key = {
        "name": "benchmark",
        "sha256": sha256(CLIENT_KEY.encode()).hexdigest(),
        "requests_per_minute": 1_000_000_000,
        "tokens_per_minute": 1_000_000_000_000,
    }
    table = {
        "service": "default",
        "revision": "r1",
        "policy": policy,
        "targets": [{"id": url, "url": url, "health_path": "/health"} for url in launch.urls],
        "access": {"keys": [key]},
    }
    file = launch.folder / "table.json"
    file.write_text(json.dumps(table))
    return file


def _revision(checkout: Path) -> str:
    """The commit that is measured, and whether the checkout has changes on top of it."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


# --- the Rust routers, from their wheels


@dataclass(frozen=True, slots=True)
class _Peer:
    package: str
    version: str
    program: tuple[str, ...]
    log_level: str
    can_tls: bool = False


_PEERS = (
    _Peer("sglang-router", "0.3.2", ("sglang-router", "launch"), "warn", can_tls=True),
    _Peer("smg", "1.13.0", ("smg", "launch"), "warn"),
    _Peer("vllm-router", "0.1.17", ("vllm-router",), "warning"),
)
PEER_NAMES = tuple(peer.package for peer in _PEERS)


def rust_router(name: str, metrics: bool = True) -> System:
    """A Rust router, installed when it is first needed. Raises Missing.

    Metrics are an option of theirs that we have on, for ours and any in production are; without them they are
    somewhat cheaper.
    """
    peer = next(peer for peer in _PEERS if peer.package == name)
    folder, version = _installed(peer)

    def command(launch: Launch) -> list[str]:
        program = [str(folder / "bin" / peer.program[0]), *peer.program[1:]]
        # Their thresholds are the defaults: with prompts that differ from the first byte on, they spread.
        policy = ["--policy", "round_robin" if launch.group is Group.PLAIN else "cache_aware"]
        # A port of its own: several of them are up at a time, and the default would collide.
        metrics_port = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        tls: list[str] = []
        if launch.tls_targets is not None:
            tls += ["--ca-cert-paths", str(launch.tls_targets.certificate)]
        if launch.tls_clients is not None:
            tls += ["--tls-cert-path", str(launch.tls_clients.certificate)]
            tls += ["--tls-key-path", str(launch.tls_clients.key)]
        return [
            *program,
            *("--host", "127.0.0.1", "--port", str(launch.port), "--worker-urls", *launch.urls),
            *policy,
            *("--log-level", peer.log_level),
            *(metrics_port if metrics else []),
            *tls,
            *("--worker-startup-check-interval", "1"),  # of 30 s, only felt while it starts
        ]

    policies = ("round_robin", "cache_aware")
    return System(name, Family.RUST, version, command, policies, can_tls=peer.can_tls)


def _installed(peer: _Peer) -> tuple[Path, str]:
    """Its virtual environment and the version in it: the pinned one, else the latest."""
    folder = cache_folder() / "venvs" / f"{peer.package}-{peer.version}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists():
        print(f"installing {peer.package}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for wanted in (f"{peer.package}=={peer.version}", peer.package):
            done = subprocess.run([*pip, wanted], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        else:
            raise Missing(f"{peer.package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        program = f"from importlib.metadata import version; print(version({peer.package!r}))"
        stamp.write_text(
            subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
        )
    return folder, stamp.read_text().strip()


# --- nginx: no routing by prefix, no metrics, no parsing of streams; near the cost of the kernel alone


_NGINX_CONF = """\
daemon off;
worker_processes 1;
worker_rlimit_nofile 65536;
pid {folder}/nginx.pid;
error_log stderr warn;
{user}
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 1000000000;
  client_body_buffer_size 128k;
  upstream engines {{
{servers}
    keepalive 1024;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096{ssl};
    {certificate}
    location / {{
      proxy_pass {scheme}://engines;
      {trust}
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def nginx() -> System:
    """Raises Missing."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None:
        raise Missing("there is no nginx (Debian, Ubuntu: apt-get install nginx)")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr

    def command(launch: Launch) -> list[str]:
        conf = launch.folder / "nginx.conf"
        clients, targets = launch.tls_clients, launch.tls_targets
        certificate = trust = ""
        if clients is not None:
            certificate = f"ssl_certificate {clients.certificate}; ssl_certificate_key {clients.key};"
            certificate += " ssl_protocols TLSv1.2 TLSv1.3;"
        if targets is not None:
            trust = f"proxy_ssl_trusted_certificate {targets.certificate}; proxy_ssl_verify on;"
            trust += " proxy_ssl_name 127.0.0.1; proxy_ssl_protocols TLSv1.2 TLSv1.3;"
        conf.write_text(
            _NGINX_CONF.format(
                folder=launch.folder,
                user="user root;" if os.geteuid() == 0 else "",
                port=launch.port,
                ssl="" if clients is None else " ssl",
                certificate=certificate,
                scheme="http" if targets is None else "https",
                trust=trust,
                servers="\n".join(f"    server 127.0.0.1:{port};" for port in launch.targets),
            )
        )
        return [program, "-p", str(launch.folder), "-e", "stderr", "-c", str(conf)]

    return System(
        "nginx", Family.NGINX, said.rsplit("/", 1)[-1].strip(), command, ("round robin", "round robin")
    )


def direct() -> System:
    """Nothing in between: what the load generator and the backend add by themselves."""
    return System("direct", Family.DIRECT, "", lambda launch: [], ("one target", "one target"))
