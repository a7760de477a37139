"""The first connection to a rented machine installs the keys that it has from then on: its host key and who may log in.

*With user data* the machine has a host key from its first boot, which users with read access to the account can read, and programs
on the machine that reach the metadata service. The first connection, which that key pins, replaces it.

*Without user data* what such a script would do is done over the first connection. Until then the machine's host key is the one
that its image came with, which is not known beforehand. The first key that the machine shows is written down before anything is
sent, and only a host with that key is given the script. An attacker on the network path can pose as the machine during its first
minute; with user data the attacker needs the key, too.

*With keys of before* (`older`: of an earlier version, or of a secret that was replaced) the machine is connected to with these, and
gets the present ones. What runs on it is not interrupted. An interrupted exchange leaves a machine with any of its host keys and any of its
logins, so all of them are tried.

The keys that last follow from the home's secret, and no others are accepted afterwards.

The memory of a machine is one small file in the home. A home that lost it finds out again: a machine that has been
prepared lets us in with the keys that we expect.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import paramiko

from provisioners.files import write_bytes
from provisioners.port.commands import (
    CONNECT_TIMEOUT_S,
    CommandError,
    Commands,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
    why,
)
from provisioners.port.vm import Machine
from provisioners.remote.ssh import connect, host_key_mismatch, link_to, place_of
from provisioners.remote.ssh_keys import fingerprint

_SCRIPT_TIMEOUT_S = 60.0
_NO_ROOT = 77


class FirstLogins:
    """Prepares new machines, and those with keys of before. Thread-safe.

    `user` is who can log in at first, `usual` how to get in afterwards, `script` what the machine is to run as root, once or
    several times, and `own_script` what the user runs on an image without sudo. `boot_keys` are the host keys that a
    machine may have from its user data; None: without user data, so the first that it shows counts. `older` are logins that the machine may
    know in place of the usual one, each with its lasting host key. `folder` is where keys are written down; None: in memory.
    """

    def __init__(
        self,
        user: str,
        usual: Callable[[Machine], Login],
        script: Callable[[Machine], str],
        folder: Path | None = None,
        *,
        boot_keys: Callable[[Machine], Sequence[str]] | None = None,
        own_script: Callable[[Machine], str] = lambda machine: ":",
        older: Callable[[Machine], Sequence[Login]] = lambda machine: (),
        dial: Callable[[Login], Commands] = connect,
        host_key: Callable[[Login], str] | None = None,
    ) -> None:
        self._user = user
        self._usual = usual
        self._script = script
        self._own_script = own_script
        self._folder = folder
        self._boot_keys = boot_keys
        self._older = older
        self._dial = dial
        self._host_key = host_key or host_key_of
        self._known: dict[str, dict[str, Any]] = {}
        self._turns: dict[str, Lock] = {}
        self._done: set[str] = set()  # tokens of machines that are known to have the present keys
        self._lock = Lock()

    def has_present_keys(self, token: str) -> bool:
        """Return whether the machine of that token was found, or made, to have the present keys since this process started."""
        return token in self._done

    def login(self, machine: Machine) -> Login:
        """Return how to get into a machine that was prepared."""
        usual = self._usual(machine)
        try:
            kept = self._read(machine.token).get("keeps")
        except ShellError:  # said by `prepare`
            kept = None
        return replace(usual, host_keys=(kept,)) if isinstance(kept, str) else usual

    def prepare(self, machine: Machine) -> None:
        """Again is nothing new. Raises ShellError: later, again, as long as the machine boots."""
        if machine.token in self._done:
            return
        with self._lock:
            turn = self._turns.setdefault(machine.token, Lock())
        with turn:
            usual = self._usual(machine)
            noted = self._read(machine.token)
            if noted.get("keys") != _mark(usual):
                self._prepare(machine, usual, noted)
            self._done.add(machine.token)

    def forget(self, token: str) -> None:
        """The machine is gone."""
        with self._lock:
            self._known.pop(token, None)
            self._turns.pop(token, None)
            self._done.discard(token)
            if self._folder is not None:
                with suppress(OSError):
                    self._path(self._folder, token).unlink(missing_ok=True)

    def _prepare(self, machine: Machine, usual: Login, noted: dict[str, Any]) -> None:
        older = self._older(machine)
        lasting = {_key(key) for login in (usual, *older) for key in login.host_keys}
        shown = self._host_key(usual)
        self._insist_on(machine, usual, shown, lasting, noted)
        if _key(shown) in map(_key, usual.host_keys):
            with suppress(LoginRefusedError):
                self._dial(usual).close()
                return self._note(machine.token, {"is_prepared": True, "keys": _mark(usual)})
        users = (usual.user, self._user) if _key(shown) in lasting else (self._user, usual.user)
        ways = [
            replace(login, user=user, host_keys=(shown,))
            for user in dict.fromkeys(users)
            for login in (usual, *older)
        ]
        if self._bring_script(machine, ways):
            self._dial(usual).close()
            return self._note(machine.token, {"is_prepared": True, "keys": _mark(usual)})
        self._dial(replace(usual, host_keys=(shown,))).close()
        return self._note(machine.token, {"keeps": shown, "keys": _mark(usual)})

    def _insist_on(
        self, machine: Machine, usual: Login, shown: str, lasting: Collection[str], noted: dict[str, Any]
    ) -> None:
        """Raise HostKeyError unless the machine may have this host key now."""
        known = set(lasting)
        if not noted.get("is_prepared"):
            if self._boot_keys is not None:
                known |= set(map(_key, self._boot_keys(machine)))
            elif _key(shown) not in known:
                if "host_key" not in noted:
                    self._note(machine.token, {**noted, "host_key": shown})
                known.add(_key(str(noted.get("host_key", shown))))
        if _key(shown) not in known:
            raise host_key_mismatch(usual, fingerprint(shown))

    def _bring_script(self, machine: Machine, ways: Sequence[Login]) -> bool:
        """Return whether it has been run, which is not possible on an image without sudo."""
        root = (
            f'as=; [ "$(id -u)" = 0 ] || {{ command -v sudo >/dev/null || exit {_NO_ROOT}; as="sudo -n"; }}'
        )
        with self._first_of(ways) as shell:
            try:
                shell.run(
                    f"{root}; exec $as /bin/sh -s",
                    stdin=self._script(machine).encode(),
                    timeout_s=_SCRIPT_TIMEOUT_S,
                )
            except UnreachableError:
                pass  # its sshd is started again by the script: whether it worked is seen by logging in
            except CommandError as error:
                if error.output.code == _NO_ROOT and self._boot_keys is not None:
                    shell.run(self._own_script(machine), timeout_s=_SCRIPT_TIMEOUT_S)
                    return False
                raise LoginRefusedError(
                    f"{place_of(ways[0])} does not run the first script: {error}"
                ) from error
        return True

    def _first_of(self, ways: Sequence[Login]) -> Commands:
        """Return a connection by the first way that the machine accepts. Raises ShellError."""
        for way in ways[:-1]:
            with suppress(LoginRefusedError):
                return self._dial(way)
        return self._dial(ways[-1])

    def _read(self, token: str) -> dict[str, Any]:
        with self._lock:
            if token not in self._known and self._folder is not None:
                path = self._path(self._folder, token)
                try:
                    self._known[token] = json.loads(path.read_text(encoding="utf-8"))
                except FileNotFoundError:
                    self._known[token] = {}
                except (OSError, ValueError) as error:
                    raise ShellError(f"{path} cannot be read: {why(error)}") from error
            return self._known.get(token, {})

    def _note(self, token: str, noted: dict[str, Any]) -> None:
        """On the disk before it is used: a key that is forgotten could be replaced by another machine's."""
        with self._lock:
            if self._folder is not None:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    content = json.dumps(noted).encode()
                    write_bytes(self._path(self._folder, token), content, is_durable=True)
                except OSError as error:
                    raise ShellError(f"{self._folder} cannot be written: {why(error)}") from error
            self._known[token] = noted

    @staticmethod
    def _path(folder: Path, token: str) -> Path:
        return folder / f"{token}.json"  # tokens are fit for names of files


def _key(line: str) -> str:
    """Return a public key without its comment."""
    return " ".join(line.split()[:2])


def _mark(login: Login) -> str:
    """Return what differs when a machine is to have other keys; it gives no key away."""
    return hashlib.sha256("\0".join((login.private_key, *login.host_keys)).encode()).hexdigest()[:16]


def host_key_of(login: Login) -> str:
    """Return the key that the host shows; nothing is sent but what the exchange of keys needs. Raises UnreachableError."""
    transport: paramiko.Transport | None = None
    try:
        transport = paramiko.Transport(link_to(login, CONNECT_TIMEOUT_S))
        transport.start_client(timeout=CONNECT_TIMEOUT_S)
        key = transport.get_remote_server_key()
        return f"{key.get_name()} {b64encode(key.asbytes()).decode()}"
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise UnreachableError(f"{place_of(login)} cannot be reached: {why(error)}") from error
    finally:
        if transport is not None:
            transport.close()
