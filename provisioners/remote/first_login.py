"""The first connection to a rented machine installs the host key that it has from then on.

*With user data* the machine has a host key from its first boot, which users with read access to the account can read, and programs
on the machine that reach the metadata service. The first connection, which that key pins, replaces it.

*Without user data* what such a script would do is done over the first connection. Until then the machine's host key is the one
that its image came with, which is not known beforehand. The first key that the machine shows is written down before anything is
sent, and only a host with that key is given the script. An attacker on the network path can pose as the machine during its first
minute; with user data the attacker needs the key, too.

The host key that lasts follows from the home's secret, and is the only one that is accepted afterwards.

The memory of a machine is one small file in the home. A home that lost it finds out again: a machine that has been
prepared lets us in with the key that we expect.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
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
    HostKeyError,
    Login,
    LoginRefusedError,
    ShellError,
    UnreachableError,
    why,
)
from provisioners.port.vm import Machine
from provisioners.remote.ssh import connect, link_to, place_of

_SCRIPT_TIMEOUT_S = 60.0
_NO_ROOT = 77


class FirstLogins:
    """Prepares new machines. Thread-safe.

    `user` is who can log in at first, `login` how to get in afterwards, `script` what the machine is to run as root, once or
    several times. `boot_key` is the host key that a machine has from its user data; None: without user data, so the first that it shows
    counts. `folder` is where keys are written down; None: in memory.
    """

    def __init__(
        self,
        user: str,
        login: Callable[[Machine], Login],
        script: Callable[[Machine], str],
        folder: Path | None = None,
        *,
        boot_key: Callable[[Machine], str] | None = None,
        dial: Callable[[Login], Commands] = connect,
        host_key: Callable[[Login], str] | None = None,
    ) -> None:
        self._user = user
        self._login = login
        self._script = script
        self._folder = folder
        self._boot_key = boot_key
        self._dial = dial
        self._host_key = host_key or host_key_of
        self._known: dict[str, dict[str, Any]] = {}
        self._lock = Lock()

    def prepare(self, machine: Machine) -> None:
        """Again is nothing new. Raises ShellError: later, again, as long as the machine boots."""
        noted = self._read(machine.token)
        if noted.get("is_prepared") or noted.get("keeps"):
            return
        usual = self._login(machine)
        try:
            self._dial(usual).close()
        except (HostKeyError, LoginRefusedError):
            is_prepared = self._bring_script(machine, usual, noted)
        else:
            is_prepared = True
        self._note(
            machine.token, {**self._read(machine.token), "is_prepared" if is_prepared else "keeps": True}
        )

    def keeps(self, token: str) -> bool:
        """Return whether the machine keeps the host key of its user data, because its image has no sudo."""
        try:
            return bool(self._read(token).get("keeps"))
        except ShellError:
            return False  # said by `prepare`

    def forget(self, token: str) -> None:
        """The machine is gone."""
        with self._lock:
            self._known.pop(token, None)
            if self._folder is not None:
                with suppress(OSError):
                    self._path(self._folder, token).unlink(missing_ok=True)

    def _bring_script(self, machine: Machine, usual: Login, noted: dict[str, Any]) -> bool:
        """Return whether it has been run, which is not possible on an image without sudo."""
        if self._boot_key is not None:
            shown = self._boot_key(machine)
        else:
            if "host_key" not in noted:
                noted = {**noted, "host_key": self._host_key(usual)}
                self._note(machine.token, noted)
            shown = str(noted["host_key"])
        first = replace(usual, user=self._user, host_keys=(shown,))
        root = (
            f'as=; [ "$(id -u)" = 0 ] || {{ command -v sudo >/dev/null || exit {_NO_ROOT}; as="sudo -n"; }}'
        )
        with self._dial(first) as shell:
            try:
                shell.run(
                    f"{root}; exec $as /bin/sh -s",
                    stdin=self._script(machine).encode(),
                    timeout_s=_SCRIPT_TIMEOUT_S,
                )
            except UnreachableError:
                pass  # its sshd is started again by the script: whether it worked is seen by logging in
            except CommandError as error:
                if error.output.code == _NO_ROOT and self._boot_key is not None:
                    return False
                raise LoginRefusedError(
                    f"{place_of(first)} does not run the first script: {error}"
                ) from error
        self._dial(usual).close()
        return True

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
