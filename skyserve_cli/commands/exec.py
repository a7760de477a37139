"""`serve exec`: a command where a replica runs, with its output and its exit code."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, BinaryIO

import typer

from provisioners.local.user_commands import Inside, run_inside
from provisioners.port.commands import ShellError, UnreachableError
from provisioners.remote.ssh import connect
from provisioners.remote.user_commands import bring_agent, run_there
from skyserve_cli.commands.log_streams import PrefixedLog
from skyserve_cli.commands.options import ServiceName, controller
from skyserve_cli.commands.reach import UNREACHABLE, Node, Place, ReplicaId, chosen, live_ids, place_of
from skyserve_cli.controller.api.client import ControllerClient, RefusedError
from skyserve_cli.output import CommandFailed, WrongUsage, inform

AT_ONCE = 8
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 and SIGPIPE, as a program that the shell runs

Write = Callable[[bytes], None]


def exec(
    name: ServiceName,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...",
            show_default=False,
            help="The command. A single word is a script for the shell there.",
        ),
    ],
    replica: ReplicaId = None,
    everywhere: Annotated[
        bool, typer.Option("--all", help="On all live replicas, each line behind the id of its replica.")
    ] = False,
    node: Node = 0,
) -> None:
    """Run a command where a replica runs.

    It runs in the replica's work directory with its environment; on machines that is without the secrets. The exit code
    is the command's, with --all the highest; 255 if a machine cannot be reached. It has no standard input, and ends on
    Ctrl-C.

    \b
    serve exec chat -- nvidia-smi
    serve exec chat --replica 3 -- 'tail -n 20 *.log | grep -i error'
    serve exec chat --all -- df -h .
    """
    if everywhere and replica is not None:
        raise WrongUsage("choose one: --replica ID or --all")
    script = command[0] if len(command) == 1 else shlex.join(command)
    client = controller()
    ids = live_ids(client, name) if everywhere else [chosen(client, name, replica)]
    stop = threading.Event()
    width = len(str(max(ids)))
    lock = threading.Lock()

    def run(replica_id: int) -> int:
        prefix = f"{replica_id:>{width}} | " if everywhere else None
        out, err = OutputSink(sys.stdout.buffer, prefix, lock), OutputSink(sys.stderr.buffer, prefix, lock)
        try:
            return _run(client, name, replica_id, node, script, out.write, err.write, stop.is_set)
        except BrokenPipeError:
            return BROKEN_PIPE
        except (CommandFailed, RefusedError, ShellError) as error:
            inform((prefix or "") + str(error))
            return UNREACHABLE if isinstance(error, UnreachableError) else 1
        finally:
            out.finish()
            err.finish()

    raise typer.Exit(_worst(run, ids, stop))


def _run(
    client: ControllerClient,
    name: str,
    replica_id: int,
    node: int,
    script: str,
    out: Write,
    err: Write,
    stopped: Callable[[], bool],
) -> int:
    place: Place = place_of(client, name, replica_id, node)
    if isinstance(place, Inside):
        return run_inside(place, script, out, err, stopped)
    with connect(place.login) as shell:
        bring_agent(shell, place.folder)
        return run_there(shell, place.folder, script, out, err, stopped)


def _worst(run: Callable[[int], int], ids: list[int], stop: threading.Event) -> int:
    """Return the highest exit code; Ctrl-C terminates all commands, and is waited for."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: list[Future[int]] = [pool.submit(run, replica_id) for replica_id in ids]
        try:
            return max(future.result() for future in futures)
        except KeyboardInterrupt:
            stop.set()
            for future in futures:
                future.cancel()
            return INTERRUPTED


class OutputSink:
    """Output as it comes, or whole lines behind a prefix. Sinks that share a lock do not mix within a line."""

    def __init__(self, stream: BinaryIO, prefix: str | None, lock: threading.Lock) -> None:
        self._stream = stream
        self._lines = None if prefix is None else PrefixedLog(prefix)
        self._lock = lock

    def write(self, content: bytes) -> None:
        self._put(content if self._lines is None else b"".join(self._lines.feed(content)))

    def finish(self) -> None:
        """The last line if it has no newline."""
        if self._lines is not None:
            self._put(b"".join(self._lines.finish()))

    def _put(self, content: bytes) -> None:
        if content:
            with self._lock:
                self._stream.write(content)
                self._stream.flush()
