"""`serve exec`: a command where a replica runs, with its output and its exit code."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, BinaryIO

import typer

from provisioners.local.user_commands import run_inside
from skyserve_cli.commands.log_streams import PrefixedLog
from skyserve_cli.commands.options import ServiceName, controller
from skyserve_cli.commands.reach import Node, ReplicaId, chosen, live_ids, local_place
from skyserve_cli.commands.sessions import relay
from skyserve_cli.controller.api.client import RefusedError
from skyserve_cli.output import CommandFailed, WrongUsage, inform

AT_ONCE = 8
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 and SIGPIPE, as a program that the shell runs


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
    stdin: Annotated[
        bool, typer.Option("--stdin", "-i", help="Pass standard input on to the command.")
    ] = False,
) -> None:
    """Run a command where a replica runs.

    It runs in the replica's work directory with its environment; on machines that is without the secrets. The exit code
    is the command's, with --all the highest; 255 if a machine cannot be reached. It has standard input with --stdin only,
    and ends on Ctrl-C.

    \b
    serve exec chat -- nvidia-smi
    serve exec chat --replica 3 -- 'tail -n 20 *.log | grep -i error'
    serve exec chat --all -- df -h .
    serve exec chat --stdin -- 'cat >prompts.txt' <prompts.txt
    """
    if everywhere and replica is not None:
        raise WrongUsage("choose one: --replica ID or --all")
    if everywhere and stdin:
        raise WrongUsage("choose one: --stdin or --all")
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
            place = local_place(client, name, replica_id, node)
            if place is not None:
                return run_inside(place, script, out.write, err.write, stop.is_set, has_stdin=stdin)
            link = client.session(name, replica_id, node=node)
            source = 0 if stdin else None
            return relay(link, script, out=out.write, err=err.write, stdin=source, stopped=stop.is_set)
        except BrokenPipeError:
            return BROKEN_PIPE
        except (CommandFailed, RefusedError) as error:
            inform((prefix or "") + str(error))
            return error.code if isinstance(error, CommandFailed) else 1
        finally:
            out.finish()
            err.finish()

    raise typer.Exit(_worst(run, ids, stop))


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
