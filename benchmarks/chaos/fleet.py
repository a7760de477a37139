"""Engines as processes with ports of their own, to be killed and brought back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from benchmarks.chaos.balancer import environment, until
from benchmarks.chaos.tiny_model import write_tiny_model

Command = Callable[[int], Sequence[str]]
"""What to run so that an engine listens on a port."""

NO_LLAMA_SERVER = (
    "no llama.cpp: install xllamacpp, or name a llama-server in SKYSERVE_LLAMA_SERVER or on the path"
)


def our_engine(speed: float) -> Command:
    """The engine of this project; engines with equal seeds say the same."""
    return lambda port: (
        sys.executable, "-m", "skyserve_cli.engine", "--port", str(port), "--model", "m", "--profile", "a100-7b",
        "--speed", f"{speed:g}",
    )  # fmt: skip


def shaped_engine(kind: str, pace_s: float) -> Command:
    """Another engine's shapes (`benchmarks.chaos.shaped_engine`)."""
    module = "benchmarks.chaos.shaped_engine"
    return lambda port: (
        sys.executable, "-m", module, "--kind", kind, "--port", str(port), "--pace", f"{pace_s:g}",
    )  # fmt: skip


def llama_server() -> Sequence[str]:
    """What starts llama.cpp's server: $SKYSERVE_LLAMA_SERVER, `llama-server` on the path, or the wheel of `xllamacpp`.

    Empty if there is none of them.
    """
    if found := os.environ.get("SKYSERVE_LLAMA_SERVER") or shutil.which("llama-server"):
        return (found,)
    if find_spec("xllamacpp") is not None:
        return (sys.executable, str(Path(__file__).with_name("llama_server.py")))
    return ()


def llama_engine(folder: Path, slots: int, context_tokens: int = 2048) -> Command:
    """llama.cpp's server with a tiny random model, made in `folder`. Raises FileNotFoundError without a server.

    Keys and values are kept as they are computed: values rounded to 16 bits differ between a prompt that is read at
    once and a response made token by token, and now and then that is enough for another token to win.
    """
    server = llama_server()
    if not server:
        raise FileNotFoundError(NO_LLAMA_SERVER)
    model = folder / "tiny.gguf"
    if not model.exists():
        write_tiny_model(model)
    return lambda port: (
        *server, "-m", str(model), "--alias", "m", "--host", "127.0.0.1", "--port", str(port),
        "-c", str(context_tokens * slots), "-np", str(slots), "-t", "1", "-tb", "1", "--no-warmup", "--metrics",
        "--slots", "--jinja", "-cb", "--no-webui", "-ctk", "f32", "-ctv", "f32", "-fa", "off",
    )  # fmt: skip


class Engine:
    """One process at a time on one port."""

    def __init__(self, name: str, command: Command) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = int(listener.getsockname()[1])
        self.name = name
        self._command = command
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def json(self) -> dict[str, Any]:
        return {"id": self.name, "url": self.url, "health_path": "/health"}

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command(self.port),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            env=environment(), start_new_session=True,
        )  # fmt: skip

    def stop(self) -> None:
        """SIGSTOP: its connections stay open, and nothing comes."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """SIGKILL, at once, with the processes that it has started."""
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
            await self._process.wait()

    async def healthy(self, http: aiohttp.ClientSession) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, f"{self.name} has ended: {self._command(self.port)}"
        try:
            async with http.get(f"{self.url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


class Fleet:
    """Engines of one kind. An async context manager: inside they are healthy, afterwards there is none."""

    def __init__(self, command: Command, size: int, start_timeout_s: float = 60.0) -> None:
        self._start_timeout_s = start_timeout_s
        self.engines = [Engine(f"engine-{number}", command) for number in range(size)]

    async def __aenter__(self) -> Fleet:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        try:
            for engine in self.engines:
                await engine.start()
            for engine in self.engines:
                await self.up(engine)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def up(self, engine: Engine) -> None:
        await until(
            lambda: engine.healthy(self._http), f"{engine.name} does not come up", self._start_timeout_s
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines:
            await engine.kill()
        await self._http.close()
