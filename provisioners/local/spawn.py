"""Host processes: how one is started so that it outlives us, and how it is terminated."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Lock

from provisioners.local.host import HostOrder
from provisioners.local.store import InstanceFolder
from provisioners.local.translate import own_environment

_PACKAGES = Path(__file__).resolve().parent.parent.parent

Spawn = Callable[[InstanceFolder, HostOrder], None]

#: The umask of the user in octal, if the process that starts instances has a stricter one for its own files.
_UMASK_VARIABLE = "SKYSERVE_USER_UMASK"

# Host processes outlive us, but while we live they are our children, and zombies once dead until we wait for them.
_hosts: list[subprocess.Popen[bytes]] = []
_hosts_lock = Lock()


def _users_umask() -> int:
    return int(os.environ.get(_UMASK_VARIABLE, "-1"), 8)  # -1: unchanged


def spawn_host(folder: InstanceFolder, order: HostOrder) -> None:
    """Start a node's host process, detached, and give it its order.

    The lock that means "alive" is taken here and inherited, so there is no instant at which a launched node
    looks dead. If we die before the order is delivered whole, the host leaves without a trace.
    """
    alive = os.open(folder.alive_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ear, mouth = os.pipe()
    with os.fdopen(mouth, "wb") as pipe:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX)
            with (folder.path / "host.err").open("wb") as errors:
                host = subprocess.Popen(
                    [sys.executable, "-m", "provisioners.local.host", str(folder.path)],
                    cwd=_PACKAGES,
                    env=own_environment(),
                    stdin=ear,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                    pass_fds=(alive,),
                    umask=_users_umask(),
                )
        finally:
            os.close(alive)
            os.close(ear)
        with _hosts_lock:
            _hosts.append(host)
        folder.write_host_pid(host.pid)
        pipe.write(json.dumps(asdict(order)).encode())


def reap_hosts() -> None:
    """Forget the hosts that have stopped."""
    with _hosts_lock:
        _hosts[:] = [host for host in _hosts if host.poll() is None]


def end_host(folder: InstanceFolder, timeout_s: float) -> None:
    """Stop the host and wait until it has; kill it if it does not.

    Its pid is only believed while its lock is held, and held on to by a descriptor, so no other process can be meant.
    """
    pid = folder.host_pid()
    if pid is None:
        return
    try:
        host = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not folder.is_host_alive():
            return
        ended = select.poll()
        ended.register(host, select.POLLIN)
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(host, signal_number)
            if ended.poll(timeout_s * 1000):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(host)
