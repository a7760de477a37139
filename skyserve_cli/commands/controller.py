"""`serve controller`: the daemon's own verbs. Services go on serving while it is away."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from skyserve_cli.commands.controller_backup import backup, database_sentences, restore
from skyserve_cli.commands.controller_cloud import undeploy
from skyserve_cli.commands.controller_elsewhere import deploy, move
from skyserve_cli.commands.deadline import waiting_for
from skyserve_cli.commands.options import Format, OutputFormat, bounded, home
from skyserve_cli.commands.options import controller as connect_any
from skyserve_cli.commands.options import own_controller as connect
from skyserve_cli.commands.sentences import CONTROLLER_DOWN
from skyserve_cli.controller.api.client import AWAY, ControllerClient, ControllerDownError, RefusedError
from skyserve_cli.controller.api.remote import Contexts
from skyserve_cli.controller.api.waiting import DeadlineError
from skyserve_cli.controller.persistence.home_lock import locked
from skyserve_cli.controller.persistence.moved import read_moved, remove_markers, why_not_to_start
from skyserve_cli.home import Home, is_held
from skyserve_cli.output import DEADLINE, CommandFailed, date_time, inform, plural, put, put_json, span

if TYPE_CHECKING:
    from skyserve_cli.state.store import Store

STOP_PATIENCE_S = 30.0
POLL_S = 0.05

app = typer.Typer(
    no_args_is_help=True,
    help="Start, stop and look at the controller; rotate its keys, back it up and restore it.",
)


@app.command()
def start(
    foreground: Annotated[bool, typer.Option("--foreground", help="Run it here, until Ctrl-C.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Start it although it was moved to another host; refused while it responds there."
        ),
    ] = False,
) -> None:
    """Start the controller; nothing happens if it is running.

    `serve up` does this by itself. A controller that fails is started again, but not with --foreground: that is
    the service manager's work. With --foreground the log goes to stderr, too.
    """
    here = home()
    reason = why_not_to_start(here)
    if reason is not None and not force:
        raise CommandFailed(reason, code=2)
    if reason is not None:
        _insist_on_none_elsewhere(here)
        _expect_more_replicas(here)
        remove_markers(here)
    if foreground:
        os.environ["SKYSERVE_LOG_TO_STDERR"] = "1"
        arguments = [sys.executable, "-m", "skyserve_cli.controller.daemon"]
        os.execv(sys.executable, arguments)  # noqa: S606 - the daemon is its own program
    started = connect().ensure_running()
    inform("controller started" if started else "the controller is running already")


def _expect_more_replicas(here: Home) -> None:
    """What the controller at the other place launched is adopted, as after a restore."""
    from skyserve_cli.controller.backup.archive import expect_more_replicas

    if here.moved.exists():
        with database_sentences("the state cannot be read"):
            expect_more_replicas(here)


def _insist_on_none_elsewhere(here: Home) -> None:
    """Raise CommandFailed if the controller responds at the place to which it was moved."""
    moved = read_moved(here)
    remote = None if moved is None else Contexts.of(here).remotes.get(moved.context)
    if moved is None or remote is None:
        return
    try:
        bounded(ControllerClient(here, remote)).health()
    except (*AWAY, RefusedError, DeadlineError) as error:
        inform(
            f"no controller responds at {remote.url} ({error}); if one runs there, stop it: there must be only one"
        )
        return
    raise CommandFailed(
        f"the controller runs at {remote.url}; stop it there with `serve controller stop`, and try again",
        code=2,
    )


@app.command()
def stop() -> None:
    """Stop the controller; replicas and load balancers go on."""
    here, client = home(), connect()
    if not is_held(here.lock) and not is_held(here.supervisor_lock):
        inform(CONTROLLER_DOWN)
        return
    pid = client.stop()
    allowed_s = client.waiting.allowance(STOP_PATIENCE_S)
    until = client.waiting.now() + allowed_s
    with client.waiting.noticed(client.why_silent):
        while client.waiting.now() < until:
            if not is_held(here.lock) and not is_held(here.supervisor_lock):
                inform("controller stopped; services go on serving")
                return
            time.sleep(POLL_S)
    found = client.why_silent()
    raise CommandFailed(
        f"the controller (process {pid}) has not stopped after {span(allowed_s)}: {found.sentence}; {found.next_step}",
        DEADLINE if allowed_s < STOP_PATIENCE_S else 1,
    )


@app.command()
def status(output: Format = OutputFormat.TABLE) -> None:
    """Show whether the controller is running; exit code 1 if it is not."""
    try:
        client = connect_any()
        health = client.health()
    except ControllerDownError:
        if output is OutputFormat.JSON:
            put_json({"running": False})
        raise
    if output is OutputFormat.JSON:
        put_json({"running": True, **health})
        return
    clouds = ", ".join(health["clouds"]) or "none"
    lease = health["lease"]
    if lease.get("unfit"):
        inform(f"it must not lead: {lease['unfit']}")
    elif not lease["leads"]:
        inform(f"it stands by: {lease['leader'] or 'no controller'} leads")
    put(
        f"running for {span(health['uptime_s'])}, process {health['pid']}, version {health['version']}, "
        f"{'at' if '://' in client.where else 'home'} {client.where}, clouds: {clouds}"
    )
    backup = health.get("backup")
    if backup is not None:
        from skyserve_cli.controller.backup.schedule import sentence_of

        put(sentence_of(backup, date_time(backup["newest_at"]) if backup["newest_at"] else ""))
    for name, row in health.items():
        if isinstance(row, str) and name not in ("version", "database"):  # of a part of another package
            put(f"{name}: {row}")


@app.command()
def adopt() -> None:
    """Go on with the database that is there, although it is empty, older than the one this home had, or another one.

    The controller must be stopped. Of an older one, machines that were launched since are adopted by their tags when the controller
    starts. What machines run for a database that is gone stays as it is; `serve gc` lists them, and removes them.
    """
    from skyserve_cli.controller.backup.archive import expect_more_replicas
    from skyserve_cli.controller.persistence.known_state import go_on_with, read_known
    from skyserve_cli.controller.persistence.opening import opened

    here = home()
    here.create()
    if is_held(here.lock) or is_held(here.supervisor_lock):
        raise CommandFailed("the controller is running; stop it first with `serve controller stop`")
    with database_sentences("the state cannot be read"), locked(here.lock):
        before = read_known(here)
        store = opened(here, knows=False)
        try:
            is_new = not store.database.known_owner()
            owner, changes = store.database.owner(), store.database.changes()
        finally:
            store.close()
        if not is_new:
            expect_more_replicas(here)
        go_on_with(here, owner, changes)
    known = (
        f"owner {owner}"
        if before is None or before.owner == owner
        else f"owner {owner}, before {before.owner}"
    )
    inform(f"this home goes on with {'an empty' if is_new else 'the'} database ({known})")
    if before is not None and before.owner not in ("", owner):
        inform("machines of the owner before are not touched; `serve gc` lists them")
    inform("`serve controller start` starts the controller")


app.command()(deploy)
app.command()(undeploy)
app.command()(move)


# --- keys and backups ---------------------------------------------------------------------------------------

app.command()(backup)
app.command()(restore)


@app.command()
def rotate() -> None:
    """Replace the keys of this home: the API's token, the key that seals secrets, and the machines' key.

    A running controller is stopped and started again; services go on serving. The controller then gives running machines their new
    login and host keys, and the old ones open none of them. Daily copies and backups from before are
    sealed with the old key and can no longer be restored without it, so make a new backup afterwards. Of several controllers of one
    database the others must be stopped; copy the keys to their homes before you start them again.
    """
    from sqlalchemy.engine import make_url

    from skyserve_cli.controller.backup.key_rotation import rotate as rotate_keys
    from skyserve_cli.controller.persistence.opening import opened
    from skyserve_cli.state.opening import sqlite_file

    here = home()
    here.create()
    with _stopped(here):
        with waiting_for("the database"):
            store = opened(here)
        try:
            with _leading(here, store):
                rotated = rotate_keys(here, store)
        finally:
            store.close()
    inform(f"new: the API's token and the sealing key; {plural(rotated.resealed, 'version')} sealed again")
    for service, version in rotated.unopened:
        inform(
            f"the secrets of {service} version {version} cannot be opened with any key of this home; run `serve update {service}`"
        )
    inform("new: machines.key")
    if rotated.machines:
        shown = ", ".join(rotated.machines[:5]) + (", ..." if len(rotated.machines) > 5 else "")
        inform(
            f"{plural(len(rotated.machines), 'machine')} made with the old key ({shown}): the controller gives those that are rented "
            "new login keys when it connects, and `serve controller status` counts those that are left"
        )
    if sqlite_file(make_url(here.database_url)) is None:
        names = ", ".join(path.name for path in (*here.key_files(), here.digest_key_file))
        inform(
            f"copy {names} from {here.root} to the home of every other controller of this database; until then they stand by"
        )


@contextmanager
def _leading(here: Home, store: Store) -> Iterator[None]:
    """With the lease of the database, so that no other controller goes on with the old keys meanwhile. Raises CommandFailed."""
    from skyserve_cli.controller.persistence.leadership import Leadership, LeaseRenewer, holder_of
    from skyserve_cli.controller.reconcile.clock import SteadyClock

    who = f"`serve controller rotate` (process {os.getpid()}, home {here.root})"
    leadership = Leadership(store, holder_of(here), who, SteadyClock())
    leadership.step()
    if not leadership.leads:
        raise CommandFailed(
            f"another controller of this database is running ({store.database.lease().about}); stop it first: it has the old keys"
        )
    renewer = LeaseRenewer(leadership, started=lambda: None, over=lambda: None)
    renewer.start()
    try:
        yield
    finally:
        renewer.stop()
        leadership.release()


@contextmanager
def _stopped(here: Home) -> Iterator[None]:
    """With the controller stopped, if it was running, and its lock held; started again afterwards, even after an error."""
    was_running = is_held(here.lock)
    if was_running and not is_held(here.supervisor_lock):
        raise CommandFailed(
            "the controller runs under a service manager (--foreground); stop it there, and try again"
        )
    if was_running:
        stop()
    try:
        with locked(here.lock):
            yield
    finally:
        if was_running:
            connect().ensure_running()
            inform("controller started")
