"""How the user's configuration says that hosts are reached over SSH: keys, certificates, bastions, programs in between.

Files are read at each login, so that a certificate that is renewed every hour is the one of now.
"""

from __future__ import annotations

import re
import shlex
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provisioners.port.commands import Login  # which loads an SSH library, and plans need none

ACCESS_KEYS = (
    "user",
    "identity_file",
    "known_hosts",
    "port",
    "passphrase_file",
    "certificate_file",
    "ssh_agent",
    "bastion",
    "proxy_command",
)
_BASTION_KEYS = ("host", "host_key", *ACCESS_KEYS[:-2])
_KNOWN_HOSTS = "~/.ssh/known_hosts"
_SHORT = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+)(?::(?P<port>\d{1,5}))?")
_OF_HOSTS, _OF_MACHINES = "hpr", "hprigz"  # what a proxy command may name after a %


@dataclass(frozen=True, slots=True)
class SshAccess:
    """`host_key` is pinned; without it what `known_hosts` says about the host is.

    `bastion` is its address and how it is reached itself.
    """

    user: str
    identity_file: Path | None
    known_hosts: Path
    port: int = 22
    host_key: str | None = None
    passphrase_file: Path | None = None
    certificate_file: Path | None = None
    ssh_agent: bool = False
    bastion: tuple[str, SshAccess] | None = None
    proxy_command: str | None = None

    def login(self, name: str, address: str) -> Login:
        """Raise OSError for a file that cannot be read."""
        from provisioners.port.commands import Login

        keys = (
            (self.host_key,)
            if self.host_key is not None
            else known_keys(self.known_hosts, address, self.port)
        )
        bastion = None
        if self.bastion is not None:
            at, access = self.bastion
            bastion = access.login(at, at)
        program: tuple[str, ...] = ()
        if self.proxy_command is not None:
            program = program_of(self.proxy_command, h=address, p=str(self.port), r=self.user)
        return Login(
            name,
            address,
            self.user,
            "" if self.identity_file is None else self.identity_file.read_text(),
            keys,
            self.port,
            passphrase=""
            if self.passphrase_file is None
            else self.passphrase_file.read_text().rstrip("\r\n"),
            certificate="" if self.certificate_file is None else self.certificate_file.read_text().strip(),
            agent=self.ssh_agent,
            bastion=bastion,
            program=program,
        )


@dataclass(frozen=True, slots=True)
class SshRoute:
    """To the machines of a cloud that are not reached at their own address."""

    bastion: tuple[str, SshAccess] | None = None
    proxy_command: str | None = None

    def to(self, login: Login, machine_id: str, region: str, zone: str) -> Login:
        """Return the login by this way. Raises OSError for a file that cannot be read."""
        if self.bastion is not None:
            at, access = self.bastion
            return replace(login, bastion=access.login(at, at))
        if self.proxy_command is None:
            return login
        about = {"h": login.address, "p": str(login.port), "r": login.user, "i": machine_id}
        return replace(login, program=program_of(self.proxy_command, **about, g=region, z=zone))


def way_of(bastion: Any, proxy_command: str | None, path: str) -> SshRoute:
    """Of the section of a cloud. ValueError with all that is wrong."""
    complaints: list[str] = []
    if bastion is not None and proxy_command is not None:
        complaints.append(f"{path}bastion: proxy_command says how machines are reached; use one of the two")
    found = None if bastion is None else bastion_of(bastion, {}, f"{path}bastion", complaints)
    if (wrong := _wrong_command(proxy_command, _OF_MACHINES)) is not None:
        complaints.append(f"{path}proxy_command: {wrong}")
    if complaints:
        raise ValueError("; ".join(complaints))
    return SshRoute(found, proxy_command)


def program_of(command: str, **values: str) -> tuple[str, ...]:
    """Return the arguments of a proxy command. No shell reads them, so that the name of a host is never more than one word."""
    return tuple(
        re.sub(r"%(.)", lambda found: "%" if found[1] == "%" else values[found[1]], word)
        for word in shlex.split(command)
    )


def known_keys(known_hosts: Path, address: str, port: int) -> tuple[str, ...]:
    """Return the keys of the host in known_hosts, hashed names included."""
    import paramiko

    if not known_hosts.is_file():
        return ()
    entry = address if port == 22 else f"[{address}]:{port}"
    found = paramiko.HostKeys(str(known_hosts)).lookup(entry)
    return () if found is None else tuple(f"{kind} {key.get_base64()}" for kind, key in found.items())


def has_authorities(known_hosts: Path) -> bool:
    """Return whether the file names authorities of host keys, which do not count here."""
    try:
        return any(line.startswith("@cert-authority") for line in known_hosts.read_text().splitlines())
    except OSError:
        return False


