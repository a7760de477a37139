"""One installation that a fault befalls, and the examination afterwards: what was launched, ended, orphaned, served and said."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from benchmarks.chaos.databases import PostgresServer
from benchmarks.chaos.harness import Stack, Stuck, until
from benchmarks.chaos.service_files import service_yaml
from benchmarks.chaos.traffic import Traffic, tally
from provisioners.local.store import LocalStore
from skyserve_cli.controller.api.client import ControllerClient, ControllerDownError
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.home import Home
from tests.clouds.kubernetes.kube_world import KubeWorld

NAME, REPLICAS, RATE = "web", 2, 5.0
SAID_WITHIN_S = 20.0
COMMAND_S = 60.0
_COMMAND = re.compile(r"`serve ([^`]+)`")


#: A fake cluster, and its kubeconfig.
Cluster: TypeAlias = tuple[KubeWorld, Path]


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed, and when its first line came; None: none came."""

    code: int
    out: str
    err: str
    first_s: float | None

    @property
    def first_line(self) -> str:
        """What a busy machine keeps a command waiting for is printed before, and is no answer."""
        lines = (self.err or self.out).splitlines()
        return next((line for line in lines if not line.startswith("waiting for ")), "")


@dataclass(slots=True)
class Examination:
    """What did not hold, by the column of the table; `remarks` are printed beside it."""

    broken: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def claim(self, column: str, holds: bool, sentence: str) -> None:
        if not holds:
            self.broken.setdefault(column, []).append(sentence)


