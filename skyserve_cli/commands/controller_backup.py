"""`serve controller backup` and `restore`: to and from a file, or a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyserve_cli.buckets.port import is_url, place_of
from skyserve_cli.commands.deadline import waiting_for
from skyserve_cli.commands.options import Format, OutputFormat, home
from skyserve_cli.commands.options import own_controller as connect
from skyserve_cli.controller.api.client import ControllerDownError
from skyserve_cli.controller.persistence.home_lock import locked
from skyserve_cli.home import Home, is_held
from skyserve_cli.output import CommandFailed, WrongUsage, date_time, inform, put_json

if TYPE_CHECKING:
    from skyserve_cli.buckets.port import Bucket, Place
    from skyserve_cli.controller.backup.archive import Backup

PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        help="Seal or open the backup with the passphrase on the first line of this file; - reads standard input.",
        metavar="FILE",
    ),
]


def backup(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A file, which only you may read, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, an https:// URL of Azure, or "
            "file:///FOLDER. Default: the place in controller.backup of config.yaml.",
            metavar="[FILE|URL]",
            show_default=False,
        ),
    ] = None,
    passphrase_file: PassphraseFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write all that a new home needs into one file or object: the state, the keys, and config.yaml.

    The controller may be running. Without a passphrase, a file opens every secret and every machine to its reader; what goes to a
    bucket is always sealed, by default with the passphrase of controller.backup. A controller with controller.backup in config.yaml
    makes a backup every day by itself.
    """
    from skyserve_cli.controller.backup.archive import read_passphrase, write_backup
    from skyserve_cli.controller.reconcile.clock import SystemClock

    here = home()
    if target is None or is_url(target):
        _to_bucket(here, target, passphrase_file)
        return
    file = Path(target)
    if file.exists() and not force:
        raise CommandFailed(f"{file} exists; choose another name, or replace it with --force")
    _insist_on_same_database(here)
    with database_sentences("the backup cannot be written"):
        passphrase = None if passphrase_file is None else read_passphrase(passphrase_file)
        with waiting_for("the database"):
            content = write_backup(here, file.absolute(), passphrase, SystemClock().now())
    here.backup_hinted.touch(mode=0o600)
    inform(f"wrote {file}: {content}, {file.stat().st_size:,} bytes")
    if passphrase is None:
        inform("it is not sealed; keep it where only you can read it, or use --passphrase-file")


def _to_bucket(here: Home, url: str | None, passphrase_file: Path | None) -> None:
    from skyserve_cli.config import load_config
    from skyserve_cli.controller.backup.archive import read_passphrase
    from skyserve_cli.controller.backup.uploader import upload
    from skyserve_cli.controller.reconcile.clock import SystemClock

    configured = load_config(here.config).controller.backup
    if url is None and configured is None:
        raise WrongUsage(f"name a file or a bucket, or set controller.backup in {here.config}")
    passphrase_file = passphrase_file or (configured.passphrase_file if configured else None)
    if passphrase_file is None:
        raise WrongUsage("a backup in a bucket is sealed: give a passphrase with --passphrase-file FILE")
    place = place_of(url) if url is not None else configured.place  # type: ignore[union-attr]
    _insist_on_same_database(here)
    with database_sentences("the backup cannot be written"):
        passphrase = read_passphrase(passphrase_file)
        inform(f"writing a backup to {place.url}")
        named, content = upload(here, _opened(here, place), passphrase, SystemClock().now())
    here.backup_hinted.touch(mode=0o600)
    inform(f"wrote {place.url}/{named.name}: {content}")


