"""What the measurements need of the machine: cores, processes that always end, compiled C, a cache folder."""

from __future__ import annotations

import functools
import hashlib
import http.client
import os
import platform
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

import platformdirs

HERE = Path(__file__).parent
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1 of control groups, which can limit single threads
_PERIOD_US = 50_000  # of which at least 1,000 can be given
_STOP_S = 3.0
_LOOK_EVERY_S = 0.01
_PROGRAMS = {"backend": ("backend.c",), "load": ("load.c", "client.c")}


class Missing(RuntimeError):
    """This machine lacks something; the message names what to install."""


def cache_folder() -> Path:
    """Where virtual environments of peers and compiled programs are kept from run to run."""
    folder = platformdirs.user_cache_path("skyserve-benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def compiled(name: str) -> Path:
    """Compiles the program of that name if a source has changed, and returns its path. Raises Missing.

    With TLS, where OpenSSL's headers are installed.
    """
    sources = sorted((*HERE.glob("*.c"), *HERE.glob("*.h")))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    program = cache_folder() / f"{name}-{digest}"
    if not program.exists():
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise Missing("there is no C compiler; install one, or name it in $CC")
        fresh = program.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(fresh)]
        command += [str(HERE / source) for source in _PROGRAMS[name]]
        with_tls = [*command, "-DWITH_TLS", "-lssl", "-lcrypto"]
        if subprocess.run(with_tls, capture_output=True, check=False).returncode:
            subprocess.run(command, check=True)
        fresh.rename(program)
    return program


@functools.cache
def native_agent(checkout: Path) -> Path:
    """Returns a folder with the agent's packages as a wheel of that checkout has them: the hot path compiled, and the helper in
    C. Compiles them, which takes some minutes, if a source has changed. Raises Missing."""
    sources = [checkout / "hatch_build.py"]
    for package in ("lb", "policies"):
        sources += sorted(file for file in (checkout / package).rglob("*") if file.suffix in (".py", ".c"))
    digest = hashlib.sha256(f"{platform.python_version()} with the helper".encode())
    for source in sources:
        digest.update(str(source.relative_to(checkout)).encode() + b"\0" + source.read_bytes())
    folder = cache_folder() / f"native-{digest.hexdigest()[:16]}"
    if not folder.exists():
        print("compiling the agent as for a wheel: some minutes", file=sys.stderr)
        fresh = folder.with_suffix(f".{os.getpid()}")
        # Not the native files of an editable installation: there may be none, or old ones.
        left_out = shutil.ignore_patterns("__pycache__", "*.so")
        for package in ("lb", "policies"):
            shutil.copytree(checkout / package, fresh / package, ignore=left_out)
        for command in (
            [sys.executable, "-c", _HELPER, str(checkout), str(fresh)],
            [sys.executable, str(checkout / "hatch_build.py"), str(fresh)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(fresh)
                raise Missing(f"the agent cannot be compiled: {(done.stderr or done.stdout).strip()[-500:]}")
        fresh.rename(folder)
    return folder


# Builds the helper as the build hook of wheels does it, which knows its flags, into another folder than the checkout.
_HELPER = """import sys, types
sys.path.insert(0, sys.argv[1])
from hatch_build import CustomBuildHook
hook = types.SimpleNamespace(root=sys.argv[2], app=types.SimpleNamespace(display_warning=sys.exit))
CustomBuildHook._fast_path(hook, {"artifacts": []})
"""


def allow_many_files() -> None:
    """Thousands of streams are twice as many descriptors in a proxy; children inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Pins the processes that are started in this context to one core; they size their thread pools for it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def limited(threads: Sequence[int], share: float) -> Iterator[None]:
    """Gives each of these threads at most a share of a core. Raises Missing."""
    groups = {thread: CPU_GROUPS / f"skyserve-benchmark-{thread}" for thread in threads}
    try:
        try:
            for thread, group in groups.items():
                group.mkdir()
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(round(share * _PERIOD_US)))
                (group / "tasks").write_text(str(thread))
        except OSError as error:
            raise Missing(f"no share of a core can be given, which needs root: {error}") from error
        yield
    finally:
        for thread, group in groups.items():
            with suppress(OSError):  # it may have ended, or the group was not made
                (CPU_GROUPS / "tasks").write_text(str(thread))
                group.rmdir()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    """Whether no process listens on the port. Connections in TIME_WAIT do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Process:
    """A program in a session of its own, on one core (None: on any). Leaving the context terminates it and all
    processes that it started."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        core: int | None,
        cwd: Path,
        pipe: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("wb") as out, nullcontext() if core is None else pinned(core):
            self._popen = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def line(self) -> str:
        """The first line of its standard output, if that is a pipe."""
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().decode()

    def pids(self) -> list[int]:
        """The process and all that it has started, also if it has ended itself: its session."""
        return [
            int(at.name) for at in Path("/proc").glob("[0-9]*") if _session(int(at.name)) == self._popen.pid
        ]

    def movers(self) -> list[int]:
        """The threads that move bytes: those of that name, else the event loop, which then does it."""
        tasks = [task for pid in self.pids() for task in Path(f"/proc/{pid}/task").iterdir()]
        named = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == "mover"]
        return named or self.pids()

    def last_lines(self, lines: int = 4) -> str:
        text = self.log.read_text(errors="replace").strip().splitlines()
        return " / ".join(line.strip()[:200] for line in text[-lines:])

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_STOP_S)
        deadline = time.monotonic() + _STOP_S
        while (left := self.pids()) and time.monotonic() < deadline:  # what they have started ends with them
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._popen.poll()
            time.sleep(_LOOK_EVERY_S)
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    trust: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """One request to loopback on a connection of its own: status, body. With TLS, if there is a `trust`.

    Raises OSError or HTTPException.
    """
    if trust is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=trust)
    try:
        connection.request(method, path, body or None, dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"