class Patient(Stack):
    """A service of REPLICAS replicas under open-loop traffic. `lost` are replicas that the fault itself takes."""

    def __init__(
        self,
        postgres: PostgresServer | None = None,
        root: Path | None = None,
        controller: str = "",
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__(controller)
        self.postgres = postgres
        self.cluster = cluster
        if root is not None:
            self.home.root.rmdir()
            self.home = Home(root, f"sqlite:///{root / 'state.db'}")
        if postgres is not None:
            self.home = Home(self.home.root, postgres.url("a"))
        self.client = ControllerClient(self.home)
        self.store = LocalStore(self.home.root)
        self.clock = Path(f"{self.home.root}.clock")  # of `shifted_controller`
        self.lost: set[int] = set()
        self.found = Examination()
        self._environment = {
            **os.environ,
            "SKYSERVE_HOME": str(self.home.root),
            "SKYSERVE_DB": self.home.database_url,
            "NO_COLOR": "1",
        }

    @contextmanager
    def in_service(self) -> Iterator[None]:
        """With the service up, and traffic; afterwards all claims are examined."""
        kept = dict(os.environ)
        self.clock.write_text("0")
        os.environ |= {
            "SKYSERVE_DB": self.home.database_url,
            "SKYSERVE_CHAOS_CLOCK": str(self.clock),
            "SKYSERVE_CHAOS_DATABASE_TOO": "1",
        }
        try:
            with self:
                self.up(self.file())
                self.settled(NAME)
                before = self.alive()
                with Traffic(self.endpoint(NAME), RATE) as traffic:
                    time.sleep(1.0)
                    yield
                    self._recovers()
                self._examine(before, traffic)
        finally:
            os.environ.clear()
            os.environ.update(kept)
            self.clock.unlink()

    def _prepare(self) -> None:
        super()._prepare()
        if self.cluster is not None:
            config = yaml.safe_load(self.home.config.read_text())
            config["clouds"]["kubernetes"] = {"kubeconfig": str(self.cluster[1]), "contexts": {"test": {}}}
            self.home.config.write_text(yaml.safe_dump(config))

    def file(self, **options: Any) -> str:
        return service_yaml(NAME, REPLICAS, **options)

    # --- what befalls it

    def lose(self, replica_id: int) -> None:
        """The machine of a replica is gone: it is to be replaced, once."""
        self.lost.add(replica_id)
        self.preempt(NAME, replica_id)

    def serve(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Said:
        """Run a command, and see when it prints its first line."""
        process = self.begin(*arguments, env=env)
        assert process.stdout is not None
        assert process.stderr is not None
        began, first = time.monotonic(), None
        texts = {process.stdout: "", process.stderr: ""}
        for pipe in texts:
            os.set_blocking(pipe.fileno(), False)
        while time.monotonic() - began < COMMAND_S:
            is_over = process.poll() is not None
            for pipe in texts:
                with suppress(TypeError):  # nothing there yet
                    texts[pipe] += pipe.read() or ""
            if first is None and any(texts.values()):
                first = time.monotonic() - began
            if is_over:
                break
            time.sleep(0.02)
        else:
            process.kill()
        code = process.wait()
        out, err = texts.values()
        for pipe in texts:
            pipe.close()
        return Said(code, out, err, first)

    def begin(self, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "skyserve_cli", *map(str, arguments)],
            env={**self._environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    # --- what is claimed

    def says(self, pattern: str, *command: str, within_s: float = SAID_WITHIN_S) -> Said:
        """Claim that the first line of `serve status` comes to match, and that no command keeps silent for more than two seconds."""
        words = command or ("status", NAME)
        until_at = time.monotonic() + within_s
        while True:
            said = self.serve(*words)
            if re.search(pattern, said.first_line) or time.monotonic() > until_at:
                break
            time.sleep(0.5)
        self.found.claim(
            "first line",
            bool(re.search(pattern, said.first_line)),
            f"`serve {shlex.join(words)}` says {said.first_line[:160]!r}, not {pattern!r}",
        )
        return said

    def follow(self, sentence: str, only: Sequence[str] = ("controller restore", "controller start")) -> None:
        """Run the commands that a sentence names, in order; the controller is stopped first."""
        self.serve("controller", "stop")
        named = [each for each in _COMMAND.findall(sentence) if each.startswith(tuple(only))]
        self.found.claim("recovers", bool(named), f"no command is named: {sentence[:160]!r}")
        for each in named:
            done = self.serve(*shlex.split(each))
            self.found.claim("recovers", done.code == 0, f"`serve {each}`: {done.err.strip()[:200]}")
        self.found.remarks.append("; ".join(" ".join(each.split()[:2]) for each in named))

    def alive(self) -> dict[str, int]:
        """The tokens of the instances that run, with their replica's id."""
        return {
            record.token: record.replica_id
            for folder in self.live_instances()
            if (record := folder.record()) is not None and record.service == NAME
        }

    def _recovers(self) -> None:
        try:  # what is lost is known to be lost: while the state cannot be written, it is shown as it was
            until(
                lambda: not self.lost & {one["id"] for one in self.replicas(NAME)}, "a lost replica is listed"
            )
            self.settled(NAME, patience_s=90.0)
        except Stuck as stuck:
            self.found.claim("recovers", False, str(stuck)[:300])

    def _examine(self, before: dict[str, int], traffic: Traffic) -> None:
        twice = {replica: count for replica, count in self.made().items() if count > 1}
        self.found.claim("not twice", not twice, f"instances made of one replica: {twice}")
        now = self.alive()
        gone = {before[token] for token in before if token not in now} - self.lost
        self.found.claim("none ended", not gone, f"replicas that were well are gone: {sorted(gone)}")
        rows = Counter(one["id"] for one in self.replicas(NAME))
        self.found.claim(
            "no orphan",
            sorted(rows) == sorted(now.values()),
            f"rows {sorted(rows)}, machines {sorted(now.values())}",
        )
        extra = len(now) - REPLICAS
        self.found.claim("not twice", extra <= 0, f"{extra} machines too many")
        self.found.claim("answers", not traffic.failed(), f"requests failed: {tally(traffic.failed())}")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return super().rows(query, *values) if self.postgres is None else self.postgres.rows(query, values)

    def wait_for(self, condition: Any, what: str, patience_s: float = 60.0) -> None:
        """Claim that something comes about. The condition may take its time."""
        ends_at = time.monotonic() + patience_s
        while time.monotonic() < ends_at:
            with suppress(ControllerDownError, DeadlineError):
                if condition():
                    return
            time.sleep(0.2)
        self.found.claim("recovers", False, what)