def access_of(raw: Mapping[str, Any], path: str, complaints: list[str]) -> SshAccess | None:
    """Of the keys of one host; `complaints` gets a sentence for each that is wrong, and then it is None."""
    before = len(complaints)
    values = dict(raw)
    if not isinstance(values.get("user"), str):
        complaints.append(f"{path}.user: is missing")
    if not isinstance(values.get("identity_file"), str) and values.get("ssh_agent") is not True:
        complaints.append(f"{path}.identity_file: is missing (or set ssh_agent: true)")
    complaints += [
        f"{path}.{key}: must be the path of a file"
        for key in ("identity_file", "known_hosts", "passphrase_file", "certificate_file")
        if key in values and not isinstance(values[key], str)
    ]
    if "certificate_file" in values and "identity_file" not in values:
        complaints.append(f"{path}.certificate_file: needs identity_file, the key that it certifies")
    if not isinstance(values.get("ssh_agent", False), bool):
        complaints.append(f"{path}.ssh_agent: must be true or false")
    port = values.get("port", 22)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        complaints.append(f"{path}.port: must be a number from 1 to 65535")
    if (wrong := _wrong_key(values.get("host_key"))) is not None:
        complaints.append(f"{path}.host_key: {wrong}")
    if (wrong := _wrong_command(values.get("proxy_command"), _OF_HOSTS)) is not None:
        complaints.append(f"{path}.proxy_command: {wrong}")
    elif "proxy_command" in values and "bastion" in values:
        complaints.append(f"{path}.bastion: proxy_command says how the host is reached; use one of the two")
    bastion = None
    if "bastion" in values and len(complaints) == before:
        bastion = bastion_of(values["bastion"], values, f"{path}.bastion", complaints)
    if len(complaints) > before:
        return None
    files = {
        key: Path(values[key]).expanduser()
        for key in ("identity_file", "passphrase_file", "certificate_file")
        if key in values
    }
    return SshAccess(
        values["user"],
        files.get("identity_file"),
        Path(values.get("known_hosts", _KNOWN_HOSTS)).expanduser(),
        port,
        values.get("host_key"),
        files.get("passphrase_file"),
        files.get("certificate_file"),
        values.get("ssh_agent", False),
        bastion,
        values.get("proxy_command"),
    )


def bastion_of(
    said: Any, values: Mapping[str, Any], path: str, complaints: list[str]
) -> tuple[str, SshAccess] | None:
    """Its address and how it is reached.

    What it does not say itself is as in `values`, those of the hosts behind it, but for the port and the host key.
    """
    if isinstance(said, str) and (found := _SHORT.fullmatch(said)):
        parts = found.groupdict()
        said = {"host": parts["host"].strip("[]")}
        said |= {"user": parts["user"]} if parts["user"] else {}
        said |= {"port": int(parts["port"])} if parts["port"] else {}
    if not isinstance(said, Mapping) or not isinstance(said.get("host"), str):
        complaints.append(f"{path}: must be user@host:port, or a mapping with host")
        return None
    unknown = [key for key in said if key not in _BASTION_KEYS]
    complaints += [f"{path}.{key}: unknown key (known: {', '.join(_BASTION_KEYS)})" for key in unknown]
    own = {key: value for key, value in said.items() if key in _BASTION_KEYS and key != "host"}
    inherited: tuple[str, ...] = ("user", "known_hosts", "ssh_agent")
    # A key goes with its passphrase and its certificate.
    if "identity_file" not in own:
        inherited += ("identity_file", "passphrase_file", "certificate_file")
    base = {key: values[key] for key in inherited if key in values}
    access = access_of({**base, **own}, path, complaints)
    return None if access is None or unknown else (said["host"], access)


def _wrong_key(line: object) -> str | None:
    if line is None:
        return None
    words = line.split() if isinstance(line, str) else []
    try:
        if len(words) >= 2 and b64decode(words[1], validate=True)[4:].startswith(words[0].encode()):
            return None
    except ValueError:
        pass
    return "must be a line like ssh-ed25519 AAAA…, as /etc/ssh/ssh_host_ed25519_key.pub has it"


def _wrong_command(command: object, letters: str) -> str | None:
    if command is None:
        return None
    if not isinstance(command, str) or not command.strip():
        return "must be a command"
    if found := re.search(f"%(?![%{letters}])", command):
        known = ", ".join(f"%{letter}" for letter in letters)
        return f"{command[found.start() : found.start() + 2]!r} stands for nothing here: there are {known}"
    try:
        shlex.split(command)
    except ValueError as error:
        return f"cannot be read: {error}"
    return None
