"""`serve controller move`: a home goes to another host, and its replicas and regional load balancers notice nothing.

There are never two controllers of a home, and there is always a sentence that says how to go on, wherever this is killed:

    1  incoming.json there     no controller starts on the home there
    2  stop here, take the lock of this home
    3  the state is sealed, sent and restored there
    4  moved.json here         from now on none starts here; until now one may, and this home is whole
    5  remove incoming.json there, start there

An error before step 4 starts the controller here again. After it the controller there is stopped first; only if that is certain
is one started here. A second `move` after step 4 goes on with step 5 and sends nothing: what is there may be newer.
"""

from __future__ import annotations

import json
import secrets
import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from provisioners.port.commands import ShellError
from skyserve_cli.controller.api.client import AWAY, ControllerClient, ControllerDownError, RefusedError
from skyserve_cli.controller.backup.archive import (
    BackupError,
    expect_more_replicas,
    read_backup,
    write_backup,
)
from skyserve_cli.controller.balancers.agent_process import AgentFolder
from skyserve_cli.controller.persistence.home_lock import locked
from skyserve_cli.controller.persistence.moved import MovedTo, remove_markers, write_moved
from skyserve_cli.controller.reconcile.clock import SteadyClock, SystemClock
from skyserve_cli.deployment import host as there
from skyserve_cli.deployment.deploy import Deployment, add_context, await_health
from skyserve_cli.deployment.move_checks import Rows, insist_on_movable
from skyserve_cli.home import Home, is_held
from skyserve_cli.output import CommandFailed, WrongUsage
from skyserve_cli.state.opening import sqlite_file

STOP_TIMEOUT_S = 30.0
ADOPTION_TIMEOUT_S = 60.0
POLL_S = 0.1
SENT_TIMEOUT_S = 300.0
#: Errors after which the controller is started here again.
FAILURES = (CommandFailed, ShellError, BackupError, RefusedError, SQLAlchemyError, OSError, *AWAY)


class Moved(NamedTuple):
    """What was moved. `pause_s`: for how long no controller ran."""

    services: list[str]
    replicas: int
    health: Mapping[str, Any]
    kept_by: str
    pause_s: float


