"""Commands where a replica of the local cloud runs: in its work directory, its network and its environment.

The environment has secrets in it and is on no disk: it is read from a process of the replica.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from provisioners.local import network as local_net
from provisioners.local import process_tree as local_process
from provisioners.local.store import InstanceFolder

_POLL_S = 0.2
_GRACE_S = 3.0  # between SIGTERM and SIGKILL

Write = Callable[[bytes], None]


class NoProcessError(Exception):
    """The replica has no process whose environment could be used. The message goes on after "replica 3 of chat"."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Where commands of one node run."""

    work: Path
    env: Mapping[str, str]
    namespace: str | None

    def command(self, words: list[str]) -> list[str]:
        """`words` in the node's network."""
        return words if self.namespace is None else local_net.entering(self.namespace, words)


def inside(node: InstanceFolder) -> Inside:
    """Raise NoProcessError."""
    record, host = node.record(), node.host_pid()
    if record is None or host is None or not node.is_host_alive():
        raise NoProcessError("does not run any more")
    for pid in local_process.descendants(host):
        env = _environment(pid)
        if env.get(local_process.INSTANCE_MARK) == record.id:
            return Inside(node.work_path, env, record.namespace)
    raise NoProcessError("has no process now: neither `setup` nor `run` runs")


def run_inside(
    place: Inside,
    script: str,
    out: Write,
    err: Write,
    stopped: Callable[[], bool],
    *,
    has_stdin: bool = False,
) -> int:
    """Run a script there until it ends, or is `stopped`. Returns its exit code, 128 and the signal if one killed it.

    With `has_stdin` it reads the standard input of this process.
    """
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    process = subprocess.Popen(
        place.command([shell, "-c", script]),
        cwd=place.work,
        env=dict(place.env),
        stdin=None if has_stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _copy_output(process, out, err, stopped)
    finally:
        code = _end(process)
    return code if code >= 0 else 128 - code


def _copy_output(
    process: subprocess.Popen[bytes], out: Write, err: Write, stopped: Callable[[], bool]
) -> None:
    """Pass the output on until the process has exited and nothing more comes, or until `stopped`."""
    if process.stdout is None or process.stderr is None:
        raise ValueError("the process has no pipes")
    with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, out)
        selector.register(process.stderr, selectors.EVENT_READ, err)
        while selector.get_map() and not stopped():
            has_ended = process.poll() is not None
            ready = selector.select(_POLL_S)
            for key, _ in ready:
                content = os.read(key.fd, 65536)
                if content:
                    key.data(content)
                else:
                    selector.unregister(key.fileobj)
            if has_ended and not ready:  # a program that was left in the background has the output open
                return
        while process.poll() is None and not stopped():  # it has closed its output
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of the process, which is terminated if it still runs."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _environment(pid: int) -> dict[str, str]:
    """Empty if the process has exited, or shows none."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}
