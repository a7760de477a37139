"""Bringing an agent to a machine where `lb.agent.supervisor` runs, over SSH. Synchronous; called on threads.

Every step looks first and can be cut short anywhere: what says that a bundle is complete is written last, and all that is
to be acted on appears whole. A new release takes over from the old one without a refused connection, which is the supervisor's
business.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lb.agent.native_files import NOTE
from lb.config.workers import AUTO, workers_argument
from skyserve_cli.controller.balancers.bundle import Bundle
from skyserve_cli.controller.reconcile.ports import RegionalOrder

if TYPE_CHECKING:
    from provisioners.port.commands import HostConnection

PREPARE_TIMEOUT_S = 900.0
_TRANSFER_TIMEOUT_S = 300.0
TRAFFIC_FILE = "/var/lib/skyserve/traffic"  # of the dead-man switch, on machines that have one
_TLS = ("tls-cert.pem", "tls-key.pem")
_PEERS = ("peers-ca.pem", "peers-own.pem")

# A machine's own Python if it can import all that is needed; else one of our own, with the libraries that are pinned.
# Debian's has no venv until a package of that name is there. A step that was cut off goes on there for a while: the lock
# makes the next one wait for it. Native files are last, so that what does not load there is the only thing missing.
_PREPARE = """mkdir -p bundles && cd bundles || exit 1
exec 9>.lock; flock -w 600 9 || {{ echo "another installation is under way" >&2; exit 1; }}
if [ -f {version}/interpreter ]; then cat >/dev/null; exit 0; fi
rm -rf {version} && mkdir {version} && cd {version} && tar -xzf - || exit 1
can() {{ PYTHONPATH="$PWD" "$1" -c 'import lb.__main__'; }}
own() {{
  rm -rf venv; "$1" -m venv venv 2>/dev/null || {{
    [ "$1" = python3 ] && sudo -n apt-get update -q && sudo -n apt-get install -qy python3-venv && rm -rf venv && "$1" -m venv venv
  }} >&2 || return 1
  venv/bin/python -m pip install --quiet --requirement requirements.txt >&2 && can venv/bin/python
}}
python=
for each in {pythons}; do
  if can "$each" >/dev/null 2>&1; then python=$each; break; fi
  if own "$each"; then python="$PWD/venv/bin/python"; break; fi