@dataclass(slots=True)
class Move:
    """One move. `context` names the controller there from then on."""

    deployment: Deployment
    context: str
    moves_endpoints: bool = False
    stopped_at: float = 0.0

    @property
    def home(self) -> Home:
        return self.deployment.home

    @property
    def host(self) -> str:
        return self.deployment.target.host

    def insist(self) -> Rows:
        """Return what will be moved; nothing has changed yet. Raises WrongUsage or CommandFailed."""
        home, facts = self.home, self.deployment.facts
        if sqlite_file(make_url(home.database_url)) is None:
            raise WrongUsage(
                f"the state is in {make_url(home.database_url).render_as_string()}: start a second controller of it on {self.host} "
                "with the same SKYSERVE_DB, then stop this one"
            )
        if is_held(home.lock) and not is_held(home.supervisor_lock):
            raise CommandFailed(
                "the controller runs under a service manager (--foreground); stop it there, and try again"
            )
        token = self.deployment.shell.read(self.deployment.at("controller.token"))
        if token and home.token_file.exists() and token == home.token_file.read_bytes():
            raise WrongUsage(f"{facts.home} on {self.host} is this home; choose another with --home")
        self._insist_on_empty_home()
        client = ControllerClient(home)
        client.ensure_running()
        rows = self._rows()
        insist_on_movable(client.services(), rows, self.deployment, moves_endpoints=self.moves_endpoints)
        return rows

    def run(self) -> Moved:
        """Move. Raises CommandFailed with a sentence that says where the controller runs now."""
        shell, facts = self.deployment.shell, self.deployment.facts
        self._mark_incoming()
        if facts.is_running and not there.stop(shell, facts, self.deployment.serve):
            raise CommandFailed(f"the controller on {self.host} cannot be stopped; nothing was moved")
        try:
            self._stop_here()
            with locked(self.home.lock):
                rows = self._transfer()
                write_moved(self.home, MovedTo(self.deployment.target.name, self.context))
        except BaseException as error:
            self._start_here_again()
            if not isinstance(error, FAILURES):
                raise
            raise CommandFailed(f"{error}; nothing was moved, and the controller runs here again") from error
        return self._complete(rows)

    def resume(self) -> Moved:
        """Go on with a move that was interrupted after its state had been sent. Raises CommandFailed."""
        if not self.deployment.facts.has_state:
            raise CommandFailed(
                f"{self.host} has no state at {self.deployment.facts.home}; "
                "`serve controller start --force` starts the controller here again"
            )
        return self._complete(self._rows())

    # --- the steps

    def _mark_incoming(self) -> None:
        content = json.dumps({"from": str(self.home.root)}).encode()
        self.deployment.shell.put(self.deployment.at("incoming.json"), content)

    def _stop_here(self) -> None:
        self.deployment.report("stopping the controller here; services go on serving")
        with suppress(ControllerDownError):
            ControllerClient(self.home).stop()
        clock = SteadyClock()
        self.stopped_at = clock.now()
        while is_held(self.home.lock) or is_held(self.home.supervisor_lock):
            if clock.now() - self.stopped_at > STOP_TIMEOUT_S:
                raise CommandFailed(f"the controller has not stopped after {STOP_TIMEOUT_S:g} s")
            time.sleep(POLL_S)

    def _transfer(self) -> Rows:
        """Restore the state there; return its rows. The passphrase is in memory, and sent by standard input."""
        shell, facts = self.deployment.shell, self.deployment.facts
        passphrase = secrets.token_urlsafe(32)
        draft, sent = self.home.root / ".moving.backup", self.deployment.at(".moving.backup")
        self.deployment.report(f"sending the state to {self.host}")
        try:
            write_backup(self.home, draft, passphrase, SystemClock().now())
            rows = read_backup(draft, passphrase).rows
            shell.put(sent, draft.read_bytes(), timeout_s=SENT_TIMEOUT_S)
            arguments = ("controller", "restore", sent, "--passphrase-file", "-", "--force")
            there.serve_there(
                shell, facts, self.deployment.serve, *arguments, stdin=f"{passphrase}\n".encode()
            )
        finally:
            draft.unlink(missing_ok=True)
            with suppress(ShellError):
                shell.run(f"rm -f {shlex.quote(sent)}")
        if self.deployment.config is not None:  # with the paths there
            shell.put(self.deployment.at("config.yaml"), self.deployment.config)
        for path in sorted((self.home.root / "first_logins").rglob("*")):
            if path.is_file():
                shell.put(self.deployment.at(path.relative_to(self.home.root).as_posix()), path.read_bytes())
        return rows

    def _complete(self, rows: Rows) -> Moved:
        deployment, shell = self.deployment, self.deployment.shell
        deployment.report(f"starting the controller on {self.host}")
        try:
            keeper = self._start_there()
            health = await_health(deployment)
            pause_s = SteadyClock().now() - self.stopped_at if self.stopped_at else 0.0
            moved = self._verified(rows, health, keeper, pause_s)
            shell.put(deployment.at("deployed.json"), deployment.release)
        except FAILURES as error:
            self._take_back(error)
        add_context(deployment, self.context, use=True)
        if self.moves_endpoints:
            self._end_load_balancers()
        if moved.services:
            self._await_adoption()
        return moved

    def _start_there(self) -> str:
        """Start the controller there unless it runs; return what keeps it running."""
        shell, facts = self.deployment.shell, self.deployment.facts
        markers = [shlex.quote(self.deployment.at(name)) for name in ("moved.json", "incoming.json")]
        shell.run(f"rm -f {markers[0]} && rm -f {markers[1]}")
        facts = there.look(shell, facts.home)
        if facts.is_running:
            return "systemd" if facts.has_systemd else "keeper"
        return there.start(shell, facts, self.deployment.serve)

    def _verified(self, rows: Rows, health: Mapping[str, Any], keeper: str, pause_s: float) -> Moved:
        """Raise CommandFailed unless the controller there knows the same services and replicas."""
        views = {view["name"]: view for view in self.deployment.client.services(ended=True, down=True)}
        known = {(name, one["id"]) for name, view in views.items() for one in view["replicas"]}
        live = {
            (row["service"], row["id"])
            for row in rows["replicas"]
            if row["state"] != "GONE" and row["role"] == "replica"
        }
        services = sorted(row["name"] for row in rows["services"] if not row["down"])
        lost = [name for name in services if name not in views]
        lost += [f"{name}/{number}" for name, number in sorted(live - known)]
        if lost:
            raise CommandFailed(f"the controller on {self.host} does not know {', '.join(lost)}")
        return Moved(services, len(live), health, keeper, round(pause_s, 1))

    def _await_adoption(self) -> None:
        """Wait until the clouds were listed there once."""
        clock = SteadyClock()
        ends_at = clock.now() + ADOPTION_TIMEOUT_S
        path = shlex.quote(self.deployment.at("restored.json"))
        while clock.now() < ends_at:
            with suppress(ShellError):
                if self.deployment.shell.run(f"[ -e {path} ]", check=False).code != 0:
                    return
            time.sleep(POLL_S * 5)
        self.deployment.report(
            f"not every cloud has responded to the controller on {self.host} yet; see `serve check` there"
        )

    # --- back

    def _start_here_again(self) -> None:
        remove_markers(self.home)
        ControllerClient(self.home).ensure_running()

    def _take_back(self, error: Exception) -> None:
        """Stop the controller there and start it here. Raises CommandFailed."""
        deployment = self.deployment
        is_stopped = False
        with suppress(ShellError, CommandFailed):
            self._mark_incoming()  # first, or whatever keeps it running would start it again
            is_stopped = there.stop(deployment.shell, deployment.facts, deployment.serve)
        if not is_stopped:
            raise CommandFailed(
                f"{error}; whether a controller runs on {self.host} is not known, so none was started here: run the command again to "
                "complete the move, or `serve controller start --force` here if none runs there"
            ) from error
        with suppress(ShellError):  # or they hold the ports there, and nothing would terminate them
            there.terminate_load_balancers(deployment.shell, deployment.facts.home)
        expect_more_replicas(self.home)
        self._start_here_again()
        raise CommandFailed(f"{error}; the controller was stopped there and runs here again") from error

    def _end_load_balancers(self) -> None:
        """End those beside the controller that was here; there are new ones there."""
        for folder in sorted(self.home.load_balancers.glob("*")):
            agent = AgentFolder(folder).left()
            if agent is not None:
                agent.send(signal.SIGTERM)

    # --- what is here and there

    def _rows(self) -> Rows:
        draft = self.home.root / ".moving.backup"
        try:
            write_backup(self.home, draft, None, SystemClock().now())
            return read_backup(draft, None).rows
        finally:
            draft.unlink(missing_ok=True)

    def _insist_on_empty_home(self) -> None:
        facts = self.deployment.facts
        if facts.is_incoming or facts.was_moved or not facts.has_state:
            return
        is_empty = False
        if facts.is_running:
            try:
                is_empty = not self.deployment.client.services(down=True, ended=True)
            except (*AWAY, RefusedError) as error:
                raise CommandFailed(f"{self.host}: {error}") from error
        if not is_empty:
            raise WrongUsage(
                f"{facts.home} on {self.host} has a controller's state of its own; choose another --home"
            )