def restore(
    source: Annotated[
        str,
        typer.Argument(
            help="A backup, a daily copy from the home's backups/, or the URL of a backup in a bucket or of their place, which has "
            "the newest restored.",
            metavar="FILE|URL",
        ),
    ],
    passphrase_file: PassphraseFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what the home has.")] = False,
    list_them: Annotated[
        bool, typer.Option("--list", help="List the backups in a bucket, newest first, and restore none.")
    ] = False,
    output: Format = OutputFormat.TABLE,
) -> None:
    """Make this home what it was when the backup was written. The controller must be stopped.

    Start the controller afterwards: machines that were launched since are adopted by their tags, and those that belong to no
    service are terminated. New replicas get ids that no earlier one had.
    """
    from skyserve_cli.controller.backup.archive import restore as restore_home
    from skyserve_cli.controller.reconcile.clock import SystemClock

    here = home()
    if list_them:
        _list(here, source, output)
        return
    here.create()
    if is_held(here.lock) or is_held(here.supervisor_lock):
        raise CommandFailed("the controller is running; stop it first with `serve controller stop`")
    with database_sentences("the backup cannot be read"):
        found = _read(here, source, passphrase_file)
    inform(f"restoring {found.counts()}, as of {date_time(found.made_at)}")
    with database_sentences("the backup cannot be restored"), locked(here.lock), waiting_for("the database"):
        aside = restore_home(here, found, force=force, now=SystemClock().now())
    if aside is not None:
        inform(f"what was there before is in {aside}")
    if not found.files:
        inform("a daily copy has no keys; those of this home are used")
    inform("restored; `serve controller start` starts the controller, which adopts the machines that run")


def _read(here: Home, source: str, passphrase_file: Path | None) -> Backup:
    from skyserve_cli.controller.backup.archive import parse_backup, read_backup, read_passphrase
    from skyserve_cli.controller.backup.schedule import read_name
    from skyserve_cli.controller.backup.uploader import the_newest

    if not is_url(source):
        inform(f"reading {source}")
        passphrase = None if passphrase_file is None else read_passphrase(passphrase_file)
        return read_backup(Path(source), passphrase)
    place = place_of(source)
    if passphrase_file is None:
        raise WrongUsage("a backup in a bucket is sealed: give its passphrase with --passphrase-file FILE")
    passphrase = read_passphrase(passphrase_file)
    above, name = place.parent()
    if read_name(name) is not None:
        place = above
    else:
        inform(f"looking for the newest backup in {place.url}")
        name = the_newest(_opened(here, place), place.url).name
    inform(f"reading {place.url}/{name}")
    return parse_backup(_opened(here, place).get(name), passphrase, f"{place.url}/{name}")


def _list(here: Home, source: str, output: OutputFormat) -> None:
    from skyserve_cli.controller.backup.schedule import newest_first
    from skyserve_cli.text_tables import FittedTable, put_table

    if not is_url(source):
        raise WrongUsage("--list is for the URL of a place in a bucket")
    place = place_of(source)
    sizes = {each.name: each.size for each in _opened(here, place).objects()}
    found = newest_first(sizes)
    if output is OutputFormat.JSON:
        put_json([{**each._asdict(), "size": sizes[each.name]} for each in found])
        return
    rows = [(each.name, date_time(each.made_at), each.owner, f"{sizes[each.name]:,}") for each in found]
    put_table(FittedTable(("BACKUP", "MADE", "OWNER", "BYTES"), rows))


def _opened(here: Home, place: Place) -> Bucket:
    """Return the bucket, with the AWS profile of config.yaml if it can be read: on a new host there is none yet."""
    from skyserve_cli.buckets.opening import bucket_at
    from skyserve_cli.config import ConfigError, aws_profile, load_config

    try:
        profile = aws_profile(load_config(here.config))
    except ConfigError:
        profile = None
    return bucket_at(place, aws_profile=profile)


@contextmanager
def database_sentences(what: str) -> Iterator[None]:
    """Turn the errors of disks and databases into one sentence."""
    from sqlalchemy.exc import SQLAlchemyError

    from skyserve_cli.controller.reconcile.store_health import sentence_of

    try:
        yield
    except SQLAlchemyError as error:
        raise CommandFailed(f"{what}: the database reports: {sentence_of(error)}") from error
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        raise CommandFailed(f"{what}: {where}{error.strerror or error}") from error


def _insist_on_same_database(here: Home) -> None:
    """The controller may have been started with another $SKYSERVE_DB than this command."""
    from sqlalchemy.engine import make_url

    try:
        used = connect().health().get("database")
    except ControllerDownError:
        return
    ours = make_url(here.database_url).render_as_string(hide_password=True)
    if used is not None and used != ours:
        raise CommandFailed(
            f"the controller uses the database {used}, not {ours}; set SKYSERVE_DB as it was for the controller"
        )
