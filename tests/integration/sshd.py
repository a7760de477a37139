"""A real sshd on this machine's loopback, for the user of the tests: one host that a command reaches over SSH."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from provisioners.remote.ssh_keys import Keys
from tests.clouds.vms.vm_bench import until

LOGIN = Keys(bytes(range(32)), "the user").login("chat")
PROGRAM = shutil.which("sshd") or "/usr/sbin/sshd"
_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
SetEnv HOME={folder}/user
"""


def why_not() -> str | None:
    """Why none can be started here, or None."""
    if not Path(PROGRAM).exists() or shutil.which("ssh-keygen") is None:
        return "needs sshd and ssh-keygen (openssh-server)"
    return None if os.geteuid() == 0 else "sshd needs root to separate its privileges"


@dataclass
class Sshd:
    """`identity` and `known_hosts` are the files with which the user who runs this can log in.

    Sessions have an empty home directory: what a developer's own .bashrc does is of no concern here.
    """

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        (self.folder / "user").mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        key = self.folder / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        (self.folder / "authorized_keys").write_text(LOGIN.public + "\n")
        (self.folder / "sshd_config").write_text(_CONFIG.format(port=self.port, folder=self.folder))
        self.identity.write_text(LOGIN.private)
        self.identity.chmod(0o600)
        kind, text, *_ = key.with_suffix(".pub").read_text().split()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {kind} {text}\n")

    @property
    def identity(self) -> Path:
        return self.folder / "identity"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def url(self) -> str:
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [PROGRAM, "-D", "-e", "-f", self.folder / "sshd_config"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "log").open("ab"),
        )
        until(self._listens, "sshd")

    def stop(self) -> None:
        """No more logins; sessions that are open go on."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)

    def cut(self) -> None:
        """End the connections that are open, as if the network had gone."""
        assert self.process is not None
        for session in psutil.Process(self.process.pid).children():
            session.kill()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def serve_script(path: Path, checkout: Path) -> Path:
    """A program `serve` that runs this checkout from anywhere, as an installed one would."""
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH={checkout} exec {sys.executable} -m skyserve_cli "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)
    return path