done
[ -n "$python" ] || exit 1
if [ -d native ]; then
  cp -R native/. . && rm -rf native && PYTHONPATH="$PWD" "$python" -m lb.agent.native_files . >&2 && can "$python" ||
    {{ rm -f ./*.so $(find lb policies -name '*.so'); echo "the native modules could not be checked there" >{note}; }}
fi
echo "$python" >interpreter.new && mv interpreter.new interpreter
"""

# Any response shows that the agent runs.
_ASK = """import http.client
line = http.client.HTTPConnection("127.0.0.1", {port}, timeout=5)
line.request("GET", "/-/live")
line.getresponse()
"""


@dataclass(frozen=True, slots=True)
class Release:
    """A release to run: code, arguments, and the certificate shown to clients (PEM), if any.

    `peers` are for agents of other regions: the authority's certificate, and this agent's key and certificate (PEM).
    """

    bundle: Bundle
    arguments: tuple[str, ...]
    tls: tuple[bytes, bytes] | None = field(default=None, repr=False)
    peers: tuple[bytes, bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Equal for equal releases."""
        parts = [self.bundle.version.encode(), *(one.encode() for one in self.arguments), *(self.tls or ())]
        parts += self.peers or ()
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]

    @property
    def wanted(self) -> bytes:
        """The file that the supervisor reads."""
        wanted = {"release": self.name, "bundle": self.bundle.version, "arguments": self.arguments}
        return json.dumps(wanted).encode()


@dataclass(frozen=True, slots=True)
class Serving:
    """The file that the supervisor writes. `release` is the one that serves, `refused` one whose agent did not come up."""

    release: str | None
    version: str | None
    pid: int | None
    admin_port: int | None
    starts: int
    refused: str | None


def arguments_of(
    service: str,
    region: str,
    port: int,
    has_tls: bool,
    peers_port: int | None = None,
    workers: int = AUTO,
) -> tuple[str, ...]:
    """Return how the agent is started; nothing in it is a secret. Of the loopback it takes any port for its admin."""
    arguments: tuple[str, ...] = ("--service", service, "--region", region)
    arguments += ("--host", "0.0.0.0", "--port", str(port), "--admin-host", "127.0.0.1", "--admin-port", "0")  # noqa: S104
    arguments += ("--traffic-file", TRAFFIC_FILE, *workers_argument(workers))
    if peers_port is not None:
        arguments += (
            "--peers-port",
            str(peers_port),
            "--peers-cafile",
            _PEERS[0],
            "--peers-certfile",
            _PEERS[1],
        )
    return (*arguments, "--tls-certfile", _TLS[0], "--tls-keyfile", _TLS[1]) if has_tls else arguments


def release_of(
    order: RegionalOrder, bundle: Bundle, peer_files: Callable[[RegionalOrder], tuple[bytes, bytes]]
) -> Release:
    """Return what the agent of the order should run. Certificates are read every time: they are renewed on the disk.

    The policy is only of the table that the agent begins with; a later one needs no new release. Raises OSError.
    """
    files = order.tls
    tls = None if files is None else (Path(files[0]).read_bytes(), Path(files[1]).read_bytes())
    region, port = order.instance.zone.region, order.peers_port
    arguments = arguments_of(order.service, region, order.port, tls is not None, port, order.workers)
    return Release(bundle, arguments, tls, None if port is None else peer_files(order))


def deploy(shell: HostConnection, folder: str, release: Release, table: Mapping[str, Any]) -> None:
    """Have the release run in the supervisor's folder.

    `table` is what an agent begins with that never had one. Raises CommandError.
    """
    version = release.bundle.version
    there = set(_list(shell, folder, f"bundles/{version}/interpreter", "table.json"))
    if f"bundles/{version}/interpreter" not in there:
        _prepare(shell, folder, release)
    if "table.json" not in there:
        shell.put(f"{folder}/table.json", json.dumps(table).encode())
    for name, content in zip(_TLS, release.tls or (), strict=False):
        shell.put(f"{folder}/{name}", content)
    for name, content in zip(_PEERS, release.peers or (), strict=False):
        shell.put(f"{folder}/{name}", content)
    shell.put(f"{folder}/wanted.json", release.wanted)


def _prepare(shell: HostConnection, folder: str, release: Release) -> None:
    from provisioners.port.commands import CommandError, DiskFullError

    script = _PREPARE.format(
        version=release.bundle.version, pythons=shlex.join(release.bundle.pythons), note=NOTE
    )
    try:
        _in(shell, folder, script, release.bundle.data, timeout_s=PREPARE_TIMEOUT_S)
    except DiskFullError:
        raise
    except CommandError as error:
        why = error.output.said.splitlines()[-1:] or [f"exit code {error.output.code}"]
        text = f"{shell.login.name}: what a load balancer agent needs cannot be installed there: {why[0]}"
        raise CommandError(text, error.output) from error


def serving(shell: HostConnection, folder: str) -> Serving | None:
    """Return what runs there; None if nothing ever did. Raises CommandError."""
    raw = shell.read(f"{folder}/serving.json")
    if not raw:
        return None
    state = json.loads(raw)
    return Serving(
        state["release"],
        state["bundle"],
        state["pid"],
        state["admin_port"],
        state["starts"],
        state["refused"],
    )


def tidy(shell: HostConnection, folder: str, kept: str) -> None:
    """Remove the bundles of the past. Raises CommandError."""
    _in(shell, folder, f'cd bundles && for b in *; do [ "$b" = {shlex.quote(kept)} ] || rm -rf "$b"; done')


def end_frozen(shell: HostConnection, agent: Serving) -> None:
    """Terminate an agent that does not respond; the supervisor restarts it.

    It is checked on its own machine, because it may as well be the way there that is slow, and this command that is late.
    Raises CommandError.
    """
    ask = _ASK.format(port=agent.admin_port)
    shell.run(f"python3 -c {shlex.quote(ask)} 2>/dev/null || kill -9 {agent.pid}", check=False)


def _list(shell: HostConnection, folder: str, *paths: str) -> Sequence[str]:
    said = shell.run(f"cd {shlex.quote(folder)} && ls -d {shlex.join(paths)} 2>/dev/null", check=False)
    return said.out.decode().split()


def _in(
    shell: HostConnection,
    folder: str,
    script: str,
    stdin: bytes = b"",
    timeout_s: float = _TRANSFER_TIMEOUT_S,
) -> None:
    """The script, in the folder. Its last lines are the error's."""
    shell.run(f"cd {shlex.quote(folder)} || exit 1\n{script}", stdin=stdin, timeout_s=timeout_s)
