"""Our agent as the controller runs it in a region: on a rented machine or a host of the user's own, but on loopback.

The controller's own code makes the bundle (`skyserve_cli.controller.balancers.bundle`) and deploys it (`.deploy`: the bundle
is unpacked in the machine's folder, the native modules are put to their places and checked there). A shell of this machine is in
the place of SSH. The supervisor (`lb.agent.supervisor`) then starts the agent with the arguments of the release. Its table
has the targets with their pinned certificate, the keys and CORS. The supervisor's CPU time counts: some 10 checks a second.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.router.keys import NO_KEYS, Keys
from benchmarks.router.machine import Missing, Process, cache_folder, free_port, native_agent
from benchmarks.router.ours import ADMIN_TOKEN, facts_of, revision, shared_arguments
from benchmarks.router.systems import CHECKOUT, ORIGIN, Family, Group, Launch, System
from provisioners.port.commands import (
    CommandOutput,
    Feed,
    HostConnection,
    Login,
    ShellError,
    checked,
    script_of,
    timed_out,
)
from provisioners.remote.certificates import Authority
from skyserve_cli.controller.agent_files import TOKEN_VARIABLE, supervisor_file
from skyserve_cli.controller.balancers.bundle import Bundle, bundle_for
from skyserve_cli.controller.balancers.deploy import Release, arguments_of, deploy

_SERVICE, _REGION, _AGENT = "benchmark", "loopback", "loopback-1"
_WRITTEN_S = 5.0

# Another agent of the region, which is away: nothing listens on that port. What it is to know of caches is kept for it as for one that is there.
_SIBLING = {
    "regions": {
        "agent": _AGENT,
        "here": _REGION,
        "peers": [],
        "owned": [],
        "siblings": [
            {
                "id": f"{_REGION}-2",
                "region": _REGION,
                "url": "https://127.0.0.1:9",
                "tls_name": f"{_REGION}-2",
            }
        ],
    },
}


def regional(
    name: str,
    plain: str = "round_robin",
    prefix: str = "cache_aware",
    cells: frozenset[str] | None = None,
    nameless: bool = False,
    native: bool = False,
    keys: Keys = NO_KEYS,
    continuation: str = "auto",
    has_sibling: bool = False,
) -> System:
    """The agent of this checkout, as in a region. `native`: from a controller that has the native modules. Raises Missing."""
    bundle = _bundle(native)

    def command(launch: Launch) -> list[str]:
        policy = prefix if launch.group is Group.PREFIX else plain
        tls = launch.tls_clients
        arguments = arguments_of(
            _SERVICE, _REGION, launch.port, tls is not None, free_port() if has_sibling else None
        )
        shown = None if tls is None else (tls.certificate.read_bytes(), tls.key.read_bytes())
        peers = _peer_files() if has_sibling else None
        release = Release(bundle, (*arguments, *shared_arguments(launch)), shown, peers)
        try:
            table = table_of(launch, policy, keys, continuation)
            if has_sibling:
                table |= _SIBLING
            deploy(LoopbackHost(), str(launch.folder), release, table)
        except ShellError as error:
            raise Missing(error.message) from error
        shutil.copyfile(supervisor_file(), launch.folder / "keeper.py")
        # As the machine's command does it; the token comes by the environment.
        return ["/bin/sh", "-c", 'cd "$1" && exec python3 keeper.py', "sh", str(launch.folder)]

    def settle(launch: Launch, process: Process) -> dict[str, object]:
        file, deadline = launch.folder / "serving.json", time.monotonic() + _WRITTEN_S
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # the agent serves before its supervisor says so
        serving = json.loads(file.read_text())
        if serving["bundle"] != bundle.version:
            raise ValueError(f"the agent is of bundle {serving['bundle']}, not {bundle.version}")
        return facts_of("regional", serving["admin_port"], launch, keys)

    return System(
        name,
        Family.OURS,
        revision(CHECKOUT),
        command,
        (plain, prefix),
        cells=cells,
        nameless=nameless,
        settle=settle,
        environment=lambda launch: {TOKEN_VARIABLE: ADMIN_TOKEN, "PATH": _path()},
    )


def table_of(launch: Launch, policy: str, keys: Keys, continuation: str = "auto") -> dict[str, Any]:
    """Return the table that the agent begins with. It has the loopback address: the arguments have every address."""
    pinned = {} if launch.tls_targets is None else {"tls_name": "127.0.0.1"}
    table: dict[str, Any] = {
        "service": _SERVICE,
        "revision": "1",
        "policy": policy,
        "targets": [
            {"id": str(number), "url": url, "health_path": "/health", **pinned}
            for number, url in enumerate(launch.urls, 1)
        ],
        "access": launch.keys(keys).access(),
        "continuation": {"mode": continuation},
        "listen": {"host": "127.0.0.1", "port": launch.port},
    }
    if launch.tls_targets is not None:
        authority = ssl.PEM_cert_to_DER_cert(launch.tls_targets.authority.read_text())
        table["targets_ca"] = base64.b64encode(authority).decode()
    if launch.has_extras:
        table["cors"] = {"origins": [ORIGIN]}
    return table


def _peer_files() -> tuple[bytes, bytes]:
    authority = Authority(secrets.token_bytes(32), "benchmark", _SERVICE)
    return authority.pem, authority.of_agent(_AGENT, datetime.now(UTC))


@cache
def _bundle(native: bool) -> Bundle:
    """The bundle that a controller makes for this machine. Raises Missing."""
    try:
        return bundle_for(LoopbackHost(), _native_wheels() if native else None)
    except ShellError as error:
        raise Missing(error.message) from error


def _native_wheels() -> Path:
    """A folder with a wheel of the compiled modules, as a controller has it in its home."""
    modules = native_agent(CHECKOUT)
    folder = cache_folder() / f"wheels-{modules.name}"
    if not folder.exists():
        fresh = folder.with_suffix(f".{os.getpid()}")
        fresh.mkdir()
        with zipfile.ZipFile(fresh / "skyserve.whl", "w") as wheel:
            for file in sorted(modules.rglob("*")):
                if file.suffix in (".py", ".so"):
                    wheel.write(file, file.relative_to(modules))
        fresh.rename(folder)
    return folder


def _path() -> str:
    """The search path of the machine: `python3` is the one that runs this, which has the libraries."""
    return f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"


class LoopbackHost(HostConnection):
    """This machine, where the controller has a machine by SSH. Only commands and files are needed."""

    login = Login(name="loopback", address="127.0.0.1", user="", private_key="", host_keys=())

    def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | Feed = b"",
        timeout_s: float = 30.0,
        check: bool = True,
    ) -> CommandOutput:
        script = script_of(command)
        assert isinstance(stdin, bytes), "nothing that deploys an agent feeds by a function"
        environment = {"PATH": _path(), "HOME": str(Path.home()), "LC_ALL": "C"}
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", script],
                input=stdin,
                capture_output=True,
                timeout=timeout_s,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise timed_out(self.login, script, timeout_s) from error
        return checked(self.login, script, CommandOutput(done.returncode, done.stdout, done.stderr), check)

    @property
    def is_open(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def start(self, command: str | Sequence[str]) -> NoReturn:
        raise NotImplementedError

    def dial(self, port: int, address: str = "127.0.0.1", timeout_s: float = 0.0) -> NoReturn:
        raise NotImplementedError
