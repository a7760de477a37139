"""Which host a controller is deployed to, and how commands reach it afterwards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from provisioners.port.commands import HostConnection
from provisioners.remote.ssh import connect
from provisioners.ssh.pool import PoolHost, load_pools
from skyserve_cli.config import Config
from skyserve_cli.controller.api.over_ssh import login_of
from skyserve_cli.controller.api.remote import Remote, RemoteError, checked
from skyserve_cli.home import Home
from skyserve_cli.output import WrongUsage

CONNECT_TIMEOUT_S = 10.0


class DeployTarget(NamedTuple):
    """`name` is as the command line has it, `host` what people call the host."""

    name: str
    host: str
    remote: Remote

    def connect(self, home: Home) -> HostConnection:
        """Log in. Raises ShellError, or OSError with a sentence."""
        return connect(login_of(self.remote, home), CONNECT_TIMEOUT_S)


def target_of(
    name: str, config: Config, *, there: str, identity: Path | None, known_hosts: Path | None
) -> DeployTarget:
    """Return what ssh/HOST names: a host of the pools in config.yaml, or USER@ADDRESS. Raises WrongUsage."""
    cloud, _, host = name.partition("/")
    if cloud != "ssh" or not host:
        raise WrongUsage(
            f"{name}: must be ssh/HOST (of clouds.ssh.pools in config.yaml), ssh/USER@ADDRESS, aws/REGION, gcp/REGION or "
            "azure/REGION; `serve controller deploy` also takes kubernetes/CONTEXT"
        )
    found = None if "@" in host else _in_pools(config, host)
    if found is not None:
        if identity is not None or known_hosts is not None:
            raise WrongUsage(
                f"{name}: config.yaml says how {host} is reached; leave out --identity and --known-hosts"
            )
        return DeployTarget(name, host, found._replace(home=there))
    if "@" not in host:
        known = ", ".join(one.name for one in _pools(config)) or "none"
        raise WrongUsage(
            f"{name}: clouds.ssh.pools in config.yaml has no host {host} (it has {known}); use ssh/USER@ADDRESS for another"
        )
    for option, path in (("--identity", identity), ("--known-hosts", known_hosts)):
        if path is not None and not path.expanduser().is_file():
            raise WrongUsage(f"{option}: there is no file {path}")
    paths = ["" if path is None else str(path.expanduser().absolute()) for path in (identity, known_hosts)]
    try:
        remote = checked(Remote(f"ssh://{host}", "", "", there, *paths), name)
    except RemoteError as error:
        raise WrongUsage(str(error)) from None
    address = host.rpartition("@")[2]
    return DeployTarget(name, re.sub(r":\d+$", "", address), remote)


def _in_pools(config: Config, name: str) -> Remote | None:
    for host in _pools(config):
        if host.name == name:
            url = f"ssh://{host.access.user}@{host.address}:{host.access.port}"
            return checked(Remote(url, "", pool_host=name), name)
    return None


def _pools(config: Config) -> tuple[PoolHost, ...]:
    section = config.clouds.get("ssh")
    return () if section is None else load_pools(getattr(section, "pools", {})).hosts
