"""Our agent on its command line: `python -m lb`, compiled or not. As it runs in a region: `regional.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from benchmarks.router.keys import NO_KEYS, Keys
from benchmarks.router.machine import Process, ask, native_agent
from benchmarks.router.systems import CHECKOUT, ORIGIN, Family, Group, Launch, System

ADMIN_TOKEN = "benchmark"  # of an admin port on loopback that lives for a measurement


def ours(
    name: str,
    checkout: Path = CHECKOUT,
    arguments: Sequence[str] = (),
    plain: str = "round_robin",
    prefix: str = "cache_aware",
    cells: frozenset[str] | None = None,
    nameless: bool = False,
    native: bool = False,
    keys: Keys = NO_KEYS,
) -> System:
    """Our agent of a checkout: the defaults of its command line, and `arguments`. `plain` and `prefix` are its policies
    in these groups of cells. `native`: as a wheel has it, compiled; else the Python modules of the checkout."""

    def command(launch: Launch) -> list[str]:
        token = launch.folder / "token"
        token.write_text(ADMIN_TOKEN)
        base = [sys.executable, "-m", "lb", "--port", str(launch.port)]
        base += ["--policy", prefix if launch.group is Group.PREFIX else plain, "--health-path", "/health"]
        base += ["--admin-token-file", str(token)]
        if launch.keys(keys).count:  # beside it the agent keeps what is left of limits, as under a controller
            base += ["--table-file", str(launch.folder / "table.json")]
        if launch.tls_targets is not None:
            base += ["--targets-cafile", str(launch.tls_targets.authority)]
        if launch.tls_clients is not None:
            tls = launch.tls_clients
            base += ["--tls-certfile", str(tls.certificate), "--tls-keyfile", str(tls.key)]
        if launch.has_extras:
            base += ["--cors", ORIGIN]
        targets = [word for url in launch.urls for word in ("--target", url)]
        return [*base, "--log-level", "warning", *shared_arguments(launch), *targets, *arguments]

    def settle(launch: Launch, process: Process) -> dict[str, object]:
        port = _announced(process.log)["admin_port"]
        if launch.keys(keys).count:
            _give_keys(port, launch.keys(keys))
        return facts_of("local", port, launch, keys)

    folder = native_agent(checkout) if native else checkout
    version = revision(checkout)
    return System(
        name, Family.OURS, version, command, (plain, prefix), folder, cells, nameless, settle=settle
    )


def shared_arguments(launch: Launch) -> list[str]:
    """Return the arguments that no table has."""
    workers = ["--workers", str(launch.workers)] if launch.workers > 1 else []
    return [*workers, *(["--access-log"] if launch.has_extras else [])]


def facts_of(agent: str, admin_port: int, launch: Launch, keys: Keys) -> dict[str, object]:
    """Return how an agent runs, by its own status. Raises OSError or ValueError."""
    status = _administer(admin_port, "GET", "/-/stats?window_s=60&build=1")
    given = launch.keys(keys)
    return {"agent": agent, **described(status.get("build") or {}), "keys": str(given)}


def described(build: Mapping[str, Any]) -> dict[str, object]:
    """Return the facts that a build (`lb.config.stats.Build`) has. An earlier agent reports none, or some."""
    kind = str(build.get("kind", "unknown"))
    if build.get("not_compiled"):
        kind += f" ({build['not_compiled']})"
    has_helper = build.get("fast_path")
    slow_tls = build.get("slow_tls")
    chunks = "unknown" if has_helper is None else "in C" if has_helper else "in Python"
    tls = f"in Python ({slow_tls})" if slow_tls else chunks
    return {"build": kind, "chunks": chunks, "chunks with TLS": tls}


def revision(checkout: Path) -> str:
    """The commit that is measured, and whether the checkout has changes on top of it."""
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "no commit"


def _give_keys(admin_port: int, keys: Keys) -> None:
    _administer(admin_port, "PATCH", "/-/options", {"access": keys.access()})


def _announced(log: Path) -> dict[str, Any]:
    """Return the line that an agent prints when it listens; its ports. Raises ValueError."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"admin_port"' in line:
            found: dict[str, Any] = json.loads(line)
            return found
    raise ValueError("the agent has not printed its ports")


def _administer(port: int, method: str, path: str, body: object = None) -> dict[str, Any]:
    """A request to the admin port. Raises OSError or ValueError."""
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"}
    try:
        status, text = ask(port, method, path, b"" if body is None else json.dumps(body).encode(), headers)
    except HTTPException as error:
        raise ValueError(f"{method} {path}: {error!r}") from error
    if status != 200:
        raise ValueError(f"{method} {path}: status {status}, {text[:200].decode(errors='replace')}")
    found: dict[str, Any] = json.loads(text)
    return found
